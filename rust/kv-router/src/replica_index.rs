//! The index: one set of replicas for each block.

use crate::hash_table::{BlockHash, HashTable, Value};

/// Replicas that an index can tell apart.
pub const MAX_REPLICAS: usize = 128;

/// Hashes that are looked up before the first of them is changed, so that their cache misses overlap.
const BATCH: usize = 64;

/// A bit for each replica.
type ReplicaSet = u128;

impl Value for ReplicaSet {
    fn is_empty(&self) -> bool {
        *self == 0
    }
}

/// A KV event of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The block is cached.
    Stored(BlockHash),
    /// The block was evicted.
    Removed(BlockHash),
    /// No block is cached any more.
    Cleared,
}

/// The replicas that have requests with this block, and how many requests each.
#[derive(Default)]
struct Pending {
    replicas: ReplicaSet,
    /// Requests beyond the first one, for replicas that have several.
    extra: Vec<(u8, u32)>,
}

impl Value for Pending {
    fn is_empty(&self) -> bool {
        self.replicas == 0
    }
}

/// The blocks of up to [`MAX_REPLICAS`] replicas, which are numbered from 0.
pub struct ReplicaIndex {
    cached: HashTable<ReplicaSet>,
    num_cached: [usize; MAX_REPLICAS],
    pending: HashTable<Pending>,
    num_pending: [usize; MAX_REPLICAS],
}

impl Default for ReplicaIndex {
    fn default() -> Self {
        Self {
            cached: HashTable::default(),
            num_cached: [0; MAX_REPLICAS],
            pending: HashTable::default(),
            num_pending: [0; MAX_REPLICAS],
        }
    }
}

impl ReplicaIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies the KV events of a replica, in order. Storing a block twice is storing it once.
    pub fn apply(&mut self, replica: usize, changes: impl Iterator<Item = Change> + Clone) {
        let (mut ahead, mut changes) = (changes.clone(), changes.peekable());
        while changes.peek().is_some() {
            let batch = ahead.by_ref().take(BATCH);
            self.cached.touch(batch.map(|change| match change {
                Change::Stored(hash) | Change::Removed(hash) => hash,
                Change::Cleared => 0,
            }));
            for change in changes.by_ref().take(BATCH) {
                match change {
                    Change::Stored(hash) => self.store(replica, hash),
                    Change::Removed(hash) => self.remove(replica, hash),
                    Change::Cleared => self.clear(replica),
                }
            }
        }
    }

    fn store(&mut self, replica: usize, hash: BlockHash) {
        let bit = bit(replica);
        self.cached.change(hash, |set| {
            self.num_cached[replica] += usize::from(*set & bit == 0);
            *set |= bit;
        });
    }

    fn remove(&mut self, replica: usize, hash: BlockHash) {
        let bit = bit(replica);
        self.cached.change(hash, |set| {
            self.num_cached[replica] -= usize::from(*set & bit != 0);
            *set &= !bit;
        });
    }

    /// Forgets the cached blocks of a replica. O(blocks in the index).
    pub fn clear(&mut self, replica: usize) {
        if self.num_cached[replica] == 0 {
            return;
        }
        let bit = bit(replica);
        self.cached.change_all(|set| *set &= !bit);
        self.num_cached[replica] = 0;
    }

    /// Adds a request that was routed to a replica: the blocks of its prompt.
    pub fn add_request(&mut self, replica: usize, hashes: &[BlockHash]) {
        let bit = bit(replica);
        for &hash in hashes {
            self.pending.change(hash, |pending| {
                if pending.replicas & bit == 0 {
                    pending.replicas |= bit;
                    self.num_pending[replica] += 1;
                    return;
                }
                let extra = &mut pending.extra;
                match extra.iter_mut().find(|(at, _)| usize::from(*at) == replica) {
                    Some((_, count)) => *count += 1,
                    None => extra.push((replica as u8, 1)),
                }
            });
        }
    }

    /// Removes a request that was added and has finished.
    pub fn remove_request(&mut self, replica: usize, hashes: &[BlockHash]) {
        let bit = bit(replica);
        for &hash in hashes {
            self.pending.change(hash, |pending| {
                let extra = &mut pending.extra;
                if let Some(at) = extra.iter().position(|(at, _)| usize::from(*at) == replica) {
                    extra[at].1 -= 1;
                    if extra[at].1 == 0 {
                        extra.swap_remove(at);
                    }
                } else if pending.replicas & bit != 0 {
                    pending.replicas &= !bit;
                    self.num_pending[replica] -= 1;
                }
            });
        }
    }

    /// The number of leading blocks of a prompt that each replica has, cached or pending, by its number. The list
    /// ends with the last replica that has the first block. O(hashes).
    pub fn matched_blocks(&self, hashes: &[BlockHash]) -> Vec<usize> {
        let mut matched = Vec::new();
        let mut matching = ReplicaSet::MAX;
        for (depth, &hash) in hashes.iter().enumerate() {
            let cached = self.cached.get(hash).copied().unwrap_or_default();
            let pending = self.pending.get(hash).map_or(0, |pending| pending.replicas);
            let next = matching & (cached | pending);
            if depth == 0 {
                matched.resize(
                    (ReplicaSet::BITS - next.leading_zeros()) as usize,
                    hashes.len(),
                );
                end_at(0, !next, &mut matched);
            } else {
                end_at(depth, matching & !next, &mut matched);
            }
            matching = next;
            if matching == 0 {
                break;
            }
        }
        matched
    }

    /// The hashes of the blocks that a replica has cached, in no order. O(blocks in the index).
    pub fn cached_blocks(&self, replica: usize) -> Vec<BlockHash> {
        let has = |(hash, set): (BlockHash, &ReplicaSet)| (set & bit(replica) != 0).then_some(hash);
        self.cached.iter().filter_map(has).collect()
    }

    /// The number of blocks that a replica has cached.
    pub fn num_cached(&self, replica: usize) -> usize {
        self.num_cached[replica]
    }

    /// The number of blocks in the requests of a replica, each counted once.
    pub fn num_pending(&self, replica: usize) -> usize {
        self.num_pending[replica]
    }

    /// The number of blocks that any replica has cached.
    pub fn num_blocks(&self) -> usize {
        self.cached.len()
    }
}

