//! Events for routers and offloaders: which blocks are cached.
//!
//! A block is stored when a block id first holds its KV, and removed when none does any more. Merges, takeovers
//! and forks emit nothing. A log of events, applied in order, gives exactly the cached blocks.

use std::sync::Arc;

use crate::ids::{BlockId, NodePosition};

/// A cached block that was evicted. Its KV is whole until the block is written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The block that held it.
    pub block: BlockId,
    /// The layer group for which it held it.
    pub group: usize,
    /// The block hash.
    pub hash: u128,
    /// The hash of the block before it; `None` at the beginning of a prompt, or where that block has no hash.
    pub parent: Option<u128>,
    /// The tokens of the block.
    pub tokens: Vec<u32>,
    /// The namespace in which it matched.
    pub namespace: Arc<[u8]>,
}

/// A change of the set of cached blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// These blocks are cached now. Each is the parent of the next one; the first one's parent was stored before.
    Stored {
        /// Block hashes.
        hashes: Vec<u128>,
        /// The hash of the block before the first one; `None` at the beginning of a prompt.
        parent: Option<u128>,
        /// The tokens of all blocks.
        tokens: Vec<u32>,
        /// The namespace in which they match.
        namespace: Arc<[u8]>,
    },
    /// These blocks are no longer cached.
    Removed {
        /// Block hashes.
        hashes: Vec<u128>,
    },
    /// No block is cached any more.
    Cleared,
}

/// Pending events. Stored blocks are hashed when the events are taken, or before the first eviction.
#[derive(Default)]
pub(crate) struct EventLog {
    events: Vec<Event>,
    /// Stored since: counts of blocks, each up to a position.
    stored: Vec<(NodePosition, usize)>,
    num_stored: usize,
    /// At least the number of hashes in `events`.
    num_hashes: usize,
    /// Leading events that are final: hashes are added to later ones only.
    num_sealed: usize,
}

impl EventLog {
    /// The `count` blocks up to `end` are cached now.
    pub(crate) fn store(&mut self, end: NodePosition, count: usize) {
        self.stored.push((end, count));
        self.num_stored += count;
    }

    /// Stored blocks that are not hashed yet.
    pub(crate) fn num_stored(&self) -> usize {
        self.num_stored
    }

    /// Consecutive blocks were removed, the last one first. Everything stored is hashed already.
    pub(crate) fn remove(&mut self, hashes: &[u128]) {
        debug_assert!(self.stored.is_empty());
        if hashes.is_empty() {
            return;
        }
        self.num_hashes += hashes.len();
        let removed = hashes.iter().rev();
        match self.events[self.num_sealed..].last_mut() {
            Some(Event::Removed { hashes }) => hashes.extend(removed),
            _ => self.events.push(Event::Removed {
                hashes: removed.copied().collect(),
            }),
        }
    }

    /// Hashes the stored blocks: `append` adds the events of the `count` blocks up to a position.
    pub(crate) fn hash_stored(
        &mut self,
        mut append: impl FnMut(NodePosition, usize, &mut Vec<Event>),
    ) {
        for (end, count) in self.stored.drain(..) {
            append(end, count, &mut self.events);
        }
        self.num_hashes += std::mem::take(&mut self.num_stored);
    }

    /// Hashes in the events, and blocks that are still to be hashed.
    pub(crate) fn num_pending(&self) -> usize {
        self.num_hashes + self.num_stored
    }

    /// Later events may be replaced by `Cleared`.
    pub(crate) fn seal(&mut self) {
        self.num_sealed = self.events.len();
    }

    /// Replaces the events since `seal` by `Cleared`.
    pub(crate) fn clear(&mut self) {
        self.events.truncate(self.num_sealed);
        self.events.push(Event::Cleared);
    }

    pub(crate) fn take(&mut self) -> Vec<Event> {
        (self.num_sealed, self.num_hashes) = (0, 0);
        std::mem::take(&mut self.events)
    }
}
