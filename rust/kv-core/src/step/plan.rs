//! An open step: its entries, and what each of them computes.

use std::borrow::Cow;

use super::journal::{Change, Journal};
use crate::error::Error;
use crate::ids::{BlockId, PlanKey};
use crate::sequence::{PlanSet, SampleRow};
use crate::table::BlockTable;

/// A sequence's part of a step. Most decode one token, so entries are small.
pub(super) struct Entry {
    pub(super) seq_idx: u32,
    /// Logical blocks that were allocated for it.
    pub(super) new_indices: u32,
    /// First position to compute.
    pub(super) start: usize,
    /// Leading logical blocks whose KV exists, or is written by another entry of the step.
    pub(super) indices_written: u32,
    /// The row of the plan before that samples the token it computes, if that is still pending.
    pub(super) pending_row: Option<SampleRow>,
    /// `None` if it decodes one token and changed nothing but the end of its table.
    pub(super) details: Option<Box<Details>>,
}

const _: () = assert!(size_of::<Entry>() == 32);

/// The work of an entry, and how to undo it.
pub(super) struct Details {
    pub(super) work: Work,
    pub(super) len: usize,
    /// Whether it reaches its last known or pending token.
    pub(super) samples: bool,
    pub(super) journal: Journal,
}

impl Details {
    pub(super) fn new(work: Work) -> Box<Self> {
        Box::new(Self {
            work,
            len: 1,
            samples: true,
            journal: Journal::default(),
        })
    }
}

/// The work of an entry.
pub(super) enum Work {
    /// The last token.
    Decode,
    /// Tokens of a prompt, after those that are cached.
    Prefill(PrefillWork),
    /// The last token and these drafts after it: not cached before they are accepted.
    Draft(Vec<u32>),
}

/// A prefill: the blocks that it reuses and registers. A table entry is `index * groups + group`.
#[derive(Default)]
pub(super) struct PrefillWork {
    /// Cached tokens that it reuses, copied ones included.
    pub(super) reused_tokens: usize,
    pub(super) matched_indices: usize,
    pub(super) matched_blocks: usize,
    /// Blocks that slid out of windows with the match.
    pub(super) slid_blocks: usize,
    /// Partial reuse: by layer group, the blocks whose first `copied_tokens` tokens are copied to the blocks after
    /// the match.
    pub(super) copy_sources: Vec<BlockId>,
    pub(super) copied_tokens: usize,
    /// Cached tokens that are computed again, and not written again.
    pub(super) replay: usize,
    /// Of the matched blocks, those that an open step computes.
    pub(super) matched_in_flight: usize,
    /// Of the matched blocks and of `already_cached`, those that an open step computes.
    pub(super) in_flight: usize,
    /// Logical blocks that are registered before they are computed, from `preregister_from` on.
    pub(super) preregistered: usize,
    pub(super) preregister_from: usize,
    /// Table entries of these whose blocks were cached before: computed again, not written again.
    pub(super) already_cached: Vec<usize>,
}

impl PrefillWork {
    /// True if another sequence has written the block of this table entry, or will.
    #[inline]
    pub(super) fn is_already_cached(&self, entry: usize) -> bool {
        self.already_cached.binary_search(&entry).is_ok()
    }

    /// Table entries whose blocks other sequences have written, or will in an open step.
    pub(super) fn shared(&self, groups: usize) -> impl Iterator<Item = usize> + '_ {
        let matched = self.preregister_from - self.matched_indices..self.preregister_from;
        let matched = matched.start * groups..matched.end * groups;
        matched.chain(self.already_cached.iter().copied())
    }

    /// Table entries that it computes for all sequences.
    pub(super) fn preregistered(
        &self,
        groups: usize,
    ) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let from = self.preregister_from * groups;
        let entries = from..from + self.preregistered * groups;
        entries.filter(|&entry| !self.is_already_cached(entry))
    }
}

impl Entry {
    #[inline]
    pub(super) fn drafts(&self) -> &[u32] {
        match self.details.as_ref().map(|details| &details.work) {
            Some(Work::Draft(drafts)) => drafts,
            _ => &[],
        }
    }

    #[inline]
    pub(super) fn prefill(&self) -> Option<&PrefillWork> {
        match &self.details.as_ref()?.work {
            Work::Prefill(prefill) => Some(prefill),
            _ => None,
        }
    }

    pub(super) fn changes(&self) -> impl DoubleEndedIterator<Item = &Change> {
        let details = self.details.iter();
        details.flat_map(|details| details.journal.iter())
    }

