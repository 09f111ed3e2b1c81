//! Sequences: what their tables hold, how far they are, where they stand in the tree.

use std::collections::HashSet;

use super::ensure;
use crate::blocks::Block;
use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::sequence::Sequence;

/// What tables say of a block: how many hold it, as which entry.
#[derive(Clone, Copy, Default)]
struct Held {
    times: u32,
    at: usize,
}

impl BlockManager {
    /// Table entries per block.
    pub(super) fn check_sequences(&self) -> Result<Vec<u32>, String> {
        let mut held = vec![Held::default(); self.config.num_blocks];
        let mut ids = HashSet::new();
        for seq in self.sequences.iter() {
            ensure(ids.insert(seq.id), || {
                format!("two sequences are number {}", seq.id)
            })?;
            self.check_table(seq, &mut held)?;
            self.check_progress(seq)?;
            self.check_windows(seq)?;
            self.check_hashes(seq)?;
            self.check_chain(seq)?;
        }
        for seq in self.sequences.iter() {
            self.check_unshared(seq, &held)?;
        }
        Ok(held.iter().map(|block| block.times).collect())
    }

    /// Whole rows of blocks that there are, each in the same place of every table that holds it, in the
    /// column of its content's group.
    fn check_table(&self, seq: &Sequence, held: &mut [Held]) -> Result<(), String> {
        let (id, groups) = (seq.id, self.groups.len());
        ensure(seq.table.len().is_multiple_of(groups), || {
            let entries = seq.table.len();
            format!("sequence {id} has {entries} table entries in {groups} groups")
        })?;
        for (at, &block) in seq.table.iter().enumerate() {
            if block == BlockId::NONE {
                continue;
            }
            let Some(place) = held.get_mut(block.at()) else {
                return Err(format!("sequence {id} holds {block:?}: there is none"));
            };
            ensure(place.times == 0 || place.at == at, || {
                let before = place.at;
                format!("sequence {id} holds {block:?} as entry {at}, it is entry {before} already")
            })?;
            place.times += 1;
            place.at = at;
            let Block { node, group, .. } = self.blocks[block.at()];
            let column = at % groups;
            ensure(
                node == NodeIdx::NONE || usize::from(group) == column,
                || format!("sequence {id} holds {block:?} of group {group} in column {column}"),
            )?;
        }
        Ok(())
    }

    fn check_progress(&self, seq: &Sequence) -> Result<(), String> {
        let (id, computed, ahead) = (seq.id, seq.computed, seq.ahead);
        let (block_size, tokens) = (self.config.block_size, seq.tokens.len());
        let rows = seq.table.len() / self.groups.len();
        ensure(computed <= tokens && computed <= rows * block_size, || {
            format!("sequence {id}: {computed} computed of {tokens} tokens in {rows} rows")
        })?;
        ensure(computed <= ahead, || {
            format!("sequence {id} is at {ahead}, behind its {computed} computed tokens")
        })?;
        ensure(seq.cached <= computed, || {
            let cached = seq.cached;
            format!("sequence {id}: {cached} cached of {computed} computed tokens")
        })?;
        // The last token of a full hit is computed again.
        let registered = seq.chain.blocks * block_size;
        ensure(registered <= ahead + 1, || {
            format!("sequence {id} is at {ahead} with {registered} registered tokens")
        })?;
        let nameless = seq.chain.blocks == 0 && !seq.chain.private;
        ensure(self.config.prefix_caching || nameless, || {
            format!("sequence {id} has named blocks, and caching is off")
        })?;
        ensure(!seq.dropped || seq.planned > 0, || {
            format!("sequence {id} was dropped and lives on")
        })
    }

    /// Every row that a token to come sees, none of those that slid out of a window, and no gap.
    fn check_windows(&self, seq: &Sequence) -> Result<(), String> {
        let (id, groups) = (seq.id, self.groups.len());
        let rows = (seq.computed / self.config.block_size).max(seq.chain.blocks);
        let settled = self.settled_rows(seq);
        for (at, block) in seq.table.iter().enumerate() {
            let (row, group) = (at / groups, at % groups);
            let seen = row >= self.groups.first_row(group, rows);
            ensure(*block != BlockId::NONE || !seen, || {
                let computed = seq.computed;
                format!(
                    "sequence {id} of {computed} computed tokens has no block in row {row} of group {group}"
                )
            })?;
            let unseen = row < self.groups.first_row(group, settled);
            ensure(*block == BlockId::NONE || !unseen, || {
                format!(
                    "sequence {id} holds {block:?} in row {row} of group {group}, which no token sees"
                )
            })?;
            let gap = row > 0 && seq.table[at - groups] != BlockId::NONE;
            ensure(*block != BlockId::NONE || !gap, || {
                format!("sequence {id} has a gap in row {row} of group {group}")
            })?;
        }
        Ok(())
    }

    /// Rows that are yet to be written are its own, unless a fork has shared them.
    fn check_unshared(&self, seq: &Sequence, held: &[Held]) -> Result<(), String> {
        let full = seq.computed / self.config.block_size;
        let from = full.max(seq.chain.blocks).max(seq.shared_rows);
        let rows = seq.table.iter().enumerate();
        for (at, block) in rows.skip(from * self.groups.len()) {
            let times = held[block.at()].times;
            let named = self.blocks[block.at()].node != NodeIdx::NONE;
            ensure(times == 1 && !named, || {
                let id = seq.id;
                format!("sequence {id} would write on entry {at}, {block:?} of {times} tables")
            })?;
        }
        Ok(())
    }

    /// The hashes that it knows are those of its leading blocks: of all that are registered, at least.
    fn check_hashes(&self, seq: &Sequence) -> Result<(), String> {
        let (id, known, registered) = (seq.id, seq.hashes.len(), seq.chain.blocks);
        let full = seq.tokens.len() / self.config.block_size;
        ensure(registered <= known && known <= full, || {
            format!("sequence {id} knows {known} hashes, {registered} of {full} blocks registered")
        })?;
        let mut parent = self.tree.hash(seq.root);
        let blocks = seq.tokens.chunks_exact(self.config.block_size);
        for (row, (tokens, &hash)) in blocks.zip(&seq.hashes).enumerate() {
            let counted = self.tree.hasher().child(parent, tokens);
            ensure(hash == counted, || {
                format!("sequence {id} has hash {hash:x} for row {row}, counted {counted:x}")
            })?;
            parent = hash;
        }
        Ok(())
    }

    /// Its first rows hold the contents on the path from its namespace to its tip.
    fn check_chain(&self, seq: &Sequence) -> Result<(), String> {
        let (id, block_size, groups) = (seq.id, self.config.block_size, self.groups.len());
        let mut node = seq.chain.tip;
        for row in (0..seq.chain.blocks).rev() {
            ensure(self.tree.lives(node), || {
                format!("sequence {id}: the content of row {row} is gone")
            })?;
            let is_its = |group: usize| match seq.table.get(row * groups + group) {
                Some(&block) => {
                    block == BlockId::NONE || self.tree.block(node, group) == Some(block)
                }
                None => false,
            };
            let tokens = &seq.tokens[row * block_size..][..block_size];
            let all_its = (0..groups).all(is_its) && self.tree.tokens(node) == tokens;
            ensure(all_its, || {
                format!("sequence {id}: row {row} is not its content's")
            })?;
            node = self.tree.parent(node).unwrap_or(NodeIdx::NONE);
        }
        ensure(node == seq.root, || {
            format!("sequence {id} does not hang from its namespace")
        })
    }
}
