//! Steps: planning, running, late merge, rollback.

use crate::life::{Answer, BlockLife, Event, Flaw, Remapping};
use crate::pool::BlockId;
use crate::state::{Entry, State, Step};
use crate::tokens::Tokens;

/// How many of `rest` tokens from `start` on to compute, at most `most`: up to a block boundary if not all.
fn chunk(start: usize, rest: usize, most: usize, block_size: usize) -> usize {
    let boundary = (start + most) / block_size * block_size;
    match rest {
        ..=usize::MAX if rest <= most => rest,
        _ if boundary > start => boundary - start,
        _ => most,
    }
}

/// Planning.
impl BlockLife {
    /// Plans known tokens: matches the cache first, then allocates for the rest.
    pub(crate) fn prefill(&self, state: &mut State, slot: usize, max_tokens: usize) -> Answer {
        let block_size = self.bounds.block_size;
        let sequence = state.at(slot);
        let (tokens, planned, known) = (sequence.tokens, sequence.planned, sequence.tokens.len());
        let before = (sequence.table.len(), sequence.registered, planned);
        let matched = self.find_match(state, slot);
        let is_loading = |&block: &BlockId| state.pool.block(block).is_loading;
        if matched.iter().any(is_loading) {
            self.saw(Event::Awaited);
            return Answer::Loading;
        }
        let cached_end = planned + matched.len() * block_size;
        // The last token is computed in any case.
        let start = if matched.is_empty() {
            planned
        } else {
            cached_end.min(known - 1)
        };
        let len = chunk(start, known - start, max_tokens, block_size);
        let (rows, has) = (self.rows(start + len), before.0 + matched.len());
        let is_queued = |block: &&BlockId| state.pool.is_queued(**block);
        let revived = matched.iter().filter(is_queued).count();
        let (needed, available) = (rows.saturating_sub(has) + revived, state.pool.available());
        if needed > available {
            self.saw(Event::NoRoom);
            return Answer::NoRoom { needed, available };
        }
        self.note_match(state, &matched, cached_end == known);
        for &block in &matched {
            state.pool.hold(block);
        }
        let sequence = state.at_mut(slot);
        sequence.registered += matched.len();
        sequence.table.extend(&matched);
        let registered = sequence.registered;
        // Whether the first block that this fills is new: if not, the commit merges it.
        let first = (registered + 1) * block_size;
        let is_new = registered >= start / block_size
            && first <= start + len
            && self.find(state, tokens.first(first)).is_none();
        self.allocate(state, slot, rows);
        let mut preregistered = 0;
        if is_new {
            let step = state.steps.len() as u8 - 1;
            let full = (start + len) / block_size;
            preregistered = full - registered;
            self.store(state, slot, registered..full, Some(step));
        }
        let samples = start + len == known;
        self.enter(
            state,
            Entry {
                slot,
                start,
                len,
                write_from: registered * block_size,
                samples,
                preregistered,
                table: Vec::new(),
                before,
            },
        );
        Answer::Planned {
            cached_tokens: start - planned,
            tokens: len,
            samples,
        }
    }

    /// The cached blocks after the block boundary that a sequence has reached; also those that an open step computes.
    fn find_match(&self, state: &State, slot: usize) -> Vec<BlockId> {
        let (sequence, block_size) = (state.at(slot), self.bounds.block_size);
        if sequence.planned != sequence.registered * block_size {
            return Vec::new();
        }
        let rows = sequence.registered + 1..=sequence.tokens.len() / block_size;
        rows.map_while(|row| self.find(state, sequence.tokens.first(row * block_size)))
            .collect()
    }

    fn note_match(&self, state: &State, matched: &[BlockId], is_whole: bool) {
        if matched.is_empty() {
            return;
        }
        self.saw(Event::Hit);
        let in_flight = |&block: &BlockId| state.pool.block(block).computed_in.is_some();
        if matched.iter().any(in_flight) {
            self.saw(Event::Shared);
        }
        if is_whole {
            self.saw(Event::FullHit);
        }
    }