/// Sets the match of these replicas to `depth`.
fn end_at(depth: usize, mut replicas: ReplicaSet, matched: &mut [usize]) {
    if matched.len() < MAX_REPLICAS {
        replicas &= (1 << matched.len()) - 1;
    }
    while replicas != 0 {
        matched[replicas.trailing_zeros() as usize] = depth;
        replicas &= replicas - 1;
    }
}

fn bit(replica: usize) -> ReplicaSet {
    assert!(
        replica < MAX_REPLICAS,
        "replica {replica} of {MAX_REPLICAS}"
    );
    1 << replica
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_match_ends_at_the_first_block_that_the_replica_lacks() {
        let mut index = ReplicaIndex::new();
        index.apply(0, [1, 2, 3].map(Change::Stored).into_iter());
        index.apply(2, [1, 3].map(Change::Stored).into_iter()); // not the second block
        assert_eq!(index.matched_blocks(&[1, 2, 3, 4]), [3, 0, 1]);
        assert_eq!(index.matched_blocks(&[9]), []);
        index.apply(0, [2, 7].map(Change::Removed).into_iter());
        assert_eq!(index.matched_blocks(&[1, 2, 3]), [1, 0, 1]);
        index.apply(127, [Change::Stored(1)].into_iter());
        assert_eq!(index.matched_blocks(&[1])[127], 1);
        index.apply(0, [Change::Cleared].into_iter());
        assert_eq!((index.num_cached(0), index.num_blocks()), (0, 2));
        assert_eq!(index.matched_blocks(&[1])[..3], [0, 0, 1]);
    }

    #[test]
    fn pending_blocks_count_until_their_last_request_is_removed() {
        let mut index = ReplicaIndex::new();
        index.add_request(3, &[1, 2]);
        index.add_request(3, &[1, 5]);
        index.add_request(4, &[1]);
        assert_eq!((index.num_pending(3), index.num_pending(4)), (3, 1));
        assert_eq!(index.matched_blocks(&[1, 2]), [0, 0, 0, 2, 1]);
        index.remove_request(3, &[1, 2]);
        assert_eq!(index.matched_blocks(&[1, 5]), [0, 0, 0, 2, 1]);
        index.remove_request(3, &[1, 5]);
        index.remove_request(4, &[1]);
        index.remove_request(4, &[1]); // was not added
        assert_eq!((index.num_pending(3), index.num_pending(4)), (0, 0));
        assert_eq!(index.pending.len(), 0);
    }

    #[test]
    fn memory_is_released() {
        let mut index = ReplicaIndex::new();
        for hash in 0..10_000 {
            index.store((hash % 2) as usize, hash << 40);
        }
        let before = index.cached.capacity();
        index.clear(0);
        index.clear(1);
        assert!(index.cached.capacity() < before / 4);
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
        fn each_replica_has_a_set_of_blocks(
            steps in prop::collection::vec((0..MAX_REPLICAS, prop::collection::vec(change(), 1..50)), 1..60),
            prompt in prop::collection::vec(0..40_u128, 0..12),
        ) {
            let mut index = ReplicaIndex::new();
            let mut sets: HashMap<usize, BTreeSet<BlockHash>> = HashMap::new();
            for (replica, changes) in &steps {
                index.apply(*replica, changes.iter().copied());
                let set = sets.entry(*replica).or_default();
                for change in changes {
                    match change {
                        Change::Stored(hash) => { set.insert(*hash); }
                        Change::Removed(hash) => { set.remove(hash); }
                        Change::Cleared => set.clear(),
                    }
                }
            }
            let matched_blocks = index.matched_blocks(&prompt);
            for replica in 0..MAX_REPLICAS {
                let set = sets.entry(replica).or_default();
                let cached: BTreeSet<BlockHash> = index.cached_blocks(replica).into_iter().collect();
                prop_assert_eq!(&cached, &*set);
                prop_assert_eq!(index.num_cached(replica), set.len());
                let depth = prompt.iter().take_while(|hash| set.contains(hash)).count();
                prop_assert_eq!(matched_blocks.get(replica).copied().unwrap_or_default(), depth);
            }
        }
    }
}
