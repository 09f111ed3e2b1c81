//! Validation of sequences: tables, progress, windows, registered logical blocks.

use std::collections::{BTreeMap, HashSet};

use super::State;
use crate::check::ensure;
use crate::ids::NodePosition;
use crate::sequence::{PlanSet, Sequence};

/// Table entries of a block: how many, and at which logical block and group.
#[derive(Clone, Copy, Default)]
struct Held {
    times: u32,
    at: (usize, usize),
}

impl State {
    /// Recounts sequences and the tree. Returns the table entries per block.
    pub(crate) fn check(&self) -> Result<Vec<u32>, String> {
        let mut roots: BTreeMap<NodePosition, u32> = BTreeMap::new();
        for seq in self.seqs.iter() {
            *roots.entry(seq.root).or_default() += 1;
        }
        self.pool.tree().check(&roots)?;
        let mut held = vec![Held::default(); self.pool.num_blocks()];
        let mut ids = HashSet::new();
        for seq in self.seqs.iter() {
            ensure(ids.insert(seq.id), || {
                format!("two sequences are number {}", seq.id)
            })?;
            self.check_table(seq, &mut held)?;
            self.check_progress(seq)?;
            self.check_windows(seq)?;
            self.check_registered(seq)?;
            self.check_version(seq)?;
        }
        for seq in self.seqs.iter() {
            self.check_unshared(seq, &held)?;
        }
        Ok(held.iter().map(|block| block.times).collect())
    }

    /// A table has whole logical blocks of existing blocks, each at the same index of every table, in its layer group.
    fn check_table(&self, seq: &Sequence, held: &mut [Held]) -> Result<(), String> {
        let id = seq.id;
        let indices = seq.table.end();
        for group in 0..seq.table.groups() {
            let end = seq.table.start(group) + seq.table.blocks_of(group).len();
            ensure(end == indices, || {
                format!("sequence {id} has {indices} logical blocks, {end} in group {group}")
            })?;
        }
        for group in 0..seq.table.groups() {
            let indices = seq.table.start(group)..;
            for (index, &block) in indices.zip(seq.table.blocks_of(group)) {
                let Some(entries) = held.get_mut(block.at()) else {
                    return Err(format!("sequence {id} holds {block:?}: there is none"));
                };
                let (at, before) = ((index, group), entries.at);
                ensure(entries.times == 0 || before == at, || {
                    format!("sequence {id} holds {block:?} at {at:?}, it is at {before:?} already")
                })?;
                entries.times += 1;
                entries.at = at;
                let of = self
                    .pool
                    .cached_info(block)
                    .map_or(group, |cached| cached.1);
                ensure(of == group, || {
                    format!("sequence {id} holds {block:?} of group {of} in group {group}")
                })?;
            }
        }
        Ok(())
    }

    fn check_progress(&self, seq: &Sequence) -> Result<(), String> {
        let (id, computed, end) = (seq.id, seq.computed, seq.planned_end);
        let (block_size, tokens) = (self.groups.block_size(), seq.tokens.len());
        let indices = seq.table.end();
        ensure(
            computed <= tokens && computed <= indices * block_size,
            || {
                format!(
                    "sequence {id}: {computed} computed of {tokens} tokens in {indices} logical blocks"
                )
            },
        )?;
        ensure(computed <= end, || {
            format!(
                "sequence {id} is planned to {end}, before the end of its {computed} computed tokens"
            )
        })?;
        ensure((seq.cached + seq.restored) as usize <= computed, || {
            let (cached, restored) = (seq.cached, seq.restored);
            format!(
                "sequence {id}: {cached} cached and {restored} restored of {computed} computed tokens"
            )
        })?;
        // The last token of a full hit is computed again, and every token after the last snapshot.
        let registered = seq.registered.end() * block_size;
        ensure(registered <= end + 1 || self.has_state(), || {
            format!("sequence {id} is planned to {end} with {registered} registered tokens")
        })?;
        ensure(self.caching || seq.registered.end() == 0, || {
            format!("sequence {id} has registered blocks, and caching is off")
        })?;
        ensure(!seq.dropped || seq.plans != PlanSet::NONE, || {
            format!("sequence {id} was dropped and lives on")
        })
    }

