//! Retention: some contents are worth more than others, for good or for a while.
//!
//! A priority orders idle blocks before the eviction policy does: every idle content of low priority
//! goes before one of normal priority, and every one of those before one of high priority. It says
//! nothing about blocks that are held, and unlike a lease it takes nothing away from admission.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::str::FromStr;
use std::time::Duration;

use crate::error::Error;
use crate::ids::{ContentId, NodeIdx};
use crate::life::check_namespace;
use crate::manager::BlockManager;
use crate::matching::Prompt;
use crate::trace::Call;

/// How long a content is kept while it is idle, compared with others.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
pub enum Priority {
    /// Given up before anything else.
    Low,
    /// In the order of the eviction policy.
    #[default]
    Normal,
    /// Given up when nothing else is left.
    High,
}

impl Priority {
    /// Every priority by its name.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("low", Self::Low),
        ("normal", Self::Normal),
        ("high", Self::High),
    ];
}

impl FromStr for Priority {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known
            .map(|(_, priority)| *priority)
            .ok_or_else(|| Error::UnknownPriority(name.into()))
    }
}

/// The end of a priority: when, which request for it, of which content.
type Deadline = Reverse<(Duration, u64, NodeIdx, ContentId)>;

/// Priorities that end.
#[derive(Default)]
pub(crate) struct Retention {
    pub(crate) now: Duration,
    deadlines: BinaryHeap<Deadline>,
    /// The request that is in force for a content; older deadlines mean nothing any more.
    in_force: HashMap<ContentId, u64>,
    requests: u64,
}

impl BlockManager {
    /// Gives the longest cached prefix of `tokens` a priority, until `ttl` has passed if that is given,
    /// or until another call says otherwise. Returns the tokens covered: a multiple of the block size.
    ///
    /// It counts as a use of those contents. A priority is the content's, not the block's, and ends
    /// with it.
    pub fn retain(
        &mut self,
        tokens: &[u32],
        namespace: &[u8],
        priority: Priority,
        ttl: Option<Duration>,
    ) -> Result<usize, Error> {
        self.read_mail();
        check_namespace(namespace)?;
        let Some(root) = self.tree.root(namespace) else {
            return Ok(0);
        };
        let prompt = Prompt {
            tokens,
            tip: root,
            rows: 0,
            hashes: None,
        };
        self.matched
            .walk(&mut self.tree, &self.groups, prompt, |_| true);
        let (mut node, rows) = (self.matched.tip, self.matched.rows);
        // Last first, so that a prefix outlives its continuations.
        for _ in 0..rows {
            self.set_priority(node, priority);
            self.retention.set(node, self.tree.id(node), ttl);
            node = self.tree.parent(node).expect("a root leads to it");
        }
        let covered = rows * self.config.block_size;
        self.note(|_| Call::retain(tokens, namespace, priority, ttl), covered);
        Ok(covered)
    }

    /// Whether any priority is to end: whether [`BlockManager::tick`] has anything to do.
    #[inline]
    pub fn wants_time(&self) -> bool {
        !self.retention.deadlines.is_empty()
    }

    /// Tells the time, since whenever the caller began to count: priorities that have ended by then are
    /// normal again. A time before the last one is passed over.
    pub fn tick(&mut self, now: Duration) {
        self.read_mail();
        self.retention.now = self.retention.now.max(now);
        while let Some((node, content)) = self.retention.pop_ended() {
            if self.tree.is_alive(node, content) {
                self.set_priority(node, Priority::Normal);
            }
        }
        self.note(|_| Call::tick(now), ());
    }

    fn set_priority(&mut self, node: NodeIdx, priority: Priority) {
        self.tree.set_priority(node, priority);
        for group in 0..self.groups.len() {
            let Some(block) = self.tree.block(node, group) else {
                continue;
            };
            let queued = self.queue.contains(block);
            self.leave_queue(block);
            self.blocks[block.at()].priority = priority;
            if queued {
                self.enter_queue(block);
            }
        }
    }
}

impl Retention {
    fn set(&mut self, node: NodeIdx, content: ContentId, ttl: Option<Duration>) {
        self.in_force.remove(&content);
        if let Some(ttl) = ttl {
            self.requests += 1;
            self.in_force.insert(content, self.requests);
            let end = self.now.saturating_add(ttl);
            let deadline = (end, self.requests, node, content);
            self.deadlines.push(Reverse(deadline));
        }
    }

    /// The next content whose priority has ended, the longest ended first.
    fn pop_ended(&mut self) -> Option<(NodeIdx, ContentId)> {
        while let Some(Reverse((end, request, node, content))) = self.deadlines.peek().copied() {
            if end > self.now {
                break;
            }
            self.deadlines.pop();
            if self.in_force.get(&content) == Some(&request) {
                self.in_force.remove(&content);
                return Some((node, content));
            }
        }
        None
    }
}
