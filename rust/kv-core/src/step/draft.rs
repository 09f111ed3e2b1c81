//! Drafts for a batch of decodes that are planned already: they take what is left.

use std::collections::HashMap;

use super::plan::{Entry, Extra, Plan};
use super::{State, Steps};
use crate::error::Error;
use crate::ids::{PlanKey, SeqKey};
use crate::sequence::Registered;

impl Steps {
    /// Extends decodes of the plan by drafts, `counts` of them for each of `sequences`, as far as budget
    /// and blocks reach; how many each got.
    pub(crate) fn draft(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        sequences: &[SeqKey],
        (drafts, counts): (&[u32], &[usize]),
    ) -> Result<Vec<usize>, Error> {
        let at = self.check_drafts(state, plan, sequences, (drafts, counts))?;
        let mut rest = drafts;
        let mut taken = Vec::with_capacity(at.len());
        for (at, &count) in at.into_iter().zip(counts) {
            let (drafts, others) = rest.split_at(count);
            rest = others;
            taken.push(self.extend_decode(state, at, drafts));
        }
        self.number_rows(state);
        Ok(taken)
    }

    /// Where each of the sequences is in the plan, if all of them may be extended.
    fn check_drafts(
        &self,
        state: &State,
        plan: PlanKey,
        sequences: &[SeqKey],
        (drafts, counts): (&[u32], &[usize]),
    ) -> Result<Vec<usize>, Error> {
        let &Plan {
            seat, ref entries, ..
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
        let mut planned: HashMap<u32, usize> = planned.map(|(at, it)| (it.slot, at)).collect();
        let mut found = Vec::with_capacity(sequences.len());
        for &key in sequences {
            let seq = state.seqs.get(key)?;
            let sequence = seq.id;
            if !seq.plans.meets(seat) {
                return Err(Error::NotPlanned { sequence });
            }
            let at = planned.remove(&key.slot);
            let at = at.ok_or(Error::InPlan { sequence })?; // twice in the list
            let entry = &entries[at];
            let uncomputed = entry.len();
            if uncomputed != 1 || !entry.samples() || entry.is_prefill() {
                return Err(Error::NotDecoding {
                    sequence,
                    uncomputed,
                });
            }
            if seq.plans != seat || seq.speculating {
                return Err(Error::InPlan { sequence });
            }
            found.push(at);
        }
        Ok(found)
    }

    /// How many of the drafts there is budget and room for: they are in the plan.
    fn extend_decode(&mut self, state: &mut State, at: usize, drafts: &[u32]) -> usize {
        let plan = self.newest();
        let Entry { slot, .. } = plan.entries[at];
        let end = plan.entries[at].end();
        let seq = state.seqs.at(slot);
        let rows = seq.table.rows() + state.pool.available() / state.groups.len();
        let room = rows * state.groups.block_size() - end;
        let count = drafts.len().min(plan.budget_left).min(room);
        if count == 0 {
            return 0;
        }
        // Where it stood when it was planned: the step before may have been committed since.
        let entry = &mut plan.entries[at];
        let rows = entry.rows_there as usize;
        let tip = seq.registered.tip;
        let tip = state.pool.contents.back(tip, seq.registered.rows() - rows);
        let stood = Registered::new(tip, rows);
        let extra = entry.extra.get_or_insert_with(|| Extra::new(stood));
        extra.drafts = drafts[..count].to_vec();
        extra.len += count;
        plan.decodes = plan.decodes.min(at);
        plan.budget_left -= count;
        plan.num_tokens += count;
        plan.num_samples += count;
        let before = seq.table.rows();
        state.allocate(slot, state.groups.rows(end + count));
        let seq = state.seqs.at_mut(slot);
        plan.entries[at].new_rows += (seq.table.rows() - before) as u32;
        seq.planned_end += count;
        seq.speculating = true;
        count
    }
}
