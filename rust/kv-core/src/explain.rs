//! Why a prompt is not cached: where its match ends, and what was there.
//!
//! Everything here belongs to one namespace: the search begins at its root, compares its sequences, and looks up its own
//! evictions. So an answer tells nothing about another namespace, not even that it exists.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::eviction::Eviction;
use crate::ids::NodePosition;
use crate::pool::{Pool, Purpose};
use crate::sequence::{Sequence, Sequences};
use crate::state::State;

/// Evictions remembered per namespace, and namespaces.
const MAX_EVICTIONS: usize = 16_384;
const MAX_NAMESPACES: usize = 32;

/// Cached blocks after a match that are compared with the prompt: the newest ones.
const MAX_NEIGHBOURS: usize = 64;

/// What a prefill of a prompt would reuse now, in tokens, and why it would compute the rest. The last token is always
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
    /// What evicted the block.
    pub by: EvictedBy,
    /// Blocks of its namespace that were evicted since, itself included: with a pool larger by about so many, it would
    /// still be cached.
    pub num_blocks_since: u64,
}

/// What evicted a block.
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
    /// Evictions of all namespaces so far.
    time: u64,
}

#[derive(Default)]
struct Evictions {
    /// Evictions so far.
    count: u64,
    /// The last of them, oldest first.
    order: VecDeque<u128>,
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

    /// Adds an eviction. The namespace that has evicted nothing for longest is forgotten for a new one.
    pub(crate) fn add(&mut self, namespace: &Arc<[u8]>, hash: u128, by: EvictedBy) {
        self.time += 1;
        if self.namespaces.len() == MAX_NAMESPACES && !self.namespaces.contains_key(namespace) {
            let oldest = self.namespaces.iter().min_by_key(|(_, own)| own.time);
            let oldest = oldest.map(|(name, _)| Arc::clone(name));
            oldest.and_then(|name| self.namespaces.remove(&name));
        }
        let own = self.namespaces.entry(Arc::clone(namespace)).or_default();
        own.time = self.time;
        own.count += 1;
        own.order.push_back(hash);
        own.latest.insert(hash, (own.count, by));
        if own.order.len() > self.most
            && let Some(oldest) = own.order.pop_front()
            && own.latest[&oldest].0 + self.most as u64 == own.count
        {
            own.latest.remove(&oldest);
        }
    }

    fn find(&self, namespace: &[u8], hash: u128) -> Option<PastEviction> {
        let own = self.namespaces.get(namespace)?;
        let &(number, by) = own.latest.get(&hash)?;
        let num_blocks_since = own.count - number + 1;
        Some(PastEviction {
            by,
            num_blocks_since,
        })
    }
}

/// A prompt of which a prefix was matched.
struct Prompt<'a> {
    tokens: &'a [u32],
    namespace: &'a [u8],
    /// The block after the match.
    position: usize,
    end: usize,
    /// The id of its own sequence, or 0.
    sequence: u64,
}

impl State {
    /// Explains a prompt. It changes nothing.
    pub(crate) fn explain(&mut self, tokens: &[u32], namespace: &[u8]) -> Explanation {
        let block_size = self.groups.block_size();
        let mut explanation = Explanation::default();
        let miss = |rows, reason| {
            let position = rows * block_size;
            Some(Miss { position, reason })
        };
        if !self.caching {
            explanation.miss = miss(0, MissReason::ReadsDisabled);
            return explanation;
        }
        let (found, groups) = (&mut self.matched, &self.groups);
        found.begin(NodePosition::NONE, 0);
        let mut ready = 0;
        if let Some(root) = self.pool.tree().root(namespace) {
            let pool = &mut self.pool;
            pool.find_match(found, groups, tokens, (root, 0), Purpose::Read);
            ready = found.num_rows;
            let purpose = Purpose::Prefill { replay: 0 };
            pool.find_match(found, groups, tokens, (root, 0), purpose);
        }
        explanation.num_pool_tokens = ready * block_size;
        let is_loading = self.pool.any_loading() && {
            let matched = self.matched_blocks_after(0);
            self.pool.transfer_of(matched).is_some()
        };
        if is_loading {
            explanation.miss = miss(ready, MissReason::Loading);
            return explanation;
        }
        explanation.num_in_flight_tokens = (self.matched.num_rows - ready) * block_size;
        if self.matched.last != NodePosition::NONE {
            explanation.num_copied_tokens = self.num_copied(tokens);
        }
        if self.matched.num_rows * block_size == tokens.len() {
            let last = match explanation.num_in_flight_tokens {
                0 => &mut explanation.num_pool_tokens,
                _ => &mut explanation.num_in_flight_tokens,
            };
            *last = last.saturating_sub(1);
        }
        let position = self.matched.num_rows * block_size;
        let prompt = Prompt {
            tokens,
            namespace,
            position,
            end: position + block_size,
            sequence: 0,
        };
        explanation.miss = find_miss(&mut self.pool, &self.seqs, self.matched.last, prompt);
        explanation
    }

