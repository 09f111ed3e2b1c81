//! Settings.

use std::str::FromStr;

use crate::error::{Error, within};
use crate::eviction::Eviction;
use crate::groups::Groups;

/// A layer group of kind `State`: its layers keep one state per sequence, which stands for all tokens before a position.
///
/// The running states belong to the caller. The manager caches *snapshots*: copies of a state at a block boundary, each
/// in [`blocks`](Self::blocks) blocks of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub struct StateConfig {
    /// Blocks of a snapshot: the bytes of a state over the bytes of a block, rounded up.
    pub blocks: usize,
    /// Tokens between the snapshots of a long prefill, which are the first to be evicted; 0: none are kept.
    pub cadence: usize,
    /// Tokens after a kept state before another one is worth its blocks.
    pub min_tokens: usize,
}

impl StateConfig {
    /// The usual settings for snapshots of this many blocks.
    pub fn new(blocks: usize) -> Self {
        Self {
            blocks,
            cadence: 512,
            min_tokens: 64,
        }
    }
}

/// Settings of a pool, resolved once.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub struct Config {
    /// Physical blocks, `1..=2^31`.
    pub num_blocks: usize,
    /// Token positions per block, `1..=65536`.
    pub block_size: usize,
    /// The layer groups: the sliding window of each in tokens (a query sees its own position and the `window - 1`
    /// before it), or `None` if its layers see everything. Every group has its own table over the same pool.
    pub groups: Vec<Option<usize>>,
    /// The layers that keep a state of fixed size instead of keys and values; `None`: the model has none.
    pub state: Option<StateConfig>,
    /// Off: no block is registered, matched or merged.
    pub prefix_caching: bool,
    /// On: a sequence shares blocks that an earlier sequence of the same step computes.
    pub in_flight_sharing: bool,
    /// On: where a match ends inside a block, the beginning of the cached block that agrees longest is copied (see
    /// [`copies`](crate::BlockManager::copies)).
    pub partial_reuse: bool,
    /// On: changes of the set of cached blocks are kept for [`take_events`](crate::BlockManager::take_events).
    pub events: bool,
    /// On: cached blocks that an allocation evicts are kept for [`take_evicted`](crate::BlockManager::take_evicted).
    // It changes no answer, so recordings do not have it.
    #[cfg_attr(feature = "trace", serde(skip))]
    pub keep_evicted: bool,
    /// On: evictions are remembered by namespace, and a sequence's first prefill records why tokens were not cached (see
    /// [`SequenceView::miss`](crate::SequenceView)).
    // It changes no answer either.
    #[cfg_attr(feature = "trace", serde(skip))]
    pub explain: bool,
    /// The order of eviction.
    pub eviction: Eviction,
    /// The seed of block hashes; `None`: random per manager.
    pub hash_seed: Option<u64>,
    /// 128; fewer bits force collisions, for tests.
    pub hash_bits: u32,
}

impl Config {
    /// The usual settings for a pool of this shape.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            num_blocks,
            block_size,
            groups: vec![None],
            state: None,
            prefix_caching: true,
            in_flight_sharing: true,
            partial_reuse: true,
            events: false,
            keep_evicted: false,
            explain: false,
            eviction: Eviction::Lru,
            hash_seed: None,
            hash_bits: 128,
        }
    }

    pub(crate) fn validate(&self) -> Result<Groups, Error> {
        within("block_size", 1..=65_536, self.block_size)?;
        within("num_blocks", 1..=1 << 31, self.num_blocks)?;
        within("hash_bits", 0..=128, self.hash_bits as usize)?;
        if let Some(state) = self.state {
            within(
                "the blocks of a snapshot",
                1..=self.num_blocks,
                state.blocks,
            )?;
        }
        Groups::new(&self.groups, self.block_size)
    }
}

impl FromStr for Eviction {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match Self::NAMES.iter().find(|(known, _)| *known == name) {
            Some((_, policy)) => Ok(*policy),
            None => Err(Error::UnknownPolicy(name.into())),
        }
    }
}
