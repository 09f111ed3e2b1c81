//! Without a plan: for engines that choose their chunks themselves, hold the tokens, and free in the middle
//! of a step. The same sequences, merges and counters; only the order is the caller's.
//!
//! Nothing is fenced here: what such an engine lets go of may be handed out at its next call. That is right
//! where its device runs one step after the other, in the order in which their blocks were handed out.

use super::{State, Steps};
use crate::error::Error;
use crate::ids::{BlockId, SeqKey};
use crate::matching::Wanted;
use crate::step::plan::Remapping;

/// The answer to [`BlockManager::extend`](crate::BlockManager::extend).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Extend {
    /// The slots are there.
    Extended {
        /// Blocks more at the end of the table, row by row: of each row, those of all layer groups.
        blocks: Vec<BlockId>,
        /// Blocks to copy before anything is written, as (source, destination): a fork's partial block.
        copies: Vec<(BlockId, BlockId)>,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed.
        needed: usize,
        /// Blocks free or evictable.
        available: usize,
    },
}

impl State {
    /// Goes on from a block boundary with what is cached; how many tokens that are.
    pub(crate) fn reuse_cached(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.at_rest(key)?;
        let seq = self.seqs.at(key.slot);
        let (tip, from) = (seq.registered.tip, seq.registered.rows());
        let stands = seq.computed == from * self.groups.block_size() && seq.table.rows() == from;
        if !stands || !self.caching || !seq.read_cache {
            return Ok(0);
        }
        let (pool, from) = (&mut self.pool, (tip, from));
        self.matched
            .walk(pool, &self.groups, &seq.tokens, from, Wanted::Ready);
        if self.matched.rows == 0 {
            return Ok(0);
        }
        let mut unseen = Vec::new();
        let (blocks, _) = self.insert_match(key.slot, &mut unseen);
        for &(_, block) in &unseen {
            self.pool.release(block);
        }
        let seq = self.seqs.at_mut(key.slot);
        let end = seq.registered.rows() * self.groups.block_size();
        let end = end.min(seq.tokens.len() - 1);
        let reused = end - seq.computed;
        seq.set_computed(end);
        seq.cached += reused;
        let stats = &mut self.pool.stats;
        stats.prompt_tokens += reused as u64;
        stats.cached_tokens += reused as u64;
        stats.hit_blocks += blocks as u64;
        stats.slid_blocks += unseen.len() as u64;
        Ok(reused)
    }

    /// Slots for `num_tokens` tokens after those that are computed.
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
        let needed = new
            .saturating_mul(self.groups.len())
            .saturating_add(shared.len());
        let available = self.pool.available();
        if needed > available {
            return Ok(Extend::NoRoom { needed, available });
        }
        for group in shared {
            let copy = self.allocate_one();
            let seq = self.seqs.at_mut(slot);
            let source = seq.table.replace(group, row, copy);
            seq.table_version += 1;
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
}

impl State {
    /// The groups whose block of the row of `position` must not be written: as `must_copy`, and what an
    /// open step is yet to copy.
    fn held_by_others(&self, slot: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups_shared_at(slot, position, |block| self.pool.refs(block) > 1)
    }
}

impl Steps {
    /// The next `num_tokens` tokens of a sequence are computed, of which `tokens` were not known before.
    pub(crate) fn publish(
        &mut self,
        state: &mut State,
        key: SeqKey,
        num_tokens: usize,
        tokens: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        let seq = state.at_rest(key)?;
        let (sequence, computed) = (seq.id, seq.computed);
        let end = computed.saturating_add(num_tokens);
        let (slots, known) = (
            seq.table.rows() * state.groups.block_size(),
            seq.tokens.len() + tokens.len(),
        );
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
        if let Some(group) = state
            .held_by_others(key.slot, computed)
            .next()
            .filter(|_| num_tokens > 0)
        {
            let block = seq.table.at(group, state.groups.row_of(computed)).get();
            return Err(Error::SharedBlock { sequence, block });
        }
        let left = seq.left();
        let seq = state.seqs.at_mut(key.slot);
        seq.tokens.extend_from_slice(tokens);
        seq.set_computed(end);
        let stats = &mut state.pool.stats;
        stats.computed_tokens += num_tokens as u64;
        if left > 1 {
            stats.prompt_tokens += num_tokens.min(left) as u64;
        }
        let mut remappings = Vec::new();
        let step = self.last_closed();
        self.register_full(state, key.slot, step, &mut remappings);
        state.slide(key.slot);
        Ok(remappings)
    }
}
