//! What others may know of the cache: which contents are in it. For routers and offloaders.
//!
//! A content is stored when a block first holds its KV and removed when none does any more. Merges,
//! take-overs and forks say nothing: they move a content, they do not make or lose one. So a replayed
//! log gives exactly the set of contents that the manager holds.

use std::sync::Arc;

/// A change of the set of contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks hold these contents now; before, none did. Each is the parent of the next one, and that of the
    /// first was stored before.
    Stored {
        /// The contents' names.
        hashes: Vec<u128>,
        /// The content before the first of them, `None` if that is the first block of a prompt.
        parent: Option<u128>,
        /// The tokens of their blocks, one block after the other.
        tokens: Vec<u32>,
        /// The namespace under which they can be matched.
        namespace: Arc<[u8]>,
    },
    /// No block holds these contents any more.
    Removed {
        /// The contents' names.
        hashes: Vec<u128>,
    },
    /// No block holds any content any more.
    Cleared,
}
