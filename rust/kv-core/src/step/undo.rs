//! Undo: taking one sequence, or everything, out of the newest plan.

use std::collections::HashSet;

use super::journal::Change;
use super::plan::{Entry, Plan};
use super::steps::Steps;
use crate::error::Error;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::sequence::SampleRow;
use crate::state::State;

impl Steps {
    /// Cancels a sequence and those that depend on it. Returns the ids of the latter, in plan order.
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
        let cancelled = dependents(state, &plan.entries, at);
        let mut ids = Vec::new();
        for &at in cancelled.iter().rev() {
            ids.push(state.seqs.at(self.newest().entries[at].slot).id);
            self.undo(state, at);
        }
        ids.pop();
        ids.reverse();
        self.number_samples(state);
        Ok(ids)
    }

    /// Numbers the sampled rows again, after an entry was removed or extended.
    pub(super) fn number_samples(&mut self, state: &mut State) {
        let mut row = 0;
        for entry in &self.newest().entries {
            if entry.samples() {
                state
                    .seqs
                    .at_mut(entry.slot)
                    .set_sample_row(SampleRow::new(row));
            }
            row += entry.num_samples();
        }
    }

    pub(super) fn undo_last(&mut self, state: &mut State) {
        let last = self.newest().entries.len() - 1;
        self.undo(state, last);
    }

    /// Removes an entry from the newest plan.
    fn undo(&mut self, state: &mut State, at: usize) {
        let plan = self.newest();
        let (bit, entry) = (plan.bit, &plan.entries.remove(at));
        plan.decodes -= usize::from(at < plan.decodes);
        plan.budget_left += entry.len();
        plan.num_tokens -= entry.len();
        plan.num_samples -= entry.num_samples();
        let slot = entry.slot;
        if entry.details.is_none() {
            let rows = state.seqs.at(slot).table.rows() - entry.new_rows as usize;
            state.shorten(slot, rows);
        }
        for change in entry.changes().rev() {
            self.revert(state, entry, change);
        }
        let end = entry.start - entry.reused_tokens();
        let seq = state.seqs.at_mut(slot);
        seq.unplan(bit, end, entry.samples(), entry.pending_row);
        // A commit of the plan before may have computed more rows meanwhile.
        state.slide(slot);
        if state.seqs.at(slot).dropped {
            state.end_sequence(slot);
        }
    }

    /// Reverts a change of an entry.
    fn revert(&mut self, state: &mut State, entry: &Entry, change: &Change) {
        let slot = entry.slot;
        match change {
            Change::Matched { before, slid, .. } => {
                let (seq, pool) = (state.seqs.at_mut(slot), &mut state.pool);
                seq.change_table(|table| change.revert(table, |block| pool.release(block)));
                slid.iter().for_each(|&(_, block)| pool.hold(block));
                seq.register(*before);
            }
            Change::Grown { rows } => state.shorten(slot, *rows),
            Change::CopiedPartly { row } => {
                let table = &state.seqs.at(slot).table;
                let is_copy = |copy: BlockId| table.row(*row).any(|block| block == copy);
                self.newest().remove_copies(is_copy);
            }
            Change::Copied { sources, .. } => {
                let (seq, pool) = (state.seqs.at_mut(slot), &mut state.pool);
                sources.iter().for_each(|&(_, source)| pool.hold(source));
                let plan = self.newest();
                let mut released = |copy| {
                    pool.release(copy);
                    plan.remove_copies(|to| to == copy);
                };
                seq.change_table(|table| change.revert(table, &mut released));
            }
            Change::Preregistered { before } => {
                let groups = state.groups.len();
                let places = entry
                    .prefill()
                    .into_iter()
                    .flat_map(|prefill| prefill.preregistered(groups).rev());
                for place in places {
                    let block = state.block_at(slot, place);
                    state.pool.forget(block);
                }
                state.seqs.at_mut(slot).register(*before);
            }
        }
    }

    /// Rolls back the newest plan.
    pub(crate) fn rollback(&mut self, state: &mut State, plan: PlanKey) -> Result<(), Error> {
        self.newest_plan(plan)?;
        self.roll_back_newest(state);
        Ok(())
    }

    /// Rolls back a plan, after those that were planned after it.
    pub(crate) fn roll_back_from(&mut self, state: &mut State, key: PlanKey) {
        let is_later = |plan: &Plan| plan.key.serial >= key.serial;
        while self.open.last().is_some_and(is_later) {
            self.roll_back_newest(state);
        }
    }

    fn roll_back_newest(&mut self, state: &mut State) {
        while !self.newest().entries.is_empty() {
            self.undo_last(state);
        }
        let plan = self.open.pop().expect("checked by newest_plan");
        self.update_open_steps(state);
        for block in plan.pinned {
            state.pool.unpin(block);
        }
        state.pool.stats.rolled_back_steps += 1;
    }
}

/// The entry at `first` and all later ones that depend on it, directly or not: they share blocks that it computes,
/// or write in place in a block that it left to them, because it writes on a copy.
fn dependents(state: &State, entries: &[Entry], first: usize) -> Vec<usize> {
    let mut dependents = vec![first];
    let details = entries[first].details.as_ref();
    if details.is_none_or(|details| details.journal.is_empty()) {
        return dependents;
    }
    let groups = state.groups.len();
    let (mut computed, mut left) = (HashSet::new(), HashSet::new());
    for (at, entry) in entries.iter().enumerate().skip(first) {
        let depends = shares_any(state, entry, &computed) || writes_in_place(state, entry, &left);
        if depends {
            dependents.push(at);
        }
        if depends || at == first {
            let prefill = entry.prefill().into_iter();
            let places = prefill.flat_map(|prefill| prefill.preregistered(groups));
            computed.extend(places.map(|place| state.block_at(entry.slot, place)));
            left.extend(entry.copied().map(|(_, _, source)| source));
        }
    }
    dependents
}

/// Whether an entry shares one of these blocks, which an open step computes.
fn shares_any(state: &State, entry: &Entry, computed: &HashSet<BlockId>) -> bool {
    let (table, groups) = (&state.seqs.at(entry.slot).table, state.groups.len());
    let prefill = entry.prefill().into_iter();
    let shared = prefill.flat_map(|prefill| prefill.shared(groups));
    let mut shared = shared.filter_map(|place| table.get(place % groups, place / groups));
    shared.any(|block| computed.contains(&block))
}

/// Whether an entry begins to write in one of these blocks.
fn writes_in_place(state: &State, entry: &Entry, blocks: &HashSet<BlockId>) -> bool {
    state
        .first_written(entry)
        .any(|block| blocks.contains(&block))
}

impl State {
    /// The block of a place of a sequence's table.
    fn block_at(&self, slot: u32, place: usize) -> BlockId {
        let groups = self.groups.len();
        self.seqs.at(slot).table.at(place % groups, place / groups)
    }

    /// The blocks, one per layer group, of the row in which an entry begins to write.
    pub(super) fn first_written(&self, entry: &Entry) -> impl Iterator<Item = BlockId> + '_ {
        let row = self.groups.row_of(entry.start);
        let written = row >= entry.rows_written as usize;
        let table = &self.seqs.at(entry.slot).table;
        let groups = 0..table.groups() * usize::from(written);
        groups.filter_map(move |group| table.get(group, row))
    }
}
