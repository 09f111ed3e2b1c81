//! Where the snapshots of states are cached.

use std::collections::BTreeMap;

use crate::config::StateConfig;
use crate::ids::{BlockId, NodePosition};
use crate::radix::RadixTree;

/// The part of the pool that spare snapshots may take: 1 / this, or less if they are larger than the keys and values
/// between two of them, which they save to compute again.
const SPARE_SHARE: usize = 8;

/// The cached snapshots of a pool, and the settings.
pub(crate) struct Snapshots {
    pub(crate) config: StateConfig,
    /// Blocks that spare snapshots may take.
    pub(crate) share: usize,
    /// By the last block of their prefix.
    pub(crate) cached: BTreeMap<NodePosition, Vec<BlockId>>,
}

impl Snapshots {
    pub(crate) fn new(config: StateConfig, num_blocks: usize, block_size: usize) -> Self {
        let between = config.cadence.div_ceil(block_size).min(config.blocks);
        let share = num_blocks / SPARE_SHARE * between / config.blocks;
        Self {
            config,
            share: share.max(config.blocks),
            cached: BTreeMap::new(),
        }
    }

    /// The last snapshot on the path to `position`, which is `indices` logical blocks long; and its own length.
    pub(crate) fn last(
        &self,
        tree: &RadixTree,
        mut position: NodePosition,
        mut indices: usize,
    ) -> Option<(NodePosition, usize)> {
        while position.offset > 0 {
            let first = NodePosition::new(position.node, 1);
            if let Some((&at, _)) = self.cached.range(first..=position).next_back() {
                return Some((at, indices - (position.offset - at.offset) as usize));
            }
            indices -= position.offset as usize;
            position = tree.parent_of(position.node)?;
        }
        None
    }

    /// The spare snapshots that fit into their share.
    pub(crate) fn max_spare(&self) -> usize {
        self.share / self.config.blocks
    }
}
