//! Transfers: blocks reserved for KV that comes from outside the pool.
//!
//! A transfer holds the blocks that it is to fill, and the cached blocks before and among them, until it ends. Neither
//! the end of its sequence nor a rollback touches it. Its blocks are in no table, and in the prefix index, where
//! prefills that match them wait.
//!
//! For a model with states, a transfer restores a prefix together with the snapshot at its end, or that alone. The
//! snapshot is cached if all of the transfer's blocks are filled.

mod check;

use std::ops::Range;

use crate::error::Error;
use crate::handles::{LoadingBlock, Transfer};
use crate::ids::{BlockId, NodePosition, SeqKey, TransferKey};
use crate::open_transfers::{LoadingSnapshot, OpenTransfer};
use crate::pool::Purpose;
use crate::state::State;
use crate::table::BlockTable;

/// The answer to [`BlockManager::reserve`](crate::BlockManager::reserve).
#[derive(Debug)]
pub enum Reserve {
    /// Blocks are reserved, and are to be filled.
    Reserved(Transfer),
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed, including evictable ones that the transfer would hold.
        needed: usize,
        /// Blocks free or evictable.
        available: usize,
    },
    /// Another transfer is to fill the next block; nothing was changed.
    Loading {
        /// The number of that transfer.
        transfer: u64,
    },
    /// The blocks are cached, an open step is to compute the next one, or the sequence may not reuse any now; nothing
    /// was changed.
    NotNeeded,
}

impl State {
    /// The transfer that is to fill blocks of the current match, or a snapshot that would begin later.
    #[cold] // inlined, it would slow prefills without a transfer
    pub(crate) fn awaited_transfer(&self, seq_idx: u32, replay: usize) -> Option<u64> {
        let number = self.pool.transfer_of(self.matched_blocks(seq_idx));
        let serial = number.map(|number| self.transfers.serial(number));
        serial.or_else(|| self.awaited_snapshot(seq_idx, replay))
    }

    /// The first transfer that is to fill a snapshot in the current match, after the state with which it begins.
    fn awaited_snapshot(&self, seq_idx: u32, replay: usize) -> Option<u64> {
        let (seq, size) = (self.seqs.at(seq_idx), self.groups.block_size());
        let matched = seq.registered.end() + self.matched.num_indices;
        let last = (seq.tokens.len() - 1).min((matched * size).saturating_sub(replay));
        let is_in_match = |open: &OpenTransfer| {
            let (end, position) = (open.indices.end, open.snapshot.as_ref()?.position);
            let is_later = self.matched.start < end * size && end * size <= last;
            let tree = self.pool.tree();
            Some(is_later && tree.ancestor(self.matched.last, matched - end) == position)
        };
        let mut open = self.transfers.open.iter();
        open.find(|(_, open)| is_in_match(open) == Some(true))
            .map(|(&serial, _)| serial)
    }

    /// Matches the first `num_tokens` tokens of a sequence, as far as their blocks are ready, for a transfer. False if
    /// the sequence may not reuse blocks now.
    fn match_for_transfer(&mut self, seq_idx: u32, num_tokens: usize) -> bool {
        if !self.has_state() {
            return self.match_ready(seq_idx);
        }
        let seq = self.seqs.at(seq_idx);
        // A sequence that has begun has a running state.
        if seq.planned_end > 0 || !seq.table.is_empty() || !self.caching || !seq.read_cache {
            return false;
        }
        let tokens = seq.labelled().first(num_tokens.min(seq.tokens.len()));
        let (matched, groups) = (&mut self.matched, &self.groups);
        let root = seq.registered;
        self.pool
            .find_match(matched, groups, tokens, root, Purpose::Read);
        true
    }

