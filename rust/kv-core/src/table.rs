//! Block tables: for each layer group a start, before which all rows are released, and one block for each row from
//! there on. Gaps are unrepresentable.

use std::ops::Range;

use crate::groups::Groups;
use crate::ids::BlockId;
use crate::radix::Match;

/// The blocks of one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Column {
    start: usize,
    blocks: Vec<BlockId>,
}

impl Column {
    #[inline]
    fn end(&self) -> usize {
        self.start + self.blocks.len()
    }

    /// Appends this group's blocks of a row-major list.
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

    /// Removes those of these rows that are in the table; the rows after them move up.
    fn take_rows(&mut self, rows: Range<usize>) -> std::vec::Drain<'_, BlockId> {
        let start = rows.start.saturating_sub(self.start);
        let end = rows.end.saturating_sub(self.start);
        self.start = self.start.min(rows.start);
        self.blocks.drain(start..end)
    }
}

/// The blocks of a sequence or a pin: every group has as many rows, and its own start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockTable {
    first: Column,
    others: Box<[Column]>,
}

impl BlockTable {
    pub(crate) fn new(groups: usize) -> Self {
        Self {
            first: Column::default(),
            others: vec![Column::default(); groups - 1].into(),
        }
    }

    /// The rows of a match, from row `from` on; each group from the first row that tokens computed after the match, or
    /// again, read.
    pub(crate) fn of_match(found: &Match, from: usize, groups: &Groups) -> Self {
        let mut table = Self::new(groups.len());
        let (blocks, rows) = (&found.blocks, from + found.num_rows);
        for group in 0..groups.len() {
            let start = groups.first_row_of(group, rows, found.replay).max(from);
            let column = table.column_mut(group);
            column.start = start;
            let blocks = &blocks[(start - from) * groups.len()..];
            column.push(blocks, group, groups.len());
        }
        table
    }

    /// Blocks that are no prefix, for a pin.
    pub(crate) fn of_blocks(groups: usize, blocks: Vec<BlockId>) -> Self {
        let mut table = Self::new(groups);
        table.first.blocks = blocks;
        table
    }

    #[inline]
    fn column(&self, group: usize) -> &Column {
        match group {
            0 => &self.first,
            _ => &self.others[group - 1],
        }
    }

    #[inline]
    fn column_mut(&mut self, group: usize) -> &mut Column {
        match group {
            0 => &mut self.first,
            _ => &mut self.others[group - 1],
        }
    }

    /// Layer groups.
    #[inline]
    pub(crate) fn groups(&self) -> usize {
        1 + self.others.len()
    }

    /// Rows, released ones included.
    #[inline]
    pub(crate) fn rows(&self) -> usize {
        self.first.end()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rows() == 0
    }

    /// The first row of which a group has a block.
    #[inline]
    pub(crate) fn start(&self, group: usize) -> usize {
        self.column(group).start
    }

    /// A group's blocks, from its start on.
    #[inline]
    pub(crate) fn blocks_of(&self, group: usize) -> &[BlockId] {
        &self.column(group).blocks
    }

    /// The block of a row, unless it was released.
    #[inline]
    pub(crate) fn get(&self, group: usize, row: usize) -> Option<BlockId> {
        let column = self.column(group);
        column.blocks.get(row.checked_sub(column.start)?).copied()
    }

    /// The block of a row that is not released.
    #[inline]
    pub(crate) fn at(&self, group: usize, row: usize) -> BlockId {
        let column = self.column(group);
        column.blocks[row - column.start]
    }

    /// Replaces a block; returns the old one.
    pub(crate) fn replace(&mut self, group: usize, row: usize, block: BlockId) -> BlockId {
        let column = self.column_mut(group);
        std::mem::replace(&mut column.blocks[row - column.start], block)
    }

