//! The allocator's interface, without plans: for engines that schedule themselves and may free a sequence in the
//! middle of a step. Sequences, merges and counters are those of planned steps.
//!
//! Nothing is pinned for a step here: a released block may be allocated by the next call. That is correct if the
//! device runs the engine's steps in the order in which their blocks were allocated.

use super::answers::{Extend, Remapping};
use crate::error::Error;
use crate::ids::SeqKey;
use crate::pool::Purpose;
use crate::state::State;

impl State {
    /// Matches the tokens after a sequence's position into `self.matched`, as far as they can be read now. False if it
    /// is not on a block boundary, has slots reserved, or may not read the cache.
    pub(crate) fn match_ready(&mut self, slot: u32) -> bool {
        let seq = self.seqs.at(slot);
        seq.table.rows() == seq.registered.rows() && self.find_match(slot, Purpose::Read)
    }

    /// Reuses the cached blocks after a block boundary. Returns how many tokens they hold. Blocks from row `restored`
    /// on are counted as restored by a transfer.
    pub(crate) fn reuse_cached(&mut self, key: SeqKey, restored: usize) -> Result<usize, Error> {
        self.at_rest(key)?;
        if !self.match_ready(key.slot) || self.matched.num_rows == 0 {
            return Ok(0);
        }
        let (mut slid, block_size) = (Vec::new(), self.groups.block_size());
        self.insert_match(key.slot, &mut slid);
        for &(_, block) in &slid {
            self.pool.release(block);
        }
        let seq = self.seqs.at_mut(key.slot);
        let (rows, before) = (seq.registered.rows(), seq.computed);
        let end = (rows * block_size).min(seq.tokens.len() - 1);
        let first = restored.clamp(rows - self.matched.num_rows, rows);
        let cached = end.min(first * block_size) - before;
        let hits = (rows - self.matched.num_rows..first).flat_map(|row| seq.table.row(row));
        let (hits, reused) = (hits.count(), end - before);
        seq.set_computed(end);
        seq.count_reused(cached, reused - cached);
        let stats = &mut self.pool.stats;
        stats.prompt_tokens += reused as u64;
        stats.cached_tokens += cached as u64;
        stats.restored_tokens += (reused - cached) as u64;
        stats.hit_blocks += hits as u64;
        stats.slid_blocks += slid.len() as u64;
        Ok(reused)
    }

    /// Allocates slots for `num_tokens` tokens after the computed ones.
    pub(crate) fn extend(&mut self, key: SeqKey, num_tokens: usize) -> Result<Extend, Error> {
        let computed = self.at_rest(key)?.computed;
        let (slot, mut copies) = (key.slot, Vec::new());
        let (row, end) = (
            self.groups.row_of(computed),
            computed.saturating_add(num_tokens),
        );
        let before = self.seqs.at(slot).table.rows();
        let shared: Vec<usize> = match num_tokens {
            0 => Vec::new(),
            _ => self.held_by_others(slot, computed).collect(),
        };
        let new = self.groups.rows(end).saturating_sub(before);
        let needed = new.saturating_mul(self.groups.len());
        let needed = needed.saturating_add(shared.len());
        let available = self.pool.available();
        if needed > available {
            return Ok(Extend::NoRoom { needed, available });
        }
        for group in shared {
            let copy = self.allocate_one();
            let source = self.replace_block(slot, group, row, copy);
            self.pool.release(source);
            copies.push((source, copy));
        }
        self.pool.stats.copied_blocks += copies.len() as u64;
        self.allocate(slot, before + new);
        let table = &self.seqs.at(slot).table;
        let blocks = (before..table.rows()).flat_map(|row| table.row(row));
        Ok(Extend::Extended {
            blocks: blocks.collect(),
            copies,
        })
    }

    /// As `must_copy`, and blocks that an open step is still to copy.
    fn held_by_others(&self, slot: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups_shared_at(slot, position, |block| self.pool.refs(block) > 1)
    }

    /// Publishes the next `num_tokens` tokens of a sequence as computed; `tokens` were not known before.
    pub(crate) fn publish(
        &mut self,
        key: SeqKey,
        num_tokens: usize,
        tokens: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        let seq = self.at_rest(key)?;
        let (sequence, computed) = (seq.id, seq.computed);
        let end = computed.saturating_add(num_tokens);
        let slots = seq.table.rows() * self.groups.block_size();
        let known = seq.tokens.len() + tokens.len();
        if end > slots {
            return Err(Error::NotExtended {
                sequence,
                end,
                slots,
            });
        }
        if end > known {
            return Err(Error::NotKnown {
                sequence,
                end,
                known,
            });
        }
        let shared = self.held_by_others(key.slot, computed).next();
        if let Some(group) = shared.filter(|_| num_tokens > 0) {
            let block = seq.table.at(group, self.groups.row_of(computed)).get();
            return Err(Error::SharedBlock { sequence, block });
        }
        let unplanned = seq.num_unplanned();
        let seq = self.seqs.at_mut(key.slot);
        seq.append(tokens);
        seq.set_computed(end);
        let stats = &mut self.pool.stats;
        stats.computed_tokens += num_tokens as u64;
        if unplanned > 1 {
            stats.prompt_tokens += num_tokens.min(unplanned) as u64;
        }
        let mut remappings = Vec::new();
        let step = self.steps.last_closed();
        self.register_full(key.slot, step, &mut remappings);
        self.slide(key.slot);
        Ok(remappings)
    }
}
