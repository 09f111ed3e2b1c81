//! What a plan is made of.

use std::borrow::Cow;

use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::sequence::{Registered, SampleRow, Seats};
use crate::table::BlockTable;

/// The answer to [`BlockManager::prefill`](crate::BlockManager::prefill) and [`BlockManager::speculate`](crate::BlockManager::speculate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Prefill {
    /// The sequence is in the plan.
    Planned {
        /// Tokens reused from the cache by this call.
        cached_tokens: usize,
        /// Tokens to compute: what the budget was charged.
        tokens: usize,
        /// Whether the step reaches the last known token, so that its logits give the next one.
        samples: bool,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed, evictable ones that a match would revive and the reserve included.
        needed: usize,
        /// Blocks free or evictable.
        available: usize,
    },
    /// No token may be computed: the budget (or `max_tokens`) is used up; nothing was changed.
    NoBudget,
}

/// A table entry that a commit moved to the block which held the content first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Remapping {
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

/// A sequence's part of a step. Most of them decode one token: they are kept small.
pub(super) struct Entry {
    pub(super) slot: u32,
    /// Rows of its table that were allocated for it.
    pub(super) new_rows: u32,
    /// First position to compute.
    pub(super) start: usize,
    /// Rows that are there already, or written by another entry of the step.
    pub(super) rows_there: u32,
    /// The row of the plan before that samples the token it computes, if that is still pending.
    pub(super) pending_row: Option<SampleRow>,
    /// What an entry has that does more than decode.
    pub(super) extra: Option<Box<Extra>>,
}

const _: () = assert!(size_of::<Entry>() == 32);

/// What prefills, drafts and copies add to an entry. Places are entries of the sequence's table,
/// `row * groups + group`.
pub(super) struct Extra {
    pub(super) prefill: bool,
    /// Positions to compute.
    pub(super) len: usize,
    /// Whether the step reaches its last known or pending token.
    pub(super) samples: bool,
    /// Where the sequence stood before.
    pub(super) stood: Registered,
    /// Speculated tokens after the last known one: computed, never registered unless accepted.
    pub(super) drafts: Vec<u32>,
    /// The partial blocks that the entry copied to write on: place, and what it was.
    pub(super) copied: Vec<(usize, BlockId)>,
    /// Tokens reused from the cache by this entry, in so many rows and blocks.
    pub(super) reused_tokens: usize,
    pub(super) matched: usize,
    pub(super) matched_blocks: usize,
    /// The blocks, by group, that lend the first tokens of the row behind the match, and how many of the
    /// tokens reused these are.
    pub(super) lent: Vec<BlockId>,
    pub(super) lent_tokens: usize,
    /// How many of the cached tokens are computed again, and not written again.
    pub(super) replay: usize,
    /// What no token after these rows sees, by group, the last one first: the plan keeps it.
    pub(super) unseen: Vec<(usize, BlockId)>,
    /// Of the reused blocks and of `present`, those that an open step computes.
    pub(super) in_flight: usize,
    /// Rows whose contents this entry computes and that others may share already: how many rows of
    /// the table from `announce_from` on.
    pub(super) announced: usize,
    pub(super) announce_from: usize,
    /// Places of these rows that held the content before: computed again, not written again.
    pub(super) present: Vec<usize>,
}

impl Extra {
    pub(super) fn new(stood: Registered) -> Box<Self> {
        Box::new(Self {
            prefill: false,
            len: 1,
            samples: true,
            stood,
            drafts: Vec::new(),
            copied: Vec::new(),
            reused_tokens: 0,
            matched: 0,
            matched_blocks: 0,
            lent: Vec::new(),
            lent_tokens: 0,
            replay: 0,
            unseen: Vec::new(),
            in_flight: 0,
            announced: 0,
            announce_from: 0,
            present: Vec::new(),
        })
    }

    /// Whether another sequence wrote the block of this place, or will.
    #[inline]
    pub(super) fn is_present(&self, place: usize) -> bool {
        self.present.binary_search(&place).is_ok()
    }

    /// The places whose blocks others have written, or will in an open step.
    pub(super) fn shared(&self, groups: usize) -> impl Iterator<Item = usize> + '_ {
        let reused = self.announce_from - self.matched..self.announce_from;
        let reused = reused.start * groups..reused.end * groups;
        reused.chain(self.present.iter().copied())
    }

    /// The places that hold contents which this entry computes for all.
    pub(super) fn announced(&self, groups: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let from = self.announce_from * groups;
        let places = from..from + self.announced * groups;
        places.filter(|&place| !self.is_present(place))
    }
}

impl Entry {
    #[inline]
    pub(super) fn drafts(&self) -> &[u32] {
        self.extra.as_ref().map_or(&[], |extra| &extra.drafts)
    }

