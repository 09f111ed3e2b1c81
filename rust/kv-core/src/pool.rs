//! The pool: all blocks, their reference counts, the free queue, and the prefix index over them.
//!
//! Only the pool changes counters, queue and tree, so they change together.

mod check;
mod explain;
mod loading;
mod restate;
mod snapshots;
mod versions;

use std::collections::TryReserveError;

use crate::config::Config;
use crate::events::{Event, EventLog, Evicted};
use crate::eviction::{Ghost, Policy};
use crate::explain::{EvictedBy, EvictionHistory};
use crate::groups::Groups;
use crate::handles::Shared;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, NodeId, NodePosition};
use crate::queue::{BlockMeta, Counts, FreeQueue, List};
use crate::radix::{MAX_COMPARED_CHILDREN, Match, RadixTree};
use crate::sequence::Registered;
use crate::snapshots::Snapshots;
use crate::stats::{BlockState, PoolSnapshot, PoolUsage, Stats};
use crate::switch::{Label, Labelled};
use crate::sync::Arc;

/// Stored blocks that may wait to be hashed.
const MAX_UNHASHED: usize = 1_024;

/// Consecutive evicted blocks of a node, the last one first.
#[derive(Clone, Copy, Default)]
struct EvictedRun {
    node: NodeId,
    first: u32,
    last: u32,
}

/// The open steps: `count` of them from `oldest` on. No block has the number of a step between them that was rolled
/// back.
#[derive(Clone, Copy, Default)]
pub(crate) struct OpenSteps {
    pub(crate) oldest: u32,
    pub(crate) count: u32,
}

impl OpenSteps {
    /// True if a step is open, so that its blocks are not ready.
    #[inline]
    fn contain(self, step: u32) -> bool {
        step.wrapping_sub(self.oldest) < self.count
    }

    /// Whether a block's KV exists.
    #[inline]
    fn are_done_with(self, meta: &BlockMeta) -> bool {
        !self.contain(meta.step) & !meta.loading
    }
}

/// The use of a match.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Blocks that can be read now, not those that an open step computes.
    Read,
    /// A prefill, which computes the last `replay` matched tokens again.
    Prefill { replay: usize },
}

/// All blocks. A block's references are the two counts of its [`BlockMeta`], and those of pins in [`Shared`]. Only the
/// latter are atomic: nothing but pins is released without the manager.
pub(crate) struct Pool {
    queue: FreeQueue,
    /// The cached block that each block id holds.
    cached: Vec<NodePosition>,
    policy: Policy,
    tree: RadixTree,
    shared: Arc<Shared>,
    /// Blocks in the tables of live sequences.
    active: usize,
    /// Blocks that transfers are to fill.
    loading: usize,
    open: OpenSteps,
    /// If events are on.
    events: Option<EventLog>,
    /// Blocks that allocations evicted, if they are kept: the latest, at least as many as the pool has. Earlier ones have
    /// been overwritten.
    evicted: Option<Vec<Evicted>>,
    /// Past evictions, if misses are explained.
    pub(crate) history: Option<Box<EvictionHistory>>,
    /// If the model has state layers.
    snapshots: Option<Box<Snapshots>>,
    weights_version: u32,
    /// The version of the weights when each block was allocated.
    versions: Vec<u32>,
    pub(crate) stats: Stats,
}

