//! Handles of sequences, plans, transfers and pins, and the releases that they defer to the manager.
//!
//! Any thread may drop a handle at any time, without the manager's lock. A [`Pin`] lowers the counts of its
//! blocks itself; everything else is deferred: the manager drains the deferred releases at the beginning of its
//! next call. The list has its own lock, held for a few instructions and never while another is taken.

use std::collections::HashSet;
use std::ops::Range;

use crate::ids::{BlockId, NodePosition, PlanKey, SeqKey, TransferKey};
use crate::sync::{Arc, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::table::BlockTable;

/// A release that waits for the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Deferred {
    /// The last pins of these blocks were dropped. The blocks may be in use again since.
    Blocks(Vec<BlockId>),
    /// A sequence's handle was dropped.
    Sequence(SeqKey),
    /// An open plan's handle was dropped.
    Plan(PlanKey),
    /// A transfer's handle was dropped. It may have ended before.
    Transfer(TransferKey),
    /// A recorded pin was dropped; it still holds its blocks.
    Pin(u64, Vec<BlockId>),
}

/// State shared by a manager and its handles.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) manager: u32,
    /// Pins that hold each block.
    refs: Box<[AtomicU32]>,
    /// Releases since the manager's last call: at most one for each handle and pin.
    deferred: Mutex<Vec<Deferred>>,
    /// Their number, and that of their blocks.
    num_deferred: AtomicUsize,
    /// Block references of all pins: an upper bound while a pin is being dropped ...
    pub(crate) pin_refs_ceiling: AtomicUsize,
    /// ... and a lower bound.
    pub(crate) pin_refs_floor: AtomicUsize,
    /// Plans are closed in the order in which they were opened; this is the last closed one.
    last_closed_plan: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        manager: u32,
        num_blocks: usize,
    ) -> Result<Self, std::collections::TryReserveError> {
        let mut refs = Vec::new();
        refs.try_reserve_exact(num_blocks)?;
        refs.resize_with(num_blocks, || AtomicU32::new(0));
        Ok(Self {
            manager,
            refs: refs.into_boxed_slice(),
            deferred: Mutex::new(Vec::new()),
            num_deferred: AtomicUsize::new(0),
            pin_refs_ceiling: AtomicUsize::new(0),
            pin_refs_floor: AtomicUsize::new(0),
            last_closed_plan: AtomicU64::new(0),
        })
    }

    pub(crate) fn pin_refs_of(&self, block: BlockId) -> u32 {
        // Acquire: the last pin's owner read the block before it is reused.
        self.refs[block.at()].load(Ordering::Acquire)
    }

    /// Whether any pin may hold a block.
    pub(crate) fn has_pins(&self) -> bool {
        // As `pin_refs_of`: the ceiling is lowered after the counts.
        self.pin_refs_ceiling.load(Ordering::Acquire) > 0
    }

    /// Adds a pin's reference. Only the manager, under its lock, makes pins.
    pub(crate) fn hold(&self, block: BlockId) {
        self.refs[block.at()].fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a pin's reference; true if it was the last.
    pub(crate) fn release(&self, block: BlockId) -> bool {
        // Release: this pin's owner read the block before it is reused.
        // Acquire: the last pin sees what the owners of all others did before they dropped theirs.
        self.refs[block.at()].fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Defers a release to the manager.
    pub(crate) fn defer(&self, release: Deferred) {
        let blocks = match &release {
            Deferred::Blocks(blocks) | Deferred::Pin(_, blocks) => blocks.len(),
            _ => 0,
        };
        let mut deferred = lock(&self.deferred);
        deferred.push(release);
        self.num_deferred.fetch_add(1 + blocks, Ordering::Release);
    }

    /// The number of deferred releases and of their blocks.
    #[inline]
    pub(crate) fn num_deferred(&self) -> usize {
        self.num_deferred.load(Ordering::Acquire)
    }

    pub(crate) fn take_deferred(&self) -> Vec<Deferred> {
        let mut deferred = lock(&self.deferred);
        self.num_deferred.store(0, Ordering::Release);
        std::mem::take(&mut *deferred)
    }

    /// The blocks of deferred releases, which stay deferred.
    pub(crate) fn deferred_blocks(&self) -> HashSet<BlockId> {
        let deferred = lock(&self.deferred);
        let blocks = deferred.iter().filter_map(|release| match release {
            Deferred::Blocks(blocks) => Some(blocks.iter().copied()),
            _ => None,
        });
        blocks.flatten().collect()
    }

    pub(crate) fn close_plan(&self, key: PlanKey) {
        self.last_closed_plan.store(key.serial, Ordering::Release);
    }

    /// The manager has released `count` block references of pins.
    pub(crate) fn forget_pin_refs(&self, count: usize) {
        self.pin_refs_floor.fetch_sub(count, Ordering::AcqRel);
        self.pin_refs_ceiling.fetch_sub(count, Ordering::AcqRel);
    }

    /// The least and the most block references that pins can hold now.
    pub(crate) fn pin_refs(&self) -> (usize, usize) {
        let ceiling = self.pin_refs_ceiling.load(Ordering::Acquire);
        (self.pin_refs_floor.load(Ordering::Acquire), ceiling)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under this lock can panic.
    let locked = mutex.lock();
    locked.unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Owns a sequence: dropping it frees the sequence at the manager's next call.
#[derive(Debug)]
pub struct SeqHandle {
    shared: Arc<Shared>,
    key: SeqKey,
}

impl SeqHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: SeqKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// The key for the manager's calls.
    pub fn key(&self) -> SeqKey {
        self.key
    }

    /// The sequence's number, unique in its manager and never reused.
    pub fn id(&self) -> u64 {
        self.key.id
    }
}

impl Drop for SeqHandle {
    fn drop(&mut self) {
        self.shared.defer(Deferred::Sequence(self.key));
    }
}

/// Owns an open plan: dropping it rolls the plan back at the manager's next call.
#[derive(Debug)]
pub struct PlanHandle {
    shared: Arc<Shared>,
    key: PlanKey,
}

impl PlanHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: PlanKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// The key for the manager's calls.
    pub fn key(&self) -> PlanKey {
        self.key
    }
}

impl Drop for PlanHandle {
    fn drop(&mut self) {
        if self.key.serial > self.shared.last_closed_plan.load(Ordering::Acquire) {
            self.shared.defer(Deferred::Plan(self.key));
        }
    }
}

/// A block that a transfer is to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadingBlock {
    /// The index of the block in the prefix: it holds the KV of the tokens from `index * block_size` on.
    pub index: usize,
    /// The layer group.
    pub group: usize,
    /// The block.
    pub block: BlockId,
}

