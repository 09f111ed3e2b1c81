//! Why a prompt is not cached: where its match ends, and why it goes no further.
//!
//! An answer depends on one namespace: the search begins at its root, compares its sequences, and looks up its own
//! evictions. It reveals nothing of another namespace, not even that it exists.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::eviction::Eviction;

/// Evictions remembered per namespace, and namespaces.
const MAX_EVICTIONS: usize = 16_384;
const MAX_NAMESPACES: usize = 32;

/// The tokens that a prefill of a prompt would reuse now, and why it would compute the rest. The last token is always
/// computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    /// Tokens in whole cached blocks.
    pub num_pool_tokens: usize,
    /// Tokens after these in whole blocks that an open step computes.
    pub num_in_flight_tokens: usize,
    /// Tokens after these whose KV is copied from the beginning of a cached block.
    pub num_copied_tokens: usize,
    /// Why the match ends; `None` if every whole block of the prompt can be reused.
    pub miss: Option<Miss>,
}

/// The end of a match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Position of the first token after the reused blocks.
    pub position: usize,
    /// Why the block that begins there is not reused.
    pub reason: MissReason,
}

/// Why a block is not reused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// Nothing like it is cached.
    New,
    /// The nearest cached prefix continues with other tokens, or its namespace switches otherwise.
    Diverged {
        /// Position of the first token that differs, or of the switch.
        position: usize,
        /// The cached tokens from there to the end of the block.
        tokens: Vec<u32>,
    },
    /// It was cached and is not any more.
    Evicted(Option<PastEviction>),
    /// A live sequence has the same tokens and has not computed them yet.
    NotYetComputed,
    /// A transfer is to fill it.
    Loading,
    /// The sequence, or the manager, does not read the cache.
    ReadsDisabled,
    /// The prompt is shorter than a block.
    BelowOneBlock,
    /// The blocks are cached; the state of the layers that keep one was not kept later than at this position.
    NoSnapshot {
        /// The end of the cached blocks.
        cached_to: usize,
    },
}

/// A remembered eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastEviction {
    /// The cause.
    pub by: EvictedBy,
    /// Blocks of its namespace that were evicted since, itself included. A pool larger by about this many blocks would
    /// still cache it.
    pub num_blocks_since: u64,
}

/// The cause of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictedBy {
    /// An allocation, in this order of eviction.
    Policy(Eviction),
    /// A call of [`evict_all`](crate::BlockManager::evict_all).
    EvictAll,
    /// A new version of the weights.
    WeightsChanged,
}

/// The last evictions of each namespace, by block hash.
pub(crate) struct EvictionHistory {
    namespaces: HashMap<Arc<[u8]>, Evictions>,
    /// Evictions kept per namespace.
    max_evictions: usize,
    /// Calls of `of` so far.
    time: u64,
}

/// Evictions of one namespace.
#[derive(Default)]
pub(crate) struct Evictions {
    count: u64,
    max_evictions: usize,
    /// The number of the last eviction of each hash, and its cause: of the newest evictions, at most `max_evictions`,
    /// and of as many before them. None is ever removed alone, so that an eviction costs one
    /// insertion.
    newest: Numbers,
    older: Numbers,
    /// The time of the last one.
    time: u64,
}

type Numbers = HashMap<u128, (u64, EvictedBy), BuildHasherDefault<OfHash>>;

/// Hashes a block hash to its lower half, which is random already.
#[derive(Default)]
struct OfHash(u64);

impl Hasher for OfHash {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl EvictionHistory {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            namespaces: HashMap::new(),
            max_evictions: num_blocks.min(MAX_EVICTIONS),
            time: 0,
        }
    }

    /// The evictions of a namespace, to add one. The namespace that has evicted nothing for longest is forgotten for a
    /// new one.
    pub(crate) fn of(&mut self, namespace: &Arc<[u8]>) -> &mut Evictions {
        self.time += 1;
        if self.namespaces.len() == MAX_NAMESPACES && !self.namespaces.contains_key(namespace) {
            let oldest = self.namespaces.iter().min_by_key(|(_, own)| own.time);
            let oldest = oldest.map(|(name, _)| Arc::clone(name));
            oldest.and_then(|name| self.namespaces.remove(&name));
        }
        let own = self.namespaces.entry(Arc::clone(namespace));
        let max_evictions = self.max_evictions;
        let own = own.or_insert_with(|| Evictions {
            max_evictions,
            ..Evictions::default()
        });
        own.time = self.time;
        own
    }

    pub(crate) fn find(&self, namespace: &[u8], hash: u128) -> Option<PastEviction> {
        let own = self.namespaces.get(namespace)?;
        let known = own.newest.get(&hash).or_else(|| own.older.get(&hash));
        let &(number, by) = known?;
        let num_blocks_since = own.count - number + 1;
        (num_blocks_since <= own.max_evictions as u64).then_some(PastEviction {
            by,
            num_blocks_since,
        })
    }
}

impl Evictions {
    pub(crate) fn add(&mut self, hash: u128, by: EvictedBy) {
        if self.newest.len() >= self.max_evictions {
            std::mem::swap(&mut self.newest, &mut self.older);
            self.newest.clear();
        }
        self.count += 1;
        self.newest.insert(hash, (self.count, by));
    }
}