impl Pool {
    pub(crate) fn new(config: &Config, shared: Arc<Shared>) -> Result<Self, TryReserveError> {
        let num_blocks = config.num_blocks;
        let seed = config.hash_seed.unwrap_or_else(ContentHasher::random_seed);
        let hasher = ContentHasher::new(seed, config.hash_bits);
        let mut cached = Vec::new();
        cached.try_reserve_exact(num_blocks)?;
        cached.resize(num_blocks, NodePosition::NONE);
        let mut versions = Vec::new();
        versions.try_reserve_exact(num_blocks)?;
        versions.resize(num_blocks, 0);
        let mut queue = FreeQueue::new(num_blocks)?;
        let (mut batch, ids) = (queue.begin_push(), (0..num_blocks).map(BlockId::new));
        ids.rev().for_each(|block| batch.push(block));
        batch.end();
        let policy = Policy::new(config.eviction, num_blocks);
        let groups = config.groups.len();
        let mut tree = RadixTree::new(num_blocks, config.block_size, groups, hasher);
        if config.events || config.keep_evicted || config.explain || policy.has_ghosts() {
            tree.reserve_hashes()?;
        }
        let explains = config.explain;
        let history = explains.then(|| EvictionHistory::new(num_blocks));
        Ok(Self {
            queue,
            cached,
            policy,
            tree,
            shared,
            active: 0,
            loading: 0,
            open: OpenSteps::default(),
            events: config.events.then(|| EventLog::new(num_blocks)),
            evicted: config.keep_evicted.then(Vec::new),
            history: history.map(Box::new),
            snapshots: (config.state)
                .map(|state| Box::new(Snapshots::new(state, num_blocks, config.block_size))),
            weights_version: 0,
            versions,
            stats: Stats::default(),
        })
    }

    /// Bytes per block, without the tree.
    pub(crate) const BYTES_PER_BLOCK: usize =
        FreeQueue::BYTES_PER_BLOCK + size_of::<NodePosition>() + 2 * size_of::<u32>();

    pub(crate) fn num_blocks(&self) -> usize {
        self.cached.len()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[inline]
    pub(crate) fn available(&self) -> usize {
        self.queue.len()
    }

    /// The prefix index. Only the pool changes it.
    #[inline]
    pub(crate) fn tree(&self) -> &RadixTree {
        &self.tree
    }

    pub(crate) fn usage(&self) -> PoolUsage {
        let free = self.queue.len_of(List::Free);
        PoolUsage {
            free,
            evictable: self.queue.len() - free,
            active: self.active,
            pinned: self.num_blocks() - self.queue.len() - self.active - self.loading,
            loading: self.loading,
        }
    }

    pub(crate) fn stats(&mut self) -> Stats {
        self.hash_stored_blocks();
        Stats {
            hashed_blocks: self.tree.num_hashed(),
            collisions: self.tree.num_collisions(),
            ..self.stats
        }
    }

    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        let is_cached = self.cached_at(block).is_some();
        if self.is_loading(block) {
            return BlockState::Loading;
        }
        match (self.is_queued(block), is_cached, self.seq_refs(block)) {
            (true, false, _) => BlockState::Free,
            (true, true, _) => BlockState::Evictable,
            (false, _, 1..) => BlockState::Active,
            (false, _, 0) => BlockState::Pinned,
        }
    }

    /// The whole pool, after `steps` steps.
    pub(crate) fn snapshot(&self, steps: u64) -> PoolSnapshot {
        let ids = || (0..self.num_blocks()).map(BlockId::new);
        let (tree, numbers) = self.tree.snapshot();
        let of_cached = |value: &dyn Fn(NodePosition, &BlockMeta) -> u32| {
            let value = |(&cached, meta): (&NodePosition, &BlockMeta)| match cached {
                NodePosition::NONE => 0,
                cached => value(cached, meta),
            };
            let blocks = self.cached.iter().zip(self.queue.metas());
            blocks.map(value).collect()
        };
        PoolSnapshot {
            states: ids().map(|block| self.state(block) as u8).collect(),
            refs: ids().map(|block| self.refs(block)).collect(),
            seq_refs: ids().map(|block| self.seq_refs(block)).collect(),
            ages: of_cached(&|_, meta| match meta.loading {
                true => 0,
                false => (steps as u32).wrapping_sub(meta.step),
            }),
            nodes: of_cached(&|cached, _| numbers[cached.node.at()]),
            node_indices: of_cached(&|cached, _| cached.offset),
            tree,
        }
    }

