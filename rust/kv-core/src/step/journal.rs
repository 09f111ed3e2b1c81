//! The undo journal of an entry: the changes that planning it made, undone in reverse order.

use crate::ids::BlockId;
use crate::sequence::Registered;
use crate::table::BlockTable;

/// A change that planning an entry made.
pub(super) enum Change {
    /// Matched logical blocks were inserted after the registered ones of `before`. `slid`: blocks that no later token
    /// reads, by group, last one first; the plan pins them.
    Matched {
        before: Registered,
        indices: usize,
        slid: Vec<(usize, BlockId)>,
    },
    /// The table grows from this index on.
    Grown { from: usize },
    /// The beginning of other blocks is copied to those of a logical block.
    CopiedPartly { index: usize },
    /// Blocks of a logical block were replaced by copies of them: group and source.
    Copied {
        index: usize,
        sources: Vec<(usize, BlockId)>,
    },
    /// Logical blocks after those of `before` were registered before they are computed.
    Preregistered { before: Registered },
}

/// The changes of an entry, in order: a match or copies on write, then one of each other kind. A decode that is
/// extended by drafts may grow twice.
#[derive(Default)]
pub(super) struct Journal([Option<Change>; 4]);

impl Journal {
    pub(super) fn push(&mut self, change: Change) {
        let free = self.0.iter_mut().find(|change| change.is_none());
        *free.expect("no more changes than kinds") = Some(change);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0[0].is_none()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Change> {
        self.0.iter().flatten()
    }

    #[cfg(test)]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Change> {
        self.0.iter_mut().flatten()
    }
}

impl Change {
    /// Whether it removed or replaced blocks of the table.
    pub(super) fn displaces(&self) -> bool {
        match self {
            Self::Matched { slid, .. } => !slid.is_empty(),
            Self::Copied { .. } => true,
            _ => false,
        }
    }

    /// Undoes it in a table; calls `removed` on the blocks that leave the table, the last one first.
    pub(super) fn revert(&self, table: &mut BlockTable, mut removed: impl FnMut(BlockId)) {
        match self {
            Self::Matched {
                before,
                indices,
                slid,
            } => {
                table.take_indices(before.end()..before.end() + indices, removed);
                for group in 0..table.groups() {
                    let blocks = slid.iter().filter(|of| of.0 == group);
                    let start = table.start(group) - blocks.clone().count();
                    table.restore(group, start, blocks.map(|of| of.1));
                }
            }
            Self::Grown { from } => table.take_indices(*from..table.end(), removed),
            Self::Copied { index, sources } => {
                for &(group, source) in sources {
                    removed(table.replace(group, *index, source));
                }
            }
            Self::CopiedPartly { .. } | Self::Preregistered { .. } => {}
        }
    }
}