    /// Reserves blocks for the first `num_tokens` tokens of a sequence: for those after the longest cached prefix, up
    /// to the first block of an open step or another transfer. With states, for all of them and their snapshot, or for
    /// none.
    pub(crate) fn reserve(&mut self, key: SeqKey, num_tokens: usize) -> Result<Reserve, Error> {
        self.at_rest(key)?;
        if !self.match_for_transfer(key.seq_idx, num_tokens) {
            return Ok(Reserve::NotNeeded);
        }
        let seq = self.seqs.at(key.seq_idx);
        let (before, last) = (seq.registered.end(), self.matched.last);
        let from = before + self.matched.num_indices;
        let end = self.groups.index_of(num_tokens.min(seq.tokens.len()));
        let (positions, unready) = self.follow_missing(key.seq_idx, from..end);
        if let Some(unready) = unready
            && (positions.is_empty() || self.has_state())
        {
            let number = self.pool.transfer_of(self.pool.tree().blocks(unready));
            return Ok(self.loading_answer(number.map(|number| self.transfers.serial(number))));
        }
        let end = from + positions.len();
        let matched = BlockTable::of_match(&self.matched, before, &self.groups);
        let table = &self.seqs.at(key.seq_idx).table;
        let mut held: Vec<BlockId> = table.blocks().chain(matched.blocks()).collect();
        let mut snapshot = None;
        if self.has_state() && end > 0 {
            let position = match positions.last() {
                Some(&position) => position,
                None => Some(last),
            };
            let known = position.and_then(|at| self.pool.snapshot_at(at));
            let loading = position.and_then(|at| self.transfers.of_snapshot(at));
            match (known, loading) {
                (Some(blocks), _) => held.extend(blocks),
                (None, Some(transfer)) => return Ok(self.loading_answer(Some(transfer))),
                (None, None) => snapshot = Some(end - 1),
            }
        }
        // A snapshot needs its last block in every layer group, also if no window reaches it.
        let (mut indices, mut positions, mut parent) = (from..end, positions, last);
        if let Some(index) = snapshot.filter(|&index| index < from) {
            (indices, positions) = (index..end, vec![Some(last)]);
            parent = self.pool.tree().ancestor(last, 1);
        }
        let mut loading = Vec::new();
        for (index, position) in indices.clone().zip(positions) {
            for group in 0..self.groups.len() {
                let block = position.and_then(|at| self.pool.tree().block(at, group));
                let is_read = index >= self.groups.first_index(group, indices.end);
                match block {
                    Some(block) if index < from && held.contains(&block) => {}
                    Some(block) => held.push(block),
                    None if is_read || snapshot == Some(index) => loading.push(LoadingBlock {
                        index,
                        group,
                        block: BlockId::NONE,
                    }),
                    None => {}
                }
            }
        }
        let num_state_blocks = match (snapshot, self.pool.snapshots()) {
            (Some(_), Some(snapshots)) => snapshots.config.blocks,
            _ => 0,
        };
        let num_loading = loading.len() + num_state_blocks;
        if num_loading == 0 {
            return Ok(Reserve::NotNeeded);
        }
        let revived = held.iter().filter(|&&block| self.pool.is_queued(block));
        let (needed, available) = (num_loading + revived.count(), self.pool.available());
        if needed > available {
            return Ok(Reserve::NoRoom { needed, available });
        }
        // Held before anything is allocated, which could evict them.
        held.iter().for_each(|&block| self.pool.pin_source(block));
        let mut taken = self.pool.take_loading(num_loading).into_iter();
        for (to_fill, block) in loading.iter_mut().zip(taken.by_ref()) {
            to_fill.block = block;
        }
        self.pool.stats.reserved_blocks += num_loading as u64;
        self.transfers.num_begun += 1;
        let (manager, serial) = (self.transfers.manager, self.transfers.num_begun);
        let end = self.index_loading(
            key.seq_idx,
            indices.clone(),
            parent,
            &loading,
            serial as u32,
        );
        let transfer = TransferKey { manager, serial };
        let open = OpenTransfer {
            key: transfer,
            sequence: key,
            indices: indices.clone(),
            loading: loading.clone(),
            snapshot: snapshot.map(|_| LoadingSnapshot {
                position: end,
                blocks: taken.collect(),
            }),
            held,
        };
        let state = open.snapshot.iter().flat_map(|of| &of.blocks);
        loading.extend(state.map(|&block| LoadingBlock {
            index: indices.end - 1,
            group: self.groups.len(),
            block,
        }));
        self.transfers.open.insert(serial, open);
        let handle = Transfer::new(self.pool.shared(), transfer, indices, loading);
        Ok(Reserve::Reserved(handle))
    }

    fn loading_answer(&self, transfer: Option<u64>) -> Reserve {
        match transfer {
            Some(transfer) => Reserve::Loading { transfer },
            None => Reserve::NotNeeded,
        }
    }

    /// The positions of the blocks after the current match, as far as they are in the tree; up to the first one
    /// with a block that is not ready, which comes second.
    fn follow_missing(
        &mut self,
        seq_idx: u32,
        indices: Range<usize>,
    ) -> (Vec<Option<NodePosition>>, Option<NodePosition>) {
        let block_size = self.groups.block_size();
        let (mut next, mut positions) = (Some(self.matched.last), Vec::new());
        for index in indices {
            let seq = self.seqs.at(seq_idx);
            let tokens = &seq.tokens[index * block_size..][..block_size];
            next = next.and_then(|at| self.pool.next(at, tokens, seq.label(index)));
            if !next.is_none_or(|position| self.pool.are_ready(position)) {
                return (positions, next);
            }
            positions.push(next);
        }
        (positions, None)
    }

