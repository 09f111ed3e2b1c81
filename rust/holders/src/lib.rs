//! Which of several holders hold which contents: what a router knows of the caches behind it.
//!
//! Contents go by their chained names, 128 bits each, so that a name stands for a whole prefix. For
//! each name there is one set of holders, a bit each: a prompt is looked up once for all of them, in
//! time linear in its blocks. What is *held* follows from events; what is *expected* are prompts on
//! their way, which their holder will have as long as they run.
#![forbid(unsafe_code)]

mod table;

use table::{Table, Value};

/// Holders that there may be at once.
pub const MOST_HOLDERS: usize = 128;

/// Names that are looked up before the first of them is changed, so that their cache misses overlap.
const AT_ONCE: usize = 64;

/// The chained name of a content.
pub type Name = u128;

type Set = u128;

impl Value for Set {
    fn is_empty(&self) -> bool {
        *self == 0
    }
}

/// What became of a holder's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It holds this one now.
    Stored(Name),
    /// It holds this one no more.
    Removed(Name),
    /// It holds none.
    Cleared,
}

/// A prompt's content on its way: by whom it is expected, and by how many requests of each.
#[derive(Default)]
struct Expected {
    holders: Set,
    /// Of those that more than one request of the same holder waits for: how many besides.
    others: Vec<(u8, u32)>,
}

impl Value for Expected {
    fn is_empty(&self) -> bool {
        self.holders == 0
    }
}

/// Who holds what, and who is expected to. Holders are numbers below [`MOST_HOLDERS`].
pub struct Holders {
    held: Table<Set>,
    num_held: [usize; MOST_HOLDERS],
    expected: Table<Expected>,
    num_expected: [usize; MOST_HOLDERS],
}

impl Default for Holders {
    fn default() -> Self {
        Self {
            held: Table::default(),
            num_held: [0; MOST_HOLDERS],
            expected: Table::default(),
            num_expected: [0; MOST_HOLDERS],
        }
    }
}

impl Holders {
    /// Nobody holds anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what became of a holder's contents, in order. Storing twice is storing once.
    pub fn apply(&mut self, holder: usize, changes: impl Iterator<Item = Change> + Clone) {
        let (mut ahead, mut changes) = (changes.clone(), changes.peekable());
        while changes.peek().is_some() {
            let some = ahead.by_ref().take(AT_ONCE);
            self.held.touch(some.map(|change| match change {
                Change::Stored(name) | Change::Removed(name) => name,
                Change::Cleared => 0,
            }));
            for change in changes.by_ref().take(AT_ONCE) {
                match change {
                    Change::Stored(name) => self.store(holder, name),
                    Change::Removed(name) => self.remove(holder, name),
                    Change::Cleared => self.clear(holder),
                }
            }
        }
    }

    fn store(&mut self, holder: usize, name: Name) {
        let bit = bit(holder);
        self.held.change(name, |set| {
            self.num_held[holder] += usize::from(*set & bit == 0);
            *set |= bit;
        });
    }

    fn remove(&mut self, holder: usize, name: Name) {
        let bit = bit(holder);
        self.held.change(name, |set| {
            self.num_held[holder] -= usize::from(*set & bit != 0);
            *set &= !bit;
        });
    }

    /// The holder holds nothing. O(names known).
    pub fn clear(&mut self, holder: usize) {
        if self.num_held[holder] == 0 {
            return;
        }
        let bit = bit(holder);
        self.held.change_all(|set| *set &= !bit);
        self.num_held[holder] = 0;
    }

    /// A request with a prompt of these contents is on its way to the holder, or runs there.
    pub fn expect(&mut self, holder: usize, names: &[Name]) {
        let bit = bit(holder);
        for &name in names {
            self.expected.change(name, |expected| {
                if expected.holders & bit == 0 {
                    expected.holders |= bit;
                    self.num_expected[holder] += 1;
                    return;
                }
                let others = &mut expected.others;
                match others.iter_mut().find(|(at, _)| usize::from(*at) == holder) {
                    Some((_, count)) => *count += 1,
                    None => others.push((holder as u8, 1)),
                }
            });
        }
    }

    /// Such a request, which was expected, has ended.
    pub fn unexpect(&mut self, holder: usize, names: &[Name]) {
        let bit = bit(holder);
        for &name in names {
            self.expected.change(name, |expected| {
                let others = &mut expected.others;
                if let Some(at) = others.iter().position(|one| usize::from(one.0) == holder) {
                    others[at].1 -= 1;
                    if others[at].1 == 0 {
                        others.swap_remove(at);
                    }
                } else if expected.holders & bit != 0 {
                    expected.holders &= !bit;
                    self.num_expected[holder] -= 1;
                }
            });
        }
    }

    /// Of a prompt of these contents, how many from the first on each holder has or will have: by
    /// the holder's number, as far as anybody has the first one. O(names).
    pub fn depths(&self, names: &[Name]) -> Vec<usize> {
        let mut depths = Vec::new();
        let mut going = Set::MAX;
        for (depth, &name) in names.iter().enumerate() {
            let held = self.held.get(name).copied().unwrap_or_default();
            let expected = self.expected.get(name).map_or(0, |one| one.holders);
            let next = going & (held | expected);
            if depth == 0 {
                depths.resize((Set::BITS - next.leading_zeros()) as usize, names.len());
                settle(!next, 0, &mut depths);
            } else {
                settle(going & !next, depth, &mut depths);
            }
            going = next;
            if going == 0 {
                break;
            }
        }
        depths
    }

