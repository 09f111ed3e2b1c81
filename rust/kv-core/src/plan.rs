//! Plans: what a step will compute, and how to undo it.
//!
//! ```text
//!   begin_step -> decode, speculate, prefill -> fill -> run -> commit
//!                 (cancel)                              \-> rollback
//! ```
//!
//! Planning (`planning.rs`) moves blocks at once and remembers what was before; `rollback.rs` takes
//! it back; `commit.rs` makes it last.

use std::borrow::Cow;

use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::manager::BlockManager;
use crate::sequence::Chain;
use crate::shared::PlanHandle;
use crate::trace::Call;

/// The answer to [`BlockManager::prefill`] and [`BlockManager::speculate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Prefill {
    /// The sequence is in the plan.
    Planned {
        /// Tokens adopted from the cache by this call.
        cached_tokens: usize,
        /// Tokens to compute: what the budget was charged.
        tokens: usize,
        /// Whether the step reaches the last known token, so that its logits give the next one.
        samples: bool,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed, idle ones that a match would revive and the reserve included.
        needed: usize,
        /// Blocks free or idle.
        available: usize,
    },
    /// No token may be computed: the budget (or `max_tokens`) is used up; nothing was changed.
    NoBudget,
}

/// A table entry that a commit moved to the block which held the content first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Redirect {
    /// The sequence's id.
    pub sequence: u64,
    /// The layer group whose table it is in.
    pub group: usize,
    /// Index in that table.
    pub index: usize,
    /// The duplicate, given back.
    pub old_block: BlockId,
    /// The block that holds the content.
    pub new_block: BlockId,
}

/// What a sequence was before the plan touched it.
pub(crate) struct Before {
    pub(crate) table_len: usize,
    pub(crate) ahead: usize,
    pub(crate) chain: Chain,
}

/// A sequence's part of a step. Most of them decode one token: they are kept small.
pub(crate) struct Entry {
    pub(crate) slot: u32,
    /// Whether the step reaches its last known or pending token.
    pub(crate) samples: bool,
    /// First position to compute.
    pub(crate) start: usize,
    /// Positions to compute.
    pub(crate) len: usize,
    /// Positions before this one are there already, or written by another entry of the step.
    pub(crate) write_from: usize,
    /// The row of the plan before that samples the token it computes, if that is still pending.
    pub(crate) pending_row: Option<usize>,
    pub(crate) before: Before,
    /// What an entry has that does more than decode.
    pub(crate) more: Option<Box<More>>,
}

/// What prefills, drafts and copies add to an entry.
pub(crate) struct More {
    pub(crate) prefill: bool,
    /// Speculated tokens after the last known one: computed, never registered unless accepted.
    pub(crate) drafts: Vec<u32>,
    /// The partial blocks that the entry copied to write on: table entry, and what it was.
    pub(crate) copied: Vec<(usize, BlockId)>,
    /// Tokens adopted from the cache by this entry, in so many rows and blocks.
    pub(crate) adopted: usize,
    pub(crate) matched: usize,
    pub(crate) matched_blocks: usize,
    /// Table entries before the windows of these rows, and what they were: the plan keeps their blocks.
    pub(crate) unseen: Vec<(usize, BlockId)>,
    /// Of the adopted blocks and of `present`, those that an open step computes.
    pub(crate) in_flight: usize,
    /// Rows whose contents this entry computes and that others may share already: how many rows of
    /// the table from `announce_from` on.
    pub(crate) announced: usize,
    pub(crate) announce_from: usize,
    /// Table entries of these rows that held the content before: computed again, not written again.
    pub(crate) present: Vec<usize>,
}

impl More {
    pub(crate) const NOTHING: Self = Self {
        prefill: false,
        drafts: Vec::new(),
        copied: Vec::new(),
        adopted: 0,
        matched: 0,
        matched_blocks: 0,
        unseen: Vec::new(),
        in_flight: 0,
        announced: 0,
        announce_from: 0,
        present: Vec::new(),
    };

    /// Whether another sequence wrote the block of this table entry, or will.
    #[inline]
    pub(crate) fn is_present(&self, at: usize) -> bool {
        self.present.binary_search(&at).is_ok()
    }

    /// The table entries whose blocks others have written, or will in an open step.
    pub(crate) fn shared(&self, groups: usize) -> impl Iterator<Item = usize> + '_ {
        let adopted = self.announce_from - self.matched..self.announce_from;
        let adopted = adopted.start * groups..adopted.end * groups;
        adopted.chain(self.present.iter().copied())
    }

    /// The table entries that hold contents which this entry computes for all.
    pub(crate) fn announced(&self, groups: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let from = self.announce_from * groups;
        (from..from + self.announced * groups).filter(|&at| !self.is_present(at))
    }
}

