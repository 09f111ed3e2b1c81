//! All blocks and contents at once, for those who draw the pool. No token is in it.

use std::sync::Arc;

/// The pool at one moment: one entry per block in each column, and the tree of contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// As `BlockState`: 0 free, 1 idle, 2 active, 3 leased.
    pub states: Vec<u8>,
    /// All holders.
    pub refs: Vec<u32>,
    /// Live sequences whose table holds the block.
    pub seq_refs: Vec<u32>,
    /// How many steps ago the block's content was computed; 0 without content.
    pub ages: Vec<u32>,
    /// The number of the branch in which its content stands, counted from 1; 0 without content.
    pub branches: Vec<u32>,
    /// The place of its content in that branch, counted from 1; 0 without content.
    pub rows: Vec<u32>,
    /// The tree. Branch 1 is the first of these.
    pub tree: Vec<Branch>,
}

/// Contents that follow each other, as an edge of a radix tree. That of a namespace has no rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// The number of the branch behind which it hangs; 0 for a namespace.
    pub parent: u32,
    /// Behind so many rows of that.
    pub behind: u32,
    /// Contents in it.
    pub rows: u32,
    /// The name of a namespace.
    pub namespace: Option<Arc<[u8]>>,
}
