//! The pool guards itself: every block that gets a holder, loses one, gets a content or loses it goes
//! through here, and nobody else sees counters, queue and contents together.

#[path = "pool/check.rs"]
mod check;

use std::collections::TryReserveError;

use crate::config::Config;
use crate::contents::{Contents, Spot};
use crate::event_log::EventLog;
use crate::events::Event;
use crate::eviction::{Ghost, Policy};
use crate::hash::ContentHasher;
use crate::ids::{BlockId, RunId};
use crate::queue::{FreeQueue, List, Place};
use crate::shared::Shared;
use crate::snapshot::PoolSnapshot;
use crate::stats::{BlockState, PoolUsage, Stats};
use crate::sync::Arc;

/// Contents that are stored and not named yet.
const MOST_UNNAMED: usize = 1_024;

/// Rows of a run that go one after the other, the last first.
#[derive(Clone, Copy)]
struct Gone {
    run: RunId,
    first: u32,
    last: u32,
}

impl Gone {
    const NOTHING: Self = Self {
        run: RunId::NONE,
        first: 0,
        last: 0,
    };
}

/// The steps that are open: the oldest and so many from it on. There is no content of a step between them: it
/// would have been rolled back.
#[derive(Clone, Copy, Default)]
pub(crate) struct OpenSteps {
    pub(crate) oldest: u32,
    pub(crate) count: u32,
}

impl OpenSteps {
    /// Whether what a step computes is yet to be there.
    #[inline]
    fn compute(self, step: u32) -> bool {
        step.wrapping_sub(self.oldest) < self.count
    }
}

/// All blocks, and what they hold. The references of a block are the two counts of its place and those of
/// pins, which alone are atomic (in [`Shared`]): nobody else lets go without the manager.
pub(crate) struct Pool {
    queue: FreeQueue,
    /// The content that each block holds, if that is registered.
    held: Vec<Spot>,
    policy: Policy,
    /// What is known. Blocks are put to contents and taken from them by the pool alone.
    pub(crate) contents: Contents,
    shared: Arc<Shared>,
    /// Blocks in tables of live sequences.
    active: usize,
    open: OpenSteps,
    /// If somebody wants them.
    events: Option<EventLog>,
    pub(crate) stats: Stats,
}

impl Pool {
    /// Every block free.
    pub(crate) fn new(config: &Config, shared: Arc<Shared>) -> Result<Self, TryReserveError> {
        let &Config {
            num_blocks,
            block_size,
            hash_bits,
            ..
        } = config;
        let seed = config.hash_seed.unwrap_or_else(ContentHasher::random_seed);
        let hasher = ContentHasher::new(seed, hash_bits);
        let mut held = Vec::new();
        held.try_reserve_exact(num_blocks)?;
        held.resize(num_blocks, Spot::NONE);
        let mut queue = FreeQueue::over(num_blocks)?;
        let (mut joining, ids) = (queue.joining(), (0..num_blocks).map(BlockId::new));
        ids.rev().for_each(|block| joining.push(block));
        joining.end();
        let policy = Policy::new(config.eviction, num_blocks);
        let mut contents = Contents::new(num_blocks, block_size, config.groups.len(), hasher);
        if config.events || policy.remembers() {
            contents.prepare_names()?;
        }
        Ok(Self {
            queue,
            held,
            policy,
            contents,
            shared,
            active: 0,
            open: OpenSteps::default(),
            events: config.events.then(EventLog::default),
            stats: Stats::default(),
        })
    }

    /// Bytes per block, without contents.
    pub(crate) const BYTES_PER_BLOCK: usize =
        FreeQueue::BYTES_PER_BLOCK + size_of::<Spot>() + size_of::<u32>();

    pub(crate) fn num_blocks(&self) -> usize {
        self.held.len()
    }