    #[inline]
    pub(crate) fn refs(&self, block: BlockId) -> u32 {
        let counts = self.queue.meta(block).counts();
        counts.seq_refs + counts.plan_pins + self.shared.pin_refs_of(block)
    }

    /// Live sequences whose table contains the block.
    #[inline]
    pub(crate) fn seq_refs(&self, block: BlockId) -> u32 {
        self.queue.meta(block).counts().seq_refs
    }

    /// The cached block that a block id holds.
    #[inline]
    pub(crate) fn cached_at(&self, block: BlockId) -> Option<NodePosition> {
        self.cached[block.at()].some()
    }

    #[inline]
    pub(crate) fn is_queued(&self, block: BlockId) -> bool {
        self.queue.meta(block).is_queued()
    }

    /// The blocks without references: the free ones, then the evictable ones of each list.
    pub(crate) fn queued(&self) -> Vec<BlockId> {
        let lists = [List::Free].into_iter().chain(List::ALL_EVICTABLE);
        lists.flat_map(|list| self.queue.iter(list)).collect()
    }

    pub(crate) fn set_open_steps(&mut self, open: OpenSteps) {
        self.open = open;
    }

    /// Whether a block's KV exists: no open step is to compute it, and no transfer is to load it.
    #[inline]
    pub(crate) fn is_ready(&self, block: BlockId) -> bool {
        self.open.are_done_with(self.queue.meta(block))
    }

    /// Whether all blocks that hold a cached block are ready.
    pub(crate) fn are_ready(&self, cached: NodePosition) -> bool {
        self.tree.blocks(cached).all(|block| self.is_ready(block))
    }

    /// Finds the longest cached continuation of a registered prefix of `tokens`.
    pub(crate) fn find_match(
        &mut self,
        matched: &mut Match,
        groups: &Groups,
        tokens: Labelled<'_>,
        prefix: Registered,
        purpose: Purpose,
    ) {
        let (queue, open) = (&self.queue, self.open);
        let is_ready = |block: BlockId| open.are_done_with(queue.meta(block));
        let (tree, last, indices) = (&mut self.tree, prefix.last, prefix.end());
        match purpose {
            Purpose::Read => {
                matched.begin(last, 0);
                tree.find_match(matched, groups, tokens, indices, is_ready);
            }
            Purpose::Prefill { replay } => {
                matched.begin(last, replay);
                tree.find_match(matched, groups, tokens, indices, |_| true);
            }
        }
    }

    /// The block after `position` with the longest prefix in common with `tokens`, of at least `min_tokens`, that is
    /// ready in every layer group; and the length of that prefix.
    pub(crate) fn longest_partial_match(
        &self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
        min_tokens: usize,
    ) -> Option<(NodePosition, usize)> {
        let is_ready = |candidate| {
            let mut groups = 0..self.tree.groups();
            groups.all(|group| {
                let block = self.tree.block(candidate, group);
                block.is_some_and(|block| self.is_ready(block))
            })
        };
        let max_children = MAX_COMPARED_CHILDREN;
        self.tree
            .longest_partial_match(position, tokens, label, min_tokens, max_children, is_ready)
    }

    /// The block that follows `position` with exactly these tokens and this label.
    #[inline]
    pub(crate) fn next(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
    ) -> Option<NodePosition> {
        self.tree.next(position, tokens, label)
    }

    /// Keeps a block in the tree while an allocation may evict its block ids; `NONE` ends it.
    pub(crate) fn protect(&mut self, position: NodePosition) {
        self.tree.protect(position);
    }

    /// The root of `namespace` for a new sequence.
    pub(crate) fn acquire_root(&mut self, namespace: &[u8]) -> NodePosition {
        self.tree.acquire_root(namespace)
    }

    pub(crate) fn share_root(&mut self, root: NodePosition) {
        self.tree.share_root(root);
    }

    /// Ends a sequence under `root` whose registered prefix ends at `last`.
    pub(crate) fn release_root(&mut self, root: NodePosition, last: NodePosition) {
        self.tree.shrink_node(last.node);
        self.tree.release_root(root);
    }

