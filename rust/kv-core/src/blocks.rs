//! The only place where counters, queue and tree meet: every block that gets a holder, loses one,
//! gets a content or loses it goes through here.

use std::ops::Range;

use crate::events::Event;
use crate::eviction::{Ghost, Policy};
use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::queue::{FreeQueue, List};
use crate::sequence::Sequence;
use crate::shared::Letter;
use crate::trace::Call;

/// What the manager knows of a block. Its references are these two counts and those of leases, which
/// alone are atomic (in [`Shared`](crate::shared::Shared)): nobody else lets go without the manager.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Live sequences whose table holds the block.
    pub(crate) seq_refs: u32,
    /// Open plans that read it beside their sequences' own, once for each time.
    pub(crate) fences: u32,
    /// The content it holds, if that is registered.
    pub(crate) node: NodeIdx,
    /// The step that computes the content, or has computed it; see `Plan`.
    pub(crate) step: u32,
    /// The layer group of which it holds the content.
    pub(crate) group: u8,
    /// The content was adopted, or has come back soon after it was evicted.
    pub(crate) used_again: bool,
    /// The list of the queue in which the block waits, if it does.
    pub(crate) list: List,
}

/// The steps that are open: the older and the newer one, which may be the same.
pub(crate) type OpenSteps = Option<[u32; 2]>;

impl Block {
    pub(crate) const NEW: Self = Self {
        seq_refs: 0,
        fences: 0,
        node: NodeIdx::NONE,
        step: 0,
        group: 0,
        used_again: false,
        list: List::Free,
    };

    /// Puts itself into the queue.
    #[inline(always)] // as `enter_queue`
    fn wait(&mut self, id: BlockId, policy: &Policy, queue: &mut FreeQueue) {
        if self.node == NodeIdx::NONE {
            self.list = List::Free;
            queue.push_head(List::Free, id);
        } else {
            self.list = policy.list(self.used_again);
            queue.push_tail(self.list, id);
        }
    }

