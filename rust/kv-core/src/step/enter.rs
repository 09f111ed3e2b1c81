//! Entering a plan: reusing cached blocks, sharing in flight, copying on write, allocating.

use std::ops::Range;

use super::journal::{Change, Journal};
use super::plan::{Details, Entry, PrefillWork, Work};
use crate::ids::{BlockId, NodePosition, SeqKey};
use crate::sequence::{Registered, SampleRow};
use crate::state::State;
use crate::table::BlockTable;

/// Tokens of an entry that need blocks.
pub(super) struct NewTokens {
    /// Tokens that the step computes.
    pub(super) computed: usize,
    /// Lookahead positions after these.
    pub(super) lookahead: usize,
}

impl NewTokens {
    pub(super) fn computed(computed: usize) -> Self {
        Self {
            computed,
            lookahead: 0,
        }
    }
}

impl State {
    /// Adds a sequence to the plan. A prefill reuses the current match; then it allocates blocks for the new tokens.
    /// Blocks and budget were checked before. `details`: `None` for a decode.
    pub(super) fn enter(
        &mut self,
        seq_idx: u32,
        NewTokens {
            computed: len,
            lookahead,
        }: NewTokens,
        mut details: Option<Box<Details>>,
    ) {
        let indices_before = self.seqs.at(seq_idx).table.end();
        if let Some(Details {
            work: Work::Prefill(prefill),
            journal,
            ..
        }) = details.as_deref_mut()
        {
            self.reuse_match(seq_idx, prefill, journal);
            self.seqs.at_mut(seq_idx).skip_cached(prefill.reused_tokens);
        }
        let seq = self.seqs.at(seq_idx);
        let (start, indices) = (seq.planned_end, seq.table.end());
        if let Some(change) = self.copy_on_write(seq_idx, start) {
            let details = details.get_or_insert_with(|| Details::new(Work::Decode));
            details.journal.push(change);
        }
        let end = self.groups.end_of(start + len + lookahead);
        if let Some(Details { work, journal, .. }) = details.as_deref_mut() {
            if indices < end {
                journal.push(Change::Grown { from: indices });
            }
            if let Work::Prefill(prefill) = work {
                self.copy_partial(seq_idx, prefill, journal);
                let (before, step) = (self.seqs.at(seq_idx).registered, self.steps.newest().step());
                self.preregister(seq_idx, start..start + len, prefill, step);
                if prefill.preregistered > 0 {
                    journal.push(Change::Preregistered { before });
                }
            }
        }
        self.allocate(seq_idx, end);
        self.push_entry(seq_idx, len, indices_before, details);
    }

    /// Plans one token for each of `sequences`, up to the first one that needs more than a plain decode, is refused, or
    /// needs a logical block when no block is left. Returns how many. `begin_indices` allocates for those that begin a
    /// logical block.
    pub(super) fn push_decodes(&mut self, sequences: &[SeqKey], lookahead: usize) -> usize {
        let sequences = if lookahead == 0 { sequences } else { &[] };
        let indices_left = self.pool.available() / self.groups.len();
        self.steps
            .push_decodes(&mut self.seqs, sequences, &self.groups, indices_left)
    }

    /// Allocates a logical block for each of the entries that begin one.
    pub(super) fn begin_indices(&mut self) {
        let (groups, taken) = (self.groups.len(), &mut self.taken);
        self.pool.take(self.steps.beginning.len() * groups, taken);
        let plan = self.steps.open.last_mut().expect("checked before");
        let beginning = self.steps.beginning.drain(..);
        for (at, index) in beginning.zip(taken.chunks_exact(groups)) {
            let entry = &mut plan.entries[at];
            entry.new_indices = 1;
            let seq = self.seqs.at_mut(entry.seq_idx);
            match index {
                [block] => seq.tail_of_one().push(*block),
                _ => seq.push_indices(index),
            }
        }
        taken.clear();
    }