    /// Positions to compute.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.extra.as_ref().map_or(1, |extra| extra.len)
    }

    /// Whether the step reaches its last known or pending token.
    #[inline]
    pub(super) fn samples(&self) -> bool {
        self.extra.as_ref().is_none_or(|extra| extra.samples)
    }

    /// Rows whose logits give a token.
    #[inline]
    pub(super) fn rows(&self) -> usize {
        usize::from(self.samples()) + self.drafts().len()
    }

    /// The position after the last one that it computes.
    #[inline]
    pub(super) fn end(&self) -> usize {
        self.start + self.len()
    }

    /// Positions before this one are there already, or written by another entry of the step.
    #[inline]
    pub(super) fn write_from(&self, block_size: usize) -> usize {
        let lent = self.extra.as_ref().map_or(0, |extra| extra.lent_tokens);
        self.rows_there as usize * block_size + lent
    }

    pub(super) fn is_prefill(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.prefill)
    }

    /// Rows by which its table has grown with it: what was found, and what was allocated.
    pub(super) fn growth(&self) -> usize {
        let matched = self.extra.as_ref().map_or(0, |extra| extra.matched);
        self.new_rows as usize + matched
    }

    /// Tokens reused from the cache.
    pub(super) fn reused_tokens(&self) -> usize {
        self.extra.as_ref().map_or(0, |extra| extra.reused_tokens)
    }
}

/// An open step. The contents that it computes carry its number; they are ready once it is closed.
pub(super) struct Plan {
    pub(super) key: PlanKey,
    /// By which its sequences know it.
    pub(super) seat: Seats,
    pub(super) entries: Vec<Entry>,
    /// So many of the entries with which it begins do no more than decode one token: nobody looks at each.
    pub(super) decodes: usize,
    pub(super) budget_left: usize,
    pub(super) num_tokens: usize,
    pub(super) num_samples: usize,
    /// Blocks to copy before the step, source and destination.
    copies: Vec<(BlockId, BlockId)>,
    /// The leading copies that the caller has read.
    copies_read: u32,
    /// Blocks that the step reads beside its sequences' own: held until it is closed.
    pub(super) fenced: Vec<BlockId>,
}

// What is this small is moved without a call: two of them are, each step.
const _: () = assert!(size_of::<Plan>() <= 128);

impl Plan {
    pub(super) fn new(key: PlanKey, seat: Seats, token_budget: usize, entries: Vec<Entry>) -> Self {
        Self {
            key,
            seat,
            entries,
            decodes: 0,
            budget_left: token_budget,
            num_tokens: 0,
            num_samples: 0,
            copies: Vec::new(),
            copies_read: 0,
            fenced: Vec::new(),
        }
    }

    pub(super) fn copies(&self) -> &[(BlockId, BlockId)] {
        &self.copies
    }

    /// The copies, which the caller carries out.
    pub(super) fn read_copies(&mut self) -> &[(BlockId, BlockId)] {
        self.copies_read = self.copies.len() as u32;
        &self.copies
    }

    #[inline]
    pub(super) fn has_read_copies(&self) -> bool {
        self.copies_read as usize == self.copies.len()
    }

    #[cold]
    pub(super) fn copies_not_read(&self) -> Error {
        Error::CopiesNotRead {
            plan: self.key.serial,
            copies: self.copies.len(),
        }
    }

    pub(super) fn add_copies(&mut self, copies: impl IntoIterator<Item = (BlockId, BlockId)>) {
        self.copies.extend(copies);
    }

    /// Takes out the copies to these destinations.
    pub(super) fn remove_copies(&mut self, is_destination: impl Fn(BlockId) -> bool) {
        let read = self.copies[..self.copies_read as usize].iter();
        self.copies_read -= read.filter(|&&(_, to)| is_destination(to)).count() as u32;
        self.copies.retain(|&(_, to)| !is_destination(to));
    }

    #[cfg(test)]
    pub(super) fn copies_mut(&mut self) -> &mut [(BlockId, BlockId)] {
        &mut self.copies
    }

    /// How many entries reach their last token.
    #[inline]
    pub(super) fn sampling(&self) -> usize {
        let others = &self.entries[self.decodes..];
        self.decodes + others.iter().filter(|entry| entry.samples()).count()
    }

    /// The plan's number as contents carry it. It wraps after 2^32 steps; a content that old which is
    /// mistaken for one of the open step is missed by a pin once, and nothing else.
    pub(super) fn step(&self) -> u32 {
        self.key.serial as u32
    }

    /// A sequence's table as it was before this plan put some of it out of sight, or a copy in its place.
    #[cold]
    pub(super) fn table_before<'a>(&self, slot: u32, table: &'a BlockTable) -> Cow<'a, BlockTable> {
        let mut entries = self.entries.iter();
        let extra = entries
            .find(|entry| entry.slot == slot)
            .and_then(|entry| entry.extra.as_ref())
            .filter(|extra| !extra.unseen.is_empty() || !extra.copied.is_empty());
        let Some(extra) = extra else {
            return Cow::Borrowed(table);
        };
        let mut table = table.clone();
        if extra.matched > 0 {
            extra.take_match_out(&mut table, |_| {});
        }
        let groups = table.groups();
        for &(place, source) in &extra.copied {
            table.replace(place % groups, place / groups, source);
        }
        Cow::Owned(table)
    }
}

impl Extra {
    /// Makes a table what it was before the match: without the matched rows, which go to `each`, the
    /// last one first, and with what they put out of sight.
    pub(super) fn take_match_out(&self, table: &mut BlockTable, each: impl FnMut(BlockId)) {
        let rows = self.stood.rows();
        table.take_rows(rows..rows + self.matched, each);
        for group in 0..table.groups() {
            let unseen = self.unseen.iter().filter(|of| of.0 == group);
            let start = table.start(group) - unseen.clone().count();
            table.restore(group, start, unseen.map(|of| of.1));
        }
    }
}