    /// Whether its content is there: no open step is to compute it.
    #[inline]
    pub(crate) fn is_ready(&self, open: OpenSteps) -> bool {
        open.is_none_or(|steps| !steps.contains(&self.step))
    }
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
                    if self.is_unheld(block) && !self.queue.contains(block) {
                        self.enter_queue(block);
                    }
                }
                Letter::Sequence(key) => {
                    if self.sequences.get(key).is_ok() {
                        self.note(|_| Call::drop_sequence(key.id), ());
                        self.drop_sequence(key.slot);
                    }
                }
                Letter::Plan(key) => self.roll_back_from(key),
                Letter::Lease(lease, blocks) => self.end_lease(lease, &blocks),
            }
        }
    }

    /// A block that nobody holds any more: idle if its content can be matched, else free.
    #[inline(always)] // the end of every sequence comes here for each of its blocks
    pub(crate) fn enter_queue(&mut self, block: BlockId) {
        let place = &mut self.blocks[block.at()];
        place.wait(block, &self.policy, &mut self.queue);
    }

    /// Before a block gets a holder.
    #[inline]
    pub(crate) fn leave_queue(&mut self, block: BlockId) {
        if self.queue.contains(block) {
            self.queue.unlink(self.blocks[block.at()].list, block);
        }
    }

    /// An idle block loses its content, and becomes what `then` says.
    #[inline(always)] // as `enter_queue`
    pub(crate) fn evict(&mut self, block: BlockId, then: Block) {
        let Block { node, group, .. } = std::mem::replace(&mut self.blocks[block.at()], then);
        if self.policy.remembers() {
            let hash = self.tree.hash(node);
            self.policy.evicted(Ghost { hash, group });
        }
        if self.config.events && self.tree.blocks(node).count() == 1 {
            let hash = self.tree.hash(node);
            self.events.push(Event::Removed { hash });
        }
        self.tree.clear_block(node, usize::from(group));
        self.stats.evicted_blocks += 1;
    }

    /// The block's content, if it has one, loses this block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let Block { node, group, .. } = self.blocks[block.at()];
        if node != NodeIdx::NONE {
            self.blocks[block.at()].node = NodeIdx::NONE;
            self.tree.clear_block(node, usize::from(group));
        }
    }

    /// A content is in this block now, computed in `step`; no other one held it for this group.
    #[inline]
    pub(crate) fn store(&mut self, node: NodeIdx, group: usize, block: BlockId, step: u32) {
        self.tree.set_block(node, group, block);
        self.note_content(node, group, block, step);
    }

    /// The part of `store` that is the block's.
    #[inline(always)] // every new content comes here
    pub(crate) fn note_content(&mut self, node: NodeIdx, group: usize, block: BlockId, step: u32) {
        let place = &mut self.blocks[block.at()];
        (place.node, place.step, place.group) = (node, step, group as u8);
        if self.policy.remembers() {
            let hash = self.tree.hash(node);
            let ghost = Ghost {
                hash,
                group: group as u8,
            };
            self.blocks[block.at()].used_again |= self.policy.comes_back(ghost);
        }
    }

    /// Whether the content of a block is there: no open step is to compute it.
    #[inline]
    pub(crate) fn is_ready(&self, block: BlockId) -> bool {
        self.blocks[block.at()].is_ready(self.open_steps())
    }

    #[inline]
    pub(crate) fn open_steps(&self) -> OpenSteps {
        Some([self.open.first()?.step(), self.open.last()?.step()])
    }

    /// All holders.
    #[inline]
    pub(crate) fn refs_of(&self, block: BlockId) -> u32 {
        let Block {
            seq_refs, fences, ..
        } = self.blocks[block.at()];
        seq_refs + fences + self.shared.lease_refs_of(block)
    }

    #[inline]
    pub(crate) fn is_unheld(&self, block: BlockId) -> bool {
        let Block {
            seq_refs, fences, ..
        } = self.blocks[block.at()];
        seq_refs + fences == 0 && self.shared.lease_refs_of(block) == 0
    }

    /// A table entry more.
    #[inline]
    pub(crate) fn hold_for_sequence(&mut self, block: BlockId) {
        self.leave_queue(block);
        let seq_refs = &mut self.blocks[block.at()].seq_refs;
        self.active += usize::from(*seq_refs == 0);
        *seq_refs += 1;
    }

    /// A table entry less.
    #[inline(always)] // as `enter_queue`
    pub(crate) fn let_go_for_sequence(&mut self, block: BlockId) {
        let place = &mut self.blocks[block.at()];
        place.seq_refs -= 1;
        if place.seq_refs == 0 {
            self.active -= 1;
            if place.fences == 0 && self.shared.lease_refs_of(block) == 0 {
                place.wait(block, &self.policy, &mut self.queue);
            }
        }
    }

    /// The newest plan reads a block, whatever becomes of its holders.
    pub(crate) fn fence(&mut self, block: BlockId) {
        self.blocks[block.at()].fences += 1;
        self.plan_mut().fenced.push(block);
    }

    /// A plan is closed.
    pub(crate) fn lift_fence(&mut self, fenced: Vec<BlockId>) {
        for block in fenced {
            self.blocks[block.at()].fences -= 1;
            if self.is_unheld(block) {
                self.enter_queue(block);
            }
        }
    }

    /// The next `count` blocks of the queue go to the end of a sequence's table, without their old
    /// contents. The caller has counted that there are as many.
    pub(crate) fn allocate(&mut self, slot: u32, count: usize) {
        let mut table = std::mem::take(&mut self.sequences.at_mut(slot).table);
        let start = table.len();
        self.queue.pop_heads(List::Free, count, &mut table);
        let idle = table.len();
        while table.len() < start + count {
            let (list, most) = self.policy.victims(&self.queue);
            let missing = start + count - table.len();
            self.queue.pop_heads(list, most.min(missing), &mut table);
        }
        let held = Block {
            seq_refs: 1,
            ..Block::NEW
        };
        for &block in &table[start..idle] {
            self.blocks[block.at()] = held;
        }
        if table.len() - idle > 1 {
            self.expect_evictions(table[idle..].iter().copied());
        }
        for &block in &table[idle..] {
            self.evict(block, held);
        }
        self.active += count;
        self.stats.allocated_blocks += count as u64;
        self.sequences.at_mut(slot).table = table;
    }

    /// About so many blocks are to be allocated one by one.
    pub(crate) fn expect_allocations(&self, count: usize) {
        let missing = count.saturating_sub(self.queue.len_of(List::Free));
        if missing > 1 && self.queue.len() > 0 {
            let (list, most) = self.policy.victims(&self.queue);
            self.expect_evictions(self.queue.iter(list).take(missing.min(most)));
        }
    }

    /// Brings what evicting these blocks reads into the processor's cache.
    #[inline]
    fn expect_evictions(&self, blocks: impl Iterator<Item = BlockId>) {
        let nodes = blocks.map(|block| self.blocks[block.at()].node);
        self.tree.expect_end(nodes);
    }

    /// Shortens a table to `rows` rows, last entry first, so that prefixes outlive continuations.
    pub(crate) fn release_table(&mut self, slot: u32, rows: usize) {
        let seq = self.sequences.at_mut(slot);
        let len = rows * self.groups.len();
        let end = seq.table.len();
        self.release_rows(slot, len.min(end)..end);
    }

    /// Takes these entries out of a table, the last one first.
    pub(crate) fn release_rows(&mut self, slot: u32, entries: Range<usize>) {
        if entries.is_empty() {
            return;
        }
        let seq = self.sequences.at_mut(slot);
        seq.table_version += 1;
        let mut table = std::mem::take(&mut seq.table);
        for block in table.drain(entries).rev().filter_map(BlockId::some) {
            self.let_go_for_sequence(block);
        }
        self.sequences.at_mut(slot).table = table;
    }

    /// Gives back what no later token of the sequence can see: the rows before the windows of its
    /// last full row. Rows that are yet to be registered wait. Returns how many blocks that are.
    #[inline]
    pub(crate) fn slide(&mut self, slot: u32) -> u64 {
        if self.groups.have_windows() {
            self.slide_windows(slot)
        } else {
            0
        }
    }

    /// The rows of which a sequence needs the windows: those computed, and registered if they ever are.
    pub(crate) fn settled_rows(&self, seq: &Sequence) -> usize {
        let nameless = seq.chain.private || !self.config.prefix_caching;
        let full = seq.computed / self.config.block_size;
        if nameless {
            full
        } else {
            full.min(seq.chain.blocks)
        }
    }

    fn slide_windows(&mut self, slot: u32) -> u64 {
        let groups = self.groups.len();
        let rows = self.settled_rows(self.sequences.at(slot));
        let mut given_back = 0;
        for group in 0..groups {
            for row in (0..self.groups.first_row(group, rows)).rev() {
                let seq = self.sequences.at_mut(slot);
                let entry = &mut seq.table[row * groups + group];
                let Some(block) = std::mem::replace(entry, BlockId::NONE).some() else {
                    break; // what comes before it went earlier
                };
                seq.table_version += 1;
                given_back += 1;
                if row < seq.chain.blocks && seq.chain.private {
                    // What follows has no name, so nobody can stand on what came before any more.
                    seq.chain.tip = seq.root;
                    seq.chain.blocks = 0;
                }
                self.let_go_for_sequence(block);
            }
        }
        given_back
    }
}
