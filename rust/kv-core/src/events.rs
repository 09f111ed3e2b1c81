//! Events for routers and offloaders: which blocks are cached.
//!
//! A block is stored when a block id first holds its KV, and removed when none does any more. Merges, takeovers
//! and forks emit nothing. A log of events, applied in order, gives exactly the cached blocks.
//!
//! The log is bounded. One that is not read is dropped, and the next reader gets [`Event::Lost`], then `Cleared`, then
//! all cached blocks as `Stored`.

use std::sync::Arc;

use crate::ids::{BlockId, NodePosition};
use crate::switch::SwitchPoint;

/// A cached block that was evicted. Its KV is intact until the block is written again.
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
    /// Where that switches, and to which name, if the block contains the position or follows it.
    pub switch: Option<SwitchPoint>,
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
        /// Where it switches, and to which name, if the last of these blocks contains that position or follows it.
        /// Block hashes then contain it, see [`ContentHasher::switch`](crate::ContentHasher::switch). Only the first of
        /// these blocks may contain the position.
        switch: Option<SwitchPoint>,
    },
    /// These blocks are no longer cached.
    Removed {
        /// Block hashes.
        hashes: Vec<u128>,
    },
    /// No block is cached any more.
    Cleared {
        /// The version of the weights that compute the blocks stored from now on.
        weights_version: u32,
    },
    /// Events were not taken for too long and were dropped. The events after it state all cached blocks: `Cleared`,
    /// then `Stored`. A reader that applies these has the whole set again.
    Lost {
        /// Blocks stored and removed in the dropped events.
        num_events: u64,
    },
}

/// Fewer pending hashes are never dropped, nor fewer than twice the pool's blocks, which one step may remove and store.
const MIN_KEPT: usize = 65_536;

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
    /// Hashes beyond which the log is dropped.
    max_hashes: usize,
    /// Hashes dropped since the events were last taken. If there are any, no event is kept.
    num_lost: u64,
}

impl EventLog {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            max_hashes: num_blocks.saturating_mul(2).max(MIN_KEPT),
            ..Self::default()
        }
    }

    /// True if events were dropped: then later ones are only counted.
    pub(crate) fn is_lost(&self) -> bool {
        self.num_lost > 0
    }

    /// Counts events that are not kept.
    pub(crate) fn lose(&mut self, count: usize) {
        self.num_lost += count as u64;
    }

    /// Drops the events if they are too many.
    fn limit(&mut self) {
        if self.num_hashes > self.max_hashes {
            self.num_lost = self.num_hashes as u64;
            (self.num_sealed, self.num_hashes) = (0, 0);
            self.events = Vec::new();
        }
    }

    /// The `count` blocks up to `end` are cached now.
    pub(crate) fn store(&mut self, end: NodePosition, count: usize) {
        if self.is_lost() {
            return self.lose(count);
        }
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
        self.limit();
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
        self.limit();
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
    pub(crate) fn clear(&mut self, weights_version: u32) {
        if self.is_lost() {
            return;
        }
        self.events.truncate(self.num_sealed);
        self.events.push(Event::Cleared { weights_version });
        self.num_hashes += 1;
        self.limit();
    }

    /// The events. After [`Event::Lost`] the caller adds all cached blocks.
    pub(crate) fn take(&mut self, weights_version: u32) -> Vec<Event> {
        (self.num_sealed, self.num_hashes) = (0, 0);
        match std::mem::take(&mut self.num_lost) {
            0 => std::mem::take(&mut self.events),
            num_events => vec![
                Event::Lost { num_events },
                Event::Cleared { weights_version },
            ],
        }
    }
}
