//! The names that contents have, so that no two have the same.
//!
//! Names are hashes already: the low bits say in which line of the cache a name stands, and 32 bits mixed
//! of all of its low half stand for it there, anywhere in the line. So what comes and what goes is one
//! comparison of a line, whatever stands in it: in a list of slots, one after the other, the ends of
//! searches cannot be foreseen, and each costs more than the search. Two names that look alike count as
//! equal, once in 2^32 comparisons: that costs a name, no more.

use std::collections::{HashSet, TryReserveError};

/// Marks of names, 0 where there is none: a line of the cache.
type Line = [u32; 16];

/// A line is for so many names, on average and at most.
const USUAL: usize = 4;

/// A set of names.
pub(crate) struct Names {
    /// A power of two of them from `first` on, or none yet.
    words: Vec<u32>,
    first: usize,
    /// Lines and marks of names for which there was no room.
    others: HashSet<(usize, u32)>,
    len: usize,
    usual_len: usize,
}

#[inline]
fn mark(name: u128) -> u32 {
    // The golden ratio: names of few bits, as tests ask for, have marks of their own.
    let mixed = (name as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as u32).max(1)
}

/// Where this mark stands.
#[inline]
fn place(line: &Line, mark: u32) -> Option<usize> {
    let places = line.iter().enumerate();
    let found = places.fold(0_u32, |found, (at, &there)| {
        found | u32::from(there == mark) << at
    });
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// In which line a name stands, of a power of two of them.
#[inline]
fn line_of(name: u128, lines: usize) -> usize {
    name as usize & (lines - 1)
}

#[inline]
fn has_other(others: &HashSet<(usize, u32)>, line: usize, mark: u32) -> bool {
    !others.is_empty() && others.contains(&(line, mark))
}

/// Adds a name, if it is not there.
#[inline]
fn add(lines: &mut [Line], others: &mut HashSet<(usize, u32)>, name: u128) -> bool {
    let (at, mark) = (line_of(name, lines.len()), mark(name));
    let line = &mut lines[at];
    if place(line, mark).is_some() || has_other(others, at, mark) {
        return false;
    }
    match place(line, 0) {
        Some(place) => line[place] = mark,
        None => _ = others.insert((at, mark)),
    }
    true
}

impl Names {
    /// For about so many names.
    pub(crate) fn new(usual_len: usize) -> Self {
        Self {
            words: Vec::new(),
            first: 0,
            others: HashSet::new(),
            len: 0,
            usual_len,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn lines(&self) -> &[Line] {
        self.words[self.first..].as_chunks().0
    }

    /// Takes the memory for as many names as are usual, and writes to all of it: the system gives pages of up to
    /// 2 MiB, and clears each, when they are first written to. Without this the first name waits for it.
    #[cold]
    pub(crate) fn prepare(&mut self) -> Result<(), TryReserveError> {
        let (count, words) = (
            (self.usual_len / USUAL).next_power_of_two(),
            size_of::<Line>() / 4,
        );
        // One line more, of which a part lies before the first and the rest after the last.
        let length = (count + 1) * words - 1;
        self.words.try_reserve_exact(length)?;
        self.words.resize(length, 0);
        self.first = self.words.as_ptr().align_offset(size_of::<Line>());
        self.words.truncate(self.first + count * words);
        Ok(())
    }

    /// Adds the leading names that are not there; how many these are.
    pub(crate) fn add_leading(&mut self, names: &[u128]) -> usize {
        if self.words.is_empty() {
            self.prepare().expect("memory for the set of names");
        }
        self.touch(names);
        let (lines, _) = self.words[self.first..].as_chunks_mut::<16>();
        let others = &mut self.others;
        let adds = |name: &&u128| add(lines, others, **name);
        let added = names.iter().take_while(adds).count();
        self.len += added;
        added
    }

    #[inline]
    pub(crate) fn contains(&self, name: u128) -> bool {
        let (lines, mark) = (self.lines(), mark(name));
        let at = line_of(name, lines.len());
        place(&lines[at], mark).is_some() || has_other(&self.others, at, mark)
    }

    /// Takes out names that are there.
    pub(crate) fn remove_all(&mut self, names: &[u128]) {
        self.touch(names);
        let (lines, _) = self.words[self.first..].as_chunks_mut::<16>();
        for &name in names {
            let (at, mark) = (line_of(name, lines.len()), mark(name));
            let line = &mut lines[at];
            match place(line, mark) {
                Some(place) => line[place] = 0,
                None => _ = self.others.remove(&(at, mark)),
            }
        }
        self.len -= names.len();
    }

    /// Reads where these names are looked for, so that the cache misses of what comes next overlap.
    fn touch(&self, names: &[u128]) {
        let lines = self.lines();
        let marks = names
            .iter()
            .map(|&name| lines[line_of(name, lines.len())][0]);
        std::hint::black_box(marks.fold(0, |seen, mark| seen ^ mark));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In one line, in which not all have a place, and in some.
        #[test]
        fn they_are_a_set(
            usual_len in prop::sample::select(vec![0_usize, 9, 100]),
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0..40_u128, 1..12)), 1..200),
        ) {
            let (mut names, mut set) = (Names::new(usual_len), BTreeSet::new());
            names.add_leading(&[]);
            for (adds, some) in steps {
                if adds {
                    let added = some.iter().take_while(|&&name| set.insert(name)).count();
                    prop_assert_eq!(names.add_leading(&some), added);
                } else if set.remove(&some[0]) {
                    names.remove_all(&some[..1]);
                }
                prop_assert_eq!(names.len(), set.len());
                prop_assert!((0..40).all(|name| names.contains(name) == set.contains(&name)));
            }
        }
    }
}