/// Owns a transfer: blocks that are to be filled with KV from outside the pool. Dropping it fails the transfer at the
/// manager's next call, unless it has ended.
///
/// Until it ends, no step reads or writes its blocks: keep it until the last byte is written.
#[derive(Debug)]
pub struct Transfer {
    shared: Arc<Shared>,
    key: TransferKey,
    indices: Range<usize>,
    blocks: Vec<LoadingBlock>,
}

impl Transfer {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        key: TransferKey,
        indices: Range<usize>,
        blocks: Vec<LoadingBlock>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
            indices,
            blocks,
        }
    }

    /// The key for the manager's calls.
    pub fn key(&self) -> TransferKey {
        self.key
    }

    /// The indices in the prefix of the blocks that it restores. A layer group with a window has only the last ones.
    pub fn indices(&self) -> Range<usize> {
        self.indices.clone()
    }

    /// The blocks to fill, by index, then by layer group. Last, for a model with states, the blocks of the snapshot at
    /// the end of the prefix, in the order of its bytes: they have the index of the last block of tokens, and the group
    /// after those with tables.
    pub fn blocks(&self) -> &[LoadingBlock] {
        &self.blocks
    }

    /// The number of indices, from the front, that [`complete`](crate::BlockManager::complete) takes if these blocks
    /// are filled: an index counts if its blocks of all layer groups are. The order of `filled` does not matter.
    ///
    /// # Errors
    /// A block that is not one of [`blocks`](Self::blocks).
    pub fn filled_indices(&self, filled: &[LoadingBlock]) -> Result<usize, LoadingBlock> {
        let mut is_filled = vec![false; self.blocks.len()];
        for block in filled {
            let order = |other: &LoadingBlock| (other.index, other.group);
            let first = { &self.blocks }.partition_point(|other| order(other) < order(block));
            let equal = self.blocks[first..].iter();
            let mut equal = equal.take_while(|other| order(other) == order(block)); // several of a snapshot
            let at = equal.position(|other| other == block).ok_or(*block)?;
            is_filled[first + at] = true;
        }
        let missing = is_filled.iter().position(|&is_filled| !is_filled);
        let end = missing.map_or(self.indices.end, |at| self.blocks[at].index);
        Ok(end - self.indices.start)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.shared.defer(Deferred::Transfer(self.key));
    }
}

/// Keeps a prefix cached, from its root to its end, without being a sequence.
///
/// Any thread may drop it, without the manager and its lock.
#[derive(Debug)]
pub struct Pin {
    shared: Arc<Shared>,
    /// Its number, if it was granted during a recording. The manager then releases the blocks, so that a replay can
    /// release them between the same operations.
    serial: Option<u64>,
    blocks: PrefixBlocks,
    num_blocks: usize,
    num_tokens: usize,
    weights_version: u32,
}

