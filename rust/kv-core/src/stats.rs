//! Figures: where every block is, counters, and a snapshot of the whole pool.

use std::sync::Arc;

/// Blocks of the pool by state. `free + evictable + active + pinned + loading` is the pool, after every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub struct PoolUsage {
    /// Not held and not cached.
    pub free: usize,
    /// Cached and not held: they match, and are evicted least recently used first.
    pub evictable: usize,
    /// In the tables of live sequences.
    pub active: usize,
    /// Held by pins, open steps and transfers only.
    pub pinned: usize,
    /// To be filled by transfers.
    pub loading: usize,
}

impl PoolUsage {
    /// Blocks that can be allocated.
    pub fn available(&self) -> usize {
        self.free + self.evictable
    }

    /// All blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.available() + self.active + self.pinned + self.loading
    }
}

/// Snapshots of states, which are part of the pool's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateUsage {
    /// Cached snapshots.
    pub snapshots: usize,
    /// Their blocks.
    pub blocks: usize,
    /// Of these, evictable blocks of spare snapshots, which are evicted first.
    pub spare_blocks: usize,
    /// Blocks of snapshots that open steps are to write.
    pub pending_blocks: usize,
}

/// The state of a block. The numbers are those of [`PoolSnapshot::states`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Not held and not cached.
    Free,
    /// Cached and not held.
    Evictable,
    /// In the table of a live sequence.
    Active,
    /// Held by pins, open steps and transfers only.
    Pinned,
    /// To be filled by a transfer.
    Loading,
}

/// The pool at one moment, for dashboards: one entry per block in each column, and the radix tree. It contains
/// no tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// As `BlockState`: 0 free, 1 evictable, 2 active, 3 pinned, 4 loading.
    pub states: Vec<u8>,
    /// All references.
    pub refs: Vec<u32>,
    /// Live sequences whose table contains the block.
    pub seq_refs: Vec<u32>,
    /// Steps since the block was computed; 0 if it is not cached.
    pub ages: Vec<u32>,
    /// The number of the block's radix node, from 1; 0 if it is not cached.
    pub nodes: Vec<u32>,
    /// Its index in that node, from 1; 0 if it is not cached.
    pub node_indices: Vec<u32>,
    /// The radix tree; node 1 is the first.
    pub tree: Vec<SnapshotNode>,
}

/// A node of the radix tree: cached blocks in a row. The root of a namespace has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotNode {
    /// The number of the parent; 0 for the root of a namespace.
    pub parent: u32,
    /// Blocks of the parent before the node.
    pub parent_index: u32,
    /// Blocks in the node.
    pub len: u32,
    /// The namespace, if this is its root.
    pub namespace: Option<Arc<[u8]>>,
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Monotonic counters since the manager was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Every counter with its name, in the order of the fields.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

stats! {
    /// Prompt tokens of committed prefills and completed transfers: cached, restored and computed.
    prompt_tokens,
    /// Of these, tokens that were cached: prefill work saved.
    cached_tokens,
    /// Tokens computed by committed steps, prefill and decode.
    computed_tokens,
    /// Cached blocks that committed prefills reused.
    hit_blocks,
    /// Blocks shared while an open step computed them for another sequence: neither stored nor computed twice.
    in_flight_blocks,
    /// Blocks that were cached already while their tokens were computed again, because a block before them was
    /// missing: not stored twice.
    already_cached_blocks,
    /// Prefills of started sequences that matched blocks which others had cached since.
    rematches,
    /// Prefills that began inside a block, after copied tokens.
    partial_hits,
    /// Tokens copied for these instead of computed; included in `cached_tokens`.
    partial_tokens,
    /// Blocks allocated.
    allocated_blocks,
    /// Blocks that became cached.
    registered_blocks,
    /// Cached blocks evicted for an allocation.
    evicted_blocks,
    /// Cached blocks that a sequence did not leave cached when it ended.
    discarded_blocks,
    /// Blocks released because they slid out of their group's window.
    slid_blocks,
    /// Late merges: duplicates released because the same prefix was cached already. Memory saved.
    merged_blocks,
    /// Evictable blocks replaced by the block that computed them again.
    taken_over_blocks,
    /// Blocks copied, for forks that diverge and prefills that begin inside a block.
    copied_blocks,
    /// Draft tokens computed by committed steps.
    draft_tokens,
    /// Of these, accepted ones.
    accepted_draft_tokens,
    /// Blocks without a hash, because another block has the same one.
    collisions,
    /// Blocks hashed, for the outside world or to find a radix node.
    hashed_blocks,
    /// Steps committed.
    committed_steps,
    /// Steps rolled back.
    rolled_back_steps,
    /// Blocks reserved for transfers.
    reserved_blocks,
    /// Of these, blocks that became cached when their transfer completed.
    restored_blocks,
    /// Prompt tokens that sequences did not compute because their own transfer restored them.
    restored_tokens,
    /// Transfers that ended without any block.
    failed_transfers,
    /// Snapshots of states that became cached.
    saved_snapshots,
    /// Snapshots that committed steps loaded.
    loaded_snapshots,
    /// Snapshots released because one of the same prefix was cached already.
    merged_snapshots,
    /// Snapshots evicted for an allocation, or with a block of their prefix.
    evicted_snapshots,
    /// Tokens whose keys and values were cached and that prefills computed again: for their states or hidden states, and the
    /// last one of a full hit.
    replayed_tokens,
}
