//! Drafts for decodes that are planned already.

use std::collections::HashMap;

use super::journal::Change;
use super::plan::{Details, Entry, Plan, Work};
use super::steps::Steps;
use crate::error::Error;
use crate::ids::{PlanKey, SeqKey};
use crate::state::State;

impl Steps {
    /// Extends decodes of the plan by drafts, `counts` of them for each of `sequences`, as far as budget and
    /// blocks reach. Returns how many each got.
    pub(crate) fn draft(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        sequences: &[SeqKey],
        (drafts, counts): (&[u32], &[usize]),
    ) -> Result<Vec<usize>, Error> {
        let entries = self.check_drafts(state, plan, sequences, (drafts, counts))?;
        let mut rest = drafts;
        let mut taken = Vec::with_capacity(entries.len());
        for (at, &count) in entries.into_iter().zip(counts) {
            let (drafts, others) = rest.split_at(count);
            rest = others;
            taken.push(self.extend_decode(state, at, drafts));
        }
        self.number_samples(state);
        Ok(taken)
    }

    /// The indices of the sequences' entries, if all of them may be extended.
    fn check_drafts(
        &self,
        state: &State,
        plan: PlanKey,
        sequences: &[SeqKey],
        (drafts, counts): (&[u32], &[usize]),
    ) -> Result<Vec<usize>, Error> {
        let &Plan {
            bit, ref entries, ..
        } = self.newest_plan(plan)?;
        let total = counts
            .iter()
            .fold(0, |sum: usize, &count| sum.saturating_add(count));
        for (expected, given) in [(sequences.len(), counts.len()), (total, drafts.len())] {
            if expected != given {
                return Err(Error::DraftCount { expected, given });
            }
        }
        let planned = entries.iter().enumerate();
        let mut planned: HashMap<u32, usize> =
            planned.map(|(at, entry)| (entry.slot, at)).collect();
        let mut indices = Vec::with_capacity(sequences.len());
        for &key in sequences {
            let seq = state.seqs.get(key)?;
            let sequence = seq.id;
            if !seq.plans.meets(bit) {
                return Err(Error::NotPlanned { sequence });
            }
            let at = planned.remove(&key.slot);
            let at = at.ok_or(Error::InPlan { sequence })?; // twice in the list
            let entry = &entries[at];
            let uncomputed = entry.len();
            if uncomputed != 1 || !entry.samples() || entry.prefill().is_some() {
                return Err(Error::NotDecoding {
                    sequence,
                    uncomputed,
                });
            }
            if seq.plans != bit || seq.speculating {
                return Err(Error::InPlan { sequence });
            }
            indices.push(at);
        }
        Ok(indices)
    }

    /// Plans as many of the drafts as budget and blocks allow. Returns how many.
    fn extend_decode(&mut self, state: &mut State, at: usize, drafts: &[u32]) -> usize {
        let plan = self.newest();
        let Entry { slot, new_rows, .. } = plan.entries[at];
        let end = plan.entries[at].end();
        let before = state.seqs.at(slot).table.rows();
        let rows = before + state.pool.available() / state.groups.len();
        let capacity = rows * state.groups.block_size() - end;
        let count = drafts.len().min(plan.budget_left).min(capacity);
        if count == 0 {
            return 0;
        }
        let entry = &mut plan.entries[at];
        let rows = match entry.details {
            None => before - new_rows as usize, // what a plain decode allocates is not in a journal
            Some(_) => before,
        };
        let details = entry
            .details
            .get_or_insert_with(|| Details::new(Work::Decode));
        details.journal.push(Change::Grown { rows });
        details.work = Work::Draft(drafts[..count].to_vec());
        details.len += count;
        plan.decodes = plan.decodes.min(at);
        plan.budget_left -= count;
        plan.num_tokens += count;
        plan.num_samples += count;
        state.allocate(slot, state.groups.rows(end + count));
        let seq = state.seqs.at_mut(slot);
        plan.entries[at].new_rows += (seq.table.rows() - before) as u32;
        seq.plan_drafts(count);
        count
    }
}
