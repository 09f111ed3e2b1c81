//! The allocator's interface, without plans: for engines that schedule themselves and may free a sequence in the
//! middle of a step. Sequences, merges and counters work as in planned steps.
//!
//! Nothing is pinned for a step here: a released block may be allocated by the next call. That is correct if the
//! device runs the engine's steps in the order in which their blocks were allocated.

use super::answers::{Extend, Remapping};
use crate::error::Error;
use crate::ids::SeqKey;
use crate::pool::Purpose;
use crate::state::State;

impl State {
    /// Matches the tokens after a sequence's position into `self.matched`, up to the first block that is not ready. False
    /// if it is not on a block boundary, has lookahead slots, or may not read the cache.
    pub(crate) fn match_ready(&mut self, seq_idx: u32) -> bool {
        let seq = self.seqs.at(seq_idx);
        seq.table.end() == seq.registered.end() && self.find_match(seq_idx, Purpose::Read)
    }

    /// Reuses the cached blocks after a block boundary. Returns how many tokens they hold. Blocks from logical block
    /// `restored` on are counted as restored by a transfer.
    pub(crate) fn reuse_cached(&mut self, key: SeqKey, restored: usize) -> Result<usize, Error> {
        self.at_rest(key)?;
        if !self.match_ready(key.seq_idx) || !self.cut_at_snapshot(key.seq_idx) {
            return Ok(0);
        }
        let (mut slid, block_size) = (Vec::new(), self.groups.block_size());
        self.insert_match(key.seq_idx, &mut slid);
        for &(_, block) in &slid {
            self.pool.release(block);
        }
        let seq = self.seqs.at_mut(key.seq_idx);
        let (indices, before) = (seq.registered.end(), seq.computed);
        let end = (indices * block_size).min(seq.tokens.len() - 1);
        let first = restored.clamp(indices - self.matched.num_indices, indices);
        let cached = end.min(first * block_size) - before;
        let hits = (indices - self.matched.num_indices..first)
            .flat_map(|index| seq.table.blocks_at(index));
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

    /// Cuts the current match at the last snapshot, which the sequence continues: its caller copies that to the running
    /// state. False if nothing is left of the match.
    fn cut_at_snapshot(&mut self, seq_idx: u32) -> bool {
        if !self.has_state() {
            return self.matched.num_indices > 0;
        }
        let seq = self.seqs.at(seq_idx);
        let Some(snapshot) = self
            .matched
            .snapshot
            .some()
            .filter(|_| seq.planned_end == 0)
        else {
            return false;
        };
        // Without a replay, windows reach back one token further.
        let (tokens, root) = (seq.labelled().first(self.matched.start), seq.registered);
        let (matched, groups) = (&mut self.matched, &self.groups);
        self.pool
            .find_match(matched, groups, tokens, root, Purpose::Read);
        if self.matched.num_indices * self.groups.block_size() < self.matched.start {
            return false;
        }
        let blocks = self.pool.pin_snapshot(snapshot);
        blocks.iter().for_each(|&block| self.pool.unpin(block));
        self.seqs.at_mut(seq_idx).track_mut().last_kept = self.matched.start;
        self.pool.stats.loaded_snapshots += 1;
        true
    }

    /// Caches the state of a sequence at its position. Returns the blocks to which its caller copies the state; none if
    /// there is nothing to write.
    pub(crate) fn keep_snapshot(&mut self, key: SeqKey) -> Result<Extend, Error> {
        let seq = self.at_rest(key)?;
        let (sequence, computed) = (seq.id, seq.computed);
        if computed == 0 || !computed.is_multiple_of(self.groups.block_size()) {
            return Err(Error::SnapshotPosition { sequence, computed });
        }
        let kept = |blocks| Extend::Extended {
            blocks,
            copies: Vec::new(),
        };
        let config = self.pool.snapshots().map(|snapshots| snapshots.config);
        let position = self.kept_position(key.seq_idx, computed);
        let (Some(config), Some(position)) = (config, position) else {
            return Ok(kept(Vec::new()));
        };
        if self.pool.snapshot_at(position).is_some() {
            return Ok(kept(Vec::new()));
        }
        let (needed, available) = (config.blocks, self.pool.available());
        if needed > available {
            return Ok(Extend::NoRoom { needed, available });
        }
        let blocks = self.pool.take_for_snapshot(false);
        let step = self.steps.last_closed();
        let is_stored = self.pool.store_snapshot(position, &blocks, step, false);
        blocks.iter().for_each(|&block| self.pool.unpin(block));
        if !is_stored {
            return Ok(kept(Vec::new()));
        }
        self.seqs.at_mut(key.seq_idx).track_mut().last_kept = computed;
        Ok(kept(blocks))
    }

    /// Allocates slots for `num_tokens` tokens after the computed ones.
    pub(crate) fn extend(&mut self, key: SeqKey, num_tokens: usize) -> Result<Extend, Error> {
        let computed = self.at_rest(key)?.computed;
        let (seq_idx, mut copies) = (key.seq_idx, Vec::new());
        let (index, end) = (
            self.groups.index_of(computed),
            computed.saturating_add(num_tokens),
        );
        let before = self.seqs.at(seq_idx).table.end();
        let shared: Vec<usize> = match num_tokens {
            0 => Vec::new(),
            _ => self.held_by_others(seq_idx, computed).collect(),
        };
        let new = self.groups.end_of(end).saturating_sub(before);
        let needed = new.saturating_mul(self.groups.len());
        let needed = needed.saturating_add(shared.len());
        let available = self.pool.available();
        if needed > available {
            return Ok(Extend::NoRoom { needed, available });
        }
        for group in shared {
            let copy = self.allocate_one();
            let source = self.replace_block(seq_idx, group, index, copy);
            self.pool.release(source);
            copies.push((source, copy));
        }
        self.pool.stats.copied_blocks += copies.len() as u64;
        self.allocate(seq_idx, before + new);
        let table = &self.seqs.at(seq_idx).table;
        let blocks = (before..table.end()).flat_map(|index| table.blocks_at(index));
        Ok(Extend::Extended {
            blocks: blocks.collect(),
            copies,
        })
    }

    /// As `must_copy`, also for blocks that an open step is to copy.
    fn held_by_others(&self, seq_idx: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups_shared_at(seq_idx, position, |block| self.pool.refs(block) > 1)
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
        let slots = seq.table.end() * self.groups.block_size();
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
        let shared = self.held_by_others(key.seq_idx, computed).next();
        if let Some(group) = shared.filter(|_| num_tokens > 0) {
            let block = seq.table.at(group, self.groups.index_of(computed)).get();
            return Err(Error::SharedBlock { sequence, block });
        }
        let unplanned = seq.num_unplanned();
        let seq = self.seqs.at_mut(key.seq_idx);
        seq.append(tokens);
        seq.set_computed(end);
        let stats = &mut self.pool.stats;
        stats.computed_tokens += num_tokens as u64;
        if unplanned > 1 {
            stats.prompt_tokens += num_tokens.min(unplanned) as u64;
        }
        let mut remappings = Vec::new();
        let step = self.steps.last_closed();
        self.register_full(key.seq_idx, step, &mut remappings);
        self.slide(key.seq_idx);
        Ok(remappings)
    }
}
