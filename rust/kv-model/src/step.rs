//! Steps: planning, running, late merge, rollback.

use crate::life::{Answer, BlockLife, Event, Flaw, Remapping};
use crate::pool::BlockId;
use crate::state::{Entry, State, Step};
use crate::tokens::Tokens;

/// How many of `rest` tokens from `start` on to compute, at most `max_tokens`: up to a block boundary if not all.
fn chunk(start: usize, rest: usize, max_tokens: usize, block_size: usize) -> usize {
    let boundary = (start + max_tokens) / block_size * block_size;
    match rest {
        ..=usize::MAX if rest <= max_tokens => rest,
        _ if boundary > start => boundary - start,
        _ => max_tokens,
    }
}

/// Planning.
impl BlockLife {
    /// Plans known tokens: matches the cache first, then allocates for the rest.
    pub(crate) fn prefill(&self, state: &mut State, seq: usize, max_tokens: usize) -> Answer {
        let block_size = self.bounds.block_size;
        let sequence = state.at(seq);
        let (tokens, planned, known) = (sequence.tokens, sequence.planned, sequence.tokens.len());
        let before = (sequence.table.len(), sequence.registered, planned);
        let matched = self.find_match(state, seq);
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
        let (indices, has) = (self.num_blocks(start + len), before.0 + matched.len());
        let is_queued = |block: &&BlockId| state.pool.is_queued(**block);
        let revived = matched.iter().filter(is_queued).count();
        let (needed, available) = (
            indices.saturating_sub(has) + revived,
            state.pool.available(),
        );
        if needed > available {
            self.saw(Event::NoRoom);
            return Answer::NoRoom { needed, available };
        }
        self.note_match(state, &matched, cached_end == known);
        for &block in &matched {
            state.pool.hold(block);
        }
        let sequence = state.at_mut(seq);
        sequence.registered += matched.len();
        sequence.table.extend(&matched);
        let registered = sequence.registered;
        // Whether the first block that this fills is new: if not, the commit merges it.
        let first = (registered + 1) * block_size;
        let is_new = registered >= start / block_size
            && first <= start + len
            && self.find(state, tokens.first(first)).is_none();
        self.allocate(state, seq, indices);
        let mut preregistered = 0;
        if is_new {
            let step = state.steps.len() as u8 - 1;
            let full = (start + len) / block_size;
            preregistered = full - registered;
            self.store(state, seq, registered..full, Some(step));
        }
        let samples = start + len == known;
        self.enter(
            state,
            Entry {
                seq,
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
    fn find_match(&self, state: &State, seq: usize) -> Vec<BlockId> {
        let (sequence, block_size) = (state.at(seq), self.bounds.block_size);
        if sequence.planned != sequence.registered * block_size {
            return Vec::new();
        }
        let indices = sequence.registered + 1..=sequence.tokens.len() / block_size;
        indices
            .map_while(|index| self.find(state, sequence.tokens.first(index * block_size)))
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
    pub(crate) fn decode(&self, state: &mut State, seq: usize) -> Answer {
        let sequence = state.at(seq);
        let (start, has, registered) =
            (sequence.planned, sequence.table.len(), sequence.registered);
        let indices = self.num_blocks(start + 1);
        let (needed, available) = (indices.saturating_sub(has), state.pool.available());
        if needed > available {
            self.saw(Event::NoRoom);
            return Answer::NoRoom { needed, available };
        }
        self.allocate(state, seq, indices);
        self.enter(
            state,
            Entry {
                seq,
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

    /// Allocates blocks until a table has `indices`.
    fn allocate(&self, state: &mut State, seq: usize, indices: usize) {
        while state.at(seq).table.len() < indices {
            if state.pool.free.is_empty() {
                self.saw(Event::Evicted);
            }
            let block = state.pool.allocate();
            state.at_mut(seq).table.push(block);
        }
    }

    /// Adds an entry to the newest step.
    fn enter(&self, state: &mut State, mut entry: Entry) {
        let sequence = state.at_mut(entry.seq);
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
        seq: usize,
        indices: std::ops::Range<usize>,
        computed_in: Option<u8>,
    ) {
        let (tokens, end) = (state.at(seq).tokens, indices.end);
        for index in indices {
            let prefix = tokens.first((index + 1) * self.bounds.block_size);
            if state
                .pool
                .find(|cached| self.equal_blocks(cached, prefix))
                .is_some()
            {
                self.saw(Event::OtherParent);
            }
            let block = state.at(seq).table[index];
            state.pool.store(block, prefix, computed_in);
        }
        state.at_mut(seq).registered = end;
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
            let is_last = !state.is_planned(entry.seq);
            let sequence = state.at_mut(entry.seq);
            sequence.computed = entry.start + entry.len;
            if entry.samples {
                sequence.pending -= 1;
                let token = sampled.next().expect("a token for each entry that samples");
                sequence.tokens.push(token);
            }
            if sequence.dropped && is_last {
                dropped.push(entry.seq);
            }
            self.register_full(state, entry.seq, &mut remappings);
        }
        for seq in dropped {
            self.end_sequence(state, seq);
        }
        for block in step.pinned {
            state.pool.unpin_for_step(block);
        }
        remappings
    }

    /// Writes the KV of a whole step, then reads it. Returns whether each position read had the KV of its tokens.
    fn run(&self, state: &mut State, step: &Step) -> bool {
        let block_size = self.bounds.block_size;
        let slot_of = |entry: &Entry, position: usize| {
            let block = usize::from(entry.table[position / block_size]);
            (block, position % block_size)
        };
        for entry in &step.entries {
            let tokens = state.at(entry.seq).tokens;
            for position in entry.start.max(entry.write_from)..entry.start + entry.len {
                let (block, offset) = slot_of(entry, position);
                state.pool.blocks[block].kv[offset] = Some(tokens.first(position + 1));
            }
        }
        step.entries.iter().all(|entry| {
            let tokens = state.at(entry.seq).tokens;
            (0..entry.start + entry.len).all(|position| {
                let (block, offset) = slot_of(entry, position);
                state.pool.blocks[block].kv[offset] == Some(tokens.first(position + 1))
            })
        })
    }

    /// Caches the blocks of a sequence that became full, or merges them into those that were cached first.
    fn register_full(&self, state: &mut State, seq: usize, remappings: &mut Vec<Remapping>) {
        let sequence = state.at(seq);
        let (tokens, full) = (sequence.tokens, sequence.computed / self.bounds.block_size);
        for index in sequence.registered..full {
            let prefix = tokens.first((index + 1) * self.bounds.block_size);
            let Some(first) = self.find(state, prefix) else {
                self.saw(Event::Inserted);
                return self.store(state, seq, index..full, None);
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
            self.merge(state, seq, index, first, remappings);
            state.at_mut(seq).registered = index + 1;
        }
    }

    /// Late merge of one block.
    fn merge(
        &self,
        state: &mut State,
        seq: usize,
        index: usize,
        first: BlockId,
        remappings: &mut Vec<Remapping>,
    ) {
        let own = state.at(seq).table[index];
        if state.pool.is_queued(first) {
            return self.take_over(state, seq, index, first);
        }
        self.saw(Event::Remapped);
        state.pool.hold(first);
        state.at_mut(seq).table[index] = first;
        remappings.push(Remapping {
            seq,
            index,
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
    fn take_over(&self, state: &mut State, seq: usize, index: usize, evictable: BlockId) {
        self.saw(Event::TakenOver);
        let own = state.at(seq).table[index];
        if self.flaw == Some(Flaw::MergesIntoEvictable) {
            state.at_mut(seq).table[index] = evictable;
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
        for index in (registered + matched..registered + matched + entry.preregistered).rev() {
            let block = state.at(entry.seq).table[index];
            match self.flaw {
                Some(Flaw::KeepsRolledBack) => state.pool.block_mut(block).computed_in = None,
                _ => state.pool.forget(block),
            }
        }
        // Without either, the commit of the step before may have registered blocks meanwhile.
        if matched + entry.preregistered > 0 {
            state.at_mut(entry.seq).registered = registered;
        }
        self.shorten(state, entry.seq, blocks);
        let sequence = state.at_mut(entry.seq);
        sequence.planned = planned;
        sequence.pending -= usize::from(entry.samples);
        if sequence.dropped && !state.is_planned(entry.seq) {
            self.end_sequence(state, entry.seq);
        }
    }
}