    /// Adds an entry for the next `len` positions of a sequence, whose blocks are in its table.
    fn push_entry(
        &mut self,
        seq_idx: u32,
        len: usize,
        indices_before: usize,
        details: Option<Box<Details>>,
    ) {
        let seq = self.seqs.at_mut(seq_idx);
        let (start, end) = (seq.planned_end, seq.planned_end + len);
        let mut entry = Entry {
            seq_idx,
            new_indices: 0,
            start,
            indices_written: seq.registered.end() as u32,
            pending_row: seq.pending_row(),
            details,
        };
        if let Some(prefill) = entry.prefill() {
            entry.indices_written = prefill.preregister_from as u32;
        }
        entry.new_indices = (seq.table.end() - indices_before - entry.growth()) as u32;
        let samples = end == seq.tokens.len() + usize::from(seq.pending);
        if let Some(details) = &mut entry.details {
            (details.len, details.samples) = (len, samples);
        }
        let plan = self.steps.open.last_mut().expect("checked before");
        plan.entries.push(entry);
        let index = samples.then_some(SampleRow::new(plan.num_samples));
        seq.plan_to(plan.bit, end, index);
        plan.budget_left -= len;
        plan.num_tokens += len;
        plan.num_samples += usize::from(samples);
    }

    /// Reuses the current match. The plan pins the blocks that slide out of windows with it: a rollback restores
    /// them, and the step before may still read them.
    fn reuse_match(&mut self, seq_idx: u32, prefill: &mut PrefillWork, journal: &mut Journal) {
        let (indices, mut slid) = (self.matched.num_indices, Vec::new());
        if indices == 0 {
            return;
        }
        prefill.matched_indices = indices;
        let before = self.seqs.at(seq_idx).registered;
        (prefill.matched_blocks, prefill.in_flight) = self.insert_match(seq_idx, &mut slid);
        prefill.matched_in_flight = prefill.in_flight;
        for &(_, block) in &slid {
            self.pin(block);
            self.pool.release(block);
        }
        prefill.slid_blocks = slid.len();
        journal.push(Change::Matched {
            before,
            indices,
            slid,
        });
    }

    /// Copy on write: replaces the blocks of the logical block of `position` that others hold by copies.
    fn copy_on_write(&mut self, seq_idx: u32, position: usize) -> Option<Change> {
        let index = self.groups.index_of(position);
        let shared: Vec<usize> = self.must_copy(seq_idx, position).collect();
        let mut sources = Vec::new();
        for group in shared {
            let copy = self.allocate_one();
            let source = self.replace_block(seq_idx, group, index, copy);
            // Pinned until the plan is closed, as the copy reads it.
            self.pin(source);
            self.pool.release(source);
            self.steps.newest().add_copies([(source, copy)]);
            sources.push((group, source));
        }
        (!sources.is_empty()).then_some(Change::Copied { index, sources })
    }

    /// Partial reuse: copies the beginning of the copy sources to the logical block after the match. Pins the sources
    /// before anything is allocated, which could evict them.
    fn copy_partial(&mut self, seq_idx: u32, prefill: &PrefillWork, journal: &mut Journal) {
        if prefill.copy_sources.is_empty() {
            return;
        }
        for &source in &prefill.copy_sources {
            self.pool.pin_source(source);
            self.steps.newest().pinned.push(source);
        }
        let index = self.seqs.at(seq_idx).registered.end();
        self.allocate(seq_idx, index + 1);
        let copies = self.seqs.at(seq_idx).table.blocks_at(index);
        let copies = prefill.copy_sources.iter().copied().zip(copies);
        self.steps.newest().add_copies(copies);
        journal.push(Change::CopiedPartly { index });
    }

    /// Pins a block until the newest plan is closed.
    pub(super) fn pin(&mut self, block: BlockId) {
        self.pool.pin(block);
        self.steps.newest().pinned.push(block);
    }
}

impl State {
    /// Inserts the current match into a table. Blocks that no later token reads leave the table, so that it has no gap;
    /// they are added to `slid`, still held. Returns how many blocks were inserted, and how many of them an
    /// open step computes.
    #[inline]
    pub(super) fn insert_match(
        &mut self,
        seq_idx: u32,
        slid: &mut Vec<(usize, BlockId)>,
    ) -> (usize, usize) {
        let seq = self.seqs.at_mut(seq_idx);
        let (last, from) = (self.matched.last, seq.registered.end());
        let indices = from + self.matched.num_indices;
        let new = BlockTable::of_match(&self.matched, from, &self.groups);
        let (blocks, mut in_flight) = (new.len(), 0);
        for group in 0..self.groups.len() {
            in_flight += self.pool.hold_cached(new.blocks_of(group));
        }
        let (groups, replay) = (&self.groups, self.matched.replay);
        let seen = |group| groups.first_index_of(group, indices, replay);
        seq.insert_match(new, Registered::new(last, indices), seen, slid);
        (blocks, in_flight)
    }