    /// Blocks that it copied to write on: index, group and source.
    pub(super) fn copied(&self) -> impl Iterator<Item = (usize, usize, BlockId)> + '_ {
        let copied = self.changes().filter_map(|change| match change {
            Change::Copied { index, sources } => Some((*index, sources)),
            _ => None,
        });
        copied.flat_map(|(index, sources)| sources.iter().map(move |of| (index, of.0, of.1)))
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.details.as_ref().map_or(1, |details| details.len)
    }

    /// Whether it reaches its last known or pending token.
    #[inline]
    pub(super) fn samples(&self) -> bool {
        self.details.as_ref().is_none_or(|details| details.samples)
    }

    /// Rows of the logits that it samples.
    #[inline]
    pub(super) fn num_samples(&self) -> usize {
        usize::from(self.samples()) + self.drafts().len()
    }

    /// The position after the last one that it computes.
    #[inline]
    pub(super) fn end(&self) -> usize {
        self.start + self.len()
    }

    /// Positions before this one are not written.
    #[inline]
    pub(super) fn write_from(&self, block_size: usize) -> usize {
        let copied = self.prefill().map_or(0, |prefill| prefill.copied_tokens);
        self.indices_written as usize * block_size + copied
    }

    /// Logical blocks by which its table has grown: matched and allocated.
    pub(super) fn growth(&self) -> usize {
        let matched = self.prefill().map_or(0, |prefill| prefill.matched_indices);
        self.new_indices as usize + matched
    }

    pub(super) fn reused_tokens(&self) -> usize {
        self.prefill().map_or(0, |prefill| prefill.reused_tokens)
    }
}

/// An open step. The blocks that it computes have its number, and are ready once it is closed.
pub(super) struct Plan {
    pub(super) key: PlanKey,
    /// Its bit in [`Sequence::plans`](crate::sequence::Sequence::plans).
    pub(super) bit: PlanSet,
    pub(super) entries: Vec<Entry>,
    /// Leading entries that decode one token each.
    pub(super) decodes: usize,
    pub(super) budget_left: usize,
    pub(super) num_tokens: usize,
    pub(super) num_samples: usize,
    /// Blocks to copy before the step: source and destination.
    copies: Vec<(BlockId, BlockId)>,
    /// The leading copies that the caller has read.
    copies_read: u32,
    /// Blocks that it reads besides those in its sequences' tables: pinned until it is closed.
    pub(super) pinned: Vec<BlockId>,
}

// A larger value is moved by a call of memcpy, and two plans are moved each step.
const _: () = assert!(size_of::<Plan>() <= 128);

impl Plan {
    pub(super) fn new(
        key: PlanKey,
        bit: PlanSet,
        token_budget: usize,
        entries: Vec<Entry>,
    ) -> Self {
        Self {
            key,
            bit,
            entries,
            decodes: 0,
            budget_left: token_budget,
            num_tokens: 0,
            num_samples: 0,
            copies: Vec::new(),
            copies_read: 0,
            pinned: Vec::new(),
        }
    }

    pub(super) fn copies(&self) -> &[(BlockId, BlockId)] {
        &self.copies
    }

    /// The copies; the caller carries them out.
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

    /// Removes the copies to these destinations.
    pub(super) fn remove_copies(&mut self, is_destination: impl Fn(BlockId) -> bool) {
        let read = self.copies[..self.copies_read as usize].iter();
        self.copies_read -= read.filter(|&&(_, to)| is_destination(to)).count() as u32;
        self.copies.retain(|&(_, to)| !is_destination(to));
    }

    #[cfg(test)]
    pub(super) fn copies_mut(&mut self) -> &mut [(BlockId, BlockId)] {
        &mut self.copies
    }

    /// Entries that reach their last token.
    #[inline]
    pub(super) fn num_sampling(&self) -> usize {
        let others = &self.entries[self.decodes..];
        self.decodes + others.iter().filter(|entry| entry.samples()).count()
    }

    /// The plan's number in blocks. It wraps after 2^32 steps: a block that old may be taken for one of an open step,
    /// and is then missed by one pin.
    pub(super) fn step(&self) -> u32 {
        self.key.serial as u32
    }

    /// A sequence's table as it was before this plan, if the plan has removed or replaced any of its blocks.
    #[cold]
    pub(super) fn table_before<'a>(
        &self,
        seq_idx: u32,
        table: &'a BlockTable,
    ) -> Cow<'a, BlockTable> {
        let Some(entry) = self.entries.iter().find(|entry| entry.seq_idx == seq_idx) else {
            return Cow::Borrowed(table);
        };
        if !entry.changes().any(Change::displaces) {
            return Cow::Borrowed(table);
        }
        let mut table = table.clone();
        for change in entry.changes().rev() {
            change.revert(&mut table, |_| {});
        }
        Cow::Owned(table)
    }
}
