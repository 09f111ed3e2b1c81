//! The free queue: doubly linked lists, by index in a flat array.
//!
//! ```text
//!   free                probation, protected     spare
//!   last freed first    least recently used first
//! ```
//!
//! Free blocks are allocated first, then evictable ones from the list that the eviction policy chooses. Every
//! operation is O(1) and allocates no memory.

mod check;

use crate::ids::BlockId;

/// The lists of the queue. A policy with one list of evictable blocks uses `Probation` only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum List {
    #[default]
    Free,
    Probation,
    Protected,
    /// Snapshots that were kept only in case a later request diverges there.
    Spare,
}

const LISTS: [List; 4] = [List::Free, List::Probation, List::Protected, List::Spare];

impl List {
    /// The lists of evictable blocks that an eviction policy orders.
    pub(crate) const EVICTABLE: [Self; 2] = [Self::Probation, Self::Protected];
    /// All lists of evictable blocks.
    pub(crate) const ALL_EVICTABLE: [Self; 3] = [Self::Probation, Self::Protected, Self::Spare];
}

/// The record of a block, read and written whenever it is reused or released: four of them fill a cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(16))]
pub(crate) struct BlockMeta {
    numbers: LinkOrCounts,
    /// The step that computes the cached block, or has computed it; of a loading block, its transfer.
    pub(crate) step: u32,
    /// The layer group for which it is cached.
    pub(crate) group: u8,
    /// The list that it is in, or joins once it has no references.
    pub(crate) list: List,
    queued: bool,
    /// Whether a transfer is to fill it.
    pub(crate) loading: bool,
}

const _: () = assert!(size_of::<BlockMeta>() == 16);

/// The link of a queued block, the counts of any other one.
#[derive(Clone, Copy, Default)]
struct LinkOrCounts {
    prev_or_seq_refs: u32,
    next_or_plan_pins: u32,
}

/// The references of a block, without those of pins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Live sequences whose table contains it.
    pub(crate) seq_refs: u32,
    /// Open plans and transfers that hold it.
    pub(crate) plan_pins: u32,
}

/// The neighbours of a block in the queue; `NONE` by default.
#[derive(Clone, Copy, Default)]
struct Link {
    prev: BlockId,
    next: BlockId,
}

impl BlockMeta {
    #[inline]
    pub(crate) fn is_queued(&self) -> bool {
        self.queued
    }

    #[inline]
    pub(crate) fn counts(&self) -> Counts {
        match self.queued {
            true => Counts::default(),
            false => Counts {
                seq_refs: self.numbers.prev_or_seq_refs,
                plan_pins: self.numbers.next_or_plan_pins,
            },
        }
    }

    /// Live sequences whose table contains the block, which is not queued.
    #[inline]
    pub(crate) fn seq_refs_mut(&mut self) -> &mut u32 {
        debug_assert!(!self.queued);
        &mut self.numbers.prev_or_seq_refs
    }

    /// Open plans and transfers that hold the block, which is not queued.
    #[inline]
    pub(crate) fn plan_pins_mut(&mut self) -> &mut u32 {
        debug_assert!(!self.queued);
        &mut self.numbers.next_or_plan_pins
    }

    #[inline]
    fn link(&self) -> Link {
        if !self.queued {
            return Link::default();
        }
        Link {
            prev: BlockId::from(self.numbers.prev_or_seq_refs),
            next: BlockId::from(self.numbers.next_or_plan_pins),
        }
    }

    #[inline]
    fn leave(&mut self, seq_refs: u32) {
        self.numbers = LinkOrCounts {
            prev_or_seq_refs: seq_refs,
            next_or_plan_pins: 0,
        };
        self.queued = false;
    }

    fn join_queue(&mut self, Link { prev, next }: Link) {
        self.numbers = LinkOrCounts {
            prev_or_seq_refs: prev.get(),
            next_or_plan_pins: next.get(),
        };
        self.queued = true;
    }
}

/// All blocks; those without references in the order in which they are allocated.
pub(crate) struct FreeQueue {
    /// One per block, and a sentinel per list at the end that closes its ring.
    metas: Vec<BlockMeta>,
    lens: [usize; LISTS.len()],
}

impl FreeQueue {
    pub(crate) const BYTES_PER_BLOCK: usize = size_of::<BlockMeta>();

