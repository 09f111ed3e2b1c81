//! Why a prompt is not cached: where its match ends, and what was there.
//!
//! An answer depends on one namespace: the search begins at its root, compares its sequences, and looks up its own
//! evictions. It reveals nothing of another namespace, not even that it exists.

use std::collections::{HashMap, VecDeque};
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
    /// The nearest cached prefix goes on with other tokens.
    Diverged {
        /// Position of the first token that differs.
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
}

/// A remembered eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastEviction {
    /// The cause.
    pub by: EvictedBy,
    /// Blocks of its namespace that were evicted since, itself included: with a pool larger by about so many, it would
    /// still be cached.
    pub num_blocks_since: u64,
}

/// The cause of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictedBy {
    /// An allocation, in this order of eviction.
    Policy(Eviction),
    /// A call of [`evict_all`](crate::BlockManager::evict_all).
    EvictAll,
}

/// The last evictions of each namespace, by block hash.
pub(crate) struct EvictionHistory {
    namespaces: HashMap<Arc<[u8]>, Evictions>,
    /// Evictions kept per namespace.
    most: usize,
    /// Calls of `of` so far.
    time: u64,
}

/// Evictions of one namespace.
pub(crate) struct Evictions {
    /// Evictions so far.
    count: u64,
    /// The last of them, at most `most`, oldest first.
    order: VecDeque<u128>,
    most: usize,
    /// The number of the last eviction of each, and its cause.
    latest: HashMap<u128, (u64, EvictedBy)>,
    /// The time of the last one.
    time: u64,
}

impl EvictionHistory {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            namespaces: HashMap::new(),
            most: num_blocks.min(MAX_EVICTIONS),
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
        let own = own.or_insert_with(|| Evictions {
            count: 0,
            order: VecDeque::new(),
            most: self.most,
            latest: HashMap::new(),
            time: 0,
        });
        own.time = self.time;
        own
    }

    pub(crate) fn find(&self, namespace: &[u8], hash: u128) -> Option<PastEviction> {
        let own = self.namespaces.get(namespace)?;
        let &(number, by) = own.latest.get(&hash)?;
        let num_blocks_since = own.count - number + 1;
        Some(PastEviction {
            by,
            num_blocks_since,
        })
    }
}

impl Evictions {
    /// Adds an eviction.
    pub(crate) fn add(&mut self, hash: u128, by: EvictedBy) {
        self.count += 1;
        self.order.push_back(hash);
        self.latest.insert(hash, (self.count, by));
        if self.order.len() > self.most
            && let Some(oldest) = self.order.pop_front()
            && self.latest[&oldest].0 + self.most as u64 == self.count
        {
            self.latest.remove(&oldest);
        }
    }
}
