//! The free queue: a doubly linked list by index in flat arrays.
//!
//! ```text
//!   head                                            tail
//!    v                                               v
//!   free (last freed first) ... free | idle (least recently used) ... idle
//! ```
//!
//! Every operation is O(1) and allocates nothing.

use crate::ids::BlockId;

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
    /// One link per block, and a sentinel at the end that closes the ring.
    links: Vec<Link>,
    len: usize,
}

impl FreeQueue {
    pub(crate) const BYTES_PER_BLOCK: usize = size_of::<Link>();

    /// An empty queue over `links.capacity() - 1` blocks; the caller has reserved the memory.
    pub(crate) fn over(num_blocks: usize) -> Result<Self, std::collections::TryReserveError> {
        let mut links = Vec::new();
        links.try_reserve_exact(num_blocks + 1)?;
        links.resize(num_blocks, UNQUEUED);
        let sentinel = BlockId::new(num_blocks);
        links.push(Link {
            prev: sentinel,
            next: sentinel,
        });
        Ok(Self { links, len: 0 })
    }

    #[inline]
    fn sentinel(&self) -> BlockId {
        BlockId::new(self.links.len() - 1)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.at()].next != BlockId::NONE
    }

    #[inline]
    pub(crate) fn push_head(&mut self, block: BlockId) {
        let sentinel = self.sentinel();
        self.insert(block, sentinel, self.links[sentinel.at()].next);
    }

    #[inline]
    pub(crate) fn push_tail(&mut self, block: BlockId) {
        let sentinel = self.sentinel();
        self.insert(block, self.links[sentinel.at()].prev, sentinel);
    }

    #[inline]
    pub(crate) fn pop_head(&mut self) -> Option<BlockId> {
        let first = self.links[self.sentinel().at()].next;
        (first != self.sentinel()).then(|| {
            self.unlink(first);
            first
        })
    }

    /// Takes a block out of the middle.
    #[inline]
    pub(crate) fn unlink(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        let Link { prev, next } = self.links[block.at()];
        self.links[prev.at()].next = next;
        self.links[next.at()].prev = prev;
        self.links[block.at()] = UNQUEUED;
        self.len -= 1;
    }

    #[inline]
    fn insert(&mut self, block: BlockId, prev: BlockId, next: BlockId) {
        debug_assert!(!self.contains(block));
        self.links[block.at()] = Link { prev, next };
        self.links[prev.at()].next = block;
        self.links[next.at()].prev = block;
        self.len += 1;
    }

    /// The blocks from head to tail, for the validator and for clearing the cache.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel();
        let mut at = self.links[sentinel.at()].next;
        std::iter::from_fn(move || {
            (at != sentinel).then(|| {
                let block = at;
                at = self.links[block.at()].next;
                block
            })
        })
    }

    /// Walks the ring both ways and counts.
    pub(crate) fn check(&self) -> Result<(), String> {
        let sentinel = self.sentinel();
        let (mut at, mut seen) = (sentinel, 0);
        loop {
            let next = self.links[at.at()].next;
            if next == BlockId::NONE || self.links[next.at()].prev != at {
                return Err(format!("free queue: {at:?} and {next:?} disagree"));
            }
            if next == sentinel {
                break;
            }
            seen += 1;
            if seen > self.len {
                return Err(format!(
                    "free queue: more than its {} blocks linked",
                    self.len
                ));
            }
            at = next;
        }
        if seen != self.len {
            return Err(format!(
                "free queue: {seen} blocks linked, {} counted",
                self.len
            ));
        }
        let queued = (0..self.links.len() - 1)
            .filter(|&b| self.contains(BlockId::new(b)))
            .count();
        if queued != self.len {
            return Err(format!(
                "free queue: {queued} blocks marked, {} counted",
                self.len
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &FreeQueue) -> Vec<u32> {
        queue.iter().map(BlockId::get).collect()
    }

    #[test]
    fn keeps_order_under_every_operation() {
        let mut queue = FreeQueue::over(5).expect("five blocks fit");
        for block in 0..4 {
            queue.push_tail(BlockId::new(block));
        }
        queue.push_head(BlockId::new(4));
        assert_eq!(order(&queue), [4, 0, 1, 2, 3]);
        queue.unlink(BlockId::new(1));
        queue.unlink(BlockId::new(3));
        assert_eq!(order(&queue), [4, 0, 2]);
        assert!(!queue.contains(BlockId::new(1)));
        assert_eq!(queue.pop_head(), Some(BlockId::new(4)));
        queue.push_head(BlockId::new(1));
        assert_eq!(order(&queue), [1, 0, 2]);
        queue.check().expect("consistent");
        while queue.pop_head().is_some() {}
        assert_eq!((queue.len(), queue.pop_head()), (0, None));
        queue.check().expect("consistent when empty");
    }

    #[test]
    fn check_sees_a_broken_link() {
        let mut queue = FreeQueue::over(3).expect("three blocks fit");
        queue.push_tail(BlockId::new(0));
        queue.push_tail(BlockId::new(1));
        queue.links[1].prev = BlockId::new(2);
        assert!(queue.check().is_err());
    }
}
