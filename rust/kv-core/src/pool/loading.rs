//! Blocks that transfers are to fill. A transfer holds them until it ends, and no table contains them, so they are
//! neither evicted nor read. A match ends before one that is in the prefix index, and a prefill that would match it
//! waits.

use super::Pool;
use crate::ids::{BlockId, NodePosition};
use crate::switch::Label;

impl Pool {
    /// Whether a transfer is to fill a block.
    pub(crate) fn is_loading(&self, block: BlockId) -> bool {
        self.queue.meta(block).loading
    }

    /// The number of the transfer of the first loading block among these cached ones.
    pub(crate) fn transfer_of(&self, mut blocks: impl Iterator<Item = BlockId>) -> Option<u32> {
        let loading = blocks.find(|&block| self.is_loading(block));
        loading.map(|block| self.queue.meta(block).step)
    }

    /// Whether any block is loading.
    pub(crate) fn any_loading(&self) -> bool {
        self.loading > 0
    }

    /// Whether a transfer is to fill any block of a cached block.
    pub(crate) fn is_loading_at(&self, cached: NodePosition) -> bool {
        self.any_loading() && self.transfer_of(self.tree.blocks(cached)).is_some()
    }

    /// Allocates blocks for a transfer, which holds them. The caller has checked that they are available.
    pub(crate) fn take_loading(&mut self, count: usize) -> Vec<BlockId> {
        let mut taken = Vec::new();
        self.take(count, &mut taken);
        for &block in &taken {
            let meta = self.queue.meta_mut(block);
            *meta.seq_refs_mut() = 0;
            *meta.plan_pins_mut() = 1;
            meta.loading = true;
        }
        self.active -= count;
        self.loading += count;
        taken
    }

    /// Adds a block without block ids after `position`. The caller stores one of it or of a block after it.
    pub(crate) fn append_empty(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
    ) -> NodePosition {
        let blocks = vec![BlockId::NONE; self.tree.groups()];
        self.tree.append(position, tokens, &blocks, label)
    }

    /// Ends the transfer of a block: it is cached as if `step` had computed it, or not at all.
    pub(crate) fn end_loading(&mut self, block: BlockId, step: Option<u32>) {
        self.loading -= 1;
        self.queue.meta_mut(block).loading = false;
        match step {
            Some(step) => self.queue.meta_mut(block).step = step,
            None => self.forget(block),
        }
    }
    /// Ends the transfer of a snapshot's blocks.
    pub(crate) fn end_loading_snapshot(&mut self, blocks: &[BlockId]) {
        self.loading -= blocks.len();
        for &block in blocks {
            self.queue.meta_mut(block).loading = false;
        }
    }
}
