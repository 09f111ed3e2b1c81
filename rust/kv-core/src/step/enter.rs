//! Entering a plan: reusing what is cached, sharing in flight, copying on write, allocating.

use std::ops::Range;

use super::plan::{Entry, Extra};
use super::{State, Steps};
use crate::contents::Spot;
use crate::ids::{BlockId, SeqKey};
use crate::sequence::{Registered, SampleRow};
use crate::table::BlockTable;

impl Steps {
    /// Puts a sequence into the plan: reuses the match under way if it is a prefill, then allocates
    /// for `len` tokens and `lookahead` more. Room and budget were counted before.
    pub(super) fn enter(
        &mut self,
        state: &mut State,
        slot: u32,
        (len, lookahead): (usize, usize),
        mut extra: Option<Box<Extra>>,
    ) {
        let seq = state.seqs.at(slot);
        let (rows_before, stood) = (seq.table.rows(), seq.registered);
        if let Some(extra) = extra.as_mut().filter(|extra| extra.prefill) {
            self.reuse_match(state, slot, extra);
            self.borrow(state, slot, extra);
            state.seqs.at_mut(slot).planned_end += extra.reused_tokens;
        }
        let start = state.seqs.at(slot).planned_end;
        let row = state.groups.row_of(start);
        let shared: Vec<usize> = state.must_copy(slot, start).collect();
        if !shared.is_empty() {
            let extra = extra.get_or_insert_with(|| Extra::new(stood));
            for group in shared {
                let source = self.copy_block(state, slot, (group, row));
                extra
                    .copied
                    .push((row * state.groups.len() + group, source));
            }
        }
        if let Some(extra) = extra.as_mut().filter(|extra| extra.prefill) {
            let step = self.newest().step();
            state.announce(slot, start..start + len, extra, step);
        }
        state.allocate(slot, state.groups.rows(start + len + lookahead));
        self.push_entry(state, slot, len, rows_before, extra);
    }