    /// Adds a table entry of a block, which may be in the queue.
    #[inline]
    pub(crate) fn hold(&mut self, block: BlockId) {
        self.queue.unlink(block);
        self.hold_all(&[block]);
    }

    /// Adds a table entry of each of these blocks, none of which is queued.
    #[inline]
    pub(crate) fn hold_all(&mut self, blocks: &[BlockId]) {
        let first = |&block: &BlockId| hold(self.queue.meta_mut(block));
        self.active += blocks.iter().map(first).sum::<usize>();
    }

    /// Adds a table entry of each of these cached blocks. Returns how many an open step is to compute.
    #[inline(never)] // inlined into a prefill, its loop would spill registers
    pub(crate) fn hold_cached(&mut self, blocks: &[BlockId]) -> usize {
        let (open, list) = (self.open, self.policy.list_of_reused());
        let (mut first, mut in_flight) = (0, 0);
        self.queue.unlink_all(blocks, |meta| {
            first += hold(meta);
            meta.list = list;
            in_flight += usize::from(open.contain(meta.step));
        });
        self.active += first;
        in_flight
    }

    #[inline]
    pub(crate) fn release(&mut self, block: BlockId) {
        self.release_all(&[block]);
    }

    /// Removes a table entry of each of these blocks, the last one first.
    #[inline(never)] // as `hold_cached`
    pub(crate) fn release_all(&mut self, blocks: &[BlockId]) {
        let (mut queue, shared) = (self.queue.begin_push(), &self.shared);
        let (mut inactive, has_pins) = (0, shared.has_pins());
        for &block in blocks.iter().rev() {
            let meta = queue.meta_mut(block);
            let seq_refs = meta.seq_refs_mut();
            *seq_refs -= 1;
            if *seq_refs == 0 {
                inactive += 1;
                if *meta.plan_pins_mut() == 0 && !(has_pins && shared.pin_refs_of(block) > 0) {
                    queue.push(block);
                }
            }
        }
        queue.end();
        self.active -= inactive;
    }

    /// Removes a block from the queue before a pin or a plan holds it.
    pub(crate) fn take_out(&mut self, block: BlockId) {
        self.queue.unlink(block);
        self.queue.meta_mut(block).list = self.policy.list_of_reused();
    }

    /// Queues those of the blocks that have no reference, after a pin or a plan released them.
    pub(crate) fn enqueue_unused(&mut self, blocks: &[BlockId]) {
        let mut queue = self.queue.begin_push();
        for &block in blocks {
            let meta = queue.meta_mut(block);
            let held = meta.counts() != Counts::default() || self.shared.pin_refs_of(block) > 0;
            if !held && !meta.is_queued() {
                queue.push(block);
            }
        }
        queue.end();
    }

    /// Pins the source of a partial copy for a plan. The block may be in the queue.
    pub(crate) fn pin_source(&mut self, block: BlockId) {
        self.take_out(block);
        self.pin(block);
    }

    /// Pins a block for a plan that reads it.
    pub(crate) fn pin(&mut self, block: BlockId) {
        *self.queue.meta_mut(block).plan_pins_mut() += 1;
    }

    pub(crate) fn unpin(&mut self, block: BlockId) {
        *self.queue.meta_mut(block).plan_pins_mut() -= 1;
        self.enqueue_unused(&[block]);
    }

    /// Allocates `count` blocks, evicting as needed, and adds them to `taken`, each with one table entry. The caller
    /// has checked that they are available.
    pub(crate) fn take(&mut self, count: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + count;
        self.queue.pop_front(List::Free, count, taken);
        match self.snapshots {
            None => self.take_victims(end - taken.len(), taken),
            Some(_) => self.take_with_snapshots(end - taken.len(), taken),
        }
        if self.weights_version > 0 {
            self.stamp(&taken[end - count..]);
        }
        self.active += count;
        self.stats.allocated_blocks += count as u64;
    }

