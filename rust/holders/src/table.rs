//! A table by name, made for changes that come in batches.
//!
//! Entries lie in one array in the order in which they came, so what came together lies together, and
//! goes together. Slots of eight bytes say where: each name's is where its low bits say or behind it
//! (linear probing and its removal: Knuth, The Art of Computer Programming 3, 6.4, algorithms L and
//! R). Names are hashes already. With entries in the slots themselves, or in the standard library's
//! map, each change of 10,000,000 entries reads another page of half a gigabyte: twice the time.

use crate::Name;

const FEWEST: usize = 16;
const NONE: u32 = u32::MAX;

/// What a table keeps. An entry whose value is empty is none.
pub(crate) trait Value: Default {
    fn is_empty(&self) -> bool;
}

struct Entry<T> {
    name: Name,
    value: T,
}

/// Where the entry is of a name with these low bits; nowhere, if that is `NONE`.
#[derive(Clone, Copy)]
struct Slot {
    low: u32,
    entry: u32,
}

const EMPTY: Slot = Slot {
    low: 0,
    entry: NONE,
};

/// Values by name; 2^32 - 1 of them at most.
pub(crate) struct Table<T> {
    /// A power of two of them, half of them empty: searches are short, and go as foreseen.
    slots: Vec<Slot>,
    entries: Vec<Entry<T>>,
    /// Places of entries that were removed.
    free: Vec<u32>,
}

impl<T: Value> Default for Table<T> {
    fn default() -> Self {
        Self {
            slots: vec![EMPTY; FEWEST],
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T: Value> Table<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len().min(self.entries.capacity())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Name, &T)> {
        let there = self.entries.iter().filter(|one| !one.value.is_empty());
        there.map(|one| (one.name, &one.value))
    }

    pub(crate) fn get(&self, name: Name) -> Option<&T> {
        let slot = self.slots[self.find(name)];
        (slot.entry != NONE).then(|| &self.entries[slot.entry as usize].value)
    }

    /// Reads what `change` of these names will read, so that their cache misses overlap.
    pub(crate) fn touch(&self, names: impl Iterator<Item = Name>) {
        let mut seen = 0;
        for name in names {
            let slot = self.slots[self.home(name as u32)];
            if slot.low == name as u32 && slot.entry != NONE {
                seen ^= self.entries[slot.entry as usize].name;
            }
        }
        std::hint::black_box(seen);
    }

    /// Changes the value of a name, which is the default where there is none.
    pub(crate) fn change(&mut self, name: Name, change: impl FnOnce(&mut T)) {
        let at = self.find(name);
        let place = self.slots[at].entry;
        if place != NONE {
            let value = &mut self.entries[place as usize].value;
            change(value);
            if value.is_empty() {
                self.free.push(place);
                self.close_gap(at);
            }
            return;
        }
        let mut value = T::default();
        change(&mut value);
        if !value.is_empty() {
            self.slots[at] = Slot {
                low: name as u32,
                entry: self.put(Entry { name, value }),
            };
            if 2 * self.len() > self.slots.len() {
                self.spread(2 * self.slots.len());
            }
        }
    }

    /// Changes all values. O(entries).
    pub(crate) fn change_all(&mut self, change: impl Fn(&mut T)) {
        for place in 0..self.entries.len() {
            let entry = &mut self.entries[place];
            if entry.value.is_empty() {
                continue;
            }
            change(&mut entry.value);
            if entry.value.is_empty() {
                let name = entry.name;
                let at = self.find(name);
                self.free.push(place as u32);
                self.close_gap(at);
            }
        }
        if 4 * self.len() < self.entries.len() {
            self.shrink();
        }
    }

    fn home(&self, low: u32) -> usize {
        low as usize & (self.slots.len() - 1)
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    /// The slot of a name, or the empty one where it is to be put.
    fn find(&self, name: Name) -> usize {
        let mut at = self.home(name as u32);
        loop {
            let slot = self.slots[at];
            let is_it = || self.entries[slot.entry as usize].name == name;
            if slot.entry == NONE || slot.low == name as u32 && is_it() {
                return at;
            }
            at = self.next(at);
        }
    }

    fn put(&mut self, entry: Entry<T>) -> u32 {
        if let Some(place) = self.free.pop() {
            self.entries[place as usize] = entry;
            return place;
        }
        assert!(self.entries.len() < NONE as usize, "2^32 - 1 names");
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    /// This slot names an entry no more: those behind it move up that would not be found.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let distance = |from: usize, to: usize| to.wrapping_sub(from) & mask;
        let mut at = self.next(gap);
        while self.slots[at].entry != NONE {
            if distance(self.home(self.slots[at].low), at) >= distance(gap, at) {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
            at = self.next(at);
        }
        self.slots[gap] = EMPTY;
    }

    /// Lays the slots out anew, so many of them.
    fn spread(&mut self, count: usize) {
        for slot in std::mem::replace(&mut self.slots, vec![EMPTY; count]) {
            if slot.entry != NONE {
                let mut at = self.home(slot.low);
                while self.slots[at].entry != NONE {
                    at = self.next(at);
                }
                self.slots[at] = slot;
            }
        }
    }

    /// Gives back what is not needed for the entries that there are, twice over.
    fn shrink(&mut self) {
        let old = std::mem::take(self);
        self.spread((2 * old.len()).next_power_of_two().max(FEWEST));
        for entry in old.entries.into_iter().filter(|one| !one.value.is_empty()) {
            self.change(entry.name, |value| *value = entry.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl Value for u8 {
        fn is_empty(&self) -> bool {
            *self == 0
        }
    }

    proptest! {
        /// Names of which many have the same home, also at the end of the array.
        #[test]
        fn it_is_a_map_whatever_the_homes(
            steps in prop::collection::vec((0..24_u128, 0..4_u8, 0..40_u8), 1..300),
        ) {
            let mut table = Table::<u8>::default();
            let mut map = BTreeMap::new();
            for (number, value, kind) in steps {
                let name = ((number % 3) << 64) | (number * 5 + 13);
                if kind == 0 {
                    table.change_all(|one| *one &= !1);
                    map.values_mut().for_each(|one| *one &= !1);
                } else {
                    table.change(name, |one| *one = value);
                    map.insert(name, value);
                }
                map.retain(|_, one| *one != 0);
                let found: BTreeMap<Name, u8> = table.iter().map(|(name, one)| (name, *one)).collect();
                prop_assert_eq!(&found, &map);
                prop_assert_eq!(table.len(), map.len());
                prop_assert!(map.iter().all(|(name, one)| table.get(*name) == Some(one)));
                prop_assert_eq!(table.get(99), None);
            }
        }
    }
}