    /// A table has every logical block that a later token reads, and none that slid out of a window.
    fn check_windows(&self, seq: &Sequence) -> Result<(), String> {
        let (id, computed) = (seq.id, seq.computed);
        let indices = self.groups.index_of(computed).max(seq.registered.end());
        let final_indices = self.final_indices(seq);
        for group in 0..self.groups.len() {
            let start = seq.table.start(group);
            let seen = match seq.is_private {
                true => self.groups.first_read(group, computed),
                false => self.groups.first_index(group, indices),
            };
            ensure(start <= seen, || {
                format!(
                    "sequence {id} of {computed} computed tokens begins at block {start} of group {group}, {seen} is seen"
                )
            })?;
            let unseen = self.groups.first_index(group, final_indices);
            ensure(start >= unseen.min(seq.table.end()), || {
                format!(
                    "sequence {id} begins at block {start} of group {group}, nothing before {unseen} is seen"
                )
            })?;
        }
        Ok(())
    }

    /// Logical blocks that are yet to be written are in no other table, unless a fork shares them.
    fn check_unshared(&self, seq: &Sequence, held: &[Held]) -> Result<(), String> {
        let full = self.groups.index_of(seq.computed);
        let from = full
            .max(seq.registered.end())
            .max(seq.shared_indices as usize);
        for block in (from..seq.table.end()).flat_map(|index| seq.table.blocks_at(index)) {
            let times = held[block.at()].times;
            ensure(times == 1 && self.pool.cached_at(block).is_none(), || {
                let id = seq.id;
                format!("sequence {id} would write on {block:?} of {times} tables")
            })?;
        }
        Ok(())
    }

    /// A sequence that registers began with the current weights, and so did its blocks. A private one has no registered
    /// block.
    fn check_version(&self, seq: &Sequence) -> Result<(), String> {
        let (id, own, weights) = (seq.id, seq.weights_version, self.pool.weights_version());
        if seq.is_private {
            let (registered, computed) = (seq.registered.end(), seq.computed);
            return ensure(registered == 0 && computed > 0 && own < weights, || {
                format!(
                    "sequence {id} is private, of version {own} of {weights}, with {registered} registered blocks and {computed} computed tokens"
                )
            });
        }
        ensure(own == weights, || {
            format!(
                "sequence {id} registers, of version {own}, the weights are at version {weights}"
            )
        })?;
        let mut blocks = seq.table.blocks();
        match blocks.find(|&block| self.pool.version_of(block) != weights) {
            None => Ok(()),
            Some(block) => {
                let of = self.pool.version_of(block);
                Err(format!(
                    "sequence {id} of version {weights} holds {block:?} of version {of}"
                ))
            }
        }
    }

