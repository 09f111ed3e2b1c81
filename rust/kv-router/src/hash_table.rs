//! A hash table for changes that come in batches.
//!
//! Entries are in one array in order of arrival: those of a batch are neighbours. Buckets of eight bytes
//! point to them, by linear probing from the low bits of the hash (insertion and removal: Knuth, The Art
//! of Computer Programming 3, 6.4, algorithms L and R). Keys are hashes already. With entries in the buckets
//! themselves, or in the standard library's map, each change of 10,000,000 entries reads another page of
//! half a gigabyte: twice the time.

/// The chained hash of a block.
pub type BlockHash = u128;

const MIN_BUCKETS: usize = 16;
const NONE: u32 = u32::MAX;

/// A value of a table. An entry with an empty value is removed.
pub(crate) trait Value: Default {
    fn is_empty(&self) -> bool;
}

struct Entry<T> {
    hash: BlockHash,
    value: T,
}

/// The low bits of a hash and the position of its entry, `NONE` for an empty bucket.
#[derive(Clone, Copy)]
struct Bucket {
    low: u32,
    entry: u32,
}

const EMPTY: Bucket = Bucket {
    low: 0,
    entry: NONE,
};

/// Values by block hash; 2^32 - 1 of them at most.
pub(crate) struct HashTable<T> {
    /// A power of two of them, at least half of them empty: probes are short, and branches predictable.
    buckets: Vec<Bucket>,
    entries: Vec<Entry<T>>,
    /// Positions of entries that were removed.
    free: Vec<u32>,
}

impl<T: Value> Default for HashTable<T> {
    fn default() -> Self {
        Self {
            buckets: vec![EMPTY; MIN_BUCKETS],
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T: Value> HashTable<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.buckets.len().min(self.entries.capacity())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, &T)> {
        let entries = self.entries.iter().filter(|entry| !entry.value.is_empty());
        entries.map(|entry| (entry.hash, &entry.value))
    }

    pub(crate) fn get(&self, hash: BlockHash) -> Option<&T> {
        let bucket = self.buckets[self.find(hash)];
        (bucket.entry != NONE).then(|| &self.entries[bucket.entry as usize].value)
    }

    /// Reads the memory that `change` of these hashes will read, so that their cache misses overlap.
    pub(crate) fn touch(&self, hashes: impl Iterator<Item = BlockHash>) {
        let mut seen = 0;
        for hash in hashes {
            let bucket = self.buckets[self.home(hash as u32)];
            if bucket.low == hash as u32 && bucket.entry != NONE {
                seen ^= self.entries[bucket.entry as usize].hash;
            }
        }
        std::hint::black_box(seen);
    }

    /// Changes the value of a hash, which is the default for a new one.
    pub(crate) fn change(&mut self, hash: BlockHash, change: impl FnOnce(&mut T)) {
        let at = self.find(hash);
        let position = self.buckets[at].entry;
        if position != NONE {
            let value = &mut self.entries[position as usize].value;
            change(value);
            if value.is_empty() {
                self.free.push(position);
                self.close_gap(at);
            }
            return;
        }
        let mut value = T::default();
        change(&mut value);
        if !value.is_empty() {
            self.buckets[at] = Bucket {
                low: hash as u32,
                entry: self.put(Entry { hash, value }),
            };
            if 2 * self.len() > self.buckets.len() {
                self.rebuild(2 * self.buckets.len());
            }
        }
    }

    /// Changes all values. O(entries).
    pub(crate) fn change_all(&mut self, change: impl Fn(&mut T)) {
        for position in 0..self.entries.len() {
            let entry = &mut self.entries[position];
            if entry.value.is_empty() {
                continue;
            }
            change(&mut entry.value);
            if entry.value.is_empty() {
                let hash = entry.hash;
                let at = self.find(hash);
                self.free.push(position as u32);
                self.close_gap(at);
            }
        }
        if 4 * self.len() < self.entries.len() {
            self.shrink();
        }
    }

    fn home(&self, low: u32) -> usize {
        low as usize & (self.buckets.len() - 1)
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.buckets.len() - 1)
    }

    /// The bucket of a hash, or the empty bucket for it.
    fn find(&self, hash: BlockHash) -> usize {
        let mut at = self.home(hash as u32);
        loop {
            let bucket = self.buckets[at];
            let is_match = || self.entries[bucket.entry as usize].hash == hash;
            if bucket.entry == NONE || bucket.low == hash as u32 && is_match() {
                return at;
            }
            at = self.next(at);
        }
    }

    fn put(&mut self, entry: Entry<T>) -> u32 {
        if let Some(position) = self.free.pop() {
            self.entries[position as usize] = entry;
            return position;
        }
        assert!(self.entries.len() < NONE as usize, "2^32 - 1 hashes");
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    /// Empties a bucket; moves up the buckets after it that would not be found otherwise.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.buckets.len() - 1;
        let distance = |from: usize, to: usize| to.wrapping_sub(from) & mask;
        let mut at = self.next(gap);
        while self.buckets[at].entry != NONE {
            if distance(self.home(self.buckets[at].low), at) >= distance(gap, at) {
                self.buckets[gap] = self.buckets[at];
                gap = at;
            }
            at = self.next(at);
        }
        self.buckets[gap] = EMPTY;
    }

    /// Rebuilds the buckets, `count` of them.
    fn rebuild(&mut self, count: usize) {
        for bucket in std::mem::replace(&mut self.buckets, vec![EMPTY; count]) {
            if bucket.entry != NONE {
                let mut at = self.home(bucket.low);
                while self.buckets[at].entry != NONE {
                    at = self.next(at);
                }
                self.buckets[at] = bucket;
            }
        }
    }

    /// Releases memory beyond twice what the entries need.
    fn shrink(&mut self) {
        let old = std::mem::take(self);
        self.rebuild((2 * old.len()).next_power_of_two().max(MIN_BUCKETS));
        for entry in old
            .entries
            .into_iter()
            .filter(|entry| !entry.value.is_empty())
        {
            self.change(entry.hash, |value| *value = entry.value);
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
        /// Many hashes have the same home bucket, also at the end of the array.
        #[test]
        fn it_is_a_map_for_any_home_buckets(
            steps in prop::collection::vec((0..24_u128, 0..4_u8, 0..40_u8), 1..300),
        ) {
            let mut table = HashTable::<u8>::default();
            let mut map = BTreeMap::new();
            for (number, value, kind) in steps {
                let hash = ((number % 3) << 64) | (number * 5 + 13);
                if kind == 0 {
                    table.change_all(|value| *value &= !1);
                    map.values_mut().for_each(|value| *value &= !1);
                } else {
                    table.change(hash, |old| *old = value);
                    map.insert(hash, value);
                }
                map.retain(|_, value| *value != 0);
                let entries: BTreeMap<BlockHash, u8> = table.iter().map(|(hash, value)| (hash, *value)).collect();
                prop_assert_eq!(&entries, &map);
                prop_assert_eq!(table.len(), map.len());
                prop_assert!(map.iter().all(|(hash, value)| table.get(*hash) == Some(value)));
                prop_assert_eq!(table.get(99), None);
            }
        }
    }
}
