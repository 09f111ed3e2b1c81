//! The validator's part that sees into the contents: runs, what hangs behind them, index, names.

use std::collections::{BTreeMap, HashSet};

use super::{Behind, Contents, Run, Spot};
use crate::check::ensure;
use crate::ids::{BlockId, RunId};

impl Contents {
    /// Recounts what hangs behind what and finds every run again. `sequences` under each root.
    pub(crate) fn check(&self, sequences: &BTreeMap<Spot, u32>) -> Result<(), String> {
        self.check_slots()?;
        let mut children: BTreeMap<Spot, u32> = BTreeMap::new();
        for (id, run) in self.living() {
            self.check_run(id, run)?;
            if run.namespace.is_none() {
                *children.entry(run.parent).or_default() += 1;
            }
        }
        self.check_children(&children)?;
        self.check_index()?;
        self.check_roots(sequences)?;
        self.check_names()
    }

    /// Whether there is such a content.
    pub(crate) fn lives(&self, spot: Spot) -> bool {
        let run = self.runs.get(spot.run.at()).filter(|run| run.lives);
        run.is_some_and(|run| spot.rows as usize * self.groups <= run.blocks.len())
    }

    fn living(&self) -> impl Iterator<Item = (RunId, &Run)> {
        let slots = self.runs.iter().enumerate();
        let runs = slots.map(|(slot, run)| (RunId::new(slot), run));
        runs.filter(|(_, run)| run.lives)
    }

    /// Every slot has a run that lives, or is vacant.
    fn check_slots(&self) -> Result<(), String> {
        let mut distinct = HashSet::new();
        for &slot in &self.vacant {
            let is_vacant = self.runs.get(slot.at()).is_some_and(|run| !run.lives);
            ensure(distinct.insert(slot) && is_vacant, || {
                format!("{slot:?} is vacant, and lives or is vacant twice")
            })?;
        }
        let (dead, vacant) = (self.runs.len() - self.living().count(), self.vacant.len());
        ensure(dead == vacant, || {
            format!("{dead} dead runs, {vacant} vacant")
        })?;
        let rows: usize = self
            .living()
            .map(|(_, run)| run.blocks.len() / self.groups)
            .sum();
        let counted = self.rows;
        ensure(rows == counted, || {
            format!("{rows} rows in all, {counted} counted")
        })
    }

    /// As many tokens as blocks, and no more rows than something needs.
    fn check_run(&self, id: RunId, run: &Run) -> Result<(), String> {
        let rows = run.blocks.len() / self.groups;
        let tokens = run.tokens.len();
        let fits = run.blocks.len().is_multiple_of(self.groups) && tokens == rows * self.block_size;
        ensure(fits, || {
            let blocks = run.blocks.len();
            format!("{id:?} has {tokens} tokens in {blocks} blocks")
        })?;
        if run.namespace.is_some() {
            return ensure(rows == 0, || format!("{id:?} is a root of {rows} rows"));
        }
        let parent = run.parent;
        ensure(self.lives(parent), || {
            format!("{id:?} hangs behind {parent:?}, which is gone")
        })?;
        let is_root = self.run(parent.run).namespace.is_some();
        ensure(is_root == (parent.rows == 0), || {
            format!("{id:?} hangs behind {parent:?}, no content and no root")
        })?;
        let last = run.blocks[run.blocks.len().saturating_sub(self.groups)..].iter();
        let needed = last.clone().any(|&block| block != BlockId::NONE);
        ensure(rows > 0 && (needed || run.has_child(rows as u32)), || {
            format!("{id:?} has {rows} rows, and nothing needs the last one")
        })
    }

