//! Commit: what the step has computed becomes content.
//!
//! Each block that became full is looked up once more (late merge), so a content never has two
//! registered blocks.

use super::plan::{Entry, Extra, Plan, Remapping};
use super::{State, Steps};
use crate::contents::Spot;
use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::sequence::{Registered, Seats};

impl Steps {
    /// Takes the oldest step as computed: one token for each sampling sequence.
    pub(crate) fn commit(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        sampled: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        let expected = self.runnable_plan(plan)?.sampling();
        if sampled.len() != expected {
            return Err(Error::SampleCount {
                expected,
                given: sampled.len(),
            });
        }
        Ok(self.close_oldest(state, sampled, None))
    }

    /// The same, with so many tokens for each sampling sequence.
    pub(crate) fn commit_accepted(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Remapping>, Error> {
        self.check_accepted(state, plan, tokens, counts)?;
        Ok(self.close_oldest(state, tokens, Some(counts)))
    }

    fn check_accepted(
        &self,
        state: &State,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), Error> {
        let plan = self.runnable_plan(plan)?;
        let (expected, given) = (plan.sampling(), counts.len());
        if expected != given {
            return Err(Error::SampleCount { expected, given });
        }
        let total = counts
            .iter()
            .fold(0, |sum: usize, &count| sum.saturating_add(count));
        if total != tokens.len() {
            return Err(Error::SampleCount {
                expected: total,
                given: tokens.len(),
            });
        }
        let mut rest = tokens;
        let sampling = plan.entries.iter().filter(|entry| entry.samples());
        for (entry, &accepted) in sampling.zip(counts) {
            let (mine, others) = rest.split_at(accepted);
            rest = others;
            let drafts = entry.drafts();
            let fits = (1..=drafts.len() + 1).contains(&accepted);
            if !fits || mine[..accepted - 1] != drafts[..accepted - 1] {
                return Err(Error::Accepted {
                    sequence: state.seqs.at(entry.slot).id,
                    accepted,
                    drafts: drafts.len(),
                });
            }
        }
        Ok(())
    }

    /// `counts: None`: one token for each sampling sequence.
    fn close_oldest(
        &mut self,
        state: &mut State,
        tokens: &[u32],
        counts: Option<&[usize]>,
    ) -> Vec<Remapping> {
        let plan = self.open.remove(0);
        self.tell_open(state);
        let (step, copies) = (plan.step(), plan.copies().len());
        let Plan {
            mut entries,
            decodes,
            fenced,
            num_tokens,
            seat,
            ..
        } = plan;
        let (mut remappings, mut dropped) = (Vec::new(), Vec::new());
        let (first, others) = entries.split_at(decodes);
        // Before anything: what a later entry announced may be the parent of what an earlier one registers.
        for entry in others {
            if let Some(extra) = &entry.extra {
                state.tell_announced(entry.slot, extra);
            }
        }
        let (sampled, mut rest) = tokens.split_at(decodes);
        let mut full = std::mem::take(&mut self.full);
        if decodes > 0 {
            state.close_decodes(seat, first.iter().zip(sampled), &mut full, &mut dropped);
        }
        for slot in full.drain(..) {
            self.settle(state, slot, step, &mut remappings);
        }
        self.full = full;
        let mut sampling = decodes;
        for entry in others {
            let mut accepted = &[][..];
            if entry.samples() {
                let count = counts.map_or(1, |counts| counts[sampling]);
                (accepted, rest) = rest.split_at(count);
                sampling += 1;
            }
            if state.close_entry(seat, entry, accepted) {
                dropped.push(entry.slot);
            }
            self.settle(state, entry.slot, step, &mut remappings);
        }
        state.pool.stats.computed_tokens += num_tokens as u64;
        // Afterwards: a dropped sequence's blocks are there for the whole batch to merge into.
        for slot in dropped {
            state.end_sequence(slot);
        }
        entries.clear();
        self.spare_entries = entries;
        for block in fenced {
            state.pool.lift_fence(block);
        }
        state.pool.stats.copied_blocks += copies as u64;
        state.pool.stats.committed_steps += 1;
        remappings
    }

    /// What a sequence has computed is there: registers it and gives back what no later token sees.
    fn settle(&mut self, state: &mut State, slot: u32, step: u32, remappings: &mut Vec<Remapping>) {
        self.register_full(state, slot, step, remappings);
        state.slide(slot);
    }

    /// Registers what became full, or merges it into the blocks that held it first.
    pub(super) fn register_full(
        &mut self,
        state: &mut State,
        slot: u32,
        step: u32,
        remappings: &mut Vec<Remapping>,
    ) {
        let seq = state.seqs.at(slot);
        let full = state.groups.row_of(seq.computed);
        if !state.caching || seq.registered.rows() >= full {
            return;
        }
        for row in seq.registered.rows()..full {
            let block_size = state.groups.block_size();
            let seq = state.seqs.at(slot);
            let tokens = &seq.tokens[row * block_size..][..block_size];
            match state.pool.contents.next(seq.registered.tip, tokens) {
                None => {
                    state.append_rows(slot, row..full, step);
                    let Registered { tip, .. } = state.seqs.at(slot).registered;
                    state.pool.tell_stored(tip, full - row);
                    return;
                }
                Some(content) => {
                    // The step after this one is to compute it: it may yet be rolled back. Asked
                    // again later.
                    if !state.pool.is_there(content) {
                        return;
                    }
                    self.merge_row(state, (slot, row), content, step, remappings);
                }
            }
        }
    }

    /// Late merge of one row whose content is known.
    fn merge_row(
        &mut self,
        state: &mut State,
        (slot, row): (u32, usize),
        content: Spot,
        step: u32,
        remappings: &mut Vec<Remapping>,
    ) {
        if state.pool.contents.blocks(content).next().is_none() {
            state.pool.tell_stored(content, 1);
        }
        for group in 0..state.groups.len() {
            let mine = state.seqs.at(slot).table.at(group, row);
            match state.pool.contents.block(content, group) {
                // It had lost its block for this group.
                None => state.pool.store(content, group, mine, step),
                // A fork shares the block and came first.
                Some(first) if first == mine => {}
                // An evictable block (a dangling mapping): the new one takes the content over.
                Some(first) if state.pool.is_queued(first) => {
                    state.pool.take_over(first, group, mine, step);
                }
                // In use: the first one wins.
                Some(first) => {
                    state.pool.hold(first);
                    self.remap(state, (slot, row, group), first, remappings);
                }
            }
        }
        state.seqs.at_mut(slot).registered = Registered::new(content, row + 1);
    }

    /// Moves a table entry to the block that holds the content.
    fn remap(
        &mut self,
        state: &mut State,
        (slot, row, group): (u32, usize, usize),
        first: BlockId,
        remappings: &mut Vec<Remapping>,
    ) {
        let seq = state.seqs.at_mut(slot);
        let mine = seq.table.replace(group, row, first);
        seq.table_version += 1;
        remappings.push(Remapping {
            sequence: seq.id,
            group,
            index: row,
            old_block: mine,
            new_block: first,
        });
        // A step that is planned already may still read the duplicate.
        if !self.open.is_empty() {
            self.fence(state, mine);
        }
        state.pool.release(mine);
        state.pool.stats.merged_blocks += 1;
    }
}

impl State {
    /// Contents that the entry announced are there now.
    fn tell_announced(&mut self, slot: u32, extra: &Extra) {
        let groups = self.groups.len();
        let from = extra.announce_from;
        let rows = from..from + extra.announced;
        if extra.present.is_empty() {
            self.tell_rows(slot, rows);
            return;
        }
        for row in rows {
            // A content of which a block was there before is no news.
            let mut places = row * groups..(row + 1) * groups;
            if !places.any(|place| extra.is_present(place)) {
                self.tell_rows(slot, row..row + 1);
            }
        }
    }

