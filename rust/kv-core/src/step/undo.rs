//! Undo: removes one sequence, or all, from the newest plan.

use std::collections::HashSet;

use super::journal::Change;
use super::plan::{Entry, Plan};
use crate::error::Error;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::sequence::SampleRow;
use crate::state::State;

impl State {
    /// Cancels a sequence and those that depend on it. Returns the ids of the latter, in plan order.
    pub(crate) fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<Vec<u64>, Error> {
        let plan = self.steps.newest_plan(plan)?;
        let sequence = self.seqs.get(key)?.id;
        let at = plan
            .entries
            .iter()
            .position(|entry| entry.seq_idx == key.seq_idx);
        let at = at.ok_or(Error::NotPlanned { sequence })?;
        let cancelled = dependents(self, &plan.entries, at);
        let mut ids = Vec::new();
        for &at in cancelled.iter().rev() {
            ids.push(self.seqs.at(self.steps.newest().entries[at].seq_idx).id);
            self.undo(at);
        }
        ids.pop();
        ids.reverse();
        self.number_samples();
        Ok(ids)
    }

    /// Numbers the sampled rows again, after an entry was removed or extended.
    pub(super) fn number_samples(&mut self) {
        let mut row = 0;
        for entry in &self.steps.newest().entries {
            if entry.samples() {
                let seq = self.seqs.at_mut(entry.seq_idx);
                seq.set_sample_row(SampleRow::new(row));
            }
            row += entry.num_samples();
        }
    }

    pub(super) fn undo_last(&mut self) {
        let last = self.steps.newest().entries.len() - 1;
        self.undo(last);
    }

    fn undo(&mut self, at: usize) {
        let plan = self.steps.newest();
        let (bit, entry) = (plan.bit, &plan.entries.remove(at));
        plan.decodes -= usize::from(at < plan.decodes);
        plan.budget_left += entry.len();
        plan.num_tokens -= entry.len();
        plan.num_samples -= entry.num_samples();
        let seq_idx = entry.seq_idx;
        if entry.details.is_none() {
            let end = self.seqs.at(seq_idx).table.end() - entry.new_indices as usize;
            self.shorten(seq_idx, end);
        }
        for change in entry.changes().rev() {
            self.revert(entry, change);
        }
        let end = entry.start - entry.reused_tokens();
        let seq = self.seqs.at_mut(seq_idx);
        seq.unplan(bit, end, entry.samples(), entry.pending_row);
        if self.has_state() {
            self.undo_state_work(seq_idx);
        }
        // A commit of the plan before may have computed more blocks meanwhile.
        self.slide(seq_idx);
        if self.seqs.at(seq_idx).dropped {
            self.end_sequence(seq_idx);
        }
    }

    fn revert(&mut self, entry: &Entry, change: &Change) {
        let seq_idx = entry.seq_idx;
        match change {
            Change::Matched { before, slid, .. } => {
                let (seq, pool) = (self.seqs.at_mut(seq_idx), &mut self.pool);
                seq.change_table(|table| change.revert(table, |block| pool.release(block)));
                slid.iter().for_each(|&(_, block)| pool.hold(block));
                seq.register(*before);
            }
            Change::Grown { from } => self.shorten(seq_idx, *from),
            Change::CopiedPartly { index } => {
                let table = &self.seqs.at(seq_idx).table;
                let is_copy = |copy: BlockId| table.blocks_at(*index).any(|block| block == copy);
                self.steps.newest().remove_copies(is_copy);
            }
            Change::Copied { sources, .. } => {
                let (seq, pool) = (self.seqs.at_mut(seq_idx), &mut self.pool);
                sources.iter().for_each(|&(_, source)| pool.hold(source));
                let plan = self.steps.newest();
                let mut released = |copy| {
                    pool.release(copy);
                    plan.remove_copies(|to| to == copy);
                };
                seq.change_table(|table| change.revert(table, &mut released));
            }
            Change::Preregistered { before } => {
                let groups = self.groups.len();
                let prefill = entry.prefill().into_iter();
                for entry in prefill.flat_map(|prefill| prefill.preregistered(groups).rev()) {
                    let block = self.block_at(seq_idx, entry);
                    self.pool.forget(block);
                }
                self.seqs.at_mut(seq_idx).register(*before);
            }
        }
    }

    pub(crate) fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        self.steps.newest_plan(plan)?;
        self.roll_back_newest();
        Ok(())
    }

    /// Rolls back a plan, after those that were planned after it.
    pub(crate) fn roll_back_from(&mut self, key: PlanKey) {
        let is_later = |plan: &Plan| plan.key.serial >= key.serial;
        while self.steps.open.last().is_some_and(is_later) {
            self.roll_back_newest();
        }
    }

    fn roll_back_newest(&mut self) {
        while !self.steps.newest().entries.is_empty() {
            self.undo_last();
        }
        let plan = self.steps.open.pop().expect("checked by newest_plan");
        self.pool.set_open_steps(self.steps.open_steps());
        for block in plan.pinned {
            self.pool.unpin(block);
        }
        self.pool.stats.rolled_back_steps += 1;
    }
}

/// The entry at `first` and all later ones that depend on it, directly or not: they share blocks that it computes, or
/// write in place to a block that it copied.
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
            let written = prefill.flat_map(|prefill| prefill.preregistered(groups));
            computed.extend(written.map(|at| state.block_at(entry.seq_idx, at)));
            left.extend(entry.copied().map(|(_, _, source)| source));
        }
    }
    dependents
}

/// Whether an entry shares one of these blocks, which an open step computes.
fn shares_any(state: &State, entry: &Entry, computed: &HashSet<BlockId>) -> bool {
    let (table, groups) = (&state.seqs.at(entry.seq_idx).table, state.groups.len());
    let prefill = entry.prefill().into_iter();
    let shared = prefill.flat_map(|prefill| prefill.shared(groups));
    let mut shared = shared.filter_map(|at| table.get(at % groups, at / groups));
    shared.any(|block| computed.contains(&block))
}

/// Whether an entry begins to write in one of these blocks.
fn writes_in_place(state: &State, entry: &Entry, blocks: &HashSet<BlockId>) -> bool {
    let mut written = state.first_written(entry);
    written.any(|block| blocks.contains(&block))
}

impl State {
    /// The block of a table entry of a sequence.
    fn block_at(&self, seq_idx: u32, entry: usize) -> BlockId {
        let groups = self.groups.len();
        self.seqs
            .at(seq_idx)
            .table
            .at(entry % groups, entry / groups)
    }

    /// The blocks, one per layer group, of the logical block in which an entry begins to write.
    pub(super) fn first_written(&self, entry: &Entry) -> impl Iterator<Item = BlockId> + '_ {
        let index = self.groups.index_of(entry.start);
        let written = index >= entry.indices_written as usize;
        let table = &self.seqs.at(entry.seq_idx).table;
        let groups = 0..table.groups() * usize::from(written);
        groups.filter_map(move |group| table.get(group, index))
    }
}