    /// Empty lists over `num_blocks` blocks.
    pub(crate) fn new(num_blocks: usize) -> Result<Self, std::collections::TryReserveError> {
        let mut metas = Vec::new();
        metas.try_reserve_exact(num_blocks + LISTS.len())?;
        metas.resize(num_blocks, BlockMeta::default());
        for list in LISTS {
            let own = BlockId::new(num_blocks + list as usize);
            let mut sentinel = BlockMeta {
                list,
                ..BlockMeta::default()
            };
            sentinel.join_queue(Link {
                prev: own,
                next: own,
            });
            metas.push(sentinel);
        }
        let lens = [0; LISTS.len()];
        Ok(Self { metas, lens })
    }

    #[inline]
    pub(crate) fn num_blocks(&self) -> usize {
        self.metas.len() - LISTS.len()
    }

    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.num_blocks() + list as usize)
    }

    pub(crate) fn metas(&self) -> &[BlockMeta] {
        &self.metas[..self.num_blocks()]
    }

    #[inline]
    pub(crate) fn meta(&self, block: BlockId) -> &BlockMeta {
        &self.metas[block.at()]
    }

    #[inline]
    pub(crate) fn meta_mut(&mut self, block: BlockId) -> &mut BlockMeta {
        &mut self.metas[block.at()]
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    #[inline]
    pub(crate) fn len_of(&self, list: List) -> usize {
        self.lens[list as usize]
    }

    /// Begins to push blocks into the queue.
    #[inline]
    pub(crate) fn begin_push(&mut self) -> BatchPush<'_> {
        let list = List::Probation;
        let last = self.meta(self.sentinel(list)).link().prev;
        BatchPush {
            metas: &mut self.metas,
            lens: &mut self.lens,
            list,
            last,
            count: 0,
        }
    }

    /// Pops at most `max_count` blocks from the front of a list and adds them to `taken`, each with one table entry.
    #[inline]
    pub(crate) fn pop_front(&mut self, list: List, max_count: usize, taken: &mut Vec<BlockId>) {
        let (sentinel, count) = (self.sentinel(list), max_count.min(self.len_of(list)));
        let mut first = self.meta(sentinel).link().next;
        for _ in 0..count {
            taken.push(first);
            let meta = self.meta_mut(first);
            first = BlockId::from(meta.numbers.next_or_plan_pins);
            meta.leave(1);
        }
        self.join(sentinel, first);
        self.lens[list as usize] -= count;
    }

    #[inline]
    pub(crate) fn unlink(&mut self, block: BlockId) {
        self.unlink_all(&[block], |_| {});
    }

    /// Unlinks the queued blocks, then calls `visit` on all of them. Neighbours in the order last to first, as the
    /// blocks of a sequence were pushed, are unlinked together.
    #[inline(always)]
    pub(crate) fn unlink_all(&mut self, blocks: &[BlockId], mut visit: impl FnMut(&mut BlockMeta)) {
        let (mut gap, mut list, mut count) = (Link::default(), List::Free, 0);
        for &block in blocks {
            // Read by its own id, before the comparison with its neighbour's link: the reads are scattered in memory
            // and must not wait for each other.
            let mut prev = self.meta(block).link().prev;
            if block != gap.prev {
                self.close(gap, list, count);
                let meta = self.meta(block);
                (gap, list, count) = (meta.link(), meta.list, 0);
                prev = gap.prev; // the gap before may have ended beside it
            }
            let meta = self.meta_mut(block);
            if meta.queued {
                meta.leave(0);
            }
            (gap.prev, count) = (prev, count + 1);
            visit(meta);
        }
        self.close(gap, list, count);
    }

    /// Links the two sides of a gap that `count` blocks of a list leave.
    #[inline]
    fn close(&mut self, gap: Link, list: List, count: usize) {
        if gap.prev != BlockId::NONE {
            self.join(gap.prev, gap.next);
            self.lens[list as usize] -= count;
        }
    }

    #[inline]
    fn join(&mut self, prev: BlockId, next: BlockId) {
        self.meta_mut(prev).numbers.next_or_plan_pins = next.get();
        self.meta_mut(next).numbers.prev_or_seq_refs = prev.get();
    }

    pub(crate) fn iter(&self, list: List) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel(list);
        let mut at = self.meta(sentinel).link().next;
        std::iter::from_fn(move || {
            (at != sentinel).then(|| {
                let block = at;
                at = self.meta(block).link().next;
                block
            })
        })
    }
}

