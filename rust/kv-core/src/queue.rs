//! The free queue: doubly linked lists by index in flat arrays.
//!
//! ```text
//!   free                probation, protected
//!   last freed first    least recently used first
//! ```
//!
//! Free blocks are handed out first; then an idle one, from the list that the eviction policy says.
//! Every operation is O(1) and allocates nothing.

use crate::check::ensure;
use crate::ids::BlockId;

/// The lists of the queue. A policy that knows one kind of idle blocks uses `Probation` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    Free,
    Probation,
    Protected,
}

const LISTS: [List; 3] = [List::Free, List::Probation, List::Protected];

impl List {
    /// The lists of idle blocks.
    pub(crate) const IDLE: [Self; 2] = [Self::Probation, Self::Protected];
}

#[derive(Clone, Copy)]
struct Link {
    prev: BlockId,
    next: BlockId,
}

const UNQUEUED: Link = Link {
    prev: BlockId::NONE,
    next: BlockId::NONE,
};

/// Blocks that nobody holds, in the order in which they are handed out.
pub(crate) struct FreeQueue {
    /// One link per block, and at the end a sentinel per list that closes its ring.
    links: Vec<Link>,
    lens: [usize; LISTS.len()],
}

impl FreeQueue {
    pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Link>();

    /// Empty lists over `num_blocks` blocks.
    pub(crate) fn over(num_blocks: usize) -> Result<Self, std::collections::TryReserveError> {
        let mut links = Vec::new();
        links.try_reserve_exact(num_blocks + LISTS.len())?;
        links.resize(num_blocks, UNQUEUED);
        for list in LISTS {
            let sentinel = BlockId::new(num_blocks + list as usize);
            links.push(Link {
                prev: sentinel,
                next: sentinel,
            });
        }
        let lens = [0; LISTS.len()];
        Ok(Self { links, lens })
    }

    #[inline]
    fn num_blocks(&self) -> usize {
        self.links.len() - LISTS.len()
    }

    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.num_blocks() + list as usize)
    }

    /// Blocks in all lists.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    #[inline]
    pub(crate) fn len_of(&self, list: List) -> usize {
        self.lens[list as usize]
    }

    #[inline]
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        is_queued(self.links[block.at()])
    }

    /// Begins to put blocks into the queue.
    #[inline]
    pub(crate) fn joining(&mut self) -> Joining<'_> {
        let list = List::Probation;
        let last = self.links[self.sentinel(list).at()].prev;
        Joining {
            links: &mut self.links,
            lens: &mut self.lens,
            list,
            last,
            count: 0,
        }
    }

    /// Takes blocks off the head of a list, up to `most` as far as there are any, and adds them to `taken`.
    #[inline]
    pub(crate) fn pop_heads(&mut self, list: List, most: usize, taken: &mut Vec<BlockId>) {
        let (sentinel, count) = (self.sentinel(list), most.min(self.len_of(list)));
        let mut first = self.links[sentinel.at()].next;
        for _ in 0..count {
            taken.push(first);
            first = std::mem::replace(&mut self.links[first.at()], UNQUEUED).next;
        }
        self.links[sentinel.at()].next = first;
        self.links[first.at()].prev = sentinel;
        self.lens[list as usize] -= count;
    }

    /// Takes a block out of its list, if it is in one.
    #[inline]
    pub(crate) fn unlink(&mut self, list: List, block: BlockId) {
        self.unlink_all(&[block], |_| list);
    }

    /// Takes out those of these blocks that are in a list. Neighbours that come last first, as the blocks of
    /// a sequence went in, leave together: what is around them is linked once.
    #[inline]
    pub(crate) fn unlink_all(&mut self, blocks: &[BlockId], list_of: impl Fn(BlockId) -> List) {
        let (mut gap, mut first, mut count) = (UNQUEUED, BlockId::NONE, 0);
        for &block in blocks {
            // By its own number, not by what its neighbour says: links lie anywhere in memory, and so no
            // one waits for the one before.
            let link = self.links[block.at()];
            if block == gap.prev {
                gap.prev = link.prev;
                count += 1;
            } else {
                self.close(gap, count, || list_of(first));
                (gap, first, count) = (self.links[block.at()], block, 1);
            }
            self.links[block.at()] = UNQUEUED;
        }
        self.close(gap, count, || list_of(first));
    }

    /// Links what is on both sides of a gap, if there is one, that `count` blocks of a list leave.
    #[inline]
    fn close(&mut self, gap: Link, count: usize, list: impl FnOnce() -> List) {
        if is_queued(gap) {
            self.links[gap.prev.at()].next = gap.next;
            self.links[gap.next.at()].prev = gap.prev;
            self.lens[list() as usize] -= count;
        }
    }

    /// A list from head to tail, for the validator and for clearing the cache.
    pub(crate) fn iter(&self, list: List) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel(list);
        let mut at = self.links[sentinel.at()].next;
        std::iter::from_fn(move || {
            (at != sentinel).then(|| {
                let block = at;
                at = self.links[block.at()].next;
                block
            })
        })
    }

    /// Walks the rings both ways and counts.
    pub(crate) fn check(&self) -> Result<(), String> {
        LISTS.iter().try_for_each(|&list| self.check_ring(list))?;
        let mut queued = 0;
        for (block, link) in self.links[..self.num_blocks()].iter().enumerate() {
            let (ahead, behind) = (link.next.some(), link.prev.some());
            ensure(ahead.is_some() == behind.is_some(), || {
                format!("free queue: block {block} hangs between {behind:?} and {ahead:?}")
            })?;
            queued += usize::from(ahead.is_some());
        }
        let len = self.len();
        ensure(queued == len, || {
            format!("free queue: {queued} blocks marked, {len} counted")
        })
    }

    fn check_ring(&self, list: List) -> Result<(), String> {
        let (sentinel, len) = (self.sentinel(list), self.len_of(list));
        let (mut at, mut seen) = (sentinel, 0);
        // The way back is looked at with each link, so the walk cannot end up in a smaller circle.
        loop {
            let next = self.links[at.at()].next;
            let back = self.links.get(next.at()).map(|link| link.prev);
            ensure(back == Some(at), || {
                format!("{list:?}: {at:?} and {next:?} disagree")
            })?;
            if next == sentinel {
                break;
            }
            seen += 1;
            at = next;
        }
        ensure(seen == len, || {
            format!("{list:?}: {seen} blocks linked, {len} counted")
        })
    }
}