    /// The contents of these rows of a sequence are news.
    fn tell_rows(&mut self, slot: u32, rows: std::ops::Range<usize>) {
        let stands = self.seqs.at(slot).registered;
        let back = stands.rows() - rows.end;
        let end = self.pool.contents.back(stands.tip, back);
        self.pool.tell_stored(end, rows.len());
    }

    /// Appends the token of each decode; the plan, which is committed, does not hold them any more. Into
    /// `full` go those with a row to register, into `dropped` those that end with that.
    #[inline(never)] // among the code of a commit its loop would not be in registers
    fn close_decodes<'a>(
        &mut self,
        plan: Seats,
        sampled: impl Iterator<Item = (&'a Entry, &'a u32)>,
        full: &mut Vec<u32>,
        dropped: &mut Vec<u32>,
    ) {
        let block = self.groups.block();
        for (entry, &token) in sampled {
            let seq = self.seqs.at_mut(entry.slot);
            seq.tokens.push(token);
            seq.computed = entry.start + 1;
            seq.pending -= 1;
            if seq.leave_plan(plan) {
                dropped.push(entry.slot);
            }
            if entry.start + 1 >= block.start_of(seq.registered.rows() + 1) {
                full.push(entry.slot);
            }
        }
    }

    /// The same for an entry of any kind, of what it accepted.
    fn close_entry(&mut self, plan: Seats, entry: &Entry, accepted: &[u32]) -> bool {
        let seq = self.seqs.at_mut(entry.slot);
        seq.computed = entry.end();
        seq.tokens.extend_from_slice(accepted);
        seq.pending -= u8::from(entry.samples());
        if let Some(extra) = &entry.extra {
            self.close_extra(entry, extra, accepted.len());
        }
        self.seqs.at_mut(entry.slot).leave_plan(plan)
    }

    /// What an entry has beyond a decode, of whose drafts `accepted - 1` stay; counts.
    fn close_extra(&mut self, entry: &Entry, extra: &Extra, accepted: usize) {
        let (seq, stats) = (self.seqs.at_mut(entry.slot), &mut self.pool.stats);
        stats.in_flight_blocks += extra.in_flight as u64;
        stats.already_cached_blocks += extra.present.len() as u64;
        if extra.prefill {
            stats.prompt_tokens += (extra.reused_tokens + extra.len) as u64;
            stats.cached_tokens += extra.reused_tokens as u64;
            let found = extra.matched > 0 || extra.lent_tokens > 0;
            let began = entry.start > extra.reused_tokens;
            stats.rematches += u64::from(found && began);
            stats.partial_hits += u64::from(extra.lent_tokens > 0);
            stats.partial_tokens += extra.lent_tokens as u64;
            stats.hit_blocks += extra.matched_blocks as u64;
            stats.slid_blocks += extra.unseen.len() as u64;
        }
        seq.cached += extra.reused_tokens;
        if !extra.drafts.is_empty() {
            stats.draft_tokens += extra.drafts.len() as u64;
            stats.accepted_draft_tokens += accepted as u64 - 1;
            seq.computed -= extra.drafts.len() + 1 - accepted;
            seq.speculating = false;
            seq.planned_end = seq.computed;
        }
    }
}
