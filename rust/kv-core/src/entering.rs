//! Entering a plan: adopting what is cached, sharing in flight, copying on write, allocating.

use std::ops::Range;

use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::matching::Match;
use crate::plan::{Before, Entry, More};
use crate::sequence::Chain;
use crate::tree::Step;

impl BlockManager {
    /// Puts a sequence into the plan: adopts the match under way if it is a prefill, then allocates
    /// for `len` tokens and `lookahead` more. Room and budget were counted before.
    pub(crate) fn push_entry(
        &mut self,
        slot: u32,
        len: usize,
        lookahead: usize,
        mut more: Option<Box<More>>,
    ) {
        let before = self.before(slot);
        if let Some(more) = more.as_mut().filter(|more| more.prefill) {
            self.adopt(slot, more);
        }
        let start = self.sequences.at(slot).ahead;
        let copied = self.must_copy(slot, start).min();
        if let Some(first) = copied {
            let more = more.get_or_insert_with(|| Box::new(More::NOTHING));
            more.copied = self.copy_row(slot, first);
        }
        if let Some(more) = more.as_mut().filter(|more| more.prefill) {
            self.announce(slot, start..start + len, more);
        }
        let entries = self.groups.rows(start + len + lookahead) * self.groups.len();
        let held = self.sequences.at(slot).table.len();
        if entries > held {
            self.allocate(slot, entries - held);
        }
        self.note_entry(slot, before, len, more);
    }

    /// What the sequence is.
    #[inline]
    pub(crate) fn before(&self, slot: u32) -> Before {
        let seq = self.sequences.at(slot);
        Before {
            table_len: seq.table.len(),
            ahead: seq.ahead,
            chain: seq.chain,
        }
    }

    /// The plan computes the next `len` positions of a sequence, whose blocks are in its table.
    #[inline(always)] // without `more`, for each decode, little of it is left
    pub(crate) fn note_entry(
        &mut self,
        slot: u32,
        before: Before,
        len: usize,
        more: Option<Box<More>>,
    ) {
        let (mut drafts, mut held) = (0, before.chain.blocks);
        if let Some(more) = &more {
            drafts = more.drafts.len();
            held = if more.prefill {
                more.announce_from
            } else {
                held
            };
        }
        let write_from = held * self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let (start, end) = (seq.ahead, seq.ahead + len);
        let samples = end == seq.tokens.len() + seq.pending + drafts;
        let pending_row = (seq.pending > 0).then_some(seq.sample_row);
        seq.ahead = end;
        seq.speculating = drafts > 0;
        let plan = self.open.last_mut().expect("checked before");
        if samples {
            seq.pending += 1;
            seq.sample_row = plan.num_samples;
        }
        plan.budget_left -= len;
        plan.num_tokens += len;
        plan.num_samples += usize::from(samples) + drafts;
        plan.entries.push(Entry {
            slot,
            samples,
            start,
            len,
            write_from,
            pending_row,
            before,
            more,
        });
    }

    /// Copies what `must_copy` named, the first of which is `first`. Returns the entries and what they
    /// were.
    fn copy_row(&mut self, slot: u32, first: usize) -> Vec<(usize, BlockId)> {
        let position = first / self.groups.len() * self.config.block_size;
        let entries: Vec<usize> = self.must_copy(slot, position).collect();
        let copy = |at| (at, self.copy_block(slot, at));
        entries.into_iter().map(copy).collect()
    }

    /// Copy on write: the sequence gets a copy of a block. Returns the source, which the plan holds
    /// until it is closed: whatever becomes of its other holders, it is still to be read.
    fn copy_block(&mut self, slot: u32, at: usize) -> BlockId {
        self.allocate(slot, 1);
        let seq = self.sequences.at_mut(slot);
        let copy = seq.table[seq.table.len() - 1];
        let source = seq.table.swap_remove(at);
        seq.table_version += 1;
        self.fence(source);
        self.let_go_for_sequence(source);
        self.plan_mut().copies.push((source, copy));
        source
    }

    /// In-flight sharing: contents that computing these positions makes full enter the tree now, as
    /// computed by this step, so that sequences planned later in it share them. Of a content that has
    /// lost some of its blocks, those that are there go into the table as they are (`present`) and only
    /// the others are written. Stops at a content that the commit must settle: a collision, or a block of
    /// this sequence's own for a content that another block holds.
    fn announce(&mut self, slot: u32, positions: Range<usize>, more: &mut More) {
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let seq = self.sequences.at(slot);
        let from = seq.chain.blocks;
        more.announce_from = from;
        if !self.config.in_flight_sharing || !self.config.prefix_caching || seq.chain.private {
            return;
        }
        if from < self.groups.row_of(positions.start) {
            return; // full already: the commit of the step before settles it
        }
        let rows = self.groups.row_of(positions.end);
        self.hash_ahead(slot, rows);
        let step = self.plan_mut().step();
        for row in from..rows {
            let seq = self.sequences.at(slot);
            let tip = seq.chain.tip;
            let has_row = row * groups < seq.table.len();
            if !has_row && self.tree.latest_child(tip).is_none() {
                more.announced += self.announce_new(slot, rows, step);
                break;
            }
            let tokens = &seq.tokens[row * block_size..][..block_size];
            let found = self.tree.step(tip, tokens, seq.hashes.get(row).copied());
            let node = match found {
                Step::Missing(hash) => self.tree.insert(tip, tokens, hash),
                Step::Found(node) if !has_row || !self.tree.has_block(node) => node,
                Step::Found(_) | Step::Collision(_) => break,
            };
            self.tree.hold(node); // allocating may evict whatever else keeps it alive
            if !has_row {
                self.take_present(slot, node, more);
            }
            for group in 0..groups {
                let at = row * groups + group;
                let mine = self.sequences.at(slot).table[at];
                if self.tree.block(node, group).is_none() {
                    self.store(node, group, mine, step);
                }
            }
            self.tree.unhold(node);
            self.stand_on(slot, row, node);
            more.announced += 1;
        }
    }

