//! The free queue: doubly linked lists by index in flat arrays.
//!
//! ```text
//!   free                low, probation, protected, high
//!   last freed first    least recently used first
//! ```
//!
//! Free blocks are handed out first; then an idle one, from the list that the eviction policy says.
//! Every operation is O(1) and allocates nothing.

use crate::ids::BlockId;

/// The lists of the queue. `Low` and `High` hold idle blocks of these priorities; a policy that knows one
/// kind of the others uses `Probation` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    Free,
    Low,
    Probation,
    Protected,
    High,
}

const LISTS: [List; 5] = [
    List::Free,
    List::Low,
    List::Probation,
    List::Protected,
    List::High,
];

impl List {
    /// The lists of idle blocks.
    pub(crate) const IDLE: [Self; 4] = [Self::Low, Self::Probation, Self::Protected, Self::High];
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
        self.links[block.at()].next != BlockId::NONE
    }

    #[inline]
    pub(crate) fn push_head(&mut self, list: List, block: BlockId) {
        let sentinel = self.sentinel(list);
        self.insert(list, block, sentinel, self.links[sentinel.at()].next);
    }

    #[inline]
    pub(crate) fn push_tail(&mut self, list: List, block: BlockId) {
        let sentinel = self.sentinel(list);
        self.insert(list, block, self.links[sentinel.at()].prev, sentinel);
    }

    #[inline]
    pub(crate) fn pop_head(&mut self, list: List) -> Option<BlockId> {
        let sentinel = self.sentinel(list);
        let first = self.links[sentinel.at()].next;
        (first != sentinel).then(|| {
            self.unlink(list, first);
            first
        })
    }

    /// Takes a block out of the middle of its list.
    #[inline]
    pub(crate) fn unlink(&mut self, list: List, block: BlockId) {
        debug_assert!(self.contains(block));
        let Link { prev, next } = self.links[block.at()];
        self.links[prev.at()].next = next;
        self.links[next.at()].prev = prev;
        self.links[block.at()] = UNQUEUED;
        self.lens[list as usize] -= 1;
    }

    #[inline]
    fn insert(&mut self, list: List, block: BlockId, prev: BlockId, next: BlockId) {
        debug_assert!(!self.contains(block));
        self.links[block.at()] = Link { prev, next };
        self.links[prev.at()].next = block;
        self.links[next.at()].prev = block;
        self.lens[list as usize] += 1;
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
        let queued = (0..self.num_blocks())
            .filter(|&block| self.contains(BlockId::new(block)))
            .count();
        if queued != self.len() {
            return Err(format!(
                "free queue: {queued} blocks marked, {} counted",
                self.len()
            ));
        }
        Ok(())
    }

    fn check_ring(&self, list: List) -> Result<(), String> {
        let (sentinel, len) = (self.sentinel(list), self.len_of(list));
        let (mut at, mut seen) = (sentinel, 0);
        loop {
            let next = self.links[at.at()].next;
            if next == BlockId::NONE || self.links[next.at()].prev != at {
                return Err(format!("{list:?}: {at:?} and {next:?} disagree"));
            }
            if next == sentinel {
                break;
            }
            seen += 1;
            if seen > len {
                return Err(format!("{list:?}: more than its {len} blocks linked"));
            }
            at = next;
        }
        if seen != len {
            return Err(format!("{list:?}: {seen} blocks linked, {len} counted"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::List::{Free, Protected};
    use super::*;

    fn order(queue: &FreeQueue) -> Vec<u32> {
        queue.iter(Free).map(BlockId::get).collect()
    }

    #[test]
    fn keeps_order_under_every_operation() {
        let mut queue = FreeQueue::over(5).expect("five blocks fit");
        for block in 0..4 {
            queue.push_tail(Free, BlockId::new(block));
        }
        queue.push_head(Free, BlockId::new(4));
        assert_eq!(order(&queue), [4, 0, 1, 2, 3]);
        queue.unlink(Free, BlockId::new(1));
        queue.unlink(Free, BlockId::new(3));
        assert_eq!(order(&queue), [4, 0, 2]);
        assert!(!queue.contains(BlockId::new(1)));
        assert_eq!(queue.pop_head(Free), Some(BlockId::new(4)));
        queue.push_tail(Protected, BlockId::new(4));
        queue.push_head(Free, BlockId::new(1));
        assert_eq!(order(&queue), [1, 0, 2]);
        assert_eq!((queue.len_of(Protected), queue.len()), (1, 4));
        queue.check().expect("consistent");
        while queue.pop_head(Free).is_some() {}
        assert_eq!((queue.len(), queue.pop_head(Free)), (1, None));
        queue.check().expect("consistent when a list is empty");
    }

    #[test]
    fn check_sees_a_broken_link() {
        let mut queue = FreeQueue::over(3).expect("three blocks fit");
        queue.push_tail(Free, BlockId::new(0));
        queue.push_tail(Free, BlockId::new(1));
        queue.links[1].prev = BlockId::new(2);
        assert!(queue.check().is_err());
    }
}
