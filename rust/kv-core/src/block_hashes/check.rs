//! Validators of the set of block hashes.

use super::{BlockHashSet, cell_of, in_overflow, line_of, mark};

impl BlockHashSet {
    /// Hashes in the set. It counts.
    pub(crate) fn len(&self) -> usize {
        let marks = self.lines().iter().flatten();
        marks.filter(|&&mark| mark > 0).count() + self.overflow.len()
    }

    pub(crate) fn contains(&self, hash: u128) -> bool {
        let (lines, mark) = (self.lines(), mark(hash));
        let at = line_of(hash, lines.len());
        cell_of(&lines[at], mark).is_some() || in_overflow(&self.overflow, at, mark)
    }
}