#[inline]
fn is_queued(link: Link) -> bool {
    link.prev != BlockId::NONE
}

/// Blocks on their way into the queue, one after the other: what comes to the same tail is linked to what
/// comes there next. The lists are whole again once it has ended.
pub(crate) struct Joining<'a> {
    links: &'a mut [Link],
    lens: &'a mut [usize; LISTS.len()],
    /// The list of the last one, which that is, and how many came there since.
    list: List,
    last: BlockId,
    count: usize,
}

impl Joining<'_> {
    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.links.len() - LISTS.len() + list as usize)
    }

    #[inline]
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        is_queued(self.links[block.at()])
    }

    /// A free block goes to the head of its list, an idle one to the tail.
    #[inline(always)] // the end of every sequence comes here for each of its blocks
    pub(crate) fn push(&mut self, list: List, block: BlockId) {
        debug_assert!(!self.contains(block));
        if list != self.list {
            if list == List::Free {
                return self.push_free(block);
            }
            self.turn_to(list);
        }
        self.links[self.last.at()].next = block;
        self.links[block.at()].prev = self.last;
        self.last = block;
        self.count += 1;
    }

    fn push_free(&mut self, block: BlockId) {
        let prev = self.sentinel(List::Free);
        let next = std::mem::replace(&mut self.links[prev.at()].next, block);
        self.links[next.at()].prev = block;
        self.links[block.at()] = Link { prev, next };
        self.lens[List::Free as usize] += 1;
    }

    fn turn_to(&mut self, list: List) {
        self.link_last();
        self.list = list;
        self.last = self.links[self.sentinel(list).at()].prev;
    }

    #[inline]
    pub(crate) fn end(mut self) {
        self.link_last();
    }

    #[inline]
    fn link_last(&mut self) {
        let sentinel = self.sentinel(self.list);
        self.links[self.last.at()].next = sentinel;
        self.links[sentinel.at()].prev = self.last;
        self.lens[self.list as usize] += std::mem::take(&mut self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::List::{Free, Protected};
    use super::*;

    fn push(queue: &mut FreeQueue, list: List, block: usize) {
        let mut joining = queue.joining();
        joining.push(list, BlockId::new(block));
        joining.end();
    }

    fn order(queue: &FreeQueue) -> Vec<u32> {
        queue.iter(Free).map(BlockId::get).collect()
    }

    #[test]
    fn keeps_order_under_every_operation() {
        let mut queue = FreeQueue::over(5).expect("five blocks fit");
        for block in [3, 2, 1, 0, 4] {
            push(&mut queue, Free, block);
        }
        assert_eq!(order(&queue), [4, 0, 1, 2, 3]);
        queue.unlink(Free, BlockId::new(1));
        queue.unlink(Free, BlockId::new(3));
        assert_eq!(order(&queue), [4, 0, 2]);
        assert!(!queue.contains(BlockId::new(1)));
        let mut taken = vec![BlockId::new(7)];
        queue.pop_heads(Free, 1, &mut taken);
        assert_eq!(taken, [7, 4].map(BlockId::new));
        push(&mut queue, Protected, 4);
        push(&mut queue, Free, 1);
        assert_eq!(order(&queue), [1, 0, 2]);
        assert_eq!((queue.len_of(Protected), queue.len()), (1, 4));
        queue.check().expect("consistent");
        queue.pop_heads(Free, 2, &mut taken);
        assert_eq!((taken.len(), order(&queue)), (4, vec![2]));
        queue
            .check()
            .expect("consistent when two were taken at once");
        queue.pop_heads(Free, 2, &mut taken);
        queue.pop_heads(Free, 2, &mut taken);
        assert_eq!(taken, [7, 4, 1, 0, 2].map(BlockId::new));
        assert_eq!((queue.len(), queue.len_of(Free)), (1, 0));
        queue.check().expect("consistent when a list is empty");
    }

    /// Blocks 0 to 2 free, block 3 protected, blocks 4 and 5 in no list.
    fn queue() -> FreeQueue {
        let mut queue = FreeQueue::over(6).expect("six blocks fit");
        (0..3).rev().for_each(|block| push(&mut queue, Free, block));
        push(&mut queue, Protected, 3);
        queue
    }

    #[test]
    fn takes_out_neighbours_and_others_in_any_order() {
        // Every order of some blocks of two lists, one of them in none.
        let all = [0, 1, 2, 3, 4, 5, 6].map(BlockId::new);
        for seed in 0..5040_usize {
            let mut queue = FreeQueue::over(7).expect("seven blocks fit");
            (0..4).rev().for_each(|block| push(&mut queue, Free, block));
            (4..6).for_each(|block| push(&mut queue, Protected, block));
            let (mut left, mut order, mut rest) = (all.to_vec(), vec![], seed);
            while !left.is_empty() {
                order.push(left.remove(rest % left.len()));
                rest /= left.len() + 1;
            }
            let gone = &order[..seed % 8];
            let list = |block: BlockId| if block.at() < 4 { Free } else { Protected };
            queue.unlink_all(gone, list);
            queue.check().expect("consistent");
            let stay = |blocks: std::ops::Range<usize>| -> Vec<BlockId> {
                let blocks = all[blocks].iter().copied();
                blocks.filter(|block| !gone.contains(block)).collect()
            };
            assert_eq!(queue.iter(Free).collect::<Vec<_>>(), stay(0..4));
            assert_eq!(queue.iter(Protected).collect::<Vec<_>>(), stay(4..6));
        }
    }

    fn link(queue: &mut FreeQueue, block: usize, prev: usize, next: usize) {
        let (prev, next) = (BlockId::new(prev), BlockId::new(next));
        queue.links[block] = Link { prev, next };
    }

    type Case = (&'static str, fn(&mut FreeQueue));

    const SPOILT: &[Case] = &[
        ("Free: BlockId(0) and BlockId(1) disagree", |q| {
            q.links[1].prev = BlockId::new(2);
        }),
        ("Free: BlockId(1) and BlockId(none) disagree", |q| {
            q.links[1].next = BlockId::NONE;
        }),
        ("Protected: BlockId(3) and BlockId(8) disagree", |q| {
            q.links[8].prev = BlockId::new(2);
        }),
        ("Free: 3 blocks linked, 4 counted", |q| q.lens[0] = 4),
        ("Free: 3 blocks linked, 2 counted", |q| q.lens[0] = 2),
        ("Probation: 0 blocks linked, 1 counted", |q| q.lens[1] = 1),
        ("block 4 hangs between None and Some(BlockId(5))", |q| {
            q.links[4].next = BlockId::new(5);
        }),
        ("block 5 hangs between Some(BlockId(4)) and None", |q| {
            q.links[5].prev = BlockId::new(4);
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
            let found = queue.check().expect_err(expected);
            assert!(found.contains(expected), "{found:?} is not {expected:?}");
        }
    }
}