    /// Blocks that an allocation can take.
    #[inline]
    pub(crate) fn available(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn usage(&self) -> PoolUsage {
        let free = self.queue.len_of(List::Free);
        PoolUsage {
            free,
            evictable: self.queue.len() - free,
            active: self.active,
            pinned: self.num_blocks() - self.queue.len() - self.active,
        }
    }

    pub(crate) fn stats(&mut self) -> Stats {
        self.settle_events();
        Stats {
            hashed_blocks: self.contents.hashed,
            collisions: self.contents.collisions,
            ..self.stats
        }
    }

    pub(crate) fn state(&self, block: BlockId) -> BlockState {
        match (
            self.is_queued(block),
            self.content(block),
            self.seq_refs(block),
        ) {
            (true, None, _) => BlockState::Free,
            (true, Some(_), _) => BlockState::Evictable,
            (false, _, 1..) => BlockState::Active,
            (false, _, 0) => BlockState::Pinned,
        }
    }

    /// Everything that is known of the blocks, after so many steps.
    pub(crate) fn snapshot(&self, steps: u64) -> PoolSnapshot {
        let ids = || (0..self.num_blocks()).map(BlockId::new);
        let (tree, numbers) = self.contents.snapshot();
        let of_content = |each: &dyn Fn(Spot, &Place) -> u32| {
            let each = |(&content, place): (&Spot, &Place)| match content {
                Spot::NONE => 0,
                content => each(content, place),
            };
            let held = self.held.iter();
            held.zip(self.queue.places()).map(each).collect()
        };
        PoolSnapshot {
            states: ids().map(|block| self.state(block) as u8).collect(),
            refs: ids().map(|block| self.refs(block)).collect(),
            seq_refs: ids().map(|block| self.seq_refs(block)).collect(),
            ages: of_content(&|_, place| (steps as u32).wrapping_sub(place.step)),
            nodes: of_content(&|content, _| numbers[content.run.at()]),
            node_indices: of_content(&|content, _| content.rows),
            tree,
        }
    }

    /// All holders.
    #[inline]
    pub(crate) fn refs(&self, block: BlockId) -> u32 {
        let [seq_refs, fences] = self.queue.place(block).counts();
        seq_refs + fences + self.shared.pin_refs_of(block)
    }

    /// Live sequences whose table holds the block.
    #[inline]
    pub(crate) fn seq_refs(&self, block: BlockId) -> u32 {
        self.queue.place(block).counts()[0]
    }

    /// The content that a block holds, if that is registered.
    #[inline]
    pub(crate) fn content(&self, block: BlockId) -> Option<Spot> {
        self.held[block.at()].some()
    }

    #[inline]
    pub(crate) fn is_queued(&self, block: BlockId) -> bool {
        self.queue.place(block).waits()
    }

    /// The blocks that nobody holds: the free ones, then the evictable ones of each list.
    pub(crate) fn queued(&self) -> Vec<BlockId> {
        let lists = [List::Free].into_iter().chain(List::EVICTABLE);
        lists.flat_map(|list| self.queue.iter(list)).collect()
    }

    /// The steps that are open now: contents that they compute are not ready.
    pub(crate) fn set_open_steps(&mut self, open: OpenSteps) {
        self.open = open;
    }

    /// Whether the content of a block is there: no open step is to compute it.
    #[inline]
    pub(crate) fn is_ready(&self, block: BlockId) -> bool {
        !self.open.compute(self.queue.place(block).step)
    }

    /// Whether no open step is to compute any block of a content.
    pub(crate) fn is_there(&self, content: Spot) -> bool {
        let mut blocks = self.contents.blocks(content);
        blocks.all(|block| self.is_ready(block))
    }

    /// As `Contents::follow`, over blocks whose contents are there.
    pub(crate) fn follow_ready(
        &mut self,
        spot: Spot,
        tokens: &[u32],
        found: &mut Vec<BlockId>,
    ) -> Spot {
        let (queue, open) = (&self.queue, self.open);
        let usable = |block: BlockId| !open.compute(queue.place(block).step);
        self.contents.follow(spot, tokens, found, usable)
    }

    /// A table entry more, of a block that may wait in the queue.
    #[inline]
    pub(crate) fn hold(&mut self, block: BlockId) {
        self.queue.unlink(block);
        self.hold_all(&[block]);
    }

    /// A table entry more of each of these, which others hold already.
    #[inline]
    pub(crate) fn hold_all(&mut self, blocks: &[BlockId]) {
        let first = |&block: &BlockId| hold(self.queue.place_mut(block));
        self.active += blocks.iter().map(first).sum::<usize>();
    }

    /// A table entry more of each of these, whose contents are reused. How many an open step is to
    /// compute.
    #[inline(never)] // among the code of a prefill its loop would not be in registers
    pub(crate) fn hold_cached(&mut self, blocks: &[BlockId]) -> usize {
        let (open, list) = (self.open, self.policy.used_again());
        let (mut begin, mut in_flight) = (0, 0);
        self.queue.unlink_all(blocks, |place| {
            begin += hold(place);
            place.list = list;
            in_flight += usize::from(open.compute(place.step));
        });
        self.active += begin;
        in_flight
    }

    /// A table entry less.
    #[inline]
    pub(crate) fn release(&mut self, block: BlockId) {
        self.release_all(&[block]);
    }

    /// A table entry less of each of these, the last one first: one after the other into the queue.
    #[inline(never)] // as `hold_cached`
    pub(crate) fn release_all(&mut self, blocks: &[BlockId]) {
        let (mut queue, shared) = (self.queue.joining(), &self.shared);
        let (mut ended, pinned) = (0, shared.has_pins());
        for &block in blocks.iter().rev() {
            let [seq_refs, fences] = queue.place_mut(block).counts_mut();
            *seq_refs -= 1;
            if *seq_refs == 0 {
                ended += 1;
                if *fences == 0 && !(pinned && shared.pin_refs_of(block) > 0) {
                    queue.push(block);
                }
            }
        }
        queue.end();
        self.active -= ended;
    }

    /// Before a pin or a plan holds a block: it waits no more.
    pub(crate) fn take_out(&mut self, block: BlockId) {
        self.queue.unlink(block);
        self.queue.place_mut(block).list = self.policy.used_again();
    }

    /// A pin or a plan let go of these blocks, one after the other: they wait, if that was their last
    /// holder.
    pub(crate) fn settle(&mut self, blocks: &[BlockId]) {
        let mut queue = self.queue.joining();
        for &block in blocks {
            let place = queue.place_mut(block);
            let held = place.counts() != [0; 2] || self.shared.pin_refs_of(block) > 0;
            if !held && !place.waits() {
                queue.push(block);
            }
        }
        queue.end();
    }

    /// Of the contents that follow `spot` the one that agrees longest with `tokens`, for `least` of them at
    /// least, and is there in a block of every layer group. How long that is.
    pub(crate) fn nearest(
        &self,
        spot: Spot,
        tokens: &[u32],
        least: usize,
    ) -> Option<(Spot, usize)> {
        self.contents.nearest(spot, tokens, least, |content| {
            let mut groups = 0..self.contents.groups();
            groups.all(|group| {
                let block = self.contents.block(content, group);
                block.is_some_and(|block| self.is_ready(block))
            })
        })
    }

    /// A plan copies from a block, which may wait in the queue.
    pub(crate) fn lend(&mut self, block: BlockId) {
        self.take_out(block);
        self.fence(block);
    }

    /// A plan reads a block, whatever becomes of its holders.
    pub(crate) fn fence(&mut self, block: BlockId) {
        self.queue.place_mut(block).counts_mut()[1] += 1;
    }

    /// The plan is closed.
    pub(crate) fn lift_fence(&mut self, block: BlockId) {
        self.queue.place_mut(block).counts_mut()[1] -= 1;
        self.settle(&[block]);
    }

    /// Adds the next `count` blocks of the queue to `taken`, without their old contents, each with one
    /// table entry. The caller has counted that there are as many.
    pub(crate) fn take(&mut self, count: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + count;
        self.queue.pop_heads(List::Free, count, taken);
        let evictable = taken.len();
        while taken.len() < end {
            let (list, most) = self.policy.victims(&self.queue);
            self.queue
                .pop_heads(list, most.min(end - taken.len()), taken);
        }
        if evictable < taken.len() {
            self.settle_events();
        }
        let mut gone = Gone::NOTHING;
        for &block in &taken[evictable..] {
            self.evict(block, &mut gone);
        }
        self.end_run(gone);
        self.active += count;
        self.stats.allocated_blocks += count as u64;
    }

    /// A block that was evictable loses its content. What goes with it of the run before, or of its own, is in
    /// `gone`.
    #[inline(always)] // every block of a cold prompt comes here
    fn evict(&mut self, block: BlockId, gone: &mut Gone) {
        let (content, group) = self.clear(block);
        if self.policy.remembers()
            && let Some(hash) = self.contents.name(content)
        {
            self.policy.evicted(Ghost { hash, group });
        }
        // As a rule the end of a run goes first, row by row: it is told and shortened once.
        if content.run != gone.run {
            self.end_run(*gone);
            *gone = Gone {
                run: content.run,
                ..Gone::NOTHING
            };
        }
        self.contents.empty_block(content, usize::from(group));
        if self.events.is_some() && !self.contents.is_held(content) {
            if content.rows + 1 != gone.first {
                self.tell_gone(*gone);
                gone.last = content.rows;
            }
            gone.first = content.rows;
        }
        self.stats.evicted_blocks += 1;
    }

    /// Tells what is gone of a run, and shortens it.
    fn end_run(&mut self, gone: Gone) {
        if gone.run != RunId::NONE {
            self.tell_gone(gone);
            self.contents.shorten(gone.run);
        }
    }

    fn tell_gone(&mut self, Gone { run, first, last }: Gone) {
        if let Some(events) = self.events.as_mut().filter(|_| last > 0) {
            events.remove(self.contents.names(run, first, last));
        }
    }

    /// Forgets every content that nobody holds. How many blocks that are.
    pub(crate) fn evict_all(&mut self) -> usize {
        let evictable = List::EVICTABLE.into_iter();
        let evictable: Vec<BlockId> = evictable.flat_map(|list| self.queue.iter(list)).collect();
        self.settle_events();
        if let Some(events) = &mut self.events {
            events.mark();
        }
        for &block in &evictable {
            self.queue.unlink(block);
            let mut gone = Gone::NOTHING;
            self.evict(block, &mut gone);
            self.end_run(gone);
            self.settle(&[block]);
        }
        let nothing_held = self.contents.held().next().is_none();
        if let Some(events) = self.events.as_mut()
            && !evictable.is_empty()
            && nothing_held
        {
            events.clear();
        }
        evictable.len()
    }

    /// The block's content, if it has one, loses this block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        if self.content(block).is_some() {
            let (content, group) = self.clear(block);
            self.contents.clear_block(content, usize::from(group));
        }
    }

    /// A block knows no content any more; which it was, of which layer group.
    #[inline(always)] // as `evict`
    fn clear(&mut self, block: BlockId) -> (Spot, u8) {
        let content = std::mem::replace(&mut self.held[block.at()], Spot::NONE);
        let place = self.queue.place_mut(block);
        place.list = List::Free;
        (content, place.group)
    }

    /// A content is in this block now, computed in `step`; no other one held it for this group.
    #[inline]
    pub(crate) fn store(&mut self, content: Spot, group: usize, block: BlockId, step: u32) {
        self.contents.set_block(content, group, block);
        self.mark(content, group, block, step);
    }

    /// New contents that follow `spot`, of which nothing has the first row yet, in these blocks,
    /// row-major. The last of them.
    pub(crate) fn append(
        &mut self,
        spot: Spot,
        tokens: &[u32],
        blocks: &[BlockId],
        step: u32,
    ) -> Spot {
        let end = self.contents.append(spot, tokens, blocks);
        let mut at = if end.run == spot.run {
            spot
        } else {
            Spot { rows: 0, ..end }
        };
        let mut groups = 0..0;
        for &block in blocks {
            let group = groups.next().unwrap_or_else(|| {
                at.rows += 1;
                groups = 1..self.contents.groups();
                0
            });
            self.mark(at, group, block, step);
        }
        end
    }

    /// The part of `store` that is the block's.
    #[inline(always)] // every new content comes here
    fn mark(&mut self, content: Spot, group: usize, block: BlockId, step: u32) {
        self.held[block.at()] = content;
        let (place, group) = (self.queue.place_mut(block), group as u8);
        (place.step, place.group, place.list) = (step, group, List::Probation);
        if self.policy.remembers()
            && let Some(hash) = self.contents.name(content)
            && self.policy.comes_back(Ghost { hash, group })
        {
            place.list = self.policy.used_again();
        }
    }

    /// An evictable block gives its content to the block that computed it again.
    pub(crate) fn take_over(
        &mut self,
        evictable: BlockId,
        group: usize,
        block: BlockId,
        step: u32,
    ) {
        let list = self.queue.place(evictable).list;
        self.queue.unlink(evictable);
        let (content, _) = self.clear(evictable);
        self.settle(&[evictable]);
        self.store(content, group, block, step);
        if list == List::Protected {
            self.queue.place_mut(block).list = list;
        }
        self.stats.taken_over_blocks += 1;
    }

    /// The `rows` contents up to `end` are there now; before, no block held them.
    #[inline]
    pub(crate) fn tell_stored(&mut self, end: Spot, rows: usize) {
        self.stats.registered_blocks += rows as u64;
        if let Some(events) = self.events.as_mut().filter(|_| rows > 0) {
            events.store(end, rows);
            // Whoever stores pays for the names: no later call has more of them to compute than that.
            if events.num_stored() > MOST_UNNAMED {
                events.settle(&mut self.contents);
            }
        }
    }

    /// Names what is stored: before a content may go, or somebody asks for names or how many were hashed.
    fn settle_events(&mut self) {
        if let Some(events) = &mut self.events {
            events.settle(&mut self.contents);
        }
    }

    pub(crate) fn num_waiting_events(&self) -> usize {
        self.events.as_ref().map_or(0, EventLog::num_waiting)
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.settle_events();
        self.events.as_mut().map(EventLog::take).unwrap_or_default()
    }

    /// The names of all contents that are there.
    pub(crate) fn names(&mut self) -> Vec<u128> {
        self.settle_events();
        let held: Vec<Spot> = self.contents.held().collect();
        let ready = |spot: &Spot| {
            self.contents
                .blocks(*spot)
                .any(|block| self.is_ready(block))
        };
        let ready: Vec<Spot> = held.into_iter().filter(ready).collect();
        ready
            .into_iter()
            .filter_map(|spot| self.contents.name(spot))
            .collect()
    }
}

/// A table entry more; whether it is the block's first one.
#[inline]
fn hold(place: &mut Place) -> usize {
    let [seq_refs, _] = place.counts_mut();
    *seq_refs += 1;
    usize::from(*seq_refs == 1)
}
