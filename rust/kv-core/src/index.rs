//! From a hash to the content that has it: open addressing with linear probing.
//!
//! An entry is a node and 32 bits of its hash, eight to a cache line. A look for what is not there
//! reads one line as a rule and no node; so does taking an entry out, since its neighbours' places
//! follow from those 32 bits: later entries move up, and no tombstone stays.

use std::collections::TryReserveError;

use crate::ids::NodeIdx;

#[derive(Clone, Copy)]
struct Entry {
    tag: u32,
    node: NodeIdx,
}

const VACANT: Entry = Entry {
    tag: 0,
    node: NodeIdx::NONE,
};

/// The nodes of a tree by their hashes. Whoever asks compares the whole hash.
pub(crate) struct HashIndex {
    /// A power of two; at most three quarters of it taken.
    entries: Vec<Entry>,
    len: usize,
}

#[inline]
fn tag(hash: u128) -> u32 {
    hash as u32
}

impl HashIndex {
    /// Bytes per content, at most, as long as no more contents are known than the pool has blocks.
    pub(crate) const BYTES_PER_BLOCK: usize = 3 * size_of::<Entry>();

    /// An index in which `contents` fit without growing.
    pub(crate) fn new(contents: usize) -> Result<Self, TryReserveError> {
        let slots = (contents + contents / 3 + 2).next_power_of_two();
        let mut entries = Vec::new();
        entries.try_reserve_exact(slots)?;
        entries.resize(slots, VACANT);
        Ok(Self { entries, len: 0 })
    }

    /// Entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn mask(&self) -> usize {
        self.entries.len() - 1
    }

    /// Where an entry with this tag would stand if nothing were in its way.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.entries.len() as u64) >> 32) as usize
    }

    /// The first node whose hash may be this one and for which `is_it` says so.
    #[inline]
    pub(crate) fn find(&self, hash: u128, is_it: impl Fn(NodeIdx) -> bool) -> Option<NodeIdx> {
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let entry = self.entries[at];
            if entry.node == NodeIdx::NONE {
                return None;
            }
            if entry.tag == tag && is_it(entry.node) {
                return Some(entry.node);
            }
            at = (at + 1) & self.mask();
        }
    }

    /// Reads where a hash would be found, so that it is in the processor's cache when it is asked for:
    /// many of these at once wait for memory together, lookups one after the other do not.
    #[inline]
    pub(crate) fn touch(&self, hash: u128) -> u32 {
        self.entries[self.home(tag(hash))].tag
    }

    /// A node that is not there yet.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u128, node: NodeIdx) {
        if 4 * (self.len + 1) > 3 * self.entries.len() {
            self.grow();
        }
        self.put(tag(hash), node);
        self.len += 1;
    }

    #[inline]
    fn put(&mut self, tag: u32, node: NodeIdx) {
        let mut at = self.home(tag);
        while self.entries[at].node != NodeIdx::NONE {
            at = (at + 1) & self.mask();
        }
        self.entries[at] = Entry { tag, node };
    }

    #[cold]
    fn grow(&mut self) {
        let larger = vec![VACANT; 2 * self.entries.len()];
        for entry in std::mem::replace(&mut self.entries, larger) {
            if entry.node != NodeIdx::NONE {
                self.put(entry.tag, entry.node);
            }
        }
    }

    /// Takes a node out that is there.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u128, node: NodeIdx) {
        let mut gap = self.home(tag(hash));
        while self.entries[gap].node != node {
            gap = (gap + 1) & self.mask();
        }
        let mut at = gap;
        loop {
            at = (at + 1) & self.mask();
            let entry = self.entries[at];
            if entry.node == NodeIdx::NONE {
                break;
            }
            // It may move up unless that is before its home. Distances, because the table is a ring.
            let from_home = at.wrapping_sub(self.home(entry.tag)) & self.mask();
            let from_gap = at.wrapping_sub(gap) & self.mask();
            if from_home >= from_gap {
                self.entries[gap] = entry;
                gap = at;
            }
        }
        self.entries[gap] = VACANT;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Against a map, with so few tags that entries get into each other's way and around the end.
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
                // Four tags near the end of the table, in many hashes that differ further up.
                let hash = u128::from(step) << 32 | u128::from(u32::MAX - draw % 4 * (1 << 28));
                map.insert(step, hash);
                index.insert(hash, NodeIdx::new(step as usize));
            } else if let Some((&node, &hash)) = map.range(draw % (step + 1)..).next() {
                map.remove(&node);
                index.remove(hash, NodeIdx::new(node as usize));
            }
            assert_eq!(index.len(), map.len());
            if step % 50 == 0 {
                for (&node, &hash) in &map {
                    let found = index.find(hash, |at| map.get(&at.get()) == Some(&hash));
                    assert_eq!(found, Some(NodeIdx::new(node as usize)));
                }
                assert_eq!(index.find(7, |_| true), None);
            }
        }
        let taken = |entry: &&Entry| entry.node != NodeIdx::NONE;
        assert_eq!(index.entries.iter().filter(taken).count(), map.len());
    }

    /// An index of `slots` entries that holds as many as it may.
    fn filled(contents: usize, taken: usize) -> HashIndex {
        let mut index = HashIndex::new(contents).expect("small");
        for node in 0..taken {
            let hash = (node as u128).wrapping_mul(0x9e37_79b9);
            index.insert(hash, NodeIdx::new(node));
        }
        index
    }

    /// Or every look would be a search from the beginning.
    #[test]
    fn homes_are_spread_over_all_slots() {
        let index = filled(12, 0);
        let slots = index.entries.len();
        let homes = (0..slots).map(|slot| index.home((slot << 32).div_ceil(slots) as u32));
        assert!(homes.eq(0..slots));
        assert_eq!(index.home(u32::MAX), slots - 1);
    }

    #[test]
    fn it_grows_when_three_quarters_are_not_enough() {
        for contents in [1, 2, 3, 4, 6, 12, 100, 1_000] {
            let slots = filled(contents, 0).entries.len();
            assert!(slots.is_power_of_two());
            assert_eq!(filled(contents, contents).entries.len(), slots);
            let most = slots / 4 * 3;
            assert_eq!(filled(contents, most).entries.len(), slots);
            assert_eq!(filled(contents, most + 1).entries.len(), 2 * slots);
        }
    }
}