    /// Plans the last known or pending token.
    pub(crate) fn decode(&self, state: &mut State, slot: usize) -> Answer {
        let sequence = state.at(slot);
        let (start, has, registered) =
            (sequence.planned, sequence.table.len(), sequence.registered);
        let rows = self.rows(start + 1);
        let (needed, available) = (rows.saturating_sub(has), state.pool.available());
        if needed > available {
            self.saw(Event::NoRoom);
            return Answer::NoRoom { needed, available };
        }
        self.allocate(state, slot, rows);
        self.enter(
            state,
            Entry {
                slot,
                start,
                len: 1,
                write_from: registered * self.bounds.block_size,
                samples: true,
                preregistered: 0,
                table: Vec::new(),
                before: (has, registered, start),
            },
        );
        Answer::Done
    }

    /// Allocates blocks until a table has `rows`.
    fn allocate(&self, state: &mut State, slot: usize, rows: usize) {
        while state.at(slot).table.len() < rows {
            if state.pool.free.is_empty() {
                self.saw(Event::Evicted);
            }
            let block = state.pool.allocate();
            state.at_mut(slot).table.push(block);
        }
    }

    /// Adds an entry to the newest step.
    fn enter(&self, state: &mut State, mut entry: Entry) {
        let sequence = state.at_mut(entry.slot);
        sequence.planned = entry.start + entry.len;
        sequence.pending += usize::from(entry.samples);
        entry.table.clone_from(&sequence.table);
        let newest = state.steps.last_mut().expect("an open step");
        newest.entries.push(entry);
    }

    /// Caches blocks of a sequence, which `computed_in` computes.
    fn store(
        &self,
        state: &mut State,
        slot: usize,
        rows: std::ops::Range<usize>,
        computed_in: Option<u8>,
    ) {
        let (tokens, end) = (state.at(slot).tokens, rows.end);
        for row in rows {
            let prefix = tokens.first((row + 1) * self.bounds.block_size);
            if state
                .pool
                .find(|cached| self.equal_blocks(cached, prefix))
                .is_some()
            {
                self.saw(Event::OtherParent);
            }
            let block = state.at(slot).table[row];
            state.pool.store(block, prefix, computed_in);
        }
        state.at_mut(slot).registered = end;
    }
}

/// Commit.
impl BlockLife {
    /// The device runs the oldest step; it is committed with the tokens that were sampled.
    pub(crate) fn commit(&self, state: &mut State, sampled: Tokens) -> Vec<Remapping> {
        let step = state.steps.remove(0);
        state.misread |= !self.run(state, &step);
        state.pool.close_oldest_step();
        let (mut sampled, mut dropped, mut remappings) = (sampled.iter(), vec![], vec![]);
        for entry in &step.entries {
            let is_last = !state.is_planned(entry.slot);
            let sequence = state.at_mut(entry.slot);
            sequence.computed = entry.start + entry.len;
            if entry.samples {
                sequence.pending -= 1;
                let token = sampled.next().expect("a token for each entry that samples");
                sequence.tokens.push(token);
            }
            if sequence.dropped && is_last {
                dropped.push(entry.slot);
            }
            self.register_full(state, entry.slot, &mut remappings);
        }
        for slot in dropped {
            self.end_sequence(state, slot);
        }
        for block in step.pinned {
            state.pool.unpin_for_step(block);
        }
        remappings
    }

    /// Writes the KV of a whole step, then reads it. Returns whether each position read had the KV of its tokens.
    fn run(&self, state: &mut State, step: &Step) -> bool {
        let block_size = self.bounds.block_size;
        let place = |entry: &Entry, position: usize| {
            let block = usize::from(entry.table[position / block_size]);
            (block, position % block_size)
        };
        for entry in &step.entries {
            let tokens = state.at(entry.slot).tokens;
            for position in entry.start.max(entry.write_from)..entry.start + entry.len {
                let (block, offset) = place(entry, position);
                state.pool.blocks[block].kv[offset] = Some(tokens.first(position + 1));
            }
        }
        step.entries.iter().all(|entry| {
            let tokens = state.at(entry.slot).tokens;
            (0..entry.start + entry.len).all(|position| {
                let (block, offset) = place(entry, position);
                state.pool.blocks[block].kv[offset] == Some(tokens.first(position + 1))
            })
        })
    }

