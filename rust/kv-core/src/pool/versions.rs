//! The version of the weights. Only blocks that the current weights computed are cached.

use super::{EvictedRun, Pool};
use crate::explain::{EvictedBy, EvictionHistory};
use crate::ids::BlockId;

impl Pool {
    pub(crate) fn weights_version(&self) -> u32 {
        self.weights_version
    }

    /// The version of the weights when a block was allocated.
    pub(crate) fn version_of(&self, block: BlockId) -> u32 {
        self.versions[block.at()]
    }

    /// Marks blocks as allocated under the current weights.
    #[cold]
    pub(crate) fn stamp(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.versions[block.at()] = self.weights_version;
        }
    }

    /// For the tests of validators, which corrupt it.
    #[cfg(test)]
    pub(crate) fn stamp_as(&mut self, block: BlockId, version: u32) {
        self.versions[block.at()] = version;
    }

    /// Ends the cache of the current weights: its blocks are free, or will be once their last reference ends. No
    /// sequence has a registered block. Returns the next version.
    pub(crate) fn advance_weights_version(&mut self) -> u32 {
        let blocks = (0..self.num_blocks()).map(BlockId::new);
        let cached: Vec<BlockId> = blocks
            .filter(|&block| self.cached_at(block).is_some())
            .collect();
        let (of_states, of_tokens): (Vec<BlockId>, Vec<BlockId>) =
            { cached.iter() }.partition(|&&block| self.is_snapshot(block));
        self.hash_stored_blocks();
        if let Some(history) = &mut self.history {
            **history = EvictionHistory::new(self.cached.len());
        }
        self.remember(&of_tokens, EvictedBy::WeightsChanged);
        if let Some(events) = &mut self.events {
            events.seal();
        }
        let mut run = EvictedRun::default();
        for &block in &of_tokens {
            self.queue.unlink(block);
            let (cached, group) = self.clear(block);
            self.remove(cached, group, &mut run);
        }
        self.end_run(run);
        for &block in &of_states {
            self.queue.unlink(block);
            self.clear(block);
            self.queue.meta_mut(block).group = 0;
        }
        if let Some(snapshots) = &mut self.snapshots {
            self.stats.evicted_snapshots += snapshots.cached.len() as u64;
            snapshots.cached.clear();
        }
        self.enqueue_unused(&cached);
        self.stats.discarded_blocks += of_tokens.len() as u64;
        self.weights_version += 1;
        if let Some(events) = &mut self.events {
            events.clear(self.weights_version);
        }
        self.take_evicted(); // a store takes no block of earlier weights
        self.weights_version
    }
}
