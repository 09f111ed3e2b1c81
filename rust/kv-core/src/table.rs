//! Block tables without holes: of each layer group a start, the rows given back before it, and one
//! block for each row from there on. What would be missing in the middle cannot be written.

use std::ops::Range;

use crate::groups::Groups;
use crate::ids::BlockId;
use crate::matching::Match;

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

    /// What a row-major list has for this group.
    #[inline]
    fn push(&mut self, blocks: &[BlockId], group: usize, groups: usize) {
        match groups {
            1 => self.blocks.extend_from_slice(blocks),
            _ => self
                .blocks
                .extend(blocks.iter().skip(group).step_by(groups)),
        }
    }

    /// Takes out those of these rows that are there; what follows moves up to the first of them.
    fn take_rows(&mut self, rows: Range<usize>) -> std::vec::Drain<'_, BlockId> {
        let start = rows.start.saturating_sub(self.start);
        let end = rows.end.saturating_sub(self.start);
        self.start = self.start.min(rows.start);
        self.blocks.drain(start..end)
    }
}

/// The blocks of a prefix: every group has as many rows, and its own start.
#[derive(Clone, Debug, PartialEq, Eq)]
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

    /// The rows of a match, from row `from` on, each group from where what is computed after the match,
    /// or again, sees it.
    pub(crate) fn of_match(found: &Match, from: usize, groups: &Groups) -> Self {
        let mut table = Self::new(groups.len());
        let (blocks, rows) = (&found.blocks, from + found.rows);
        for group in 0..groups.len() {
            let start = groups.first_row_of(group, rows, found.replay).max(from);
            let column = table.column_mut(group);
            column.start = start;
            column.push(
                &blocks[(start - from) * groups.len()..],
                group,
                groups.len(),
            );
        }
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

    /// Rows, those given back included.
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

    /// The block of a row, unless it was given back.
    #[inline]
    pub(crate) fn get(&self, group: usize, row: usize) -> Option<BlockId> {
        let column = self.column(group);
        column.blocks.get(row.checked_sub(column.start)?).copied()
    }

    /// The block of a row that is there.
    #[inline]
    pub(crate) fn at(&self, group: usize, row: usize) -> BlockId {
        let column = self.column(group);
        column.blocks[row - column.start]
    }

    /// Puts another block in place of one that is there, which it returns.
    pub(crate) fn replace(&mut self, group: usize, row: usize, block: BlockId) -> BlockId {
        let column = self.column_mut(group);
        std::mem::replace(&mut column.blocks[row - column.start], block)
    }

    /// All blocks, row by row.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        let one = self.others.is_empty();
        let first = if one { &self.first.blocks[..] } else { &[] };
        let starts = (0..self.groups()).map(|group| self.start(group));
        let start = if one {
            self.rows()
        } else {
            starts.min().unwrap_or(0)
        };
        let rows = start..self.rows();
        first
            .iter()
            .copied()
            .chain(rows.flat_map(|row| self.row(row)))
    }

    /// The blocks of a row that are there.
    pub(crate) fn row(&self, row: usize) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        (0..self.groups()).filter_map(move |group| self.get(group, row))
    }

    /// How many blocks there are.
    pub(crate) fn len(&self) -> usize {
        (0..self.groups())
            .map(|group| self.blocks_of(group).len())
            .sum()
    }

    /// Rows more at the end, row-major.
    #[inline]
    pub(crate) fn push_rows(&mut self, blocks: &[BlockId]) {
        let groups = self.groups();
        for group in 0..groups {
            self.column_mut(group).push(blocks, group, groups);
        }
    }

    /// As `push_rows`, of the one group that there is.
    #[inline]
    pub(crate) fn tail_of_one(&mut self) -> &mut Vec<BlockId> {
        debug_assert!(self.others.is_empty());
        &mut self.first.blocks
    }

    /// Takes the last rows out, of the one group that there is, when `each` has seen them.
    #[inline]
    pub(crate) fn cut_one(&mut self, rows: usize, each: impl FnOnce(&[BlockId])) {
        let Column { start, blocks } = &mut self.first;
        let keep = rows.saturating_sub(*start);
        each(&blocks[keep..]);
        blocks.truncate(keep);
        *start = rows.min(*start);
    }

    /// The blocks of a group, to be spoilt.
    #[cfg(test)]
    pub(crate) fn tail_of_group(&mut self, group: usize) -> &mut Vec<BlockId> {
        &mut self.column_mut(group).blocks
    }

    /// Takes rows out; their blocks, the last one first.
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

    /// Gives back a group's rows before `start`; their blocks, the last one first.
    pub(crate) fn slide(&mut self, group: usize, start: usize, each: impl FnMut(BlockId)) {
        let column = self.column_mut(group);
        let gone = start.saturating_sub(column.start).min(column.blocks.len());
        column.blocks.drain(..gone).rev().for_each(each);
        column.start += gone;
    }

    /// Puts rows in before row `at`: those of a table that begins there. A group of which that table
    /// begins later has nothing before.
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

    /// Puts blocks back before a group's first ones: what `slide` took, in its order. `start` is where
    /// the group begins then.
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

    /// The first rows of this table, each group from where a token after them sees it, if every group has
    /// those.
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

    /// Every group has as many rows.
    pub(crate) fn check(&self) -> Result<(), String> {
        let ends = |group: &usize| self.column(*group).end() != self.rows();
        match (0..self.groups()).find(ends) {
            Some(group) => {
                let (rows, end) = (self.rows(), self.column(group).end());
                Err(format!("{rows} rows, {end} in group {group}"))
            }
            None => Ok(()),
        }
    }
}
