//! Blocks: counters, the free queue, the cached prefixes, and the KV that the device has written.

use crate::tokens::Tokens;

/// The number of a block.
pub type BlockId = u8;

/// The largest block.
pub(crate) const MAX_BLOCK_SIZE: usize = 2;

/// A block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Live sequences whose table contains it.
    pub seq_refs: u8,
    /// Pins of open steps and of the transfer.
    pub step_pins: u8,
    /// Pins on it.
    pub pin_refs: u8,
    /// The whole prefix up to its last token, if it is cached or an open step computes it.
    pub cached: Option<Tokens>,
    /// The open step that computes it: 0 is the oldest.
    pub computed_in: Option<u8>,
    /// The transfer is to fill it.
    pub is_loading: bool,
    /// By position: the tokens of which the device has written the KV.
    pub(crate) kv: [Option<Tokens>; MAX_BLOCK_SIZE],
}

impl Block {
    /// All references.
    pub fn refs(&self) -> u8 {
        self.seq_refs + self.step_pins + self.pin_refs
    }

    /// Whether its KV exists: no open step is to compute it, and no transfer to load it.
    pub fn is_ready(&self) -> bool {
        self.computed_in.is_none() && !self.is_loading
    }
}

/// All blocks, and the queue of those without references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// By number.
    pub blocks: Vec<Block>,
    /// Blocks without a cached prefix; the first is allocated first.
    pub free: Vec<BlockId>,
    /// Cached blocks without references; the first is evicted first.
    pub evictable: Vec<BlockId>,
}

impl Pool {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks],
            free: (0..num_blocks as BlockId).collect(),
            evictable: Vec::new(),
        }
    }

    /// A block.
    pub fn block(&self, block: BlockId) -> &Block {
        &self.blocks[usize::from(block)]
    }

    pub(crate) fn block_mut(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[usize::from(block)]
    }

    /// Blocks that can be allocated.
    pub fn available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// Whether a block is in the free queue.
    pub fn is_queued(&self, block: BlockId) -> bool {
        self.free.contains(&block) || self.evictable.contains(&block)
    }

    /// The block of a cached prefix: one that `matches`.
    pub(crate) fn find(&self, matches: impl Fn(Tokens) -> bool) -> Option<BlockId> {
        let is_match = |block: &Block| block.cached.is_some_and(&matches);
        self.blocks
            .iter()
            .position(is_match)
            .map(|block| block as BlockId)
    }

    fn unlink(&mut self, block: BlockId) {
        self.free.retain(|&queued| queued != block);
        self.evictable.retain(|&queued| queued != block);
    }

    /// Adds a table entry of a block, which may be in the queue.
    pub(crate) fn hold(&mut self, block: BlockId) {
        self.unlink(block);
        self.block_mut(block).seq_refs += 1;
    }

    /// Removes a table entry.
    pub(crate) fn release(&mut self, block: BlockId) {
        self.block_mut(block).seq_refs -= 1;
        self.enqueue_unused(block);
    }

    /// Pins a block for an open step or the transfer. The block may be in the queue.
    pub(crate) fn pin_for_step(&mut self, block: BlockId) {
        self.unlink(block);
        self.block_mut(block).step_pins += 1;
    }

    /// Ends a step's or transfer's pin.
    pub(crate) fn unpin_for_step(&mut self, block: BlockId) {
        self.block_mut(block).step_pins -= 1;
        self.enqueue_unused(block);
    }

    /// Pins a block, which may be in the queue.
    pub(crate) fn pin(&mut self, block: BlockId) {
        self.unlink(block);
        self.block_mut(block).pin_refs += 1;
    }

    /// Ends a pin.
    pub(crate) fn unpin(&mut self, block: BlockId) {
        self.block_mut(block).pin_refs -= 1;
        self.enqueue_unused(block);
    }

    /// Puts a block into the queue if it has no references. The KV of a block that is not cached is lost: what reads
    /// it after this is seen to read wrong KV.
    pub(crate) fn enqueue_unused(&mut self, block: BlockId) {
        let state = self.block_mut(block);
        if state.refs() > 0 {
            return;
        }
        if state.cached.is_some() {
            self.evictable.push(block);
        } else {
            state.kv = Default::default();
            self.free.insert(0, block);
        }
    }

    /// Removes a block from the cached prefixes.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let block = self.block_mut(block);
        (block.cached, block.computed_in) = (None, None);
    }

    /// Evicts the evictable block that was released first.
    pub(crate) fn evict(&mut self) {
        let block = self.evictable.remove(0);
        self.forget(block);
        self.enqueue_unused(block);
    }

    /// Allocates a block, with one table entry: a free one, or it evicts one.
    pub(crate) fn allocate(&mut self) -> BlockId {
        if self.free.is_empty() {
            self.evict();
        }
        let block = self.free[0];
        self.hold(block);
        block
    }

    /// Allocates a block that the transfer fills.
    pub(crate) fn allocate_loading(&mut self) -> BlockId {
        let block = self.allocate();
        let state = self.block_mut(block);
        (state.seq_refs, state.step_pins, state.is_loading) = (0, 1, true);
        block
    }

    /// Caches a block.
    pub(crate) fn store(&mut self, block: BlockId, prefix: Tokens, computed_in: Option<u8>) {
        let block = self.block_mut(block);
        (block.cached, block.computed_in) = (Some(prefix), computed_in);
    }

    /// The oldest open step is closed: its blocks are ready.
    pub(crate) fn close_oldest_step(&mut self) {
        for block in &mut self.blocks {
            block.computed_in = block.computed_in.and_then(|step| step.checked_sub(1));
        }
    }
}