    /// Evicts the next `count` blocks and adds them to `taken`, each with one table entry.
    #[inline]
    fn take_victims(&mut self, count: usize, taken: &mut Vec<BlockId>) {
        let (evicted, end) = (taken.len(), taken.len() + count);
        while taken.len() < end {
            let (list, max_count) = self.policy.victims(&self.queue);
            self.queue
                .pop_front(list, max_count.min(end - taken.len()), taken);
        }
        if evicted < taken.len() {
            self.hash_stored_blocks();
            if self.evicted.is_some() | self.history.is_some() {
                self.keep_evicted(&taken[evicted..]);
            }
        }
        let mut run = EvictedRun::default();
        for &block in &taken[evicted..] {
            self.evict(block, &mut run);
        }
        self.end_run(run);
    }

    /// Keeps a record of evicted blocks.
    #[cold]
    fn keep_evicted(&mut self, blocks: &[BlockId]) {
        self.remember(blocks, EvictedBy::Policy(self.policy.kind()));
        if self.evicted.is_none() {
            return;
        }
        let (queue, tree) = (&self.queue, &mut self.tree);
        let records = blocks.iter().filter_map(|&block| {
            let group = usize::from(queue.meta(block).group);
            tree.evicted(self.cached[block.at()], group, block)
        });
        if let Some(evicted) = &mut self.evicted {
            evicted.extend(records);
            let max_kept = self.cached.len();
            if evicted.len() > 2 * max_kept {
                evicted.drain(..evicted.len() - max_kept);
            }
        }
    }

    /// Adds cached blocks that are about to be evicted to the history.
    #[cold]
    fn remember(&mut self, blocks: &[BlockId], by: EvictedBy) {
        let Some(history) = &mut self.history else {
            return;
        };
        let cached = |block: &BlockId| self.cached[block.at()];
        for run in blocks.chunk_by(|a, b| cached(a).node == cached(b).node) {
            let own = history.of(&self.tree.namespace(cached(&run[0])));
            for block in run {
                if let Some(hash) = self.tree.hash(cached(block)) {
                    own.add(hash, by);
                }
            }
        }
    }

    /// The blocks that allocations evicted since the last call.
    pub(crate) fn take_evicted(&mut self) -> Vec<Evicted> {
        let evicted = self.evicted.as_mut().map(std::mem::take);
        evicted.unwrap_or_default()
    }

    /// Evicts the next `count` blocks, or all of them, for the caller to pin. They are in no list. Also returns a record
    /// of each.
    pub(crate) fn evict_next(&mut self, count: usize) -> (Vec<BlockId>, Vec<Evicted>) {
        let kept = self.evicted.replace(Vec::new());
        let evictable = self.queue.len() - self.queue.len_of(List::Free);
        let mut taken = Vec::new();
        if self.snapshots.is_some() {
            taken = self.evict_next_with_snapshots(count);
        } else {
            self.take_victims(count.min(evictable), &mut taken);
        }
        for &block in &taken {
            *self.queue.meta_mut(block).seq_refs_mut() = 0;
        }
        let evicted = std::mem::replace(&mut self.evicted, kept);
        (taken, evicted.unwrap_or_default())
    }

    /// Evicts a block: it is no longer cached.
    #[inline(always)] // every block of a cold prompt comes here
    fn evict(&mut self, block: BlockId, run: &mut EvictedRun) {
        let (cached, group) = self.clear(block);
        if self.policy.has_ghosts()
            && let Some(hash) = self.tree.hash(cached)
        {
            self.policy.add_ghost(Ghost { hash, group });
        }
        self.remove(cached, group, run);
        self.stats.evicted_blocks += 1;
    }

    /// Removes cached blocks, of at most one table each, from the prefix index.
    pub(crate) fn discard(&mut self, blocks: &[BlockId]) {
        self.hash_stored_blocks();
        let mut run = EvictedRun::default();
        for &block in blocks {
            self.queue.unlink(block);
            let (cached, group) = self.clear(block);
            self.remove(cached, group, &mut run);
            self.evict_snapshot(cached);
        }
        self.end_run(run);
        self.enqueue_unused(blocks);
        self.stats.discarded_blocks += blocks.len() as u64;
    }