    fn check_children(&self, counted: &BTreeMap<Spot, u32>) -> Result<(), String> {
        let says = self.living().flat_map(|(run, of)| {
            of.children
                .iter()
                .map(move |&Behind { rows, count, .. }| (Spot { run, rows }, count))
        });
        let says: BTreeMap<Spot, u32> = says.collect();
        for (spot, count) in counted {
            let found = says.get(spot).copied().unwrap_or(0);
            ensure(found == *count, || {
                format!("{found} runs hang behind {spot:?}, counted {count}")
            })?;
        }
        ensure(says.len() == counted.len(), || {
            format!(
                "children behind {} spots, counted {}",
                says.len(),
                counted.len()
            )
        })?;
        let sorted = |run: &Run| run.children.is_sorted_by(|a, b| a.rows < b.rows);
        ensure(self.living().all(|(_, run)| sorted(run)), || {
            "children out of order".into()
        })?;
        let behind = self.living().flat_map(|(run, of)| {
            let spot = move |behind: &Behind| {
                (
                    Spot {
                        run,
                        rows: behind.rows,
                    },
                    behind.newest,
                )
            };
            of.children.iter().map(spot)
        });
        let mut linked = 0;
        for (spot, newest) in behind {
            linked += self.check_links(spot, newest)?;
        }
        let hanging: u32 = counted.values().sum();
        ensure(linked == hanging, || {
            format!("{linked} runs linked, counted {hanging}")
        })
    }

    /// The runs behind a spot, from the newest one on: each is linked both ways. How many they are.
    fn check_links(&self, spot: Spot, newest: RunId) -> Result<u32, String> {
        let (mut at, mut newer, mut linked) = (newest, RunId::NONE, 0);
        while at != RunId::NONE {
            let run = self.runs.get(at.at()).filter(|run| run.lives);
            let fits = run.filter(|run| run.parent == spot && run.newer == newer);
            let Some(run) = fits else {
                return Err(format!("{at:?} is linked after {newer:?} behind {spot:?}"));
            };
            (at, newer) = (run.older, at);
            linked += 1;
        }
        Ok(linked)
    }

    /// The index has every run, and nothing else: no two begin with the same content.
    fn check_index(&self) -> Result<(), String> {
        let runs = self.living().filter(|(_, run)| run.namespace.is_none());
        let runs: Vec<_> = runs.collect();
        let (indexed, counted) = (self.index.len(), runs.len());
        ensure(indexed == counted, || {
            format!("{counted} runs, {indexed} in the index")
        })?;
        for (id, run) in runs {
            let tokens = &run.tokens[..self.block_size];
            let hash = self.index_hash(run.parent, tokens);
            let found = self
                .index
                .find(hash, |run_id| self.begins(run_id, run.parent, tokens));
            ensure(found == Some(id), || {
                format!("{id:?} is not found, but {found:?}")
            })?;
            // What goes on in the run above is no child of it.
            let above = self.run(run.parent.run);
            let at = run.parent.rows as usize * self.block_size;
            ensure(
                above.tokens.get(at..at + self.block_size) != Some(tokens),
                || format!("{id:?} begins as its parent goes on"),
            )?;
        }
        Ok(())
    }

    /// Each root stands for one namespace, for something that lives under it.
    fn check_roots(&self, sequences: &BTreeMap<Spot, u32>) -> Result<(), String> {
        let roots = self.living().filter(|(_, run)| run.namespace.is_some());
        let roots: Vec<_> = roots.collect();
        for &(run, root) in &roots {
            let name = root
                .namespace
                .as_ref()
                .and_then(|name| self.namespaces.get(name));
            ensure(name == Some(&run), || {
                format!("{run:?} is the root of {name:?}")
            })?;
            let counted = sequences.get(&Spot { run, rows: 0 }).copied().unwrap_or(0);
            let says = root.sequences;
            ensure(says == counted, || {
                format!("{run:?} has {says} sequences, counted {counted}")
            })?;
            ensure(counted > 0 || !root.children.is_empty(), || {
                format!("{run:?} is the root of nothing")
            })?;
        }
        let (counted, named) = (roots.len(), self.namespaces.len());
        ensure(counted == named, || {
            format!("{counted} roots, {named} namespaces")
        })?;
        for (root, count) in sequences {
            let is_root = self.lives(*root) && self.run(root.run).namespace.is_some();
            ensure(is_root, || {
                format!("{count} sequences under {root:?}, which is no root")
            })?;
        }
        Ok(())
    }