static NOTHING: More = More::NOTHING;

impl Entry {
    #[inline]
    pub(crate) fn more(&self) -> &More {
        self.more.as_deref().unwrap_or(&NOTHING)
    }

    /// Rows whose logits give a token.
    #[inline]
    pub(crate) fn rows(&self) -> usize {
        usize::from(self.samples) + self.more().drafts.len()
    }
}

/// An open step. The contents that it computes carry its number; they are ready once it is closed.
pub(crate) struct Plan {
    pub(crate) key: PlanKey,
    pub(crate) entries: Vec<Entry>,
    pub(crate) budget_left: usize,
    pub(crate) num_tokens: usize,
    pub(crate) num_samples: usize,
    /// Blocks to copy before the step, source and destination.
    pub(crate) copies: Vec<(BlockId, BlockId)>,
    /// Blocks that the step reads beside its sequences' own: held until it is closed.
    pub(crate) fenced: Vec<BlockId>,
}

impl Plan {
    /// The plan's number as contents carry it. It wraps after 2^32 steps; a content that old which is
    /// mistaken for one of the open step is missed by a lease once, and nothing else.
    pub(crate) fn step(&self) -> u32 {
        self.key.serial as u32
    }

    /// A sequence's table as it was before a match of this plan put some of it out of sight.
    #[cold]
    pub(crate) fn table_before<'a>(&self, slot: u32, table: &'a [BlockId]) -> Cow<'a, [BlockId]> {
        let mut entries = self.entries.iter();
        let Some(unseen) = entries
            .find(|entry| entry.slot == slot)
            .map(|entry| &entry.more().unseen)
            .filter(|unseen| !unseen.is_empty())
        else {
            return Cow::Borrowed(table);
        };
        let mut table = table.to_vec();
        for &(at, block) in unseen {
            table[at] = block;
        }
        Cow::Owned(table)
    }
}

/// A look at an open plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanView {
    /// Tokens to compute.
    pub num_tokens: usize,
    /// Sequences in the plan.
    pub num_sequences: usize,
    /// Rows whose logits give a token: one per sequence that reaches its last known token, and one more
    /// for each of its drafts.
    pub num_samples: usize,
    /// Tokens that may still be planned.
    pub budget_left: usize,
}

impl BlockManager {
    /// Opens a step that may compute `token_budget` tokens.
    ///
    /// Two may be open: the second is planned while the first one runs, before its tokens are known
    /// (see [`BlockManager::decode`]). They are committed in order.
    pub fn begin_step(&mut self, token_budget: usize) -> Result<PlanHandle, Error> {
        self.read_mail();
        if let (Some(oldest), 2..) = (self.open.first(), self.open.len()) {
            return Err(Error::PlanOpen {
                plan: oldest.key.serial,
            });
        }
        self.plans += 1;
        let key = PlanKey {
            manager: self.shared.manager,
            serial: self.plans,
        };
        self.open.push(Plan {
            key,
            entries: std::mem::take(&mut self.spare_entries),
            budget_left: token_budget,
            num_tokens: 0,
            num_samples: 0,
            copies: Vec::new(),
            fenced: Vec::new(),
        });
        self.note(|_| Call::begin_step(token_budget), key.serial);
        Ok(PlanHandle::new(&self.shared, key))
    }

    pub(crate) fn open_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        if key.manager != self.shared.manager {
            return Err(Error::Foreign {
                what: "plan",
                id: key.serial,
            });
        }
        let found = self.open.iter().find(|plan| plan.key == key);
        found.ok_or(Error::PlanClosed { plan: key.serial })
    }

    /// The plan, which must be the newest: the one that is planned into.
    pub(crate) fn newest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
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
    pub(crate) fn oldest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match self.open.first() {
            Some(oldest) if oldest.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: oldest.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    #[inline]
    pub(crate) fn plan_mut(&mut self) -> &mut Plan {
        self.open.last_mut().expect("checked by newest_plan")
    }

    /// The figures of an open plan.
    pub fn plan_view(&self, key: PlanKey) -> Result<PlanView, Error> {
        let plan = self.open_plan(key)?;
        Ok(PlanView {
            num_tokens: plan.num_tokens,
            num_sequences: plan.entries.len(),
            num_samples: plan.num_samples,
            budget_left: plan.budget_left,
        })
    }

    /// Blocks that must be copied before the step runs, as (source, destination), in order.
    pub fn copies(&self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        Ok(&self.open_plan(key)?.copies)
    }
}