    /// Caches the blocks of a sequence that became full, or merges them into those that were cached first.
    fn register_full(&self, state: &mut State, slot: usize, remappings: &mut Vec<Remapping>) {
        let sequence = state.at(slot);
        let (tokens, full) = (sequence.tokens, sequence.computed / self.bounds.block_size);
        for row in sequence.registered..full {
            let prefix = tokens.first((row + 1) * self.bounds.block_size);
            let Some(first) = self.find(state, prefix) else {
                self.saw(Event::Inserted);
                return self.store(state, slot, row..full, None);
            };
            // An open step is to compute it, and may yet be rolled back; or the transfer may yet fail.
            let block = state.pool.block(first);
            if !block.is_ready() {
                self.saw(match block.is_loading {
                    true => Event::LoadedMeanwhile,
                    false => Event::Delayed,
                });
                return;
            }
            self.merge(state, (slot, row), first, remappings);
            state.at_mut(slot).registered = row + 1;
        }
    }

    /// Late merge of one block.
    fn merge(
        &self,
        state: &mut State,
        (slot, row): (usize, usize),
        first: BlockId,
        remappings: &mut Vec<Remapping>,
    ) {
        let own = state.at(slot).table[row];
        if state.pool.is_queued(first) {
            return self.take_over(state, (slot, row), first);
        }
        self.saw(Event::Remapped);
        state.pool.hold(first);
        state.at_mut(slot).table[row] = first;
        remappings.push(Remapping {
            slot,
            index: row,
            old_block: own,
            new_block: first,
        });
        // A step that is planned already may still read the duplicate.
        if let Some(next) = state.steps.last_mut() {
            self.saw(Event::RemappedDuringStep);
            if self.flaw != Some(Flaw::ReleasesDuplicateEarly) {
                next.pinned.push(own);
                state.pool.pin_for_step(own);
            }
        }
        if self.flaw != Some(Flaw::KeepsDuplicate) {
            state.pool.release(own);
        }
    }

    /// The prefix is on an evictable block: the new one takes its place, and the old one is free.
    fn take_over(&self, state: &mut State, (slot, row): (usize, usize), evictable: BlockId) {
        self.saw(Event::TakenOver);
        let own = state.at(slot).table[row];
        if self.flaw == Some(Flaw::MergesIntoEvictable) {
            state.at_mut(slot).table[row] = evictable;
            state.pool.block_mut(evictable).seq_refs += 1;
            return state.pool.release(own);
        }
        let prefix = state.pool.block(evictable).cached.expect("cached");
        state.pool.evictable.retain(|&block| block != evictable);
        state.pool.forget(evictable);
        state.pool.enqueue_unused(evictable);
        state.pool.store(own, prefix, None);
    }
}

/// Rollback.
impl BlockLife {
    /// Rolls the newest step back: its sequences are as before it.
    pub(crate) fn roll_back(&self, state: &mut State) {
        let step = state.steps.pop().expect("an open step");
        for entry in step.entries.iter().rev() {
            self.undo(state, entry);
        }
        for block in step.pinned {
            state.pool.unpin_for_step(block);
        }
    }

    fn undo(&self, state: &mut State, entry: &Entry) {
        let (blocks, registered, planned) = entry.before;
        let matched = entry.write_from / self.bounds.block_size - registered;
        if entry.preregistered > 0 {
            self.saw(Event::RolledBack);
        }
        for row in (registered + matched..registered + matched + entry.preregistered).rev() {
            let block = state.at(entry.slot).table[row];
            match self.flaw {
                Some(Flaw::KeepsRolledBack) => state.pool.block_mut(block).computed_in = None,
                _ => state.pool.forget(block),
            }
        }
        // Without either, the commit of the step before may have registered blocks meanwhile.
        if matched + entry.preregistered > 0 {
            state.at_mut(entry.slot).registered = registered;
        }
        self.shorten(state, entry.slot, blocks);
        let sequence = state.at_mut(entry.slot);
        sequence.planned = planned;
        sequence.pending -= usize::from(entry.samples);
        if sequence.dropped && !state.is_planned(entry.slot) {
            self.end_sequence(state, entry.slot);
        }
    }
}
