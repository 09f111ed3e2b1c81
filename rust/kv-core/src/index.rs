//! From a hash to the content that has it: open addressing in buckets.
//!
//! Two buckets fill a cache line. Each has room for six nodes, and for a tag of each: seven bits of its
//! hash, all of which are compared at once. What finds its bucket full goes into the next one that has
//! room, and every bucket that it passed counts it. So a look for what is not there reads one bucket as
//! a rule and no node, and what is taken out leaves no tombstone and moves nothing.

use std::collections::TryReserveError;

use crate::ids::NodeIdx;

const PLACES: usize = 6;
/// Entries of a bucket on average, at most: otherwise too many find theirs full.
const MOST_ON_AVERAGE: usize = 4;

/// The highest bit of the tag of each place.
const TAKEN: u64 = 0x0000_8080_8080_8080;
/// One in each byte.
const EACH: u64 = 0x0101_0101_0101_0101;
/// One in the count of passers-by.
const ONE_PASSED: u64 = 1 << (8 * PLACES);

#[derive(Clone, Copy)]
#[repr(align(32))]
struct Bucket {
    /// Bytes 0 to 5: the tags, 0 where a place is vacant. The two highest bytes: how many entries
    /// passed by; once that is as many as fit, it stays.
    word: u64,
    nodes: [NodeIdx; PLACES],
}

const EMPTY: Bucket = Bucket {
    word: 0,
    nodes: [NodeIdx::NONE; PLACES],
};

impl Bucket {
    /// The places that may have this tag: all that have, and a few others.
    #[inline]
    fn candidates(&self, tag: u8) -> Places {
        let differences = self.word ^ (EACH * u64::from(tag));
        Places(differences.wrapping_sub(EACH) & !differences & TAKEN)
    }

    #[inline]
    fn vacant(&self) -> Places {
        Places(!self.word & TAKEN)
    }

    #[inline]
    fn was_passed(&self) -> bool {
        self.word >= ONE_PASSED
    }

    #[inline]
    fn put(&mut self, place: usize, hash: u128, node: NodeIdx) {
        self.word |= u64::from(tag(hash)) << (8 * place);
        self.nodes[place] = node;
    }

    /// Whether as many passed by as can be counted: nobody knows any more how many did.
    fn lost_count(&self) -> bool {
        self.word >> (8 * PLACES) == u64::from(u16::MAX)
    }
}

/// Places of a bucket, first to last: the highest bit of each one's byte.
struct Places(u64);

impl Iterator for Places {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        (self.0 != 0).then(|| {
            let place = self.0.trailing_zeros() as usize / 8;
            self.0 &= self.0 - 1;
            place
        })
    }
}

/// The nodes of a tree by their hashes. Whoever asks compares the whole hash.
pub(crate) struct HashIndex {
    buckets: Vec<Bucket>,
    len: usize,
}

/// Never 0: a taken place.
#[inline]
fn tag(hash: u128) -> u8 {
    (hash >> 32) as u8 | 0x80
}

impl HashIndex {
    /// Bytes per content as long as no more contents are known than the pool has blocks.
    pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Bucket>().div_ceil(PLACES / 2);

    /// An index in which `contents` fit without growing, and take half of it.
    pub(crate) fn new(contents: usize) -> Result<Self, TryReserveError> {
        let count = contents.div_ceil(PLACES / 2) + 1;
        let mut buckets = Vec::new();
        buckets.try_reserve_exact(count)?;
        buckets.resize(count, EMPTY);
        Ok(Self { buckets, len: 0 })
    }