    /// The plan computes the last token of each of `sequences`, up to the first with which there is more to
    /// do, be it to refuse it, or for which there is no room; how many. What `enter` does, for most decodes:
    /// `begin_rows` gives a block to those that need one.
    pub(super) fn push_decodes(
        &mut self,
        state: &mut State,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> usize {
        let plan = self.open.last_mut().expect("checked before");
        let most = match lookahead {
            0 => sequences.len().min(plan.budget_left),
            _ => 0,
        };
        let (before, samples) = (plan.entries.len(), plan.num_samples..);
        let (seat, block) = (plan.seat, state.groups.block());
        let mut room = state.pool.available() / state.groups.len();
        // In registers, not in the plan: what is written to a sequence might be there.
        let mut entries = std::mem::take(&mut plan.entries);
        entries.reserve(most);
        for (&key, sample) in sequences[..most].iter().zip(samples) {
            let Some(seq) = state.seqs.decoding(key, seat) else {
                break;
            };
            let start = seq.planned_end;
            // Where a row has begun it is in the table, which lies elsewhere in memory: most are not asked.
            let begins = block.begins_row(start) && seq.table.rows() == block.row_of(start);
            // There is room for the entry; asked here, it is not made where it is pushed.
            if begins && room == 0 || entries.len() == entries.capacity() {
                break;
            }
            entries.push(Entry {
                slot: key.slot,
                new_rows: 0,
                start,
                rows_there: seq.registered.rows() as u32,
                pending_row: seq.pending_row(),
                extra: None,
            });
            seq.plan_to(seat, start + 1, Some(SampleRow::new(sample)));
            if begins {
                room -= 1;
                self.beginning.push(entries.len() - 1);
            }
        }
        let pushed = entries.len() - before;
        plan.entries = entries;
        if plan.decodes == before {
            plan.decodes += pushed;
        }
        plan.budget_left -= pushed;
        plan.num_tokens += pushed;
        plan.num_samples += pushed;
        pushed
    }

    /// A row more for each of the entries that are `beginning` one.
    pub(super) fn begin_rows(&mut self, state: &mut State) {
        let (groups, taken) = (state.groups.len(), &mut state.taken);
        state.pool.take(self.beginning.len() * groups, taken);
        let plan = self.open.last_mut().expect("checked before");
        for (at, row) in self.beginning.drain(..).zip(taken.chunks_exact(groups)) {
            let entry = &mut plan.entries[at];
            entry.new_rows = 1;
            state.seqs.at_mut(entry.slot).table.push_rows(row);
        }
        taken.clear();
    }

    /// The plan computes the next `len` positions of a sequence, whose blocks are in its table.
    fn push_entry(
        &mut self,
        state: &mut State,
        slot: u32,
        len: usize,
        rows_before: usize,
        mut extra: Option<Box<Extra>>,
    ) {
        let seq = state.seqs.at_mut(slot);
        let (start, end) = (seq.planned_end, seq.planned_end + len);
        let drafts = extra.as_ref().map_or(0, |extra| extra.drafts.len());
        let samples = end == seq.tokens.len() + usize::from(seq.pending) + drafts;
        let mut rows_there = seq.registered.rows();
        let mut new_rows = seq.table.rows() - rows_before;
        if let Some(extra) = &mut extra {
            (extra.len, extra.samples) = (len, samples);
            new_rows -= extra.matched;
            if extra.prefill {
                rows_there = extra.announce_from;
            }
        }
        let plan = self.open.last_mut().expect("checked before");
        plan.entries.push(Entry {
            slot,
            new_rows: new_rows as u32,
            start,
            rows_there: rows_there as u32,
            pending_row: seq.pending_row(),
            extra,
        });
        let row = samples.then_some(SampleRow::new(plan.num_samples));
        seq.plan_to(plan.seat, end, row);
        seq.speculating = drafts > 0;
        plan.budget_left -= len;
        plan.num_tokens += len;
        plan.num_samples += usize::from(samples) + drafts;
    }

    /// Copy on write: the sequence gets a copy of a block. Returns the source, which the plan holds
    /// until it is closed: whatever becomes of its other holders, it is still to be read.
    fn copy_block(
        &mut self,
        state: &mut State,
        slot: u32,
        (group, row): (usize, usize),
    ) -> BlockId {
        let copy = state.allocate_one();
        let seq = state.seqs.at_mut(slot);
        let source = seq.table.replace(group, row, copy);
        seq.table_version += 1;
        self.fence(state, source);
        state.pool.release(source);
        self.newest().add_copies([(source, copy)]);
        source
    }

    /// Partial reuse: the row behind the match gets copies of the blocks that lend it its first tokens.
    /// These are held before anything is allocated: nobody else may.
    fn borrow(&mut self, state: &mut State, slot: u32, extra: &mut Extra) {
        if extra.lent.is_empty() {
            return;
        }
        for &source in &extra.lent {
            state.pool.lend(source);
            self.newest().fenced.push(source);
        }
        let row = state.seqs.at(slot).registered.rows();
        state.allocate(slot, row + 1);
        let copies = state.seqs.at(slot).table.row(row);
        let copies = extra.lent.iter().copied().zip(copies);
        self.newest().add_copies(copies);
    }

    /// The newest plan holds a block until it is closed.
    pub(super) fn fence(&mut self, state: &mut State, block: BlockId) {
        state.pool.fence(block);
        self.newest().fenced.push(block);
    }

    /// Reuses the match under way. The plan keeps what it puts out of sight: it may be rolled back, and the
    /// step before may still read it.
    fn reuse_match(&mut self, state: &mut State, slot: u32, extra: &mut Extra) {
        if state.matched.rows == 0 {
            return;
        }
        extra.matched = state.matched.rows;
        (extra.matched_blocks, extra.in_flight) = state.insert_match(slot, &mut extra.unseen);
        for &(_, block) in &extra.unseen {
            self.fence(state, block);
            state.pool.release(block);
        }
    }
}

impl State {
    /// Puts the match under way into a table. What nothing that is to be computed sees leaves the table, so
    /// that there is no hole, and goes to `unseen`, still held. How many blocks it puts in, and how many of
    /// these an open step is to compute.
    pub(super) fn insert_match(
        &mut self,
        slot: u32,
        unseen: &mut Vec<(usize, BlockId)>,
    ) -> (usize, usize) {
        let seq = self.seqs.at_mut(slot);
        let (tip, from) = (self.matched.tip, seq.registered.rows());
        let rows = from + self.matched.rows;
        let new = BlockTable::of_match(&self.matched, from, &self.groups);
        let (blocks, mut in_flight) = (new.len(), 0);
        for group in 0..self.groups.len() {
            in_flight += self.pool.hold_cached(new.blocks_of(group));
            let seen = self.groups.first_row_of(group, rows, self.matched.replay);
            let each = |block| unseen.push((group, block));
            seq.table.slide(group, seen.min(from), each);
        }
        if !unseen.is_empty() || seq.table.rows() > from {
            seq.table_version += 1;
        }
        seq.table.insert(from, new);
        seq.registered = Registered::new(tip, rows);
        (blocks, in_flight)
    }

