//! Which idle block goes first: small policies, chosen by name.

use std::collections::{HashSet, VecDeque};
use std::str::FromStr;

use crate::error::Error;
use crate::queue::{FreeQueue, List};
use crate::retention::Priority;

/// How idle blocks are given up when there are no free ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// Least recently used first.
    #[default]
    Lru,
    /// Two queues, after Johnson and Shasha, *2Q: A Low Overhead High Performance Buffer Management
    /// Replacement Algorithm*, VLDB 1994.
    ///
    /// Contents that were used once wait in one list, those that were used again in another; each is
    /// evicted least recently used first, and the first list keeps at most half of the idle blocks. A
    /// content that comes back soon after it was evicted counts as used again. One pass of prompts that
    /// never return cannot flush what does return.
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

impl FromStr for Eviction {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known
            .map(|(_, policy)| *policy)
            .ok_or_else(|| Error::UnknownPolicy(name.into()))
    }
}

/// What is remembered of an evicted block: the content's name and the layer group.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ghost {
    pub(crate) hash: u128,
    pub(crate) group: u8,
}

/// The state of a policy.
pub(crate) struct Policy {
    kind: Eviction,
    /// Evicted lately, the oldest first: as many as the pool has blocks.
    ghosts: VecDeque<Ghost>,
    known_ghosts: HashSet<Ghost>,
    num_blocks: usize,
}

impl Policy {
    pub(crate) fn new(kind: Eviction, num_blocks: usize) -> Self {
        Self {
            kind,
            ghosts: VecDeque::new(),
            known_ghosts: HashSet::new(),
            num_blocks,
        }
    }

    /// Where a block waits that has become idle.
    #[inline]
    pub(crate) fn list(&self, used_again: bool, priority: Priority) -> List {
        match (priority, self.kind) {
            (Priority::Low, _) => List::Low,
            (Priority::High, _) => List::High,
            (Priority::Normal, Eviction::TwoQueue) if used_again => List::Protected,
            (Priority::Normal, _) => List::Probation,
        }
    }

    /// The list of which the first block goes. There is an idle one.
    #[inline]
    pub(crate) fn victim(&self, queue: &FreeQueue) -> List {
        let (once, again) = (queue.len_of(List::Probation), queue.len_of(List::Protected));
        if queue.len_of(List::Low) > 0 {
            List::Low
        } else if once + again == 0 {
            List::High
        } else if again == 0 || (once > 0 && 2 * once > once + again) {
            List::Probation
        } else {
            List::Protected
        }
    }

    /// Whether it wants to know what was evicted and what comes back.
    #[inline]
    pub(crate) fn remembers(&self) -> bool {
        self.kind != Eviction::Lru
    }

    /// A content was evicted.
    pub(crate) fn evicted(&mut self, ghost: Ghost) {
        if !self.remembers() || !self.known_ghosts.insert(ghost) {
            return;
        }
        self.ghosts.push_back(ghost);
        if self.ghosts.len() > self.num_blocks
            && let Some(oldest) = self.ghosts.pop_front()
        {
            self.known_ghosts.remove(&oldest);
        }
    }

    /// Whether a content that is stored now was evicted lately.
    #[inline]
    pub(crate) fn comes_back(&self, ghost: Ghost) -> bool {
        self.known_ghosts.contains(&ghost)
    }
}
