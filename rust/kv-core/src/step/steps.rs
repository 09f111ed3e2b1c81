//! The open steps.

use super::answers::PlanView;
use super::plan::{Entry, Plan};
use crate::error::Error;
use crate::groups::Groups;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::pool::OpenSteps;
use crate::sequence::{PlanSet, SampleRow, Sequences};

/// The open steps of a manager.
#[derive(Default)]
pub(crate) struct Steps {
    pub(super) manager: u32,
    /// Oldest first; at most two.
    pub(super) open: Vec<Plan>,
    pub(super) num_begun: u64,
    /// The memory of a closed plan's entries, for the next plan.
    pub(super) spare_entries: Vec<Entry>,
    /// Entries of the newest plan that need a new logical block; empty between calls.
    pub(super) beginning: Vec<usize>,
    /// Decodes of the committed plan that have filled a logical block; empty between calls.
    pub(super) full: Vec<u32>,
}

impl Steps {
    pub(crate) fn new(manager: u32) -> Self {
        Self {
            manager,
            ..Self::default()
        }
    }

    pub(crate) fn num_begun(&self) -> u64 {
        self.num_begun
    }

    /// The step before the oldest open one: published and restored blocks count as computed by it.
    pub(crate) fn last_closed(&self) -> u32 {
        let oldest = self.open.first().map(|plan| plan.key.serial);
        (oldest.unwrap_or(self.num_begun + 1) - 1) as u32
    }

    pub(crate) fn begin(&mut self, token_budget: usize) -> Result<PlanKey, Error> {
        if let [oldest, _, ..] = &self.open[..] {
            let plan = oldest.key.serial;
            return Err(Error::PlanOpen { plan });
        }
        self.num_begun += 1;
        let key = PlanKey {
            manager: self.manager,
            serial: self.num_begun,
        };
        let entries = std::mem::take(&mut self.spare_entries);
        let bit = match self.open.first() {
            Some(older) if older.bit == PlanSet::FIRST => PlanSet::SECOND,
            _ => PlanSet::FIRST,
        };
        let plan = Plan::new(key, bit, token_budget, entries);
        self.open.push(plan);
        Ok(key)
    }

    /// The numbers of the open steps.
    pub(crate) fn open_steps(&self) -> OpenSteps {
        let steps = self.open.first().zip(self.open.last());
        let steps = steps.map(|(oldest, newest)| OpenSteps {
            oldest: oldest.step(),
            count: newest.step().wrapping_sub(oldest.step()) + 1,
        });
        steps.unwrap_or_default()
    }

    pub(super) fn open_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        if key.manager != self.manager {
            return Err(Error::WrongManager {
                what: "plan",
                id: key.serial,
            });
        }
        let plan = self.open.iter().find(|plan| plan.key == key);
        plan.ok_or(Error::PlanClosed { plan: key.serial })
    }

    /// The plan of `key`, which must be `first`.
    #[inline]
    fn in_turn(&self, key: PlanKey, first: Option<&Plan>) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match first {
            Some(first) if first.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: first.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    /// The plan of `key`, which must be the newest: only that one may be planned into.
    pub(super) fn newest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        self.in_turn(key, self.open.last())
    }

    /// The plan of `key`, which must be the oldest, and whose copies the caller must have read: without them, blocks
    /// would be cached whose first tokens were never written.
    #[inline]
    pub(super) fn runnable_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        match self.in_turn(key, self.open.first()) {
            Ok(plan) if !plan.has_read_copies() => Err(plan.copies_not_read()),
            plan => plan,
        }
    }

    #[inline]
    pub(super) fn newest(&mut self) -> &mut Plan {
        self.open.last_mut().expect("checked by newest_plan")
    }

    /// As `State::push_decodes`, with `indices_left` logical blocks that can be allocated.
    pub(super) fn push_decodes(
        &mut self,
        seqs: &mut Sequences,
        sequences: &[SeqKey],
        groups: &Groups,
        indices_left: usize,
    ) -> usize {
        let plan = self.open.last_mut().expect("checked before");
        let limit = sequences.len().min(plan.budget_left);
        let (before, samples) = (plan.entries.len(), plan.num_samples..);
        let (bit, size) = (plan.bit, groups.size());
        // A local, so that it stays in registers: the compiler cannot rule out that a sequence aliases the plan.
        let mut entries = std::mem::take(&mut plan.entries);
        entries.reserve(limit);
        for (&key, sample) in sequences[..limit].iter().zip(samples) {
            let Some(seq) = seqs.decoding(key, bit) else {
                break;
            };
            let start = seq.planned_end;
            // The table is in another cache line: read only where a logical block begins.
            let begins = size.begins_index(start) && seq.table.end() == size.index_of(start);
            // Never at capacity; the check keeps `push` from compiling a reallocation.
            if begins && indices_left == self.beginning.len() || entries.len() == entries.capacity()
            {
                break;
            }
            entries.push(Entry {
                seq_idx: key.seq_idx,
                new_indices: 0,
                start,
                indices_written: seq.registered.end() as u32,
                pending_row: seq.pending_row(),
                details: None,
            });
            seq.plan_to(bit, start + 1, Some(SampleRow::new(sample)));
            if begins {
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

    pub(crate) fn view(&self, key: PlanKey) -> Result<PlanView, Error> {
        let plan = self.open_plan(key)?;
        Ok(PlanView {
            num_tokens: plan.num_tokens,
            num_sequences: plan.entries.len(),
            num_samples: plan.num_samples,
            budget_left: plan.budget_left,
        })
    }

    /// Blocks to copy before the step runs, as (source, destination), in order. They count as read.
    pub(crate) fn copies(&mut self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        self.open_plan(key)?;
        let mut open = self.open.iter_mut();
        let plan = open.find(|plan| plan.key == key);
        Ok(plan.map_or(&[], |plan| plan.read_copies()))
    }

    pub(crate) fn num_open(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn is_open(&self, key: PlanKey) -> bool {
        self.open_plan(key).is_ok()
    }

    /// The plan after this one, if it may have removed or replaced blocks of a table.
    #[inline]
    pub(super) fn displaces(&self, plan: &Plan) -> Option<&Plan> {
        let newest = self.open.last();
        newest.filter(|newest| newest.key != plan.key && !newest.pinned.is_empty())
    }
}
