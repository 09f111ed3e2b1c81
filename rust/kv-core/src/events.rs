//! What others may know of the cache: which contents are in it. For routers and offloaders.
//!
//! A content is stored when a block first holds its KV and removed when none does any more. Merges,
//! take-overs and forks say nothing: they move a content, they do not make or lose one. So a replayed
//! log gives exactly the set of contents that the manager holds.

use std::sync::Arc;

/// A change of the set of contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A block holds this content now; before, none did. Parents are stored before their children.
    Stored {
        /// The content's name.
        hash: u128,
        /// The content before it, `None` for the first block of a prompt.
        parent: Option<u128>,
        /// The block's own tokens.
        tokens: Box<[u32]>,
        /// The namespace under which it can be matched.
        namespace: Arc<[u8]>,
    },
    /// No block holds this content any more.
    Removed {
        /// The content's name.
        hash: u128,
    },
    /// No block holds any content any more.
    Cleared,
}