    /// Entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bucket in which an entry with this hash is if there was room.
    #[inline]
    fn home(&self, hash: u128) -> usize {
        ((u64::from(hash as u32) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() {
            0
        } else {
            at + 1
        }
    }

    /// The first node whose hash may be this one and for which `is_it` says so.
    #[inline]
    pub(crate) fn find(&self, hash: u128, is_it: impl Fn(NodeIdx) -> bool) -> Option<NodeIdx> {
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for place in bucket.candidates(tag(hash)) {
                let node = bucket.nodes[place];
                if is_it(node) {
                    return Some(node);
                }
            }
            if !bucket.was_passed() {
                break;
            }
            at = self.after(at);
        }
        None
    }

    /// Reads where a hash would be found, so that it is in the processor's cache when it is asked for:
    /// many of these at once wait for memory together, lookups one after the other do not.
    #[inline]
    pub(crate) fn touch(&self, hash: u128) -> u64 {
        self.buckets[self.home(hash)].word
    }

    /// Room for one more. `hash_of` knows the hash of every node that is there.
    #[inline]
    pub(crate) fn make_room(&mut self, hash_of: impl Fn(NodeIdx) -> u128) {
        if self.len >= MOST_ON_AVERAGE * self.buckets.len() {
            self.grow(hash_of);
        }
    }

    #[cold]
    fn grow(&mut self, hash_of: impl Fn(NodeIdx) -> u128) {
        let larger = vec![EMPTY; 2 * self.buckets.len()];
        let smaller = std::mem::replace(&mut self.buckets, larger);
        self.len = 0;
        for bucket in smaller {
            for place in Places(bucket.word & TAKEN) {
                let node = bucket.nodes[place];
                self.insert(hash_of(node), node);
            }
        }
    }

    /// Puts a node in for which there is room, unless `is_it` says of one with this hash that it is there.
    #[inline(always)] // every new content comes here
    pub(crate) fn insert_new(
        &mut self,
        hash: u128,
        node: NodeIdx,
        is_it: impl Fn(NodeIdx) -> bool,
    ) -> bool {
        let at = self.home(hash);
        let bucket = &mut self.buckets[at];
        // As a rule one bucket is all that has to be looked at.
        if let (Some(place), false) = (bucket.vacant().next(), bucket.was_passed()) {
            if bucket
                .candidates(tag(hash))
                .any(|place| is_it(bucket.nodes[place]))
            {
                return false;
            }
            bucket.put(place, hash, node);
            self.len += 1;
            return true;
        }
        if self.find(hash, is_it).is_some() {
            return false;
        }
        self.insert(hash, node);
        true
    }

    /// A node that is not there yet, and for which there is room.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u128, node: NodeIdx) {
        let mut at = self.home(hash);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = bucket.vacant().next() {
                bucket.put(place, hash, node);
                break;
            }
            if !bucket.lost_count() {
                bucket.word += ONE_PASSED;
            }
            at = self.after(at);
        }
        self.len += 1;
    }

    /// Takes a node out that is there.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u128, node: NodeIdx) {
        let mut at = self.home(hash);
        loop {
            let bucket = &mut self.buckets[at];
            let found = bucket
                .candidates(tag(hash))
                .find(|&place| bucket.nodes[place] == node);
            if let Some(place) = found {
                bucket.word &= !(0xff << (8 * place));
                bucket.nodes[place] = NodeIdx::NONE;
                break;
            }
            if !bucket.lost_count() {
                bucket.word -= ONE_PASSED;
            }
            at = self.after(at);
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn taken(index: &HashIndex) -> usize {
        let places = |bucket: &Bucket| Places(bucket.word & TAKEN).count();
        index.buckets.iter().map(places).sum()
    }

    fn passed(index: &HashIndex) -> u64 {
        let count = |bucket: &Bucket| bucket.word / ONE_PASSED;
        index.buckets.iter().map(count).sum()
    }

    /// Against a map, with so few homes and tags that entries get into each other's way, around the end
    /// and past one another.
    #[test]
    fn agrees_with_a_map() {
        let mut index = HashIndex::new(4).expect("small");
        let mut map: BTreeMap<u32, u128> = BTreeMap::new();
        let mut state = 1_u64;
        for step in 0..20_000_u32 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let draw = (state >> 33) as u32;
            let grows = step / 1_000 % 2 == 0;
            if draw % 8 < if grows { 5 } else { 3 } {
                // Four homes near the end of the table, two tags, many hashes that differ further up.
                let home = u128::from(u32::MAX - draw % 4 * (1 << 28));
                let hash = u128::from(step) << 64 | u128::from(draw >> 8 & 1) << 32 | home;
                index.make_room(|node| map[&node.get()]);
                let node = NodeIdx::new(step as usize);
                if draw & 1 << 9 == 0 {
                    index.insert(hash, node);
                } else {
                    let is_it = |at: NodeIdx| map.get(&at.get()) == Some(&hash);
                    assert!(index.insert_new(hash, node, is_it));
                }
                map.insert(step, hash);
            } else if let Some((&node, &hash)) = map.range(draw % (step + 1)..).next() {
                map.remove(&node);
                index.remove(hash, NodeIdx::new(node as usize));
            }
            assert_eq!(index.len(), map.len());
            if step % 50 == 0 {
                for (&node, &hash) in &map {
                    let found = index.find(hash, |at| map.get(&at.get()) == Some(&hash));
                    assert_eq!(found, Some(NodeIdx::new(node as usize)));
                    let is_it = |at: NodeIdx| map.get(&at.get()) == Some(&hash);
                    assert!(!index.insert_new(hash, NodeIdx::new(0), is_it));
                }
                assert_eq!(index.find(0x55 << 32, |_| true), None);
            }
        }
        assert_eq!(taken(&index), map.len());
        for (node, hash) in map {
            index.remove(hash, NodeIdx::new(node as usize));
        }
        assert_eq!((taken(&index), passed(&index)), (0, 0));
    }

    /// An index made for so many contents with so many in it, and their hashes.
    fn filled(contents: usize, taken: usize) -> (HashIndex, Vec<u128>) {
        let mut index = HashIndex::new(contents).expect("small");
        let hash = |node: usize| (node as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for node in 0..taken {
            index.make_room(|node| hash(node.at()));
            index.insert(hash(node), NodeIdx::new(node));
        }
        (index, (0..taken).map(hash).collect())
    }

    /// Or every look would be a search from the beginning.
    #[test]
    fn homes_are_spread_over_all_buckets() {
        let (index, _) = filled(12, 0);
        let buckets = index.buckets.len();
        let homes = (0..buckets).map(|at| index.home((at << 32).div_ceil(buckets) as u128));
        assert!(homes.eq(0..buckets));
        assert_eq!(index.home(u128::from(u32::MAX)), buckets - 1);
    }

    #[test]
    fn it_grows_when_buckets_are_too_full() {
        for contents in [1, 2, 3, 4, 6, 12, 100, 1_000] {
            let buckets = filled(contents, 0).0.buckets.len();
            assert!(contents <= PLACES / 2 * buckets);
            let most = MOST_ON_AVERAGE * buckets;
            assert_eq!(filled(contents, most).0.buckets.len(), buckets);
            let (index, hashes) = filled(contents, most + 1);
            assert_eq!(index.buckets.len(), 2 * buckets);
            for (node, &hash) in hashes.iter().enumerate() {
                let found = index.find(hash, |at| hashes[at.at()] == hash);
                assert_eq!(found, Some(NodeIdx::new(node)));
            }
        }
    }

    /// Every bucket was passed by an entry that is still there: a look must come to an end.
    #[test]
    fn a_ring_of_passed_buckets_has_an_end() {
        let (mut index, _) = filled(1, 0);
        let [first, last] = [0, u128::from(u32::MAX)];
        assert_eq!((index.home(first), index.home(last)), (0, 1));
        let hash = |home: u128, node: usize| home | (node as u128) << 64;
        // The last one of each home finds its bucket full.
        (0..6).for_each(|node| index.insert(hash(first, node), NodeIdx::new(node)));
        (6..11).for_each(|node| index.insert(hash(last, node), NodeIdx::new(node)));
        index.insert(hash(first, 11), NodeIdx::new(11));
        index.remove(hash(first, 0), NodeIdx::new(0));
        index.insert(hash(last, 12), NodeIdx::new(12));
        assert!(index.buckets.iter().all(Bucket::was_passed));
        for home in [first, last] {
            assert_eq!(index.find(hash(home, 13), |_| false), None);
        }
        let found = index.find(hash(last, 12), |node| node.at() == 12);
        assert_eq!(found, Some(NodeIdx::new(12)));
    }

    /// More entries pass a bucket than it can count: what is left is found all the same.
    #[test]
    fn lost_count() {
        let (mut index, _) = filled(6, 0);
        let hash = |node: usize| (node as u128) << 64;
        let passes = u64::from(u16::MAX) - 1;
        index.buckets[0].word = passes * ONE_PASSED;
        (0..9).for_each(|node| index.insert(hash(node), NodeIdx::new(node)));
        assert!(index.buckets[0].lost_count());
        (0..8).for_each(|node| index.remove(hash(node), NodeIdx::new(node)));
        assert!(index.buckets[0].lost_count());
        let found = index.find(hash(8), |node| node.at() == 8);
        assert_eq!((found, taken(&index)), (Some(NodeIdx::new(8)), 1));
    }
}
