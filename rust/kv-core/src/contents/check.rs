//! The validator's part that sees into the contents: runs, what hangs behind them, index, names.

use std::collections::{BTreeMap, HashSet};

use super::{Contents, Run, Spot};
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
                .map(move |&(rows, count)| (Spot { run, rows }, count))
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
        let sorted = |run: &Run| run.children.is_sorted_by(|a, b| a.0 < b.0);
        ensure(self.living().all(|(_, run)| sorted(run)), || {
            "children out of order".into()
        })
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
                .find(hash, |&run_id| self.begins(run_id, run.parent, tokens));
            ensure(found == Some(&id), || {
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
            ensure(run.names.len() <= rows, || {
                let names = run.names.len();
                format!("{id:?} has {names} names of {rows} rows")
            })?;
            for (row, name) in run.names.iter().enumerate() {
                let Some(name) = *name else { continue };
                let parent = match row.checked_sub(1) {
                    Some(before) => run.names[before],
                    None => self.name_of(run.parent),
                };
                let tokens = &run.tokens[row * self.block_size..][..self.block_size];
                let counted = parent.map(|parent| self.hasher.child(parent, tokens));
                ensure(counted == Some(name), || {
                    format!("{id:?} is named {name:x} in row {row}, counted {counted:x?}")
                })?;
                ensure(all.insert(name), || {
                    format!("two contents are named {name:x}")
                })?;
            }
        }
        ensure(all == self.named, || {
            format!("{} names, {} kept", all.len(), self.named.len())
        })
    }

    /// A name that is known already.
    fn name_of(&self, spot: Spot) -> Option<u128> {
        let run = self.run(spot.run);
        match &run.namespace {
            Some(name) => Some(self.hasher.root(name)),
            None => run.names.get(spot.row()).copied().flatten(),
        }
    }
}
