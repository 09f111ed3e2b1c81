//! Where each block is: in the free queue, or held. The queue is doubly linked lists by index in a flat array:
//!
//! ```text
//!   free                probation, protected
//!   last freed first    least recently used first
//! ```
//!
//! Free blocks are handed out first; then an evictable one, from the list that the eviction policy says.
//! Every operation is O(1) and allocates nothing.

use crate::check::ensure;
use crate::ids::BlockId;

/// The lists of the queue. A policy that knows one kind of evictable blocks uses `Probation` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum List {
    Free,
    Probation,
    Protected,
}

const LISTS: [List; 3] = [List::Free, List::Probation, List::Protected];

impl List {
    /// The lists of evictable blocks.
    pub(crate) const EVICTABLE: [Self; 2] = [Self::Probation, Self::Protected];
}

/// What of a block is read and written whenever it is reused or released: four of them are a cache line.
#[derive(Clone, Copy)]
#[repr(align(16))]
pub(crate) struct Place {
    /// While it waits, the blocks before and behind it. Else two of its counts: live sequences whose table
    /// holds it, and open plans that read it beside their sequences' own, once for each time.
    pair: [u32; 2],
    /// The step that computes the content, or has computed it.
    pub(crate) step: u32,
    /// The layer group of which it holds the content.
    pub(crate) group: u8,
    /// The list in which it waits, or will wait when nobody holds it.
    pub(crate) list: List,
    /// Whether it is in the queue.
    waits: bool,
}

const _: () = assert!(size_of::<Place>() == 16);

const NEW: Place = Place {
    pair: [0; 2],
    step: 0,
    group: 0,
    list: List::Free,
    waits: false,
};

#[derive(Clone, Copy)]
struct Link {
    prev: BlockId,
    next: BlockId,
}

const NO_LINK: Link = Link {
    prev: BlockId::NONE,
    next: BlockId::NONE,
};

impl Place {
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Live sequences whose table holds the block, and fences.
    #[inline]
    pub(crate) fn counts(&self) -> [u32; 2] {
        if self.waits { [0; 2] } else { self.pair }
    }

    /// The same, to be changed, of a block that does not wait.
    #[inline]
    pub(crate) fn counts_mut(&mut self) -> &mut [u32; 2] {
        debug_assert!(!self.waits);
        &mut self.pair
    }

    /// Its neighbours, if it waits.
    #[inline]
    fn link(&self) -> Link {
        if !self.waits {
            return NO_LINK;
        }
        let [prev, next] = self.pair.map(BlockId::from);
        Link { prev, next }
    }

    #[inline]
    fn leave(&mut self, seq_refs: u32) {
        (self.pair, self.waits) = ([seq_refs, 0], false);
    }
}

/// All blocks; those that nobody holds in the order in which they are handed out.
pub(crate) struct FreeQueue {
    /// One per block, and at the end a sentinel per list that closes its ring.
    places: Vec<Place>,
    lens: [usize; LISTS.len()],
}

impl FreeQueue {
    pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Place>();

    /// Empty lists over `num_blocks` blocks.
    pub(crate) fn over(num_blocks: usize) -> Result<Self, std::collections::TryReserveError> {
        let mut places = Vec::new();
        places.try_reserve_exact(num_blocks + LISTS.len())?;
        places.resize(num_blocks, NEW);
        for list in LISTS {
            places.push(Place {
                pair: [(num_blocks + list as usize) as u32; 2],
                list,
                waits: true,
                ..NEW
            });
        }
        let lens = [0; LISTS.len()];
        Ok(Self { places, lens })
    }