    /// In-flight sharing: contents that computing these positions makes full are known now, as
    /// computed by this step, so that sequences planned later in it share them. Of a content that has
    /// lost some of its blocks, those that are there go into the table as they are (`present`) and only
    /// the others are written. Stops at a content that the commit must settle: a block of this
    /// sequence's own for a content that another block holds.
    fn announce(&mut self, slot: u32, positions: Range<usize>, extra: &mut Extra, step: u32) {
        let block_size = self.groups.block_size();
        let from = self.seqs.at(slot).registered.rows();
        extra.announce_from = from;
        // What is full already is settled by the commit of the step before.
        if !self.sharing || from < self.groups.row_of(positions.start) {
            return;
        }
        let rows = self.groups.row_of(positions.end);
        for row in from..rows {
            let seq = self.seqs.at(slot);
            let has_row = row < seq.table.rows();
            let tokens = &seq.tokens[row * block_size..][..block_size];
            let Some(content) = self.pool.contents.next(seq.registered.tip, tokens) else {
                self.allocate(slot, rows);
                self.append_rows(slot, row..rows, step);
                extra.announced += rows - row;
                break;
            };
            if has_row && self.pool.contents.blocks(content).next().is_some() {
                break;
            }
            self.pool.contents.keep(content); // allocating may evict whatever else keeps it
            if !has_row {
                self.take_present(slot, row, content, extra);
            }
            for group in 0..self.groups.len() {
                if self.pool.contents.block(content, group).is_none() {
                    let mine = self.seqs.at(slot).table.at(group, row);
                    self.pool.store(content, group, mine, step);
                }
            }
            self.pool.contents.keep(Spot::NONE);
            self.seqs.at_mut(slot).registered = Registered::new(content, row + 1);
            extra.announced += 1;
        }
    }

    /// A row more in the table: the blocks that hold `content`, and new ones where there is none.
    fn take_present(&mut self, slot: u32, row: usize, content: Spot, extra: &mut Extra) {
        let groups = self.groups.len();
        let mut blocks = Vec::with_capacity(groups);
        for group in 0..groups {
            let Some(block) = self.pool.contents.block(content, group) else {
                blocks.push(self.allocate_one());
                continue;
            };
            self.pool.hold(block);
            extra.in_flight += usize::from(!self.pool.is_ready(block));
            extra.present.push(row * groups + group);
            blocks.push(block);
        }
        self.seqs.at_mut(slot).table.push_rows(&blocks);
    }

    /// Rows of a sequence's own become contents, of the first of which nothing is known.
    pub(super) fn append_rows(&mut self, slot: u32, rows: Range<usize>, step: u32) {
        let block_size = self.groups.block_size();
        let seq = self.seqs.at_mut(slot);
        let tokens = &seq.tokens[rows.start * block_size..rows.end * block_size];
        let tip = seq.registered.tip;
        let tip = if seq.table.groups() == 1 {
            let start = seq.table.start(0);
            let blocks = &seq.table.blocks_of(0)[rows.start - start..rows.end - start];
            self.pool.append(tip, tokens, blocks, step)
        } else {
            let blocks: Vec<BlockId> = rows.clone().flat_map(|row| seq.table.row(row)).collect();
            self.pool.append(tip, tokens, &blocks, step)
        };
        seq.registered = Registered::new(tip, rows.end);
    }
}