    /// Removes a layer group's block from the tree. Extends `run`, or ends it and begins the next one.
    #[inline(always)] // as `evict`
    fn remove(&mut self, cached: NodePosition, group: u8, run: &mut EvictedRun) {
        // A node is usually evicted from its end, so its blocks are emitted and truncated together.
        if cached.node != run.node {
            self.end_run(*run);
            *run = EvictedRun::default();
            run.node = cached.node;
        }
        self.tree
            .set_block(cached, usize::from(group), BlockId::NONE);
        // With one layer group it was the only block.
        let is_held = self.tree.groups() > 1 && self.tree.is_held(cached);
        if self.events.is_some() && !is_held {
            if cached.offset + 1 != run.first {
                self.emit_removed(*run);
                run.last = cached.offset;
            }
            run.first = cached.offset;
        }
    }

    /// Emits the evicted blocks of a node and truncates it.
    fn end_run(&mut self, run: EvictedRun) {
        if run.node != NodeId::NONE {
            self.emit_removed(run);
            self.tree.truncate(run.node);
        }
    }

    fn emit_removed(&mut self, EvictedRun { node, first, last }: EvictedRun) {
        if let Some(events) = self.events.as_mut().filter(|_| last > 0) {
            match events.is_lost() {
                true => events.lose((last + 1 - first) as usize),
                false => events.remove(self.tree.hashes(node, first, last)),
            }
        }
    }

    /// Evicts every evictable block. Returns how many.
    pub(crate) fn evict_all(&mut self) -> usize {
        let lists = List::ALL_EVICTABLE.into_iter();
        let mut evictable: Vec<BlockId> = lists.flat_map(|list| self.queue.iter(list)).collect();
        let num_evicted = evictable.len();
        self.hash_stored_blocks();
        if self.snapshots.is_some() {
            evictable.retain(|&block| {
                let is_snapshot = self.is_snapshot(block);
                if is_snapshot {
                    self.evict_snapshot(self.cached[block.at()]);
                }
                !is_snapshot && self.cached_at(block).is_some()
            });
        }
        self.remember(&evictable, EvictedBy::EvictAll);
        if let Some(events) = &mut self.events {
            events.seal();
        }
        for &block in &evictable {
            self.queue.unlink(block);
            let mut run = EvictedRun::default();
            self.evict_snapshot(self.cached[block.at()]);
            self.evict(block, &mut run);
            self.end_run(run);
            self.enqueue_unused(&[block]);
        }
        let is_empty = self.tree.cached().next().is_none();
        if let Some(events) = self.events.as_mut()
            && !evictable.is_empty()
            && is_empty
        {
            events.clear(self.weights_version);
        }
        num_evicted
    }

    /// Removes a block from the prefix index, if it is cached.
    pub(crate) fn forget(&mut self, block: BlockId) {
        if self.cached_at(block).is_some() {
            let (cached, group) = self.clear(block);
            self.evict_snapshot(cached);
            self.tree.clear_block(cached, usize::from(group));
        }
    }

    /// Clears the cached block of a block id. Returns its position and layer group.
    #[inline(always)] // as `evict`
    fn clear(&mut self, block: BlockId) -> (NodePosition, u8) {
        let cached = std::mem::replace(&mut self.cached[block.at()], NodePosition::NONE);
        let meta = self.queue.meta_mut(block);
        meta.list = List::Free;
        (cached, meta.group)
    }

    /// Caches a block for a layer group that had none at this position, computed in `step`.
    #[inline]
    pub(crate) fn store(&mut self, cached: NodePosition, group: usize, block: BlockId, step: u32) {
        self.tree.set_block(cached, group, block);
        self.mark(cached, group, block, step);
    }