    /// The names that a holder holds, in no order. O(names known).
    pub fn contents(&self, holder: usize) -> Vec<Name> {
        let holds = |(name, set): (Name, &Set)| (set & bit(holder) != 0).then_some(name);
        self.held.iter().filter_map(holds).collect()
    }

    /// How many contents a holder holds.
    pub fn num_held(&self, holder: usize) -> usize {
        self.num_held[holder]
    }

    /// How many contents the prompts on their way to a holder have, each counted once.
    pub fn num_expected(&self, holder: usize) -> usize {
        self.num_expected[holder]
    }

    /// Names that anybody holds.
    pub fn num_names(&self) -> usize {
        self.held.len()
    }
}

/// The prompt ends at `depth` for these.
fn settle(mut ended: Set, depth: usize, depths: &mut [usize]) {
    if depths.len() < MOST_HOLDERS {
        ended &= (1 << depths.len()) - 1;
    }
    while ended != 0 {
        depths[ended.trailing_zeros() as usize] = depth;
        ended &= ended - 1;
    }
}

fn bit(holder: usize) -> Set {
    assert!(holder < MOST_HOLDERS, "holder {holder} of {MOST_HOLDERS}");
    1 << holder
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_prefix_ends_where_its_holder_has_no_more() {
        let mut holders = Holders::new();
        holders.apply(0, [1, 2, 3].map(Change::Stored).into_iter());
        holders.apply(2, [1, 3].map(Change::Stored).into_iter()); // a hole: what is behind it counts for nothing
        assert_eq!(holders.depths(&[1, 2, 3, 4]), [3, 0, 1]);
        assert_eq!(holders.depths(&[9]), []);
        holders.apply(0, [2, 7].map(Change::Removed).into_iter());
        assert_eq!(holders.depths(&[1, 2, 3]), [1, 0, 1]);
        holders.apply(127, [Change::Stored(1)].into_iter());
        assert_eq!(holders.depths(&[1])[127], 1);
        holders.apply(0, [Change::Cleared].into_iter());
        assert_eq!((holders.num_held(0), holders.num_names()), (0, 2));
        assert_eq!(holders.depths(&[1])[..3], [0, 0, 1]);
    }

    #[test]
    fn what_is_on_its_way_counts_until_the_last_request_of_it_has_ended() {
        let mut holders = Holders::new();
        holders.expect(3, &[1, 2]);
        holders.expect(3, &[1, 5]);
        holders.expect(4, &[1]);
        assert_eq!((holders.num_expected(3), holders.num_expected(4)), (3, 1));
        assert_eq!(holders.depths(&[1, 2]), [0, 0, 0, 2, 1]);
        holders.unexpect(3, &[1, 2]);
        assert_eq!(holders.depths(&[1, 5]), [0, 0, 0, 2, 1]);
        holders.unexpect(3, &[1, 5]);
        holders.unexpect(4, &[1]);
        holders.unexpect(4, &[1]); // never expected
        assert_eq!((holders.num_expected(3), holders.num_expected(4)), (0, 0));
        assert_eq!(holders.expected.len(), 0);
    }

    #[test]
    fn memory_is_given_back() {
        let mut holders = Holders::new();
        for name in 0..10_000 {
            holders.store((name % 2) as usize, name << 40);
        }
        let before = holders.held.capacity();
        holders.clear(0);
        holders.clear(1);
        assert!(holders.held.capacity() < before / 4);
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            8 => (0..40_u128).prop_map(Change::Stored),
            6 => (0..40_u128).prop_map(Change::Removed),
            1 => Just(Change::Cleared),
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_set_for_each(
            steps in prop::collection::vec((0..MOST_HOLDERS, prop::collection::vec(change(), 1..50)), 1..60),
            prompt in prop::collection::vec(0..40_u128, 0..12),
        ) {
            let mut holders = Holders::new();
            let mut sets: HashMap<usize, BTreeSet<Name>> = HashMap::new();
            for (holder, changes) in &steps {
                holders.apply(*holder, changes.iter().copied());
                let set = sets.entry(*holder).or_default();
                for change in changes {
                    match change {
                        Change::Stored(name) => { set.insert(*name); }
                        Change::Removed(name) => { set.remove(name); }
                        Change::Cleared => set.clear(),
                    }
                }
            }
            let depths = holders.depths(&prompt);
            for holder in 0..MOST_HOLDERS {
                let set = sets.entry(holder).or_default();
                let contents: BTreeSet<Name> = holders.contents(holder).into_iter().collect();
                prop_assert_eq!(&contents, &*set);
                prop_assert_eq!(holders.num_held(holder), set.len());
                let depth = prompt.iter().take_while(|name| set.contains(name)).count();
                prop_assert_eq!(depths.get(holder).copied().unwrap_or_default(), depth);
            }
        }
    }
}
