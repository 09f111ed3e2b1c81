//! Block tables: for each layer group a start, before which all blocks are released, and one block for each index from
//! there on. Gaps are unrepresentable.

use std::ops::Range;

use crate::groups::Groups;
use crate::ids::BlockId;
use crate::radix::Match;

/// The blocks of one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct GroupBlocks {
    start: usize,
    blocks: Vec<BlockId>,
}

impl GroupBlocks {
    #[inline]
    fn end(&self) -> usize {
        self.start + self.blocks.len()
    }

    /// Appends this group's blocks of a list by logical block, then by layer group.
    #[inline]
    fn push(&mut self, blocks: &[BlockId], group: usize, groups: usize) {
        match groups {
            1 => self.blocks.extend_from_slice(blocks),
            _ => {
                let own = blocks.iter().skip(group).step_by(groups);
                self.blocks.extend(own);
            }
        }
    }

    /// Removes these logical blocks, as far as they are in the table; later ones move up.
    fn take_indices(&mut self, indices: Range<usize>) -> std::vec::Drain<'_, BlockId> {
        let start = indices.start.saturating_sub(self.start);
        let end = indices.end.saturating_sub(self.start);
        self.start = self.start.min(indices.start);
        self.blocks.drain(start..end)
    }
}

/// The blocks of a sequence or a pin: every group has as many logical blocks, and its own start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockTable {
    first: GroupBlocks,
    others: Box<[GroupBlocks]>,
}

impl BlockTable {
    pub(crate) fn new(groups: usize) -> Self {
        Self {
            first: GroupBlocks::default(),
            others: vec![GroupBlocks::default(); groups - 1].into(),
        }
    }

    /// The blocks of a match, from index `from` on; each group from the first one that tokens computed after the match,
    /// or again, read.
    pub(crate) fn of_match(matched: &Match, from: usize, groups: &Groups) -> Self {
        let mut table = Self::new(groups.len());
        let (blocks, indices) = (&matched.blocks, from + matched.num_indices);
        for group in 0..groups.len() {
            let start = groups
                .first_index_of(group, indices, matched.replay)
                .max(from);
            let own = table.group_mut(group);
            own.start = start;
            let blocks = &blocks[(start - from) * groups.len()..];
            own.push(blocks, group, groups.len());
        }
        table
    }

    /// Blocks that form no prefix, for a pin.
    pub(crate) fn of_blocks(groups: usize, blocks: Vec<BlockId>) -> Self {
        let mut table = Self::new(groups);
        table.first.blocks = blocks;
        table
    }

    #[inline]
    fn group(&self, group: usize) -> &GroupBlocks {
        match group {
            0 => &self.first,
            _ => &self.others[group - 1],
        }
    }

    #[inline]
    fn group_mut(&mut self, group: usize) -> &mut GroupBlocks {
        match group {
            0 => &mut self.first,
            _ => &mut self.others[group - 1],
        }
    }

    #[inline]
    pub(crate) fn groups(&self) -> usize {
        1 + self.others.len()
    }