    /// Caches blocks after `position`, the first of which is not in the tree, and has this label. `blocks`: by block, then
    /// by layer group. Returns the position of the last one.
    pub(crate) fn append(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        blocks: &[BlockId],
        step: u32,
        label: Option<&Label>,
    ) -> NodePosition {
        let end = self.tree.append(position, tokens, blocks, label);
        let mut at = match end.node == position.node {
            true => position,
            false => NodePosition::new(end.node, 0),
        };
        let mut groups = 0..0;
        for &block in blocks {
            let group = groups.next().unwrap_or_else(|| {
                at.offset += 1;
                groups = 1..self.tree.groups();
                0
            });
            self.mark(at, group, block, step);
        }
        end
    }

    /// Records a cached block with its block id.
    #[inline(always)] // every block that becomes cached comes here
    fn mark(&mut self, cached: NodePosition, group: usize, block: BlockId, step: u32) {
        self.cached[block.at()] = cached;
        let (meta, group) = (self.queue.meta_mut(block), group as u8);
        (meta.step, meta.group, meta.list) = (step, group, List::Probation);
        if self.policy.has_ghosts()
            && let Some(hash) = self.tree.hash(cached)
            && self.policy.has_ghost(Ghost { hash, group })
        {
            meta.list = self.policy.list_of_reused();
        }
    }

    /// Replaces an evictable block in the tree by the block that computed it again.
    pub(crate) fn take_over(
        &mut self,
        evictable: BlockId,
        group: usize,
        block: BlockId,
        step: u32,
    ) {
        let list = self.queue.meta(evictable).list;
        self.queue.unlink(evictable);
        let (cached, _) = self.clear(evictable);
        self.enqueue_unused(&[evictable]);
        self.store(cached, group, block, step);
        if list == List::Protected {
            self.queue.meta_mut(block).list = list;
        }
        self.stats.taken_over_blocks += 1;
    }

    /// Emits that the `count` blocks up to `end` are newly cached.
    #[inline]
    pub(crate) fn emit_stored(&mut self, end: NodePosition, count: usize) {
        self.stats.registered_blocks += count as u64;
        if let Some(events) = self.events.as_mut().filter(|_| count > 0) {
            events.store(end, count);
            // Hashed by the call that stores them, so that a later call has a bounded number to hash.
            if events.num_stored() > MAX_UNHASHED {
                self.hash_stored_blocks();
            }
        }
    }

    /// Hashes the stored blocks: before an eviction, and when events or counters are read.
    fn hash_stored_blocks(&mut self) {
        if let Some(events) = &mut self.events {
            let tree = &mut self.tree;
            events.hash_stored(|end, count, events| tree.append_stored(end, count, events));
        }
    }

    pub(crate) fn num_pending_events(&self) -> usize {
        match &self.events {
            None => 0,
            Some(events) if events.is_lost() => self.tree.len(),
            Some(events) => events.num_pending(),
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.hash_stored_blocks();
        let Some(log) = &mut self.events else {
            return Vec::new();
        };
        let (is_lost, mut events) = (log.is_lost(), log.take(self.weights_version));
        if is_lost {
            self.append_cached(&mut events);
        }
        events
    }

    pub(crate) fn cached_hashes(&mut self) -> Vec<u128> {
        self.hash_stored_blocks();
        let ready = self.ready().into_iter();
        ready.filter_map(|cached| self.tree.hash(cached)).collect()
    }

    /// The cached blocks whose KV exists in a layer group; those of a node in order.
    fn ready(&self) -> Vec<NodePosition> {
        let is_ready =
            |cached: &NodePosition| self.tree.blocks(*cached).any(|block| self.is_ready(block));
        self.tree.cached().filter(is_ready).collect()
    }
}

/// Adds a table entry; 1 if it is the block's first one.
#[inline]
fn hold(meta: &mut BlockMeta) -> usize {
    let seq_refs = meta.seq_refs_mut();
    *seq_refs += 1;
    usize::from(*seq_refs == 1)
}