    /// Puts loading blocks into the index, at the logical blocks after `position`. Returns the last one's position.
    fn index_loading(
        &mut self,
        seq_idx: u32,
        indices: Range<usize>,
        mut position: NodePosition,
        loading: &[LoadingBlock],
        number: u32,
    ) -> NodePosition {
        let block_size = self.groups.block_size();
        let mut loading = loading.iter().peekable();
        for index in indices {
            let seq = self.seqs.at(seq_idx);
            let tokens = &seq.tokens[index * block_size..][..block_size];
            let label = seq.label(index);
            position = match self.pool.next(position, tokens, label) {
                Some(next) => next,
                None => self.pool.append_empty(position, tokens, label),
            };
            while let Some(next) = loading.next_if(|next| next.index == index) {
                self.pool.store(position, next.group, next.block, number);
            }
        }
        position
    }

    /// Ends a transfer. Its blocks at the first `num_indices` indices are cached, as if the last step had computed them.
    /// If its sequence can, it reuses them; returns how many tokens it reuses.
    pub(crate) fn end_transfer(
        &mut self,
        key: TransferKey,
        num_indices: usize,
    ) -> Result<usize, Error> {
        let transfer = self.transfers.find(key)?;
        let reserved = self.transfers.open[&transfer].indices.len();
        if num_indices > reserved {
            return Err(Error::TransferBlocks {
                transfer,
                reserved,
                num_blocks: num_indices,
            });
        }
        let ended = self.transfers.remove(key)?;
        let (from, step) = (ended.indices.start, self.steps.last_closed());
        let all: Vec<BlockId> = ended.blocks().collect();
        let mut restored = self.register_loaded(&ended.loading, from + num_indices, step);
        if let Some(LoadingSnapshot { position, blocks }) = &ended.snapshot {
            let is_filled = num_indices == reserved && *position != NodePosition::NONE;
            if is_filled && self.pool.store_snapshot(*position, blocks, step, false) {
                restored += blocks.len() as u64;
            }
            self.pool.end_loading_snapshot(blocks);
        }
        let stats = &mut self.pool.stats;
        stats.restored_blocks += restored;
        stats.failed_transfers += u64::from(restored == 0);
        let reused = match restored {
            0 => 0,
            _ if self.has_state() => 0, // a prefill loads the snapshot, or `reuse_cached` is called
            _ => self.reuse_cached(ended.sequence, from).unwrap_or(0),
        };
        for block in ended.held.into_iter().chain(all).rev() {
            self.pool.unpin(block);
        }
        Ok(reused)
    }

    /// Caches the loaded blocks before index `end`, and removes the others from the index. Returns how many are cached.
    fn register_loaded(&mut self, loading: &[LoadingBlock], end: usize, step: u32) -> u64 {
        let pool = &mut self.pool;
        let (mut restored, mut stored, mut last) = (0, 0, NodePosition::NONE);
        for index in loading.chunk_by(|a, b| a.index == b.index) {
            let cached = pool.cached_at(index[0].block);
            let Some(position) = cached.filter(|_| index[0].index < end) else {
                break; // it ends here, or was abandoned
            };
            // A logical block of which a layer group had a block is not stored again.
            let tree = pool.tree();
            if tree.blocks(position).all(|block| pool.is_loading(block)) {
                if pool.tree().parent(position) != Some(last) {
                    pool.emit_stored(last, std::mem::take(&mut stored));
                }
                (last, stored) = (position, stored + 1);
            }
            for loaded in index {
                pool.end_loading(loaded.block, Some(step));
                restored += 1;
            }
        }
        pool.emit_stored(last, stored);
        for failed in loading[restored..].iter().rev() {
            pool.end_loading(failed.block, None);
        }
        restored as u64
    }

    /// Removes a transfer's blocks from the index, so that no prefill waits for it. It still holds them.
    pub(crate) fn abandon_transfer(&mut self, key: TransferKey) -> Result<(), Error> {
        let open = self.transfers.find_mut(key)?;
        for abandoned in open.loading.iter().rev() {
            self.pool.forget(abandoned.block);
        }
        if let Some(snapshot) = &mut open.snapshot {
            snapshot.position = NodePosition::NONE;
        }
        for block in std::mem::take(&mut open.held).into_iter().rev() {
            self.pool.unpin(block);
        }
        Ok(())
    }
}