    /// Logical blocks, released ones included.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.first.end()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.end() == 0
    }

    /// The first index at which a group has a block.
    #[inline]
    pub(crate) fn start(&self, group: usize) -> usize {
        self.group(group).start
    }

    #[inline]
    pub(crate) fn blocks_of(&self, group: usize) -> &[BlockId] {
        &self.group(group).blocks
    }

    #[inline]
    pub(crate) fn get(&self, group: usize, index: usize) -> Option<BlockId> {
        let own = self.group(group);
        own.blocks.get(index.checked_sub(own.start)?).copied()
    }

    /// The block at an index, where it is not released.
    #[inline]
    pub(crate) fn at(&self, group: usize, index: usize) -> BlockId {
        let own = self.group(group);
        own.blocks[index - own.start]
    }

    /// Replaces a block; returns the old one.
    pub(crate) fn replace(&mut self, group: usize, index: usize, block: BlockId) -> BlockId {
        let own = self.group_mut(group);
        std::mem::replace(&mut own.blocks[index - own.start], block)
    }

    /// All blocks, by index, then by layer group.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        let starts = (0..self.groups()).map(|group| self.start(group));
        let (first, start) = match self.others.is_empty() {
            true => (&self.first.blocks[..], self.end()),
            false => (&[][..], starts.min().unwrap_or(0)),
        };
        let indices = (start..self.end()).flat_map(|index| self.blocks_at(index));
        first.iter().copied().chain(indices)
    }

    /// The blocks at an index that are not released.
    pub(crate) fn blocks_at(&self, index: usize) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        (0..self.groups()).filter_map(move |group| self.get(group, index))
    }

    pub(crate) fn len(&self) -> usize {
        let groups = 0..self.groups();
        groups.map(|group| self.blocks_of(group).len()).sum()
    }

    /// Appends logical blocks; `blocks` are by index, then by layer group.
    #[inline]
    pub(crate) fn push_indices(&mut self, blocks: &[BlockId]) {
        let groups = self.groups();
        for group in 0..groups {
            self.group_mut(group).push(blocks, group, groups);
        }
    }

    /// The blocks of a table of one group, to append to.
    #[inline]
    pub(crate) fn tail_of_one(&mut self) -> &mut Vec<BlockId> {
        debug_assert!(self.others.is_empty());
        &mut self.first.blocks
    }

    /// Calls `release` on the logical blocks from `indices` on, then removes them. For tables of one group.
    #[inline]
    pub(crate) fn cut_one(&mut self, indices: usize, release: impl FnOnce(&[BlockId])) {
        let GroupBlocks { start, blocks } = &mut self.first;
        let keep = indices.saturating_sub(*start);
        release(&blocks[keep..]);
        blocks.truncate(keep);
        *start = indices.min(*start);
    }

    /// The blocks of a group, to be corrupted.
    #[cfg(test)]
    pub(crate) fn tail_of_group(&mut self, group: usize) -> &mut Vec<BlockId> {
        &mut self.group_mut(group).blocks
    }

    /// Removes logical blocks; calls `release` on their blocks, the last one first.
    pub(crate) fn take_indices(&mut self, indices: Range<usize>, mut release: impl FnMut(BlockId)) {
        if indices.is_empty() {
            return;
        }
        if self.others.is_empty() {
            self.first.take_indices(indices).rev().for_each(release);
            return;
        }
        for index in indices.clone().rev() {
            self.blocks_at(index).rev().for_each(&mut release);
        }
        for group in 0..self.groups() {
            self.group_mut(group).take_indices(indices.clone());
        }
    }

    /// Removes a group's logical blocks before `start`; calls `release` on their blocks, the last one first.
    pub(crate) fn slide(&mut self, group: usize, start: usize, release: impl FnMut(BlockId)) {
        let own = self.group_mut(group);
        let count = start.saturating_sub(own.start).min(own.blocks.len());
        own.blocks.drain(..count).rev().for_each(release);
        own.start += count;
    }

    /// Inserts the blocks of a table that begins at index `at` before that index. A group that begins later in it has
    /// no blocks before `at`.
    pub(crate) fn insert(&mut self, at: usize, mut indices: Self) {
        for group in 0..self.groups() {
            let new = std::mem::take(indices.group_mut(group));
            let own = self.group_mut(group);
            let offset = at - own.start;
            if own.blocks.is_empty() {
                *own = new;
                continue;
            }
            if new.start > at {
                debug_assert!(offset == 0);
                own.start = new.start;
            }
            own.blocks.splice(offset..offset, new.blocks);
        }
    }

    /// Undoes `slide`: inserts the blocks that it removed, in its order, before a group's first one. `start`: the
    /// group's start before it.
    pub(crate) fn restore(
        &mut self,
        group: usize,
        start: usize,
        taken: impl Iterator<Item = BlockId>,
    ) {
        let own = self.group_mut(group);
        let mut blocks: Vec<BlockId> = taken.collect();
        blocks.reverse();
        debug_assert_eq!(start + blocks.len(), own.start.min(start + blocks.len()));
        own.blocks.splice(..0, blocks);
        own.start = start;
    }

    /// The first logical blocks of this table, each group from the index that `seen` gives; `None` if a group has
    /// released any of these.
    pub(crate) fn prefix(&self, indices: usize, seen: impl Fn(usize) -> usize) -> Option<Self> {
        let mut prefix = Self::new(self.groups());
        for group in 0..self.groups() {
            let (own, start) = (self.group(group), seen(group).min(indices));
            if own.start > start && indices > 0 {
                return None;
            }
            let blocks = &own.blocks[start - own.start.min(start)..][..indices - start];
            *prefix.group_mut(group) = GroupBlocks {
                start,
                blocks: blocks.to_vec(),
            };
        }
        Some(prefix)
    }
}
