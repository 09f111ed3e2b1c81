//! Taking back: one sequence of the newest plan, or the whole plan.

use std::collections::HashSet;

use crate::error::Error;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::manager::BlockManager;
use crate::plan::Entry;
use crate::trace::Call;

impl BlockManager {
    /// Takes a sequence out of the plan again, as if it had not been planned.
    ///
    /// Sequences that share what it was to compute in this step are taken out with it; returns
    /// their ids, in plan order.
    pub fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<Vec<u64>, Error> {
        self.read_mail();
        let serial = plan.serial;
        let plan = self.newest_plan(plan)?;
        let sequence = self.sequences.get(key)?.id;
        let at = plan.entries.iter().position(|entry| entry.slot == key.slot);
        let at = at.ok_or(Error::NotPlanned { sequence })?;
        let out = self.dependents(at);
        let mut ids = Vec::new();
        for &at in out.iter().rev() {
            let plan = self.plan_mut();
            let entry = plan.entries.remove(at);
            plan.budget_left += entry.len;
            plan.num_tokens -= entry.len;
            plan.num_samples -= entry.rows();
            ids.push(self.sequences.at(entry.slot).id);
            self.undo(entry);
        }
        ids.pop();
        ids.reverse();
        self.number_rows();
        self.note(|_| Call::cancel(serial, sequence), &ids);
        Ok(ids)
    }

    /// Rows move up when an entry goes.
    fn number_rows(&mut self) {
        let Some(plan) = self.open.last() else {
            return;
        };
        let mut row = 0;
        for entry in &plan.entries {
            if entry.samples {
                self.sequences.at_mut(entry.slot).sample_row = row;
            }
            row += entry.rows();
        }
    }

    /// The entry at `first` and all later ones that adopted, directly or not, what it computes.
    fn dependents(&mut self, first: usize) -> Vec<usize> {
        let entries = &self.plan_mut().entries;
        let in_flight = entries[first..]
            .iter()
            .any(|entry| entry.more().in_flight > 0);
        if entries[first].more().announced == 0 || !in_flight {
            return vec![first];
        }
        let groups = self.groups.len();
        let entries = &self.open.last().expect("open").entries;
        let mut out = vec![first];
        let mut gone: HashSet<BlockId> = HashSet::new();
        for (at, entry) in entries.iter().enumerate().skip(first) {
            let table = &self.sequences.at(entry.slot).table;
            let mut shared = entry.more().shared(groups).map(|at| table[at]);
            let depends = entry.more().in_flight > 0 && shared.any(|block| gone.contains(&block));
            if depends {
                out.push(at);
            }
            if depends || at == first {
                gone.extend(entry.more().announced(groups).map(|at| table[at]));
            }
        }
        out
    }

    fn undo(&mut self, entry: Entry) {
        let (slot, before, more) = (entry.slot, &entry.before, entry.more());
        for at in more.announced(self.groups.len()).rev() {
            let block = self.sequences.at(slot).table[at];
            self.forget(block);
        }
        let groups = self.groups.len();
        let stood = before.chain.blocks * groups;
        self.release_table(slot, before.table_len / groups + more.matched);
        self.release_rows(slot, stood..stood + more.matched * groups);
        for &(at, block) in &more.unseen {
            self.hold_for_sequence(block);
            let seq = self.sequences.at_mut(slot);
            seq.table[at] = block;
            seq.table_version += 1;
        }
        for &(at, source) in &more.copied {
            self.hold_for_sequence(source);
            let seq = self.sequences.at_mut(slot);
            let copy = std::mem::replace(&mut seq.table[at], source);
            seq.table_version += 1;
            self.let_go_for_sequence(copy);
            if let Some(plan) = self.open.last_mut() {
                plan.copies.retain(|&(_, to)| to != copy);
            }
        }
        self.unmark(slot);
        let seq = self.sequences.at_mut(slot);
        seq.ahead = before.ahead;
        seq.pending -= usize::from(entry.samples);
        seq.speculating = false;
        // Otherwise the chain is what it was, or what a commit of the plan before has made of it.
        if more.matched > 0 || more.announced > 0 {
            seq.chain = before.chain;
        }
        if let (true, Some(row)) = (seq.pending > 0, entry.pending_row) {
            seq.sample_row = row;
        }
        if !more.unseen.is_empty() {
            // What the plan before has settled meanwhile goes at last.
            self.stats.slid_blocks += self.slide(slot);
        }
        if self.sequences.at(slot).dropped {
            self.drop_sequence(slot);
        }
    }

    /// Undoes the plan. Sequences are what they were before it; dropped ones end now.
    pub fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        self.read_mail();
        self.newest_plan(plan)?;
        self.roll_back_newest();
        self.note(|_| Call::rollback(plan.serial), ());
        Ok(())
    }

    /// Rolls back the plan, if it is open, after those that were planned on top of it.
    pub(crate) fn roll_back_from(&mut self, key: PlanKey) {
        if self.open_plan(key).is_err() {
            return;
        }
        self.note(|_| Call::drop_plan(key.serial), ());
        while self
            .open
            .last()
            .is_some_and(|plan| plan.key.serial >= key.serial)
        {
            self.roll_back_newest();
        }
    }

    fn roll_back_newest(&mut self) {
        while let Some(entry) = self.plan_mut().entries.pop() {
            self.undo(entry);
        }
        let plan = self.open.pop().expect("checked by newest_plan");
        self.lift_fence(plan.fenced);
        self.stats.rolled_back_steps += 1;
    }
}
