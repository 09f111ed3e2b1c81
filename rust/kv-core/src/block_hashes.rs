//! The set of block hashes, which keeps them distinct.
//!
//! A hash selects a line of 16 cells by its low bits; 32 mixed bits of its low half are stored in any cell of the line.
//! So an insertion or removal compares one cache line, without an unpredictable probe sequence. Two hashes with equal
//! stored bits, once in 2^32 comparisons, count as equal: that block has no hash.

mod check;

use std::collections::{HashSet, TryReserveError};

/// Stored bits of hashes, 0 in empty cells: one cache line.
type Line = [u32; 16];

/// Hashes per line on average, in a full pool.
const HASHES_PER_LINE: usize = 4;

/// A set of hashes.
#[derive(Default)]
pub(crate) struct BlockHashSet {
    /// A power of two of lines from `first` on; empty until `reserve`.
    words: Vec<u32>,
    first: usize,
    /// Line and stored bits of hashes whose line was full.
    overflow: HashSet<(usize, u32)>,
    num_blocks: usize,
}

fn mark(hash: u128) -> u32 {
    // The golden ratio: hashes of few bits, as tests ask for, have distinct marks.
    let mixed = (hash as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as u32).max(1)
}

/// The cell of this mark.
fn cell_of(line: &Line, mark: u32) -> Option<usize> {
    let places = line.iter().enumerate();
    let mask = places.fold(0_u32, |mask, (at, &there)| {
        mask | u32::from(there == mark) << at
    });
    (mask != 0).then(|| mask.trailing_zeros() as usize)
}

/// The line of a hash.
fn line_of(hash: u128, lines: usize) -> usize {
    hash as usize & (lines - 1)
}

fn in_overflow(overflow: &HashSet<(usize, u32)>, line: usize, mark: u32) -> bool {
    !overflow.is_empty() && overflow.contains(&(line, mark))
}

/// Adds a hash if it is missing.
fn add(lines: &mut [Line], overflow: &mut HashSet<(usize, u32)>, hash: u128) -> bool {
    let (at, mark) = (line_of(hash, lines.len()), mark(hash));
    let line = &mut lines[at];
    if cell_of(line, mark).is_some() || in_overflow(overflow, at, mark) {
        return false;
    }
    match cell_of(line, 0) {
        Some(cell) => line[cell] = mark,
        None => _ = overflow.insert((at, mark)),
    }
    true
}

impl BlockHashSet {
    /// An empty set, sized for a pool of `num_blocks` blocks.
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks,
            ..Self::default()
        }
    }

    fn lines(&self) -> &[Line] {
        self.words[self.first..].as_chunks().0
    }

    /// Allocates the set and touches all of it, so that the first hash does not wait while the system clears pages of up
    /// to 2 MiB.
    #[cold]
    pub(crate) fn reserve(&mut self) -> Result<(), TryReserveError> {
        let count = (self.num_blocks / HASHES_PER_LINE).next_power_of_two();
        let words = size_of::<Line>() / 4;
        // One line more, of which a part lies before the first and the rest after the last.
        let length = (count + 1) * words - 1;
        self.words.try_reserve_exact(length)?;
        self.words.resize(length, 0);
        self.first = self.words.as_ptr().align_offset(size_of::<Line>());
        self.words.truncate(self.first + count * words);
        Ok(())
    }

    /// Adds leading hashes up to the first one that is in the set. Returns how many.
    pub(crate) fn add_leading(&mut self, hashes: &[u128]) -> usize {
        if self.words.is_empty() {
            self.reserve().expect("memory for the set of hashes");
        }
        self.touch(hashes);
        let (lines, _) = self.words[self.first..].as_chunks_mut::<16>();
        let overflow = &mut self.overflow;
        let adds = |hash: &&u128| add(lines, overflow, **hash);
        hashes.iter().take_while(adds).count()
    }

    /// Removes hashes, all of which are in the set.
    pub(crate) fn remove_all(&mut self, hashes: &[u128]) {
        self.touch(hashes);
        let (lines, _) = self.words[self.first..].as_chunks_mut::<16>();
        for &hash in hashes {
            let (at, mark) = (line_of(hash, lines.len()), mark(hash));
            let line = &mut lines[at];
            match cell_of(line, mark) {
                Some(cell) => line[cell] = 0,
                None => _ = self.overflow.remove(&(at, mark)),
            }
        }
    }

    /// Reads the lines of these hashes, so that the cache misses of the following loop overlap.
    fn touch(&self, hashes: &[u128]) {
        let lines = self.lines();
        let mark = |&hash: &u128| lines[line_of(hash, lines.len())][0];
        let marks = hashes.iter().map(mark);
        std::hint::black_box(marks.fold(0, |seen, mark| seen ^ mark));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Hashes of one line, which has too few cells, and of several.
        #[test]
        fn they_are_a_set(
            num_blocks in prop::sample::select(vec![0_usize, 9, 100]),
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0..40_u128, 1..12)), 1..200),
        ) {
            let (mut hashes, mut set) = (BlockHashSet::new(num_blocks), BTreeSet::new());
            hashes.add_leading(&[]);
            for (adds, some) in steps {
                if adds {
                    let added = some.iter().take_while(|&&hash| set.insert(hash)).count();
                    prop_assert_eq!(hashes.add_leading(&some), added);
                } else if set.remove(&some[0]) {
                    hashes.remove_all(&some[..1]);
                }
                prop_assert_eq!(hashes.len(), set.len());
                prop_assert!((0..40).all(|hash| hashes.contains(hash) == set.contains(&hash)));
            }
        }
    }
}
