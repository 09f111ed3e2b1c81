//! Steps: what is planned, computed, and committed or undone.
//!
//! ```text
//!   begin_step -> decode, speculate, prefill -> fill -> run -> commit
//!                 (cancel)                              \-> rollback
//! ```
//!
//! `admit` counts whether there is room and budget, `enter` moves the blocks and remembers what
//! was before, `undo` takes it back, `commit` makes it last (with the late merge), `inputs` writes
//! the runner's arrays, `sharing`, with `trie` and `cascade`, says which rows share which
//! leading blocks. `direct` is for those who do all of this without a plan.

mod admit;
mod cascade;
mod check;
mod commit;
mod direct;
mod draft;
mod enter;
mod inputs;
mod plan;
mod sharing;
mod trie;
mod undo;

use std::borrow::Cow;

use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::pool::OpenSteps;
use crate::sequence::Seats;
use crate::state::State;
use crate::table::BlockTable;

pub(crate) use admit::Asked;
pub use cascade::SharedPrefix;
pub use direct::Extend;
pub use inputs::{IntArray, StepArrays, TableRows};
use plan::{Entry, Plan};
pub use plan::{PlanView, Prefill, Remapping};
pub use sharing::{PrefixArrays, SharedPrefixes};

/// The open steps.
pub(crate) struct Steps {
    manager: u32,
    /// Oldest first; at most two.
    open: Vec<Plan>,
    /// How many there have been.
    made: u64,
    /// The memory of a closed plan's entries.
    spare_entries: Vec<Entry>,
    /// Entries of the newest plan that need a row more; none between calls.
    beginning: Vec<usize>,
    /// Decodes of the plan that is committed that have filled a row; none between calls.
    full: Vec<u32>,
}

impl Steps {
    pub(crate) fn new(manager: u32) -> Self {
        Self {
            manager,
            open: Vec::new(),
            made: 0,
            spare_entries: Vec::new(),
            beginning: Vec::new(),
            full: Vec::new(),
        }
    }

    /// How many there have been.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// The step before the oldest open one, by which what is published counts as computed: its KV is there.
    fn last_closed(&self) -> u32 {
        let oldest = self
            .open
            .first()
            .map_or(self.made + 1, |plan| plan.key.serial);
        (oldest - 1) as u32
    }

    pub(crate) fn begin(
        &mut self,
        state: &mut State,
        token_budget: usize,
    ) -> Result<PlanKey, Error> {
        if let (Some(oldest), 2..) = (self.open.first(), self.open.len()) {
            return Err(Error::PlanOpen {
                plan: oldest.key.serial,
            });
        }
        self.made += 1;
        let key = PlanKey {
            manager: self.manager,
            serial: self.made,
        };
        let entries = std::mem::take(&mut self.spare_entries);
        let seat = match self.open.first() {
            Some(older) if older.seat == Seats::FIRST => Seats::SECOND,
            _ => Seats::FIRST,
        };
        let plan = Plan::new(key, seat, token_budget, entries);
        self.open.push(plan);
        self.tell_open(state);
        Ok(key)
    }

    /// Lets the pool know which steps are open.
    fn tell_open(&self, state: &mut State) {
        let steps = self.open.first().zip(self.open.last());
        let steps = steps.map(|(oldest, newest)| OpenSteps {
            oldest: oldest.step(),
            count: newest.step().wrapping_sub(oldest.step()) + 1,
        });
        state.pool.set_open_steps(steps.unwrap_or_default());
    }

    fn open_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        if key.manager != self.manager {
            return Err(Error::Foreign {
                what: "plan",
                id: key.serial,
            });
        }
        let found = self.open.iter().find(|plan| plan.key == key);
        found.ok_or(Error::PlanClosed { plan: key.serial })
    }

    /// The plan, which must be the newest: the one that is planned into.
    fn newest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match self.open.last() {
            Some(newest) if newest.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: newest.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    /// The plan, which must be the oldest: the one that is committed.
    fn oldest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match self.open.first() {
            Some(oldest) if oldest.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: oldest.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    /// The plan, which must be the oldest, and whose copies the caller must have read: without them, blocks
    /// would become content whose first tokens were never written.
    #[inline]
    fn runnable_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        match self.oldest_plan(key) {
            Ok(plan) if !plan.has_read_copies() => Err(plan.copies_not_read()),
            plan => plan,
        }
    }

    #[inline]
    fn newest(&mut self) -> &mut Plan {
        self.open.last_mut().expect("checked by newest_plan")
    }

    /// The figures of an open plan.
    pub(crate) fn view(&self, key: PlanKey) -> Result<PlanView, Error> {
        let plan = self.open_plan(key)?;
        Ok(PlanView {
            num_tokens: plan.num_tokens,
            num_sequences: plan.entries.len(),
            num_samples: plan.num_samples,
            budget_left: plan.budget_left,
        })
    }

    /// Blocks that must be copied before the step runs, as (source, destination), in order.
    /// The caller has read them.
    pub(crate) fn copies(&mut self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        self.open_plan(key)?;
        let mut open = self.open.iter_mut();
        let plan = open.find(|plan| plan.key == key);
        Ok(plan.map_or(&[], |plan| plan.read_copies()))
    }

    /// Whether the plan is open.
    pub(crate) fn is_open(&self, key: PlanKey) -> bool {
        self.open_plan(key).is_ok()
    }

    /// A sequence's table as a plan has it, whatever the plan after it has put elsewhere.
    #[inline]
    fn table_of<'a>(&self, state: &'a State, plan: &Plan, entry: &Entry) -> Cow<'a, BlockTable> {
        let table = &state.seqs.at(entry.slot).table;
        match self.displaces(plan) {
            Some(newest) => newest.table_before(entry.slot, table),
            None => Cow::Borrowed(table),
        }
    }

    /// The plan after this one, if it has put something of a table elsewhere.
    #[inline]
    fn displaces(&self, plan: &Plan) -> Option<&Plan> {
        let newest = self.open.last();
        newest.filter(|newest| newest.key != plan.key && !newest.fenced.is_empty())
    }
}