    #[inline]
    pub(crate) fn num_blocks(&self) -> usize {
        self.places.len() - LISTS.len()
    }

    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.num_blocks() + list as usize)
    }

    /// The blocks, in the order of their ids.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places[..self.num_blocks()]
    }

    #[inline]
    pub(crate) fn place(&self, block: BlockId) -> &Place {
        &self.places[block.at()]
    }

    #[inline]
    pub(crate) fn place_mut(&mut self, block: BlockId) -> &mut Place {
        &mut self.places[block.at()]
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

    /// Begins to put blocks into the queue.
    #[inline]
    pub(crate) fn joining(&mut self) -> Joining<'_> {
        let list = List::Probation;
        let last = self.place(self.sentinel(list)).link().prev;
        Joining {
            places: &mut self.places,
            lens: &mut self.lens,
            list,
            last,
            count: 0,
        }
    }

    /// Takes blocks off the head of a list, up to `most` as far as there are any, and adds them to `taken`:
    /// each has one table entry then.
    #[inline]
    pub(crate) fn pop_heads(&mut self, list: List, most: usize, taken: &mut Vec<BlockId>) {
        let (sentinel, count) = (self.sentinel(list), most.min(self.len_of(list)));
        let mut first = self.place(sentinel).link().next;
        for _ in 0..count {
            taken.push(first);
            let place = self.place_mut(first);
            first = BlockId::from(place.pair[1]);
            place.leave(1);
        }
        self.join(sentinel, first);
        self.lens[list as usize] -= count;
    }

    /// Takes a block out of its list, if it is in one.
    #[inline]
    pub(crate) fn unlink(&mut self, block: BlockId) {
        self.unlink_all(&[block], |_| {});
    }

    /// Takes out those of these blocks that are in a list, and does `each` to every one. Neighbours that come
    /// last first, as the blocks of a sequence went in, leave together: what is around them is linked once.
    #[inline(always)]
    pub(crate) fn unlink_all(&mut self, blocks: &[BlockId], mut each: impl FnMut(&mut Place)) {
        let (mut gap, mut list, mut count) = (NO_LINK, List::Free, 0);
        for &block in blocks {
            // Looked at before it is compared, by its own number and not by what its neighbour says: places
            // lie anywhere in memory, and so no one waits for the one before.
            let mut prev = self.place(block).link().prev;
            if block != gap.prev {
                self.close(gap, list, count);
                let place = self.place(block);
                (gap, list, count) = (place.link(), place.list, 0);
                prev = gap.prev; // the gap before may have ended beside it
            }
            let place = self.place_mut(block);
            if place.waits {
                place.leave(0);
            }
            (gap.prev, count) = (prev, count + 1);
            each(place);
        }
        self.close(gap, list, count);
    }

    /// Links what is on both sides of a gap, if there is one, that `count` blocks of a list leave.
    #[inline]
    fn close(&mut self, gap: Link, list: List, count: usize) {
        if gap.prev != BlockId::NONE {
            self.join(gap.prev, gap.next);
            self.lens[list as usize] -= count;
        }
    }

    #[inline]
    fn join(&mut self, prev: BlockId, next: BlockId) {
        self.place_mut(prev).pair[1] = next.get();
        self.place_mut(next).pair[0] = prev.get();
    }

    /// A list from head to tail, for the validator and for clearing the cache.
    pub(crate) fn iter(&self, list: List) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel(list);
        let mut at = self.place(sentinel).link().next;
        std::iter::from_fn(move || {
            (at != sentinel).then(|| {
                let block = at;
                at = self.place(block).link().next;
                block
            })
        })
    }

    /// Walks the rings both ways and counts.
    pub(crate) fn check(&self) -> Result<(), String> {
        LISTS.iter().try_for_each(|&list| self.check_ring(list))?;
        let waiting = self.places().iter().filter(|place| place.waits).count();
        let len = self.len();
        ensure(waiting == len, || {
            format!("free queue: {waiting} blocks marked, {len} counted")
        })
    }

    fn check_ring(&self, list: List) -> Result<(), String> {
        let (sentinel, len) = (self.sentinel(list), self.len_of(list));
        let (mut at, mut seen) = (sentinel, 0);
        // The way back is looked at with each link, so the walk cannot end up in a smaller circle.
        loop {
            let next = self.place(at).link().next;
            let back = self.places.get(next.at()).map(|place| place.link().prev);
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

/// Blocks on their way into the queue, one after the other: what comes to the same tail is linked to what
/// comes there next. The lists are whole again once it has ended.
pub(crate) struct Joining<'a> {
    places: &'a mut [Place],
    lens: &'a mut [usize; LISTS.len()],
    /// The list of the last one, which that is, and how many came there since.
    list: List,
    last: BlockId,
    count: usize,
}

impl Joining<'_> {
    #[inline]
    fn sentinel(&self, list: List) -> BlockId {
        BlockId::new(self.places.len() - LISTS.len() + list as usize)
    }

    #[inline]
    pub(crate) fn place_mut(&mut self, block: BlockId) -> &mut Place {
        &mut self.places[block.at()]
    }

    /// A free block goes to the head of its list, an evictable one to the tail. Nobody holds it.
    #[inline(always)] // the end of every sequence comes here for each of its blocks
    pub(crate) fn push(&mut self, block: BlockId) {
        let list = self.place_mut(block).list;
        debug_assert_eq!(self.place_mut(block).counts_mut(), &[0; 2]);
        if list != self.list {
            if list == List::Free {
                return self.push_free(block);
            }
            self.turn_to(list);
        }
        self.places[self.last.at()].pair[1] = block.get();
        let place = &mut self.places[block.at()];
        (place.pair[0], place.waits) = (self.last.get(), true);
        self.last = block;
        self.count += 1;
    }

    fn push_free(&mut self, block: BlockId) {
        let prev = self.sentinel(List::Free);
        let next = std::mem::replace(&mut self.place_mut(prev).pair[1], block.get());
        self.place_mut(BlockId::from(next)).pair[0] = block.get();
        let place = self.place_mut(block);
        (place.pair, place.waits) = ([prev.get(), next], true);
        self.lens[List::Free as usize] += 1;
    }

    fn turn_to(&mut self, list: List) {
        self.link_last();
        self.list = list;
        self.last = self.places[self.sentinel(list).at()].link().prev;
    }

    #[inline]
    pub(crate) fn end(mut self) {
        self.link_last();
    }

    #[inline]
    fn link_last(&mut self) {
        let sentinel = self.sentinel(self.list);
        self.places[self.last.at()].pair[1] = sentinel.get();
        self.places[sentinel.at()].pair[0] = self.last.get();
        self.lens[self.list as usize] += std::mem::take(&mut self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::List::{Free, Protected};
    use super::*;

    fn push(queue: &mut FreeQueue, list: List, block: usize) {
        let block = BlockId::new(block);
        let place = queue.place_mut(block);
        (place.list, *place.counts_mut()) = (list, [0; 2]);
        let mut joining = queue.joining();
        joining.push(block);
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
        queue.unlink(BlockId::new(1));
        queue.unlink(BlockId::new(3));
        assert_eq!(order(&queue), [4, 0, 2]);
        assert!(!queue.place(BlockId::new(1)).waits());
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

    fn link(queue: &mut FreeQueue, block: usize, prev: usize, next: usize) {
        let place = queue.place_mut(BlockId::new(block));
        (place.pair, place.waits) = ([prev as u32, next as u32], true);
    }

    type Case = (&'static str, fn(&mut FreeQueue));

    const SPOILT: &[Case] = &[
        ("Free: BlockId(0) and BlockId(1) disagree", |q| {
            q.places[1].pair[0] = 2;
        }),
        ("Free: BlockId(1) and BlockId(none) disagree", |q| {
            q.places[1].pair[1] = u32::MAX;
        }),
        ("Protected: BlockId(3) and BlockId(8) disagree", |q| {
            q.places[8].pair[0] = 2;
        }),
        ("Free: 3 blocks linked, 4 counted", |q| q.lens[0] = 4),
        ("Free: 3 blocks linked, 2 counted", |q| q.lens[0] = 2),
        ("Probation: 0 blocks linked, 1 counted", |q| q.lens[1] = 1),
        ("Free: BlockId(0) and BlockId(1) disagree", |q| {
            q.places[1].waits = false;
        }),
        ("free queue: 5 blocks marked, 4 counted", |q| {
            q.places[4].waits = true;
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
