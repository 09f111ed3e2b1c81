//! Snapshots of states: copies of what the state layers keep, at block boundaries.
//!
//! A snapshot takes a fixed number of blocks of the pool, any free ones. It is cached under the last block of its prefix,
//! found on the path to it, evicted on its own, and freed as soon as that block is no longer cached in all layer groups:
//! without it the snapshot cannot be reached.
//!
//! *Spare* snapshots were kept only in case a later request diverges there. They have a share of the pool: beyond it, they
//! are evicted before everything else; within it, after everything else.

use super::{EvictedRun, Pool, Purpose};
use crate::groups::Groups;
use crate::ids::{BlockId, NodePosition};
use crate::queue::List;
use crate::radix::{Match, RadixTree, Reach};
use crate::sequence::Registered;
use crate::snapshots::Snapshots;
use crate::stats::StateUsage;
use crate::switch::Labelled;

impl Pool {
    /// The snapshots, if the model has state layers.
    #[inline]
    pub(crate) fn snapshots(&self) -> Option<&Snapshots> {
        self.snapshots.as_deref()
    }

    /// The cached snapshots with their positions.
    pub(super) fn cached_snapshots(
        &self,
    ) -> impl Iterator<Item = (NodePosition, &Vec<BlockId>)> + '_ {
        let snapshots = self.snapshots.iter();
        snapshots.flat_map(|of| of.cached.iter().map(|(&at, blocks)| (at, blocks)))
    }

    /// For the tests of validators, which corrupt them.
    #[cfg(test)]
    pub(crate) fn cached_snapshots_mut(
        &mut self,
    ) -> &mut std::collections::BTreeMap<NodePosition, Vec<BlockId>> {
        let snapshots = self.snapshots.as_mut();
        &mut snapshots.expect("a model with states").cached
    }

    pub(crate) fn state_usage(&self) -> StateUsage {
        let snapshots = self.cached_snapshots().count();
        let blocks = self.cached_snapshots().map(|(_, blocks)| blocks.len());
        StateUsage {
            snapshots,
            blocks: blocks.sum(),
            spare_blocks: self.queue.len_of(List::Spare),
            pending_blocks: 0,
        }
    }

    /// The layer group under which the blocks of snapshots are marked: one more than those with tables.
    fn state_group(&self) -> usize {
        self.tree.groups()
    }

    /// Whether a cached block is a snapshot's.
    pub(super) fn is_snapshot(&self, block: BlockId) -> bool {
        usize::from(self.queue.meta(block).group) == self.state_group()
            && self.cached_at(block).is_some()
    }

    /// The blocks of the snapshot at a position.
    pub(crate) fn snapshot_at(&self, position: NodePosition) -> Option<&[BlockId]> {
        let snapshots = self.snapshots.as_ref()?;
        snapshots.cached.get(&position).map(Vec::as_slice)
    }

    /// The last snapshot on the path to `position`, which is `indices` logical blocks long; and its own length.
    pub(crate) fn last_snapshot(
        &self,
        position: NodePosition,
        indices: usize,
    ) -> Option<(NodePosition, usize)> {
        let snapshots = self.snapshots.as_ref()?;
        snapshots.last(&self.tree, position, indices)
    }

    /// As [`Pool::find_match`], for a model with state layers: also finds where the state begins. `base`: the position of
    /// the sequence's own state. The state begins at most at `cap`, and `replay` tokens before the end of the match.
    pub(crate) fn find_match_with_state(
        &mut self,
        matched: &mut Match,
        groups: &Groups,
        prompt: Labelled<'_>,
        prefix: Registered,
        purpose: Purpose,
        (base, cap): (usize, usize),
    ) {
        let (queue, open) = (&self.queue, self.open);
        let Some(snapshots) = self.snapshots.as_deref() else {
            return;
        };
        let (reads, replay) = match purpose {
            Purpose::Read => (true, 0),
            Purpose::Prefill { replay } => (false, replay),
        };
        let usable = |block: BlockId| !reads || open.are_done_with(queue.meta(block));
        let (tree, from, size) = (&mut self.tree, prefix.end(), groups.block_size());
        // The last snapshot from which a match of `indices` logical blocks may be continued, and its position.
        let start = |tree: &RadixTree, last: NodePosition, indices: usize| {
            let cap = cap.min((indices * size).saturating_sub(replay)) / size;
            let at = tree.ancestor(last, indices - cap.min(indices));
            let snapshot = snapshots.last(tree, at, cap.min(indices));
            let snapshot = snapshot.filter(|(_, length)| length * size > base);
            snapshot.map_or((NodePosition::NONE, base), |(at, length)| {
                (at, length * size)
            })
        };
        matched.begin(prefix.last, 0);
        (matched.snapshot, matched.start) = (NodePosition::NONE, base);
        if groups.is_one() {
            tree.find_match(matched, groups, prompt, from, usable);
            let indices = from + matched.num_indices;
            if matched.num_indices > 0 {
                (matched.snapshot, matched.start) = start(tree, matched.last, indices);
                matched.replay = indices * size - matched.start;
            }
            return;
        }
        let (mut position, mut hit) = (prefix.last, (NodePosition::NONE, base));
        let mut replay = 0;
        matched.begin_groups(groups, from);
        let rest = prompt.tokens.get(from * size..).unwrap_or_default();
        for (index, tokens) in rest.chunks_exact(size).enumerate() {
            let Some(next) = tree.next(position, tokens, prompt.label(from + index)) else {
                break;
            };
            let indices = from + index + 1;
            let begin = start(tree, next, indices);
            matched.replay = indices * size - begin.1;
            let block = |group| tree.block(next, group).filter(|&block| usable(block));
            match matched.push(groups, indices, (0..groups.len()).map(block)) {
                Reach::Ends => break,
                Reach::Passes => {}
                Reach::Hits => {
                    (matched.last, matched.num_indices) = (next, index + 1);
                    (hit, replay) = (begin, matched.replay);
                }
            }
            position = next;
        }
        (matched.snapshot, matched.start) = hit;
        matched.replay = replay;
        matched.blocks.truncate(matched.num_indices * groups.len());
    }

    /// Allocates the blocks of a snapshot that an open step writes, and pins them for it. The caller has checked that
    /// they are available.
    pub(crate) fn take_for_snapshot(&mut self, is_spare: bool) -> Vec<BlockId> {
        let count = self.snapshots.as_ref().map_or(0, |of| of.config.blocks);
        if is_spare {
            self.evict_old_spares(count);
        }
        let mut taken = Vec::with_capacity(count);
        self.take(count, &mut taken);
        for &block in &taken {
            let meta = self.queue.meta_mut(block);
            (*meta.seq_refs_mut(), *meta.plan_pins_mut()) = (0, 1);
        }
        self.active -= count;
        taken
    }

    /// Evicts the oldest spare snapshots while they would exceed their share with `count` blocks more, and no free
    /// blocks are left for these.
    fn evict_old_spares(&mut self, count: usize) {
        let share = self.snapshots.as_ref().map_or(0, |of| of.share);
        while self.queue.len_of(List::Free) < count
            && self.queue.len_of(List::Spare) + count > share
        {
            let Some(oldest) = self.queue.iter(List::Spare).next() else {
                return;
            };
            self.evict_snapshot(self.cached[oldest.at()]);
        }
    }

    /// Caches a snapshot that `step` has written, unless there is one at its position. The caller unpins its blocks.
    /// Returns whether it is cached now.
    pub(crate) fn store_snapshot(
        &mut self,
        position: NodePosition,
        blocks: &[BlockId],
        step: u32,
        is_spare: bool,
    ) -> bool {
        let is_whole = self.tree.blocks(position).count() == self.tree.groups();
        let group = self.state_group() as u8;
        let Some(snapshots) = self.snapshots.as_mut().filter(|_| is_whole) else {
            return false;
        };
        if snapshots.cached.contains_key(&position) {
            self.stats.merged_snapshots += 1;
            return false;
        }
        snapshots.cached.insert(position, blocks.to_vec());
        for &block in blocks {
            self.cached[block.at()] = position;
            let meta = self.queue.meta_mut(block);
            (meta.step, meta.group) = (step, group);
            meta.list = match is_spare {
                true => List::Spare,
                false => List::Probation,
            };
        }
        self.stats.saved_snapshots += 1;
        true
    }

    /// Pins the snapshot at a position for a plan that loads it. It is no longer spare.
    pub(crate) fn pin_snapshot(&mut self, position: NodePosition) -> Vec<BlockId> {
        let blocks = self.snapshot_at(position).unwrap_or_default().to_vec();
        blocks.iter().for_each(|&block| self.pin_source(block));
        blocks
    }

    /// Removes the snapshot at a position, if there is one, from the cache. Its blocks are free, or will be once their
    /// last pin ends.
    pub(crate) fn evict_snapshot(&mut self, position: NodePosition) {
        let snapshots = self.snapshots.as_mut();
        let Some(blocks) = snapshots.and_then(|of| of.cached.remove(&position)) else {
            return;
        };
        for &block in &blocks {
            self.queue.unlink(block);
            self.clear(block);
            self.queue.meta_mut(block).group = 0;
        }
        self.enqueue_unused(&blocks);
        self.stats.evicted_snapshots += 1;
    }

    /// Removes the snapshot at a position unless it is held.
    pub(crate) fn drop_unused_snapshot(&mut self, position: NodePosition) {
        let is_unused = |blocks: &[BlockId]| blocks.iter().all(|&block| self.is_queued(block));
        if self.snapshot_at(position).is_some_and(is_unused) {
            self.evict_snapshot(position);
        }
    }

    /// Counts the snapshots on the path to `position` as used now, the shortest prefix last. Spare ones keep their age.
    #[cold]
    pub(crate) fn touch_snapshots(&mut self, position: NodePosition) {
        let mut next = self.last_snapshot(position, usize::MAX);
        while let Some((at, _)) = next {
            let blocks = self.snapshot_at(at).unwrap_or_default().to_vec();
            if blocks.iter().all(|&block| self.is_recent(block)) {
                blocks.iter().for_each(|&block| self.queue.unlink(block));
                self.enqueue_unused(&blocks);
            }
            let before = self.tree.parent(at);
            next = before.and_then(|before| self.last_snapshot(before, usize::MAX));
        }
    }

    /// Whether the snapshot at a position is spare.
    pub(crate) fn is_spare(&self, position: NodePosition) -> bool {
        let mut blocks = self.snapshot_at(position).unwrap_or_default().iter();
        blocks.any(|&block| self.queue.meta(block).list == List::Spare)
    }

    fn is_recent(&self, block: BlockId) -> bool {
        self.is_queued(block) && self.queue.meta(block).list != List::Spare
    }

    /// The block that is evicted next: a spare snapshot's if these exceed their share or nothing else is evictable.
    fn next_victim(&self) -> Option<BlockId> {
        let share = self.snapshots.as_ref().map_or(0, |of| of.share);
        let spare = self.queue.len_of(List::Spare);
        let others = List::EVICTABLE.map(|list| self.queue.len_of(list));
        let list = match others.iter().sum() {
            0 => List::Spare,
            _ if spare > share => List::Spare,
            1.. => self.policy.victims(&self.queue).0,
        };
        self.queue.iter(list).next()
    }

    /// As `take_victims`, for a pool with snapshots: `count` blocks that are free now, or are evicted.
    #[cold]
    pub(super) fn take_with_snapshots(&mut self, count: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + count;
        while taken.len() < end {
            self.queue.pop_front(List::Free, end - taken.len(), taken);
            if taken.len() < end {
                let Some(victim) = self.next_victim() else {
                    debug_assert!(false, "blocks are taken that are not available");
                    return;
                };
                self.evict_victim(victim);
            }
        }
    }

    /// Evicts the next blocks, at least `count` with those of snapshots, which are free then. Returns the others.
    pub(super) fn evict_next_with_snapshots(&mut self, count: usize) -> Vec<BlockId> {
        let (mut taken, mut left) = (Vec::new(), count);
        while left > 0
            && let Some(victim) = self.next_victim()
        {
            if self.is_snapshot(victim) {
                let blocks = self.snapshots.as_ref().map_or(0, |of| of.config.blocks);
                left = left.saturating_sub(blocks);
                self.evict_victim(victim);
                continue;
            }
            left -= 1;
            self.evict_victim(victim);
            self.queue.unlink(victim);
            taken.push(victim);
        }
        taken
    }

    /// Evicts a block, or the snapshot that it is part of: it is free then.
    fn evict_victim(&mut self, victim: BlockId) {
        let position = self.cached[victim.at()];
        if self.is_snapshot(victim) {
            self.evict_snapshot(position);
            return;
        }
        self.hash_stored_blocks();
        if self.evicted.is_some() | self.history.is_some() {
            self.keep_evicted(&[victim]);
        }
        self.queue.unlink(victim);
        let mut run = EvictedRun::default();
        self.evict(victim, &mut run);
        self.evict_snapshot(position);
        self.end_run(run);
        self.enqueue_unused(&[victim]);
    }
}
