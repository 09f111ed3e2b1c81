//! Eviction policies: which evictable block is evicted first.

use std::collections::{HashSet, VecDeque};

use crate::queue::{FreeQueue, List};

/// The order in which evictable blocks are evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub enum Eviction {
    /// Least recently used first.
    #[default]
    Lru,
    /// Two queues, after Johnson and Shasha, *2Q: A Low Overhead High Performance Buffer Management
    /// Replacement Algorithm*, VLDB 1994.
    ///
    /// Blocks used once are in one list, blocks used again in another; each evicts least recently used first, and
    /// the first keeps at most half of the evictable blocks. A block that is cached again soon after its eviction
    /// counts as used again. A scan of prompts that are used once does not flush the others.
    TwoQueue,
}

impl Eviction {
    /// Every policy by its name, in the order of the variants.
    pub const NAMES: [(&'static str, Self); 2] = [("lru", Self::Lru), ("2q", Self::TwoQueue)];

    /// The name of the policy.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// An evicted block that is remembered: its hash and layer group.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ghost {
    pub(crate) hash: u128,
    pub(crate) group: u8,
}

/// The state of a policy.
#[derive(Default)]
pub(crate) struct Policy {
    kind: Eviction,
    /// The last evictions, oldest first: at most as many as the pool has blocks.
    ghosts: VecDeque<Ghost>,
    known_ghosts: HashSet<Ghost>,
    num_blocks: usize,
}

impl Policy {
    pub(crate) fn new(kind: Eviction, num_blocks: usize) -> Self {
        Self {
            kind,
            num_blocks,
            ..Self::default()
        }
    }

    pub(crate) fn kind(&self) -> Eviction {
        self.kind
    }

    /// The list of blocks that were reused, or cached again soon after their eviction. All others are in `Probation`.
    pub(crate) fn list_of_reused(&self) -> List {
        match self.kind {
            Eviction::Lru => List::Probation,
            Eviction::TwoQueue => List::Protected,
        }
    }

    /// The list to evict from, and how many blocks until the other list may be next. At least one block is evictable.
    pub(crate) fn victims(&self, queue: &FreeQueue) -> (List, usize) {
        let [once, again] = List::EVICTABLE.map(|list| queue.len_of(list));
        if once > again {
            (List::Probation, once - again) // until it has half of them
        } else {
            (List::Protected, (again - once + 1).min(again))
        }
    }

    pub(crate) fn has_ghosts(&self) -> bool {
        self.kind != Eviction::Lru
    }

    pub(crate) fn add_ghost(&mut self, ghost: Ghost) {
        if !self.has_ghosts() || !self.known_ghosts.insert(ghost) {
            return;
        }
        self.ghosts.push_back(ghost);
        if self.ghosts.len() > self.num_blocks
            && let Some(oldest) = self.ghosts.pop_front()
        {
            self.known_ghosts.remove(&oldest);
        }
    }

    /// Whether a block was evicted recently.
    pub(crate) fn has_ghost(&self, ghost: Ghost) -> bool {
        self.known_ghosts.contains(&ghost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ghost(hash: u128, group: u8) -> Ghost {
        Ghost { hash, group }
    }

    #[test]
    fn as_many_are_remembered_as_the_pool_has_blocks() {
        let mut policy = Policy::new(Eviction::TwoQueue, 3);
        let knows = |policy: &Policy| -> Vec<u128> {
            let known = |hash: &u128| policy.has_ghost(ghost(*hash, 0));
            (1..=5).filter(known).collect()
        };
        assert!(policy.has_ghosts() && knows(&policy).is_empty());
        for hash in [1, 2, 3] {
            policy.add_ghost(ghost(hash, 0));
        }
        assert_eq!(knows(&policy), [1, 2, 3]);
        policy.add_ghost(ghost(1, 0)); // again: it keeps its place
        assert_eq!(knows(&policy), [1, 2, 3]);
        policy.add_ghost(ghost(4, 0));
        assert_eq!(knows(&policy), [2, 3, 4]);
        policy.add_ghost(ghost(5, 0));
        assert_eq!(knows(&policy), [3, 4, 5]);
        assert_eq!((policy.ghosts.len(), policy.known_ghosts.len()), (3, 3));
    }

    #[test]
    fn groups_are_remembered_one_by_one() {
        let mut policy = Policy::new(Eviction::TwoQueue, 3);
        policy.add_ghost(ghost(1, 2));
        assert!(policy.has_ghost(ghost(1, 2)) && !policy.has_ghost(ghost(1, 0)));
    }

    #[test]
    fn lru_remembers_nothing() {
        let mut policy = Policy::new(Eviction::Lru, 3);
        policy.add_ghost(ghost(1, 0));
        assert!(!policy.has_ghosts() && !policy.has_ghost(ghost(1, 0)));
        assert_eq!((policy.ghosts.len(), policy.known_ghosts.len()), (0, 0));
    }

    /// A queue with this many blocks in each list of evictable ones.
    fn queue(once: usize, again: usize) -> FreeQueue {
        let mut queue = FreeQueue::new(32).expect("small");
        let lists = List::EVICTABLE.into_iter().zip([once, again]);
        let lists = lists.flat_map(|(list, count)| std::iter::repeat_n(list, count));
        let mut batch = queue.begin_push();
        for (block, list) in lists.enumerate() {
            let block = crate::ids::BlockId::new(block);
            batch.meta_mut(block).list = list;
            batch.push(block);
        }
        batch.end();
        queue
    }

    #[test]
    fn the_list_that_gives() {
        use List::{Probation, Protected};
        let policy = Policy::new(Eviction::TwoQueue, 32);
        for (lens, list, count) in [
            ((1, 0), Probation, 1),
            ((9, 0), Probation, 9),
            ((0, 1), Protected, 1),
            ((0, 9), Protected, 9),
            ((1, 1), Protected, 1),
            ((1, 2), Protected, 2),
            ((2, 1), Probation, 1),
            ((3, 2), Probation, 1),
            ((3, 3), Protected, 1),
            ((5, 6), Protected, 2),
            ((7, 6), Probation, 1),
            ((7, 2), Probation, 5),
        ] {
            let (once, again) = lens;
            let queue = queue(once, again);
            assert_eq!(policy.victims(&queue), (list, count), "{lens:?}");
        }
    }

    /// To take many at once is to take them one by one.
    #[test]
    fn victims_of_one_list_are_those_that_would_go_one_by_one() {
        let policy = Policy::new(Eviction::TwoQueue, 32);
        for (once, again) in (0..12).flat_map(|once| (0..12).map(move |again| (once, again))) {
            if once + again == 0 {
                continue;
            }
            let (list, count) = policy.victims(&queue(once, again));
            let (mut once, mut again) = (once, again);
            for _ in 0..count {
                let half = once > 0 && 2 * once > once + again;
                let from_first = again == 0 || half;
                assert_eq!(list == List::Probation, from_first, "{once} {again}");
                *(if from_first { &mut once } else { &mut again }) -= 1;
            }
            if once + again > 0 {
                let next = policy.victims(&queue(once, again)).0;
                assert_ne!(next, list, "{once} {again}");
            }
        }
    }
}
