//! Taking back: one sequence of the newest plan, or the whole plan.

use std::collections::HashSet;

use super::plan::Entry;
use super::{State, Steps};
use crate::error::Error;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::sequence::SampleRow;

impl Steps {
    /// Takes a sequence out of the plan again, and those that depend on it; their ids, in plan order.
    pub(crate) fn cancel(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        key: SeqKey,
    ) -> Result<Vec<u64>, Error> {
        let plan = self.newest_plan(plan)?;
        let sequence = state.seqs.get(key)?.id;
        let at = plan.entries.iter().position(|entry| entry.slot == key.slot);
        let at = at.ok_or(Error::NotPlanned { sequence })?;
        let out = dependents(state, &plan.entries, at);
        let mut ids = Vec::new();
        for &at in out.iter().rev() {
            ids.push(state.seqs.at(self.newest().entries[at].slot).id);
            self.undo(state, at);
        }
        ids.pop();
        ids.reverse();
        self.number_rows(state);
        Ok(ids)
    }

    /// Rows move when an entry goes or becomes longer.
    pub(super) fn number_rows(&mut self, state: &mut State) {
        let mut row = 0;
        for entry in &self.newest().entries {
            if entry.samples() {
                state.seqs.at_mut(entry.slot).sample_row = SampleRow::new(row);
            }
            row += entry.rows();
        }
    }

    pub(super) fn undo_last(&mut self, state: &mut State) {
        let last = self.newest().entries.len() - 1;
        self.undo(state, last);
    }

    /// Takes an entry out of the newest plan.
    fn undo(&mut self, state: &mut State, at: usize) {
        let plan = self.newest();
        let (seat, entry) = (plan.seat, &plan.entries.remove(at));
        plan.decodes -= usize::from(at < plan.decodes);
        plan.budget_left += entry.len();
        plan.num_tokens -= entry.len();
        plan.num_samples -= entry.rows();
        let slot = entry.slot;
        let rows = state.seqs.at(slot).table.rows() - entry.new_rows as usize;
        match &entry.extra {
            None => state.shorten(slot, rows),
            Some(extra) => {
                for place in extra.announced(state.groups.len()).rev() {
                    let block = state.at(slot, place);
                    state.pool.forget(block);
                }
                if !extra.lent.is_empty() {
                    let row = extra.stood.rows() + extra.matched;
                    let table = &state.seqs.at(slot).table;
                    let is_its = |copy: BlockId| table.row(row).any(|block| block == copy);
                    self.newest().remove_copies(is_its);
                }
                state.shorten(slot, rows);
                if extra.matched > 0 {
                    let (seq, pool) = (state.seqs.at_mut(slot), &mut state.pool);
                    extra.take_match_out(&mut seq.table, |block| pool.release(block));
                    seq.table_version += 1;
                    for &(_, block) in &extra.unseen {
                        pool.hold(block);
                    }
                }
                for &(place, source) in &extra.copied {
                    self.take_copy_back(state, slot, place, source);
                }
                // Otherwise it stands where it did, or where the commit of the plan before brought it.
                if extra.matched > 0 || extra.announced > 0 {
                    state.seqs.at_mut(slot).registered = extra.stood;
                }
            }
        }
        let seq = state.seqs.at_mut(slot);
        seq.plans = seq.plans.without(seat);
        seq.planned_end = entry.start - entry.reused_tokens();
        seq.pending -= u8::from(entry.samples());
        seq.speculating = false;
        if let (true, Some(row)) = (seq.pending > 0, entry.pending_row) {
            seq.sample_row = row;
        }
        // What the plan before has settled meanwhile goes at last.
        state.slide(slot);
        if state.seqs.at(slot).dropped {
            state.end_sequence(slot);
        }
    }

    fn take_copy_back(&mut self, state: &mut State, slot: u32, place: usize, source: BlockId) {
        let (row, group) = (place / state.groups.len(), place % state.groups.len());
        state.pool.hold(source);
        let seq = state.seqs.at_mut(slot);
        let copy = seq.table.replace(group, row, source);
        seq.table_version += 1;
        state.pool.release(copy);
        self.newest().remove_copies(|to| to == copy);
    }

    /// Undoes the newest plan.
    pub(crate) fn rollback(&mut self, state: &mut State, plan: PlanKey) -> Result<(), Error> {
        self.newest_plan(plan)?;
        self.roll_back_newest(state);
        Ok(())
    }

    /// Rolls back a plan after those that were planned on top of it.
    pub(crate) fn roll_back_from(&mut self, state: &mut State, key: PlanKey) {
        let is_later = |plan: &super::Plan| plan.key.serial >= key.serial;
        while self.open.last().is_some_and(is_later) {
            self.roll_back_newest(state);
        }
    }

    fn roll_back_newest(&mut self, state: &mut State) {
        while !self.newest().entries.is_empty() {
            self.undo_last(state);
        }
        let plan = self.open.pop().expect("checked by newest_plan");
        self.tell_open(state);
        for block in plan.fenced {
            state.pool.lift_fence(block);
        }
        state.pool.stats.rolled_back_steps += 1;
    }
}

/// The entry at `first` and all later ones that depend on it, directly or not: they reused what it
/// computes, or write in place where it left a block to them alone, as it writes on a copy.
fn dependents(state: &State, entries: &[Entry], first: usize) -> Vec<usize> {
    let mut out = vec![first];
    let Some(extra) = &entries[first].extra else {
        return out;
    };
    if extra.copied.is_empty() && extra.announced == 0 {
        return out;
    }
    let groups = state.groups.len();
    let (mut gone, mut left) = (HashSet::new(), HashSet::new());
    for (at, entry) in entries.iter().enumerate().skip(first) {
        let depends = reuses_any(state, entry, &gone) || writes_in_place(state, entry, &left);
        if depends {
            out.push(at);
        }
        if let (true, Some(extra)) = (depends || at == first, &entry.extra) {
            let places = extra.announced(groups);
            gone.extend(places.map(|place| state.at(entry.slot, place)));
            left.extend(extra.copied.iter().map(|copied| copied.1));
        }
    }
    out
}

/// Whether an entry shares one of the blocks that an open step computes.
fn reuses_any(state: &State, entry: &Entry, computed: &HashSet<BlockId>) -> bool {
    let (table, groups) = (&state.seqs.at(entry.slot).table, state.groups.len());
    let extra = entry.extra.iter();
    let shared = extra.flat_map(|extra| extra.shared(groups));
    let mut shared = shared.filter_map(|place| table.get(place % groups, place / groups));
    shared.any(|block| computed.contains(&block))
}

/// Whether one of the blocks is that of the row in which an entry begins to write.
fn writes_in_place(state: &State, entry: &Entry, blocks: &HashSet<BlockId>) -> bool {
    state.begins_in(entry).any(|block| blocks.contains(&block))
}

impl State {
    /// The block of a place of a sequence's table.
    pub(super) fn at(&self, slot: u32, place: usize) -> BlockId {
        let groups = self.groups.len();
        self.seqs.at(slot).table.at(place % groups, place / groups)
    }

    /// The blocks, one of each group, of the row in which an entry begins to write.
    pub(super) fn begins_in(&self, entry: &Entry) -> impl Iterator<Item = BlockId> + '_ {
        let row = self.groups.row_of(entry.start);
        let written = row >= entry.rows_there as usize;
        let table = &self.seqs.at(entry.slot).table;
        let groups = 0..table.groups() * usize::from(written);
        groups.filter_map(move |group| table.get(group, row))
    }
}