    /// Records why a sequence computes tokens, given its match, before it computes any.
    pub(crate) fn explain_prefill(&mut self, slot: u32) {
        let (seq, block_size) = (self.seqs.at(slot), self.groups.block_size());
        if seq.planned_end > seq.cached + seq.restored {
            return;
        }
        let rows = seq.registered.rows() + self.matched.num_rows;
        let position = rows * block_size;
        let miss = if !self.caching || !seq.read_cache {
            let reason = MissReason::ReadsDisabled;
            Some(Miss { position, reason })
        } else if rows > 0 && position + block_size > seq.tokens.len() {
            None
        } else {
            let prompt = Prompt {
                tokens: &seq.tokens,
                namespace: &self.pool.tree().namespace(seq.root),
                position,
                end: position + block_size,
                sequence: seq.id,
            };
            find_miss(&mut self.pool, &self.seqs, self.matched.last, prompt)
        };
        self.seqs.at_mut(slot).set_miss(miss.map(Box::new));
    }
}

/// Where and why a match, which ends at `last`, ends before the last whole block of a prompt.
fn find_miss(
    pool: &mut Pool,
    seqs: &Sequences,
    last: NodePosition,
    prompt: Prompt<'_>,
) -> Option<Miss> {
    let Prompt {
        tokens,
        position,
        end,
        ..
    } = prompt;
    let Some(block) = tokens.get(position..end) else {
        let reason = MissReason::BelowOneBlock;
        return (position == 0).then_some(Miss { position, reason });
    };
    let root = pool.tree().root(prompt.namespace);
    let is_to_come = |seq: &Sequence| {
        let computes = seq.id != prompt.sequence && seq.planned_end > 0 && seq.computed < end;
        computes
            && Some(seq.root) == root
            && seq.tokens.get(position..end) == Some(block)
            && seq.tokens[..position] == tokens[..position]
    };
    let reason = if seqs.iter().any(is_to_come) {
        MissReason::NotYetComputed
    } else {
        pool.explain_block(last, block, (prompt.namespace, position))
    };
    Some(Miss { position, reason })
}

impl Pool {
    /// Why no block with these tokens follows `last`, the end of a match of `position` tokens.
    fn explain_block(
        &mut self,
        last: NodePosition,
        block: &[u32],
        (namespace, position): (&[u8], usize),
    ) -> MissReason {
        let last = last.some();
        let is_known = last.is_some_and(|last| self.next(last, block).is_some());
        let eviction = self.find_eviction(last, block, namespace);
        if is_known || eviction.is_some() {
            return MissReason::Evicted(eviction);
        }
        let all = |_| true;
        let nearest = last.and_then(|last| {
            let most = (0, MAX_NEIGHBOURS);
            self.tree().longest_partial_match(last, block, most, all)
        });
        match nearest {
            Some((near, agrees)) if position + agrees > 0 => MissReason::Diverged {
                position: position + agrees,
                tokens: self.tree().tokens(near)[agrees..].to_vec(),
            },
            _ => MissReason::New,
        }
    }

    fn find_eviction(
        &mut self,
        last: Option<NodePosition>,
        block: &[u32],
        namespace: &[u8],
    ) -> Option<PastEviction> {
        self.history.as_ref()?;
        let parent = match last {
            Some(last) => self.tree_mut().hash(last)?,
            None => self.tree().hasher().root(namespace),
        };
        let hash = self.tree().hasher().child(parent, block);
        self.history.as_ref()?.find(namespace, hash)
    }
}
