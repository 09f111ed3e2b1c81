//! The only place where counters, queue and tree meet: every block that gets a holder, loses one,
//! gets a content or loses it goes through here.

use crate::events::Event;
use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::queue::List;
use crate::shared::Letter;
use crate::trace::Call;

/// What the manager knows of a block, apart from its references (atomic, in [`Shared`]).
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Live sequences whose table holds the block.
    pub(crate) seq_refs: u32,
    /// The content it holds, if that is registered.
    pub(crate) node: NodeIdx,
    /// The content was adopted, or has come back soon after it was evicted.
    pub(crate) used_again: bool,
    /// The list of the queue in which the block waits, if it does.
    pub(crate) list: List,
}

impl Block {
    pub(crate) const NEW: Self = Self {
        seq_refs: 0,
        node: NodeIdx::NONE,
        used_again: false,
        list: List::Free,
    };
}

impl BlockManager {
    /// Does what dropped handles and leases left to do. Every call that changes something begins with
    /// it; before `view`, `stats` or `plan_view` it may be called for their sake.
    #[inline]
    pub fn settle(&mut self) {
        self.read_mail();
    }

    /// Does what was left in the mailbox: the first thing in every call that looks at blocks.
    #[inline]
    pub(crate) fn read_mail(&mut self) {
        for letter in self.shared.collect() {
            match letter {
                Letter::Block(block) => {
                    if self.shared.refs(block) == 0 && !self.queue.contains(block) {
                        self.enter_queue(block);
                    }
                }
                Letter::Sequence(key) => {
                    if self.sequences.get(key).is_ok() {
                        self.note(|it| Call::drop_sequence(it.id(key)), ());
                        self.drop_sequence(key.slot);
                    }
                }
                Letter::Plan(key) => self.roll_back_from(key),
                Letter::Lease(lease, blocks) => self.end_lease(lease, &blocks),
            }
        }
    }

    /// A block that nobody holds any more: idle if its content can be matched, else free.
    #[inline]
    pub(crate) fn enter_queue(&mut self, block: BlockId) {
        let place = &mut self.blocks[block.at()];
        if place.node == NodeIdx::NONE {
            place.list = List::Free;
            self.queue.push_head(List::Free, block);
        } else {
            place.list = self.policy.list(place.used_again);
            self.queue.push_tail(place.list, block);
        }
    }

    /// Before a block gets a holder.
    #[inline]
    pub(crate) fn leave_queue(&mut self, block: BlockId) {
        if self.queue.contains(block) {
            self.queue.unlink(self.blocks[block.at()].list, block);
        }
    }

    /// An idle block loses its content.
    pub(crate) fn evict(&mut self, block: BlockId) {
        let hash = self.tree.hash(self.blocks[block.at()].node);
        self.policy.evicted(hash);
        if self.config.events {
            self.events.push(Event::Removed { hash });
        }
        self.forget(block);
        self.stats.evicted_blocks += 1;
    }

    /// The block's content, if it has one, loses this block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let node = std::mem::replace(&mut self.blocks[block.at()].node, NodeIdx::NONE);
        if node != NodeIdx::NONE {
            self.tree.clear_block(node);
        }
    }

    /// A content that is stored now: whether it was here lately.
    pub(crate) fn note_stored(&mut self, node: NodeIdx, block: BlockId) {
        self.blocks[block.at()].node = node;
        if self.policy.comes_back(self.tree.hash(node)) {
            self.blocks[block.at()].used_again = true;
        }
    }

    /// A table entry more.
    #[inline]
    pub(crate) fn hold_for_sequence(&mut self, block: BlockId) {
        self.leave_queue(block);
        self.shared.hold(block);
        let seq_refs = &mut self.blocks[block.at()].seq_refs;
        self.active += usize::from(*seq_refs == 0);
        *seq_refs += 1;
    }

    /// A table entry less.
    #[inline]
    pub(crate) fn let_go_for_sequence(&mut self, block: BlockId) {
        let seq_refs = &mut self.blocks[block.at()].seq_refs;
        *seq_refs -= 1;
        self.active -= usize::from(*seq_refs == 0);
        if self.shared.let_go(block) {
            self.enter_queue(block);
        }
    }

    /// The next block of the queue, without its old content. The caller has counted that there is one.
    #[inline]
    pub(crate) fn allocate(&mut self) -> BlockId {
        let block = match self.queue.pop_head(List::Free) {
            Some(block) => block,
            None => {
                let list = self.policy.victim(&self.queue);
                let block = self.queue.pop_head(list).expect("counted before");
                self.evict(block);
                block
            }
        };
        self.blocks[block.at()].used_again = false;
        self.stats.allocated_blocks += 1;
        self.hold_for_sequence(block);
        block
    }

    /// Shortens a table to `len` entries, last entry first, so that prefixes outlive continuations.
    pub(crate) fn release_table(&mut self, slot: u32, len: usize) {
        let seq = self.sequences.at_mut(slot);
        if seq.table.len() <= len {
            return;
        }
        seq.table_version += 1;
        let mut table = std::mem::take(&mut seq.table);
        for &block in table[len..].iter().rev() {
            self.let_go_for_sequence(block);
        }
        table.truncate(len);
        self.sequences.at_mut(slot).table = table;
    }
}
