//! Drafts for decodes that are planned already.

use std::collections::HashMap;

use super::journal::Change;
use super::plan::{Details, Entry, Plan, Work};
use crate::error::Error;
use crate::ids::{PlanKey, SeqKey};
use crate::state::State;

/// The sum of callers' counts, saturating.
pub(super) fn total(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

impl State {
    /// Extends decodes of the plan by drafts, `counts` of them for each of `sequences`, as far as budget and
    /// blocks reach. Returns how many each got.
    pub(crate) fn draft(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        drafts: &[u32],
        counts: &[usize],
    ) -> Result<Vec<usize>, Error> {
        let entries = self.check_drafts(plan, sequences, drafts.len(), counts)?;
        let mut rest = drafts;
        let mut taken = Vec::with_capacity(entries.len());
        for (at, &count) in entries.into_iter().zip(counts) {
            let (drafts, others) = rest.split_at(count);
            rest = others;
            taken.push(self.extend_decode(at, drafts));
        }
        self.number_samples();
        Ok(taken)
    }

    /// The indices of the sequences' entries, if all of them may be extended.
    fn check_drafts(
        &self,
        plan: PlanKey,
        sequences: &[SeqKey],
        num_drafts: usize,
        counts: &[usize],
    ) -> Result<Vec<usize>, Error> {
        let &Plan {
            bit, ref entries, ..
        } = self.steps.newest_plan(plan)?;
        let of_drafts = (total(counts), num_drafts);
        for (expected, given) in [(sequences.len(), counts.len()), of_drafts] {
            if expected != given {
                return Err(Error::DraftCount { expected, given });
            }
        }
        let seq_idxs = entries.iter().map(|entry| entry.seq_idx);
        let mut planned: HashMap<u32, usize> = seq_idxs.zip(0..).collect();
        let mut indices = Vec::with_capacity(sequences.len());
        for &key in sequences {
            let seq = self.seqs.get(key)?;
            let sequence = seq.id;
            if !seq.plans.meets(bit) {
                return Err(Error::NotPlanned { sequence });
            }
            let at = planned.remove(&key.seq_idx);
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
    pub(super) fn extend_decode(&mut self, at: usize, drafts: &[u32]) -> usize {
        if !drafts.is_empty() && self.has_state() {
            let seq_idx = self.steps.newest().entries[at].seq_idx;
            self.drop_save(seq_idx); // not all of the drafts may be accepted
        }
        let plan = self.steps.newest();
        let Entry {
            seq_idx,
            new_indices,
            ..
        } = plan.entries[at];
        let end = plan.entries[at].end();
        let before = self.seqs.at(seq_idx).table.end();
        let indices = before + self.pool.available() / self.groups.len();
        let capacity = indices * self.groups.block_size() - end;
        let count = drafts.len().min(plan.budget_left).min(capacity);
        if count == 0 {
            return 0;
        }
        self.allocate(seq_idx, self.groups.end_of(end + count));
        let seq = self.seqs.at_mut(seq_idx);
        seq.plan_drafts(count);
        let plan = self.steps.newest();
        let entry = &mut plan.entries[at];
        entry.new_indices += (seq.table.end() - before) as u32;
        let indices = match entry.details {
            None => before - new_indices as usize, // a plain decode's allocation is in no journal
            Some(_) => before,
        };
        let decode = || Details::new(Work::Decode);
        let details = entry.details.get_or_insert_with(decode);
        details.journal.push(Change::Grown { from: indices });
        details.work = Work::Draft(drafts[..count].to_vec());
        details.len += count;
        plan.decodes = plan.decodes.min(at);
        plan.budget_left -= count;
        plan.num_tokens += count;
        plan.num_samples += count;
        count
    }
}