/// The blocks of a cached prefix.
#[derive(Debug)]
pub(crate) struct PrefixBlocks {
    /// Those that a token after the prefix reads.
    pub(crate) table: BlockTable,
    /// The end of the prefix; `NONE` if it is empty, and for blocks that are not cached.
    pub(crate) end: NodePosition,
    /// The last snapshot of the prefix: its position, and its blocks.
    pub(crate) snapshot: (usize, Vec<BlockId>),
}

impl PrefixBlocks {
    /// The blocks of an empty prefix.
    pub(crate) fn none(groups: usize) -> Self {
        Self {
            table: BlockTable::new(groups),
            end: NodePosition::NONE,
            snapshot: (0, Vec::new()),
        }
    }
}

impl Pin {
    /// Adds a reference to each block. Called by the manager, under its lock.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        serial: Option<u64>,
        blocks: PrefixBlocks,
        num_tokens: usize,
        weights_version: u32,
    ) -> Self {
        let (table, snapshot) = (&blocks.table, &blocks.snapshot.1);
        let num_blocks = table.len() + snapshot.len();
        let (ceiling, floor) = (&shared.pin_refs_ceiling, &shared.pin_refs_floor);
        ceiling.fetch_add(num_blocks, Ordering::AcqRel);
        table.blocks().for_each(|block| shared.hold(block));
        snapshot.iter().for_each(|&block| shared.hold(block));
        floor.fetch_add(num_blocks, Ordering::AcqRel);
        Self {
            shared: Arc::clone(shared),
            serial,
            blocks,
            num_blocks,
            num_tokens,
            weights_version,
        }
    }

    /// The pinned blocks, first to last; of each block of tokens those of all layer groups. Last, those of the snapshot.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        let snapshot = self.blocks.snapshot.1.iter().copied();
        self.blocks.table.blocks().chain(snapshot)
    }

    /// Index in the prefix, layer group and id of every pinned block, in this order, as [`Transfer::blocks`] has them:
    /// last, those of the snapshot.
    pub fn indexed_blocks(&self) -> Vec<(usize, usize, BlockId)> {
        let (table, (position, snapshot)) = (&self.blocks.table, &self.blocks.snapshot);
        let (indices, groups) = (table.end(), table.groups());
        let mut all = Vec::with_capacity(self.num_blocks);
        for (index, group) in (0..indices).flat_map(|index| (0..groups).map(move |of| (index, of)))
        {
            all.extend(table.get(group, index).map(|block| (index, group, block)));
        }
        if let Some(tokens) = self.num_tokens.checked_div(indices) {
            let index = (position / tokens).saturating_sub(1);
            all.extend(snapshot.iter().map(|&block| (index, groups, block)));
        }
        all
    }

    /// The last snapshot of the prefix: the tokens that its state stands for, and its blocks; 0 and none without one.
    pub fn snapshot(&self) -> (usize, &[BlockId]) {
        (self.blocks.snapshot.0, &self.blocks.snapshot.1)
    }

    /// How many blocks it pins.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn table(&self) -> &BlockTable {
        &self.blocks.table
    }

    /// Tokens covered: a multiple of the block size.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// The version of the weights when it was granted.
    pub fn weights_version(&self) -> u32 {
        self.weights_version
    }

    pub(crate) fn manager(&self) -> u32 {
        self.shared.manager
    }

    pub(crate) fn serial(&self) -> Option<u64> {
        self.serial
    }

    pub(crate) fn end(&self) -> Option<NodePosition> {
        self.blocks.end.some()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let shared = &self.shared;
        if let Some(serial) = self.serial {
            if self.num_blocks > 0 {
                shared.defer(Deferred::Pin(serial, self.blocks().collect()));
            }
            return;
        }
        let (ceiling, floor) = (&shared.pin_refs_ceiling, &shared.pin_refs_floor);
        floor.fetch_sub(self.num_blocks, Ordering::AcqRel);
        // Last block first, so that a prefix outlives its continuations in the queue.
        let is_unused = |block: &BlockId| shared.release(*block);
        let snapshot = self.blocks.snapshot.1.iter().rev().copied();
        let mut unused: Vec<_> = snapshot.filter(is_unused).collect();
        unused.extend(self.blocks.table.blocks().rev().filter(is_unused));
        if !unused.is_empty() {
            shared.defer(Deferred::Blocks(unused));
        }
        ceiling.fetch_sub(self.num_blocks, Ordering::AcqRel);
    }
}