    /// All blocks, row by row.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        let starts = (0..self.groups()).map(|group| self.start(group));
        let (first, start) = match self.others.is_empty() {
            true => (&self.first.blocks[..], self.rows()),
            false => (&[][..], starts.min().unwrap_or(0)),
        };
        let rows = (start..self.rows()).flat_map(|row| self.row(row));
        first.iter().copied().chain(rows)
    }

    /// The blocks of a row that are not released.
    pub(crate) fn row(&self, row: usize) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        (0..self.groups()).filter_map(move |group| self.get(group, row))
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        let groups = 0..self.groups();
        groups.map(|group| self.blocks_of(group).len()).sum()
    }

    /// Appends rows; the blocks are row-major.
    #[inline]
    pub(crate) fn push_rows(&mut self, blocks: &[BlockId]) {
        let groups = self.groups();
        for group in 0..groups {
            self.column_mut(group).push(blocks, group, groups);
        }
    }

    /// The blocks of a table of one group, to append to.
    #[inline]
    pub(crate) fn tail_of_one(&mut self) -> &mut Vec<BlockId> {
        debug_assert!(self.others.is_empty());
        &mut self.first.blocks
    }

    /// Calls `each` on the rows from `rows` on, then removes them. For tables of one group.
    #[inline]
    pub(crate) fn cut_one(&mut self, rows: usize, each: impl FnOnce(&[BlockId])) {
        let Column { start, blocks } = &mut self.first;
        let keep = rows.saturating_sub(*start);
        each(&blocks[keep..]);
        blocks.truncate(keep);
        *start = rows.min(*start);
    }

    /// The blocks of a group, to be corrupted.
    #[cfg(test)]
    pub(crate) fn tail_of_group(&mut self, group: usize) -> &mut Vec<BlockId> {
        &mut self.column_mut(group).blocks
    }

    /// Removes rows; calls `each` on their blocks, the last one first.
    pub(crate) fn take_rows(&mut self, rows: Range<usize>, mut each: impl FnMut(BlockId)) {
        if rows.is_empty() {
            return;
        }
        if self.others.is_empty() {
            self.first.take_rows(rows).rev().for_each(each);
            return;
        }
        for row in rows.clone().rev() {
            self.row(row).rev().for_each(&mut each);
        }
        for group in 0..self.groups() {
            self.column_mut(group).take_rows(rows.clone());
        }
    }

    /// Releases a group's rows before `start`; calls `each` on their blocks, the last one first.
    pub(crate) fn slide(&mut self, group: usize, start: usize, each: impl FnMut(BlockId)) {
        let column = self.column_mut(group);
        let gone = start.saturating_sub(column.start).min(column.blocks.len());
        column.blocks.drain(..gone).rev().for_each(each);
        column.start += gone;
    }

    /// Inserts the rows of a table that begins at row `at` before that row. A group that begins later in it has no
    /// rows before `at`.
    pub(crate) fn insert(&mut self, at: usize, mut rows: Self) {
        for group in 0..self.groups() {
            let new = std::mem::take(rows.column_mut(group));
            let column = self.column_mut(group);
            let place = at - column.start;
            if column.blocks.is_empty() {
                *column = new;
                continue;
            }
            if new.start > at {
                debug_assert!(place == 0);
                column.start = new.start;
            }
            column.blocks.splice(place..place, new.blocks);
        }
    }

    /// Undoes `slide`: inserts the blocks that it released, in its order, before a group's first one. `start`: the
    /// group's start then.
    pub(crate) fn restore(
        &mut self,
        group: usize,
        start: usize,
        taken: impl Iterator<Item = BlockId>,
    ) {
        let column = self.column_mut(group);
        let mut blocks: Vec<BlockId> = taken.collect();
        blocks.reverse();
        debug_assert_eq!(start + blocks.len(), column.start.min(start + blocks.len()));
        column.blocks.splice(..0, blocks);
        column.start = start;
    }

    /// The first rows of this table, each group from the row that `seen` gives; `None` if a group has released any
    /// of these.
    pub(crate) fn prefix(&self, rows: usize, seen: impl Fn(usize) -> usize) -> Option<Self> {
        let mut prefix = Self::new(self.groups());
        for group in 0..self.groups() {
            let (column, start) = (self.column(group), seen(group).min(rows));
            if column.start > start && rows > 0 {
                return None;
            }
            let blocks = &column.blocks[start - column.start.min(start)..][..rows - start];
            *prefix.column_mut(group) = Column {
                start,
                blocks: blocks.to_vec(),
            };
        }
        Some(prefix)
    }
}