    /// The rest of `announce` for a sequence that stands at the end of its table and on a content that
    /// nothing follows: all up to row `rows` is new. Returns how many rows it announced.
    fn announce_new(&mut self, slot: u32, rows: usize, step: u32) -> usize {
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let from = self.sequences.at(slot).chain.blocks;
        self.allocate(slot, (rows - from) * groups);
        let seq = self.sequences.at_mut(slot);
        let hashes = std::mem::take(&mut seq.hashes);
        let tokens = std::mem::take(&mut seq.tokens);
        let table = std::mem::take(&mut seq.table);
        let mut tip = seq.chain.tip;
        let mut announced = 0;
        self.tree.expect(&hashes[from..rows]);
        let blocks = tokens[from * block_size..rows * block_size].chunks_exact(block_size);
        let entries = table[from * groups..].chunks_exact(groups);
        for ((tokens, &hash), entries) in blocks.zip(&hashes[from..rows]).zip(entries) {
            let Some(node) = self.tree.append(tip, tokens, hash, entries) else {
                break;
            };
            for (group, &block) in entries.iter().enumerate() {
                self.note_content(node, group, block, step);
            }
            tip = node;
            announced += 1;
        }
        let seq = self.sequences.at_mut(slot);
        (seq.hashes, seq.tokens, seq.table) = (hashes, tokens, table);
        seq.chain.tip = tip;
        seq.chain.blocks += announced;
        announced
    }

    /// Hashes what is not hashed yet of the first `rows` blocks, all at once.
    fn hash_ahead(&mut self, slot: u32, rows: usize) {
        let block_size = self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let known = seq.hashes.len();
        if rows > known {
            let last = seq.hashes.last();
            let parent = last.map_or_else(|| self.tree.hash(seq.root), |&hash| hash);
            let blocks = seq.tokens[known * block_size..rows * block_size].chunks_exact(block_size);
            self.tree.hash_ahead(parent, blocks, &mut seq.hashes);
        }
    }

    /// A row more in the table: the blocks that hold `node`, and new ones where there is none.
    #[inline]
    fn take_present(&mut self, slot: u32, node: NodeIdx, more: &mut More) {
        for group in 0..self.groups.len() {
            let Some(block) = self.tree.block(node, group) else {
                self.allocate(slot, 1);
                continue;
            };
            self.hold_for_sequence(block);
            more.in_flight += usize::from(!self.is_ready(block));
            let table = &mut self.sequences.at_mut(slot).table;
            more.present.push(table.len());
            table.push(block);
        }
    }

    /// The sequence's block `index` holds `node`.
    #[inline]
    pub(crate) fn stand_on(&mut self, slot: u32, index: usize, node: NodeIdx) {
        let hash = self.tree.hash(node);
        let seq = self.sequences.at_mut(slot);
        seq.note_hash(index, hash);
        seq.chain.tip = node;
        seq.chain.blocks = index + 1;
    }

    /// Adopts the match under way.
    fn adopt(&mut self, slot: u32, more: &mut More) {
        let matched = std::mem::replace(&mut self.matched, Match::NOTHING);
        if let Some(tip) = matched.tip.some() {
            let open = self.open_steps();
            let (mut blocks, mut in_flight) = (0, 0);
            for block in matched.blocks.iter().copied().filter_map(BlockId::some) {
                self.hold_for_sequence(block);
                let place = &mut self.blocks[block.at()];
                place.used_again = true;
                blocks += 1;
                in_flight += usize::from(!place.is_ready(open));
            }
            (more.matched, more.matched_blocks) = (matched.rows, blocks);
            more.in_flight = in_flight;
            let seq = self.sequences.at_mut(slot);
            let at = seq.chain.blocks * self.groups.len();
            if at < seq.table.len() {
                seq.table_version += 1; // slots were reserved past the boundary: they move up
            }
            seq.table.splice(at..at, matched.blocks.iter().copied());
            seq.chain = Chain {
                tip,
                blocks: seq.chain.blocks + matched.rows,
                private: false,
            };
            let covered = seq.chain.blocks * self.config.block_size;
            let ahead = covered.min(seq.tokens.len() - 1);
            more.adopted = ahead - seq.ahead;
            seq.ahead = ahead;
            self.take_unseen(slot, more);
        }
        self.matched = matched;
    }

    /// What no token after the adopted rows sees leaves the table, so that it has no gap. The plan keeps
    /// it: it may be rolled back, and the step before may still read it.
    fn take_unseen(&mut self, slot: u32, more: &mut More) {
        let groups = self.groups.len();
        let rows = self.sequences.at(slot).chain.blocks;
        for group in 0..groups {
            let first = self.groups.first_row(group, rows).min(rows - more.matched);
            for row in (0..first).rev() {
                let seq = self.sequences.at_mut(slot);
                let at = row * groups + group;
                let Some(block) = std::mem::replace(&mut seq.table[at], BlockId::NONE).some()
                else {
                    break;
                };
                seq.table_version += 1;
                self.fence(block);
                self.let_go_for_sequence(block);
                more.unseen.push((at, block));
            }
        }
    }
}