    /// Registered logical blocks are the blocks on the path from the root to the last one.
    fn check_registered(&self, seq: &Sequence) -> Result<(), String> {
        let (id, tree) = (seq.id, self.pool.tree());
        let (mut position, indices) = (seq.registered.last, seq.registered.end());
        let tokens = seq.tokens.get(..indices * self.groups.block_size());
        let is_path = tree.contains(position)
            && tokens.is_some_and(|tokens| {
                let prefix = seq.labelled().first(tokens.len());
                tree.leads_to(seq.root, prefix, position)
            });
        ensure(is_path, || {
            format!("sequence {id} does not stand on its first {indices} blocks")
        })?;
        for index in (0..indices).rev() {
            let is_its = |group: &usize| match seq.table.get(*group, index) {
                Some(block) => tree.block(position, *group) == Some(block),
                None => true,
            };
            ensure((0..self.groups.len()).all(|group| is_its(&group)), || {
                format!("sequence {id}: index {index} is not its cached block")
            })?;
            position = tree.parent(position).unwrap_or(NodePosition::NONE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::check::scene::*;
    use crate::ids::BlockId;
    use crate::ids::NodePosition;
    use crate::sequence::Registered;

    const CASES: &[Case] = &[
        ("two sequences are number 1", |s| s.seq(COPY).id = 1),
        ("sequence 1 has 4 logical blocks, 3 in group 1", |s| {
            let mut table = s.seq(REST).table.clone();
            s.manager.state.shorten(REST, 3);
            table.take_indices(3..4, |_| {});
            let one = table.blocks_of(0).to_vec();
            s.seq(REST).table.tail_of_group(0).push(one[0]);
        }),
        ("sequence 1 holds BlockId(128): there is none", |s| {
            s.seq(REST).table.replace(1, 3, BlockId::from(128));
        }),
        ("it is at (3, 0) already", |s| {
            let block = s.seq(REST).table.at(0, 3);
            s.seq(REST).table.replace(1, 3, block);
        }),
        ("of group 1 in group 0", |s| {
            let (one, other) = (s.seq(REST).table.at(0, 3), s.seq(REST).table.at(1, 3));
            s.seq(REST).table.replace(0, 3, other);
            s.seq(REST).table.replace(1, 3, one);
        }),
        (
            "sequence 5: 8 computed of 7 tokens in 3 logical blocks",
            |s| s.seq(TAIL).computed = 8,
        ),
        (
            "sequence 1: 13 computed of 13 tokens in 4 logical blocks",
            |s| s.seq(REST).computed = 13,
        ),
        (
            "sequence 1 is planned to 11, before the end of its 12 computed tokens",
            |s| {
                s.seq(REST).planned_end = 11;
            },
        ),
        (
            "sequence 6: 12 cached and 0 restored of 11 computed tokens",
            |s| s.seq(ATTACHED).cached = 12,
        ),
        (
            "sequence 6 is planned to 10 with 12 registered tokens",
            |s| {
                s.seq(ATTACHED).set_computed(10);
                s.seq(ATTACHED).cached = 0;
            },
        ),
        (
            "sequence 1 has registered blocks, and caching is off",
            |s| {
                s.manager.state.caching = false;
            },
        ),
        ("sequence 1 was dropped and lives on", |s| {
            s.seq(REST).dropped = true
        }),
        ("begins at block 3 of group 1, 2 is seen", |s| {
            let mut gone = Vec::new();
            s.seq(REST).table.slide(1, 3, |block| gone.push(block));
            gone.into_iter()
                .for_each(|block| s.manager.state.pool.release(block));
        }),
        (
            "begins at block 2 of group 1, nothing before 3 is seen",
            |s| {
                s.seq(REST).registered = Registered::new(s.seq(REST).registered.last, 5);
                s.seq(REST).computed = 15;
                s.seq(REST).planned_end = 15;
                s.seq(REST).tokens = (0..16).collect();
                s.manager.state.allocate(REST, 5);
            },
        ),
        ("sequence 1 does not stand on its first 4 blocks", |s| {
            s.seq(REST).registered.last = NodePosition::NONE;
        }),
        ("sequence 1 does not stand on its first 4 blocks", |s| {
            s.seq(REST).registered.last = s.seq(PARENT).registered.last;
        }),
        ("sequence 1 does not stand on its first 4 blocks", |s| {
            s.seq(REST).tokens[1] += 1
        }),
        ("index 3 is not its cached block", |s| {
            let block = s.manager.state.allocate_one();
            let mine = s.seq(COPY).table.replace(0, 3, block);
            s.manager.state.pool.release(mine);
        }),
        (
            "sequence 1 registers, of version 3, the weights are at version 0",
            |s| s.seq(REST).weights_version = 3,
        ),
        (
            "sequence 1 is private, of version 0 of 0, with 4 registered blocks",
            |s| s.seq(REST).is_private = true,
        ),
        ("sequence 1 of version 0 holds BlockId(", |s| {
            let block = s.seq(REST).table.at(0, 3);
            s.manager.state.pool.stamp_as(block, 5);
        }),
        ("sequence 3 would write on", |s| {
            s.seq(PARENT).shared_indices = 0;
            s.seq(TAIL).shared_indices = 0;
        }),
    ];

    #[test]
    fn each_of_them_is_named() {
        each_is_named(scene, CASES);
    }
}