/// Pushes blocks one after the other. The tail of the current list is linked once, at the end: until then the list is
/// open.
pub(crate) struct BatchPush<'a> {
    metas: &'a mut [BlockMeta],
    lens: &'a mut [usize; LISTS.len()],
    /// The current list, its last block, and how many blocks were pushed to it.
    list: List,
    last: BlockId,
    count: usize,
}

impl BatchPush<'_> {
    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.metas.len() - LISTS.len() + list as usize)
    }

    #[inline]
    pub(crate) fn meta_mut(&mut self, block: BlockId) -> &mut BlockMeta {
        &mut self.metas[block.at()]
    }

    /// Pushes a block without references: a free one to the front of its list, an evictable one to the back.
    #[inline(always)] // each block of every sequence that ends comes here
    pub(crate) fn push(&mut self, block: BlockId) {
        let list = self.meta_mut(block).list;
        debug_assert_eq!(self.meta_mut(block).counts(), Counts::default());
        if list != self.list {
            if list == List::Free {
                return self.push_free(block);
            }
            self.switch_to(list);
        }
        self.metas[self.last.at()].numbers.next_or_plan_pins = block.get();
        let meta = &mut self.metas[block.at()];
        meta.numbers.prev_or_seq_refs = self.last.get();
        meta.queued = true;
        self.last = block;
        self.count += 1;
    }

    fn push_free(&mut self, block: BlockId) {
        let prev = self.sentinel(List::Free);
        let sentinel = self.meta_mut(prev);
        let next = BlockId::from(sentinel.numbers.next_or_plan_pins);
        sentinel.numbers.next_or_plan_pins = block.get();
        self.meta_mut(next).numbers.prev_or_seq_refs = block.get();
        self.meta_mut(block).join_queue(Link { prev, next });
        self.lens[List::Free as usize] += 1;
    }

    fn switch_to(&mut self, list: List) {
        self.link_last();
        self.list = list;
        self.last = self.metas[self.sentinel(list).at()].link().prev;
    }

    #[inline]
    pub(crate) fn end(mut self) {
        self.link_last();
    }

    #[inline]
    fn link_last(&mut self) {
        let sentinel = self.sentinel(self.list);
        self.metas[self.last.at()].numbers.next_or_plan_pins = sentinel.get();
        self.metas[sentinel.at()].numbers.prev_or_seq_refs = self.last.get();
        self.lens[self.list as usize] += std::mem::take(&mut self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::List::{Free, Protected};
    use super::*;

    fn push(queue: &mut FreeQueue, list: List, block: usize) {
        let block = BlockId::new(block);
        let meta = queue.meta_mut(block);
        meta.list = list;
        meta.leave(0);
        let mut batch = queue.begin_push();
        batch.push(block);
        batch.end();
    }

    fn order(queue: &FreeQueue) -> Vec<u32> {
        queue.iter(Free).map(BlockId::get).collect()
    }

    #[test]
    fn keeps_order_under_every_operation() {
        let mut queue = FreeQueue::new(5).expect("five blocks fit");
        for block in [3, 2, 1, 0, 4] {
            push(&mut queue, Free, block);
        }
        assert_eq!(order(&queue), [4, 0, 1, 2, 3]);
        queue.unlink(BlockId::new(1));
        queue.unlink(BlockId::new(3));
        assert_eq!(order(&queue), [4, 0, 2]);
        assert!(!queue.meta(BlockId::new(1)).is_queued());
        let mut taken = vec![BlockId::new(7)];
        queue.pop_front(Free, 1, &mut taken);
        assert_eq!(taken, [7, 4].map(BlockId::new));
        push(&mut queue, Protected, 4);
        push(&mut queue, Free, 1);
        assert_eq!(order(&queue), [1, 0, 2]);
        assert_eq!((queue.len_of(Protected), queue.len()), (1, 4));
        queue.check().expect("consistent");
        queue.pop_front(Free, 2, &mut taken);
        assert_eq!((taken.len(), order(&queue)), (4, vec![2]));
        queue
            .check()
            .expect("consistent when two were taken at once");
        queue.pop_front(Free, 2, &mut taken);
        queue.pop_front(Free, 2, &mut taken);
        assert_eq!(taken, [7, 4, 1, 0, 2].map(BlockId::new));
        assert_eq!((queue.len(), queue.len_of(Free)), (1, 0));
        queue.check().expect("consistent when a list is empty");
    }

    /// Blocks 0 to 2 free, block 3 protected, blocks 4 and 5 in no list.
    fn queue() -> FreeQueue {
        let mut queue = FreeQueue::new(6).expect("six blocks fit");
        (0..3).rev().for_each(|block| push(&mut queue, Free, block));
        push(&mut queue, Protected, 3);
        queue
    }

    #[test]
    fn takes_out_neighbours_and_others_in_any_order() {
        // Every order of some blocks of two lists, one of them in none.
        let all = [0, 1, 2, 3, 4, 5, 6].map(BlockId::new);
        for seed in 0..5040_usize {
            let mut queue = FreeQueue::new(7).expect("seven blocks fit");
            (0..4).rev().for_each(|block| push(&mut queue, Free, block));
            (4..6).for_each(|block| push(&mut queue, Protected, block));
            let (mut left, mut order, mut rest) = (all.to_vec(), vec![], seed);
            while !left.is_empty() {
                order.push(left.remove(rest % left.len()));
                rest /= left.len() + 1;
            }
            let gone = &order[..seed % 8];
            queue.unlink_all(gone, |_| {});
            queue.check().expect("consistent");
            let stay = |blocks: std::ops::Range<usize>| -> Vec<BlockId> {
                let blocks = all[blocks].iter().copied();
                blocks.filter(|block| !gone.contains(block)).collect()
            };
            assert_eq!(queue.iter(Free).collect::<Vec<_>>(), stay(0..4));
            assert_eq!(queue.iter(Protected).collect::<Vec<_>>(), stay(4..6));
        }
    }

    #[inline]
    fn link(queue: &mut FreeQueue, block: usize, prev: usize, next: usize) {
        let [prev, next] = [prev, next].map(BlockId::new);
        let meta = queue.meta_mut(BlockId::new(block));
        meta.join_queue(Link { prev, next });
    }

    type Case = (&'static str, fn(&mut FreeQueue));

    const SPOILT: &[Case] = &[
        ("Free: BlockId(0) and BlockId(1) disagree", |q| {
            q.metas[1].numbers.prev_or_seq_refs = 2;
        }),
        ("Free: BlockId(1) and BlockId(none) disagree", |q| {
            q.metas[1].numbers.next_or_plan_pins = u32::MAX;
        }),
        ("Protected: BlockId(3) and BlockId(8) disagree", |q| {
            q.metas[8].numbers.prev_or_seq_refs = 2;
        }),
        ("Free: 3 blocks linked, 4 counted", |q| q.lens[0] = 4),
        ("Free: 3 blocks linked, 2 counted", |q| q.lens[0] = 2),
        ("Probation: 0 blocks linked, 1 counted", |q| q.lens[1] = 1),
        ("Free: BlockId(0) and BlockId(1) disagree", |q| {
            q.metas[1].queued = false;
        }),
        ("free queue: 5 blocks marked, 4 counted", |q| {
            q.metas[4].queued = true;
        }),
        ("free queue: 6 blocks marked, 4 counted", |q| {
            link(q, 4, 5, 5);
            link(q, 5, 4, 4);
        }),
        // Two lists in one ring, each as long as it says.
        ("free queue: 4 blocks marked, 10 counted", |q| {
            link(q, 6, 3, 0);
            link(q, 2, 1, 8);
            link(q, 8, 2, 3);
            link(q, 3, 8, 6);
            (q.lens[0], q.lens[2]) = (5, 5);
        }),
    ];

    #[test]
    fn check_names_what_is_spoilt() {
        for (expected, spoil) in SPOILT {
            let mut queue = queue();
            assert_eq!(queue.check(), Ok(()));
            spoil(&mut queue);
            let difference = queue.check().expect_err(expected);
            assert!(
                difference.contains(expected),
                "{difference:?} is not {expected:?}"
            );
        }
    }
}
