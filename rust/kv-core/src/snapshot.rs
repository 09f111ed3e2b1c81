//! The whole pool at one moment, for dashboards. It contains no tokens.

use std::sync::Arc;

/// The pool at one moment: one entry per block in each column, and the radix tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// As `BlockState`: 0 free, 1 evictable, 2 active, 3 pinned.
    pub states: Vec<u8>,
    /// All holders.
    pub refs: Vec<u32>,
    /// Live sequences whose table holds the block.
    pub seq_refs: Vec<u32>,
    /// Steps since the block was computed; 0 if it is not cached.
    pub ages: Vec<u32>,
    /// The number of the block's radix node, from 1; 0 if the block is not cached.
    pub nodes: Vec<u32>,
    /// Its index in that node, from 1; 0 if the block is not cached.
    pub node_indices: Vec<u32>,
    /// The radix tree; node 1 is the first.
    pub tree: Vec<SnapshotNode>,
}

/// A node of the radix tree: cached blocks in a row. The root of a namespace has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotNode {
    /// The number of the parent; 0 for the root of a namespace.
    pub parent: u32,
    /// The node is attached after so many blocks of its parent.
    pub parent_index: u32,
    /// Blocks in the node.
    pub len: u32,
    /// The namespace, if this is its root.
    pub namespace: Option<Arc<[u8]>>,
}
