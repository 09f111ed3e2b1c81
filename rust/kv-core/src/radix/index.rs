//! The index of radix nodes: a sharded hash table that stores each node's hash beside its id.
//!
//! A table that grows moves all of its entries. A sharded one grows shard by shard, without reading nodes.

use hashbrown::HashTable;

use crate::ids::NodeId;

/// Nodes per shard in a pool where every block is a node.
const USUAL: usize = 1_024;

/// Shards at most.
const MAX_SHARDS: usize = 8_192;

#[derive(Clone, Copy)]
struct Indexed {
    hash: u32,
    node: NodeId,
}

pub(super) struct Index {
    /// A power of two of shards.
    shards: Vec<HashTable<Indexed>>,
}

/// Spreads a hash for the table, which uses the low bits and the highest seven.
fn spread(hash: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(hash)
}

impl Index {
    /// An empty index, sized for `num_blocks` nodes.
    pub(super) fn new(num_blocks: usize) -> Self {
        let shards = (num_blocks / USUAL).next_power_of_two().min(MAX_SHARDS);
        Self {
            shards: vec![HashTable::new(); shards],
        }
    }

    /// The table's own bits are lower ones, and the highest seven.
    fn shard(&self, hash: u32) -> usize {
        (hash >> 12) as usize & (self.shards.len() - 1)
    }

    /// The node with this hash that `matches`.
    pub(super) fn find(&self, hash: u32, matches: impl Fn(NodeId) -> bool) -> Option<NodeId> {
        let matches = |entry: &Indexed| entry.hash == hash && matches(entry.node);
        let entry = self.shards[self.shard(hash)].find(spread(hash), matches)?;
        Some(entry.node)
    }

    /// Adds a node that is not in the index.
    pub(super) fn insert(&mut self, hash: u32, node: NodeId) {
        let shard = self.shard(hash);
        let rehash = |entry: &Indexed| spread(entry.hash);
        self.shards[shard].insert_unique(spread(hash), Indexed { hash, node }, rehash);
    }

    /// Removes a node, if it is in the index.
    pub(super) fn remove(&mut self, hash: u32, node: NodeId) {
        let shard = self.shard(hash);
        let entry = self.shards[shard].find_entry(spread(hash), |entry| entry.node == node);
        if let Ok(entry) = entry {
            entry.remove();
        }
    }

    /// Nodes in the index. It counts.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(HashTable::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_until_they_are_removed() {
        let mut index = Index::new(1 << 20);
        let hash = |at: u32| at.wrapping_mul(2_654_435_761) >> 3;
        for at in 0..100_000 {
            index.insert(hash(at), NodeId::new(at as usize));
        }
        for at in (0..100_000).step_by(2) {
            index.remove(hash(at), NodeId::new(at as usize));
            index.remove(hash(at), NodeId::new(at as usize)); // there no more: nothing happens
        }
        assert_eq!(index.len(), 50_000);
        for at in 0..100_000 {
            let node = NodeId::new(at as usize);
            let indexed = index.find(hash(at), |other| other == node);
            assert_eq!(indexed, (at % 2 == 1).then_some(node));
        }
    }

    /// No insertion moves more than a small part of the index.
    #[test]
    fn it_grows_shard_by_shard() {
        let mut index = Index::new(1 << 20);
        let mut state = 1_u64;
        for at in 0..1 << 20 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            index.insert((state >> 32) as u32, NodeId::new(at));
        }
        let largest = index.shards.iter().map(HashTable::len).max();
        assert!(
            largest < Some(2 * USUAL),
            "{largest:?} of {USUAL} in a shard"
        );
    }

    /// Hashes of few bits, as tests ask for.
    #[test]
    fn equal_hashes_are_told_apart() {
        let mut index = Index::new(0);
        for at in 0..100 {
            index.insert(0, NodeId::new(at));
        }
        for at in 0..100 {
            let node = NodeId::new(at);
            assert_eq!(index.find(0, |other| other == node), Some(node));
        }
    }
}