    /// Names follow from what is named, and no two contents have the same.
    fn check_names(&self) -> Result<(), String> {
        let mut all = HashSet::new();
        for (id, run) in self.living() {
            let rows = run.tokens.len() / self.block_size;
            let (names, asked) = (run.names.len(), run.asked as usize);
            ensure(names <= asked && asked <= rows, || {
                format!("{id:?} has {names} names of {asked} in {rows} rows")
            })?;
            let mut parent = run.parent.some().and_then(|spot| self.name_of(spot));
            for (row, &name) in run.names.iter().enumerate() {
                let tokens = &run.tokens[row * self.block_size..][..self.block_size];
                let counted = parent.map(|parent| self.hasher.child(parent, tokens));
                parent = Some(name);
                ensure(counted == Some(name), || {
                    format!("{id:?} is named {name:x} in row {row}, counted {counted:x?}")
                })?;
                ensure(all.insert(name), || {
                    format!("two contents are named {name:x}")
                })?;
            }
        }
        all.extend(&self.gone);
        let are_named = all.iter().all(|&name| self.named.contains(name));
        ensure(are_named && all.len() == self.named.len(), || {
            format!("{} names, {} kept", all.len(), self.named.len())
        })
    }

    /// A name that is known already.
    fn name_of(&self, spot: Spot) -> Option<u128> {
        let run = self.run(spot.run);
        match &run.namespace {
            Some(name) => Some(self.hasher.root(name)),
            None => run.names.get(spot.row()).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fit;
    use super::*;
    use crate::hash::ContentHasher;

    // The runs of the scene by their slots; slot 4 is vacant.
    const ROOT: usize = 0;
    /// Under `ROOT`: three rows, of which the middle one has lost its block in the second group.
    const LONG: usize = 1;
    /// Behind two rows of `LONG`: one row.
    const CHILD: usize = 2;
    /// The root of another namespace, with a sequence.
    const TENANT: usize = 3;

    struct Scene {
        contents: Contents,
        sequences: BTreeMap<Spot, u32>,
    }

    fn scene() -> Scene {
        let mut contents = Contents::new(64, 2, 2, ContentHasher::new(1, 128));
        let root = contents.hold_root(b"");
        let blocks = |ids: [u32; 2]| ids.map(BlockId::from);
        let long = [blocks([0, 1]), blocks([2, 3]), blocks([4, 5])].concat();
        let end = contents.append(root, &[1, 1, 2, 2, 3, 3], &long);
        let behind = Spot { rows: 2, ..end };
        let child = contents.append(behind, &[4, 4], &blocks([6, 7]));
        let tenant = contents.hold_root(b"tenant");
        let gone = contents.append(behind, &[5, 5], &blocks([8, 9]));
        contents.clear_block(gone, 0);
        contents.clear_block(gone, 1);
        contents.clear_block(behind, 1);
        contents.name(end);
        contents.name(child);
        Scene {
            contents,
            sequences: [(root, 1), (tenant, 1)].into(),
        }
    }

    type Case = (&'static str, fn(&mut Scene));

    const CASES: &[Case] = &[
        ("RunId(4) is vacant, and lives or is vacant twice", |s| {
            s.contents.vacant.push(RunId::new(4));
        }),
        ("RunId(1) is vacant, and lives or is vacant twice", |s| {
            s.contents.vacant[0] = RunId::new(LONG)
        }),
        ("1 dead runs, 0 vacant", |s| s.contents.vacant.clear()),
        ("4 rows in all, 5 counted", |s| s.contents.rows += 1),
        ("RunId(1) has 5 tokens in 6 blocks", |s| {
            s.contents.runs[LONG].tokens.pop();
        }),
        ("RunId(3) is a root of 1 rows", |s| {
            s.contents.runs[TENANT].tokens = vec![1, 1];
            s.contents.runs[TENANT].blocks = vec![BlockId::from(8); 2];
            s.contents.rows += 1;
        }),
        (
            "hangs behind Spot { run: RunId(4), rows: 1 }, which is gone",
            |s| {
                s.contents.runs[CHILD].parent = Spot {
                    run: RunId::new(4),
                    rows: 1,
                };
            },
        ),
        ("no content and no root", |s| {
            s.contents.runs[CHILD].parent.rows = 0
        }),
        ("RunId(2) has 1 rows, and nothing needs the last one", |s| {
            s.contents.runs[CHILD].blocks = vec![BlockId::NONE; 2];
        }),
        (
            "2 runs hang behind Spot { run: RunId(1), rows: 2 }, counted 1",
            |s| {
                s.contents.runs[LONG].children[0].count = 2;
            },
        ),
        (
            "0 runs hang behind Spot { run: RunId(1), rows: 2 }, counted 1",
            |s| {
                s.contents.runs[LONG].children.clear();
            },
        ),
        ("children behind 3 spots, counted 2", |s| {
            s.contents.hang(Spot {
                run: RunId::new(LONG),
                rows: 3,
            });
        }),
        ("RunId(1) is linked after RunId(none) behind", |s| {
            s.contents.runs[LONG].newer = RunId::new(CHILD);
        }),
        ("RunId(1) is linked after RunId(2) behind", |s| {
            s.contents.runs[CHILD].older = RunId::new(LONG);
        }),
        ("1 runs linked, counted 2", |s| {
            s.contents.runs[LONG].children[0].newest = RunId::NONE;
        }),
        ("2 runs, 1 in the index", |s| {
            let (parent, tokens) = (s.contents.runs[CHILD].parent, [4, 4]);
            let hash = s.contents.index_hash(parent, &tokens);
            s.contents.index.remove(hash, RunId::new(CHILD));
        }),
        ("RunId(2) is not found, but None", |s| {
            s.contents.runs[CHILD].tokens[0] = 9
        }),
        ("RunId(2) begins as its parent goes on", |s| {
            s.contents.runs[LONG].tokens[4..].copy_from_slice(&[4, 4]);
        }),
        ("RunId(3) is the root of None", |s| {
            s.contents.namespaces.remove(&b"tenant"[..]);
        }),
        ("RunId(3) has 1 sequences, counted 2", |s| {
            s.sequences.insert(
                Spot {
                    run: RunId::new(TENANT),
                    rows: 0,
                },
                2,
            );
        }),
        ("RunId(3) is the root of nothing", |s| {
            s.sequences.remove(&Spot {
                run: RunId::new(TENANT),
                rows: 0,
            });
            s.contents.runs[TENANT].sequences = 0;
        }),
        ("2 roots, 3 namespaces", |s| {
            s.contents
                .namespaces
                .insert([1][..].into(), RunId::new(ROOT));
        }),
        (
            "2 sequences under Spot { run: RunId(1), rows: 1 }, which is no root",
            |s| {
                s.sequences.insert(
                    Spot {
                        run: RunId::new(LONG),
                        rows: 1,
                    },
                    2,
                );
            },
        ),
        ("RunId(1) has 4 names of 3 in 3 rows", |s| {
            s.contents.runs[LONG].names.push(9)
        }),
        ("RunId(1) has 3 names of 4 in 3 rows", |s| {
            s.contents.runs[LONG].asked = 4
        }),
        ("RunId(1) is named", |s| {
            s.contents.runs[LONG].names[1] = 7;
        }),
        ("4 names, 5 kept", |s| {
            s.contents.named.add_leading(&[7]);
        }),
    ];

    #[test]
    fn each_is_named() {
        for (at, (expected, spoil)) in CASES.iter().enumerate() {
            let mut scene = scene();
            assert_eq!(scene.contents.check(&scene.sequences), Ok(()));
            spoil(&mut scene);
            let found = scene.contents.check(&scene.sequences).expect_err(expected);
            assert!(
                found.contains(expected),
                "case {at}: {found:?} is not {expected:?}"
            );
        }
    }

    #[test]
    fn runs_give_back_what_they_forgot_or_do_not_need() {
        let mut rows = vec![9; 97];
        rows.truncate(10);
        fit(&mut rows);
        assert_eq!(rows.capacity(), 97); // 26 are not small enough for 97
        rows.truncate(7);
        fit(&mut rows);
        assert!(rows.capacity() < 97 && rows == [9; 7]);
        let mut s = scene();
        for (room, kept) in [(10, 10), (1_000, 1_000), (1_300, 1_250)] {
            let run = &mut s.contents.runs[LONG];
            run.tokens = Vec::with_capacity(room);
            run.tokens.resize(1_000.min(room), 7);
            s.contents.rest(RunId::new(LONG));
            assert_eq!(s.contents.runs[LONG].tokens.capacity(), kept);
        }
    }
}