    /// Same-step sharing: registers the logical blocks that computing these positions fills, as computed by this step,
    /// so that sequences planned later in it share them. Of a logical block that has lost some of its blocks, the
    /// cached ones go into the table, and only the others are written. Stops at a logical block that the commit must
    /// merge: one with a block of this sequence while another block is cached, or one that a transfer is to fill.
    fn preregister(
        &mut self,
        seq_idx: u32,
        positions: Range<usize>,
        prefill: &mut PrefillWork,
        step: u32,
    ) {
        let block_size = self.groups.block_size();
        let from = self.seqs.at(seq_idx).registered.end();
        prefill.preregister_from = from;
        // Logical blocks that are full already are left to the commit of the step before.
        let is_private = self.seqs.at(seq_idx).is_private;
        if !self.sharing || is_private || from < self.groups.index_of(positions.start) {
            return;
        }
        let indices = self.groups.index_of(positions.end);
        for index in from..indices {
            let seq = self.seqs.at(seq_idx);
            let has_index = index < seq.table.end();
            let tokens = &seq.tokens[index * block_size..][..block_size];
            let Some(cached) = self
                .pool
                .next(seq.registered.last, tokens, seq.label(index))
            else {
                self.allocate(seq_idx, indices);
                self.append_indices(seq_idx, index..indices, step);
                prefill.preregistered += indices - index;
                break;
            };
            let is_held = has_index && self.pool.tree().is_held(cached);
            if is_held || self.pool.is_loading_at(cached) {
                break;
            }
            self.pool.protect(cached);
            if !has_index {
                self.take_already_cached(seq_idx, index, cached, prefill);
            }
            for group in 0..self.groups.len() {
                if self.pool.tree().block(cached, group).is_none() {
                    let block = self.seqs.at(seq_idx).table.at(group, index);
                    self.pool.store(cached, group, block, step);
                }
            }
            self.pool.protect(NodePosition::NONE);
            let seq = self.seqs.at_mut(seq_idx);
            seq.register(Registered::new(cached, index + 1));
            prefill.preregistered += 1;
        }
    }

    /// Adds a logical block to the table: the blocks that are cached, and new ones for the other groups.
    fn take_already_cached(
        &mut self,
        seq_idx: u32,
        index: usize,
        cached: NodePosition,
        prefill: &mut PrefillWork,
    ) {
        let groups = self.groups.len();
        let mut blocks = Vec::with_capacity(groups);
        for group in 0..groups {
            let Some(block) = self.pool.tree().block(cached, group) else {
                blocks.push(self.allocate_one());
                continue;
            };
            self.pool.hold(block);
            prefill.in_flight += usize::from(!self.pool.is_ready(block));
            prefill.already_cached.push(index * groups + group);
            blocks.push(block);
        }
        self.seqs.at_mut(seq_idx).push_indices(&blocks);
    }

    /// Registers logical blocks of a sequence's own blocks, the first of which is not in the tree.
    pub(super) fn append_indices(&mut self, seq_idx: u32, indices: Range<usize>, step: u32) {
        let block_size = self.groups.block_size();
        let seq = self.seqs.at_mut(seq_idx);
        if let Some(switch) = &seq.switch
            && indices.start < switch.index
            && switch.index < indices.end
        {
            let index = switch.index;
            self.append_indices(seq_idx, indices.start..index, step);
            return self.append_indices(seq_idx, index..indices.end, step);
        }
        let label = seq.label(indices.start);
        let tokens = &seq.tokens[indices.start * block_size..indices.end * block_size];
        let last = seq.registered.last;
        let last = if seq.table.groups() == 1 {
            let start = seq.table.start(0);
            let blocks = &seq.table.blocks_of(0)[indices.start - start..indices.end - start];
            self.pool.append(last, tokens, blocks, step, label)
        } else {
            let blocks: Vec<BlockId> = indices
                .clone()
                .flat_map(|index| seq.table.blocks_at(index))
                .collect();
            self.pool.append(last, tokens, &blocks, step, label)
        };
        seq.register(Registered::new(last, indices.end));
    }
}
