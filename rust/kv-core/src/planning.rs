//! Planning: decodes, drafts, prefills; matching, adopting, sharing in flight, copying on write.

use crate::blocks::Block;
use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::manager::BlockManager;
use crate::matching::Prompt;
use crate::plan::{Before, Entry, Prefill};
use crate::sequence::Chain;
use crate::trace::{Call, ids};
use crate::tree::Step;

/// What an entry takes beside the tokens that it computes.
struct Extent {
    prefill: bool,
    lookahead: usize,
    drafts: Box<[u32]>,
}

impl Extent {
    fn prefill() -> Self {
        Self {
            prefill: true,
            lookahead: 0,
            drafts: Box::default(),
        }
    }

    fn reserving(lookahead: usize) -> Self {
        Self {
            prefill: false,
            lookahead,
            drafts: Box::default(),
        }
    }

    fn speculating(drafts: &[u32]) -> Self {
        Self {
            drafts: drafts.into(),
            ..Self::reserving(0)
        }
    }
}

/// How many of `rest` tokens from `start` on to compute when `most` may be.
fn chunk(start: usize, rest: usize, most: usize, block_size: usize) -> usize {
    if rest <= most {
        return rest;
    }
    let boundary = (start + most) / block_size * block_size;
    if boundary > start {
        boundary - start
    } else {
        most
    }
}

impl BlockManager {
    /// Plans one token for each of `sequences`, in their order, as far as blocks and budget reach.
    ///
    /// Returns the positions (in `sequences`) of those that did not fit; they are unchanged. Each
    /// must have exactly one token left to compute. On misuse none is planned. With `lookahead` a
    /// sequence gets blocks for so many slots past its known tokens too; [`BlockManager::trim`] gives
    /// back those that are not used.
    ///
    /// A sequence that the step before samples may be decoded while that step is open: its token is
    /// pending, and [`BlockManager::fill`] writes where it will come from instead of its value.
    pub fn decode(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> Result<Vec<usize>, Error> {
        self.read_mail();
        self.newest_plan(plan)?;
        for (position, &key) in sequences.iter().enumerate() {
            if let Err(error) = self.mark_for_decode(key) {
                for key in &sequences[..position] {
                    self.unmark(key.slot);
                }
                return Err(error);
            }
        }
        let mut misfits = Vec::new();
        for (position, key) in sequences.iter().enumerate() {
            if !self.plan_decode(key.slot, lookahead) {
                self.unmark(key.slot);
                misfits.push(position);
            }
        }
        self.note(
            |_| Call::decode(plan.serial, ids(sequences), lookahead),
            &misfits,
        );
        Ok(misfits)
    }

    #[inline]
    fn mark_for_decode(&mut self, key: SeqKey) -> Result<(), Error> {
        let serial = self.plan_mut().key.serial;
        let seq = self.sequences.get_mut(key)?;
        let (sequence, uncomputed) = (seq.id, seq.left());
        if seq.last_plan == serial || seq.speculating {
            return Err(Error::InPlan { sequence });
        }
        if uncomputed != 1 {
            return Err(Error::NotDecoding {
                sequence,
                uncomputed,
            });
        }
        seq.planned += 1;
        seq.last_plan = serial;
        Ok(())
    }

    /// The newest plan does not hold the sequence any more.
    pub(crate) fn unmark(&mut self, slot: u32) {
        let before = self.open.iter().rev().nth(1).map(|plan| plan.key.serial);
        let seq = self.sequences.at_mut(slot);
        seq.planned -= 1;
        seq.last_plan = before.filter(|_| seq.planned > 0).unwrap_or(0);
    }

    /// The table entries that writing at `position` must not change: other sequences hold their blocks
    /// too, or they are registered contents of which a fork kept the beginning only.
    #[inline]
    fn must_copy(&self, slot: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        let seq = self.sequences.at(slot);
        let (groups, row) = (self.groups.len(), position / self.config.block_size);
        let partial = row >= seq.chain.blocks && row * groups < seq.table.len();
        let entries = row * groups..(row + usize::from(partial)) * groups;
        entries.filter(|&at| {
            let Block { seq_refs, node, .. } = self.blocks[seq.table[at].at()];
            seq_refs > 1 || node != NodeIdx::NONE
        })
    }

    #[inline]
    fn plan_decode(&mut self, slot: u32, lookahead: usize) -> bool {
        if self.plan_mut().budget_left == 0
            || self.blocks_to_write(slot, lookahead.saturating_add(1)) > self.queue.len()
        {
            return false;
        }
        self.push_entry(slot, 1, Extent::reserving(lookahead));
        true
    }

    /// Blocks to allocate before the sequence can write its next `len` positions.
    #[inline]
    fn blocks_to_write(&self, slot: u32, len: usize) -> usize {
        let seq = self.sequences.at(slot);
        let rows = seq
            .ahead
            .saturating_add(len)
            .div_ceil(self.config.block_size);
        rows.saturating_mul(self.groups.len())
            .saturating_sub(seq.table.len())
            + self.must_copy(slot, seq.ahead).count()
    }

    /// Plans a sequence that has one token left to compute together with `drafts` that may follow it.
    ///
    /// The step computes all of them and samples a row for each; the commit says which were accepted
    /// (see [`BlockManager::commit_accepted`]). All or nothing: blocks and budget for every draft.
    pub fn speculate(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        let answer = self.plan_drafts(plan, key, drafts)?;
        self.note(|_| Call::speculate(plan.serial, key.id, drafts), answer);
        Ok(answer)
    }

    fn plan_drafts(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        self.read_mail();
        let budget = self.newest_plan(plan)?.budget_left;
        self.mark_for_decode(key)?;
        let seq = self.sequences.at(key.slot);
        if seq.pending > 0 {
            let sequence = seq.id;
            self.unmark(key.slot);
            return Err(Error::InPlan { sequence });
        }
        let len = 1 + drafts.len();
        let (needed, available) = (self.blocks_to_write(key.slot, len), self.queue.len());
        let answer = if len > budget {
            Prefill::NoBudget
        } else if needed > available {
            Prefill::NoRoom { needed, available }
        } else {
            self.push_entry(key.slot, len, Extent::speculating(drafts));
            return Ok(Prefill::Planned {
                cached_tokens: 0,
                tokens: len,
                samples: true,
            });
        };
        self.unmark(key.slot);
        Ok(answer)
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    ///
    /// A chunk that does not reach the last known token ends on a block boundary if it can, because on
    /// a block boundary the index is asked first: what is cached is adopted, and neither charged
    /// nor computed, including what sequences planned before it in this step compute. A sequence whose
    /// every token is cached computes its last one, takes no block and writes nothing. `reserve: None` asks for the blocks of this step's tokens only;
    /// `Some(n)` makes the answer [`Prefill::NoRoom`] unless all known tokens could get a block now
    /// with `n` blocks to spare (blocks are taken for this step's tokens all the same).
    pub fn prefill(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        max_tokens: usize,
        reserve: Option<usize>,
    ) -> Result<Prefill, Error> {
        let answer = self.plan_prefill(plan, key, max_tokens, reserve)?;
        self.note(
            |_| Call::prefill(plan.serial, key.id, max_tokens, reserve),
            answer,
        );
        Ok(answer)
    }

    fn plan_prefill(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        max_tokens: usize,
        reserve: Option<usize>,
    ) -> Result<Prefill, Error> {
        self.read_mail();
        let budget = self.newest_plan(plan)?.budget_left;
        let seq = self.sequences.get(key)?;
        let sequence = seq.id;
        if seq.last_plan == plan.serial || seq.pending > 0 || seq.speculating {
            return Err(Error::InPlan { sequence });
        }
        if seq.left() == 0 {
            return Err(Error::NothingToCompute { sequence });
        }
        let block_size = self.config.block_size;
        let revived = self.find_match(key.slot);
        let matched = self.matched.rows();
        let seq = self.sequences.at(key.slot);
        let start = match matched {
            0 => seq.ahead,
            _ => (seq.ahead + matched * block_size).min(seq.tokens.len() - 1),
        };
        let rest = seq.tokens.len() - start;
        let len = chunk(start, rest, max_tokens.min(budget), block_size);
        if len == 0 {
            return Ok(Prefill::NoBudget);
        }
        let copies = match matched {
            0 => self.must_copy(key.slot, start).count(),
            _ => 0,
        };
        let new = match reserve {
            None => self.new_blocks(key.slot, start + len),
            Some(spare) => {
                let whole = self.blocks_to_come(key.slot, start + len, max_tokens);
                whole.saturating_add(spare)
            }
        };
        let needed = new.saturating_add(revived + copies);
        let available = self.queue.len();
        if needed > available {
            return Ok(Prefill::NoRoom { needed, available });
        }
        let seq = self.sequences.at_mut(key.slot);
        let cached_tokens = start - seq.ahead;
        let samples = start + len == seq.tokens.len();
        seq.planned += 1;
        seq.last_plan = plan.serial;
        self.push_entry(key.slot, len, Extent::prefill());
        Ok(Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        })
    }

    /// Blocks to allocate so that the table, with the match under way, reaches `end` tokens.
    fn new_blocks(&self, slot: u32, end: usize) -> usize {
        let groups = self.groups.len();
        let held = self.sequences.at(slot).table.len() + self.matched.rows() * groups;
        (end.div_ceil(self.config.block_size) * groups).saturating_sub(held)
    }

    /// Blocks to allocate, at once and for good, until all known tokens are computed: in a step that
    /// ends at `end`, then in steps of at most `max_tokens`. What slides out of a window meanwhile is
    /// used again.
    fn blocks_to_come(&self, slot: u32, end: usize, max_tokens: usize) -> usize {
        let seq = self.sequences.at(slot);
        let groups = self.groups.len();
        let now = self.new_blocks(slot, end);
        if !self.groups.have_windows() {
            return self.new_blocks(slot, seq.tokens.len());
        }
        let all = seq.table.iter().chain(&self.matched.blocks);
        let held = |group: usize| {
            let entries = all.clone().skip(group).step_by(groups);
            entries.filter(|&&block| block != BlockId::NONE).count()
        };
        let come = |group: usize| {
            let peak = self.groups.peak(group, seq.tokens.len(), max_tokens);
            peak.saturating_sub(held(group)).max(now / groups)
        };
        (0..groups).map(come).sum()
    }

    /// Walks the tree from where the sequence stands, if that is a block boundary; leaves the hits
    /// in `self.matched` and returns how many of their blocks are in the queue now.
    fn find_match(&mut self, slot: u32) -> usize {
        let seq = self.sequences.at_mut(slot);
        let rows = seq.chain.blocks;
        let on_boundary = rows * self.groups.len() == seq.table.len()
            && seq.ahead == rows * self.config.block_size;
        let may_match = self.config.prefix_caching && seq.read_cache && !seq.chain.private;
        if !on_boundary || !may_match {
            self.matched.clear();
            return 0;
        }
        let prompt = Prompt {
            tokens: &seq.tokens,
            tip: seq.chain.tip,
            rows,
            hashes: Some(&mut seq.hashes),
        };
        self.matched
            .walk(&mut self.tree, &self.groups, prompt, |_| true);
        let blocks = self.matched.blocks.iter().copied();
        let blocks = blocks.filter_map(BlockId::some);
        blocks.filter(|&block| self.queue.contains(block)).count()
    }

    /// Puts a sequence into the plan: adopts the match under way if it is a prefill, then allocates
    /// for `len` tokens and what is reserved beyond. Room and budget were counted before.
    #[inline]
    fn push_entry(&mut self, slot: u32, len: usize, extent: Extent) {
        let Extent {
            prefill,
            lookahead,
            drafts,
        } = extent;
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let seq = self.sequences.at(slot);
        let mut before = Before {
            rows: seq.table.len() / groups,
            ahead: seq.ahead,
            chain: seq.chain,
            copied: Vec::new(),
        };
        let (matched, matched_blocks, mut in_flight) = match prefill {
            true => self.adopt(slot),
            false => (0, 0, 0),
        };
        let seq = self.sequences.at(slot);
        let (start, announce_from) = (seq.ahead, seq.chain.blocks);
        let end = start + len;
        let samples = end == seq.tokens.len() + seq.pending + drafts.len();
        let pending_row = (seq.pending > 0).then_some(seq.sample_row);
        let copied = self.must_copy(slot, start);
        // Collected only if there are any: a decode step must not allocate memory.
        if let Some(first) = copied.min() {
            before.copied = self.copy_row(slot, first);
        }
        let mut present = Vec::new();
        if prefill {
            in_flight += self.announce(slot, end, &mut present);
        }
        self.extend_table(slot, (end + lookahead).div_ceil(block_size));
        let announced = self.sequences.at(slot).chain.blocks - announce_from;
        let plan = self.plan_mut();
        plan.budget_left -= len;
        plan.num_tokens += len;
        let entry = Entry {
            slot,
            start,
            len,
            samples,
            pending_row,
            drafts,
            write_from: announce_from * block_size,
            adopted: start - before.ahead,
            matched,
            matched_blocks,
            in_flight,
            announced,
            announce_from,
            present,
            prefill,
            before,
        };
        let row = plan.num_samples;
        plan.num_samples += entry.rows();
        let speculates = !entry.drafts.is_empty();
        plan.entries.push(entry);
        let seq = self.sequences.at_mut(slot);
        seq.ahead = end;
        seq.speculating = speculates;
        if samples {
            seq.pending += 1;
            seq.sample_row = row;
        }
    }

    /// Allocates until the table has `rows` rows.
    #[inline]
    fn extend_table(&mut self, slot: u32, rows: usize) {
        let len = rows * self.groups.len();
        while self.sequences.at(slot).table.len() < len {
            let block = self.allocate();
            self.sequences.at_mut(slot).table.push(block);
        }
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
        let copy = self.allocate();
        let seq = self.sequences.at_mut(slot);
        let source = std::mem::replace(&mut seq.table[at], copy);
        seq.table_version += 1;
        self.fence(source);
        self.let_go_for_sequence(source);
        self.plan_mut().copies.push((source, copy));
        source
    }

    /// In-flight sharing: contents that will be full at `end` enter the tree now, as computed by this
    /// step, so that sequences planned later in it share them. Of a content that has lost some of its
    /// blocks, those that are there go into the table as they are (`present`) and only the others are
    /// written. Stops at a content that the commit must settle: a collision, or a block of this
    /// sequence's own for a content that another block holds.
    ///
    /// Returns how many of `present` an open step computes.
    fn announce(&mut self, slot: u32, end: usize, present: &mut Vec<usize>) -> usize {
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        let seq = self.sequences.at(slot);
        let from = seq.chain.blocks;
        if !self.config.in_flight_sharing || !self.config.prefix_caching || seq.chain.private {
            return 0;
        }
        self.hash_ahead(slot, end / block_size);
        self.expect_allocations((end / block_size - from) * groups);
        let step = self.plan_mut().step();
        let mut in_flight = 0;
        for row in from..end / block_size {
            let seq = self.sequences.at(slot);
            let tip = seq.chain.tip;
            let tokens = &seq.tokens[row * block_size..][..block_size];
            let has_row = row * groups < seq.table.len();
            let found = self.tree.step(tip, tokens, seq.hashes.get(row).copied());
            let node = match found {
                Step::Missing(hash) => self.tree.insert(tip, tokens, hash),
                Step::Found(node) if !has_row || !self.tree.has_block(node) => node,
                Step::Found(_) | Step::Collision(_) => break,
            };
            self.tree.hold(node); // allocating may evict whatever else keeps it alive
            if !has_row {
                in_flight += self.take_present(slot, node, present);
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
        }
        in_flight
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
    fn take_present(&mut self, slot: u32, node: NodeIdx, present: &mut Vec<usize>) -> usize {
        let mut in_flight = 0;
        for group in 0..self.groups.len() {
            let held = self.tree.block(node, group);
            let block = match held {
                Some(block) => {
                    self.hold_for_sequence(block);
                    in_flight += usize::from(!self.is_ready(block));
                    block
                }
                None => self.allocate(),
            };
            let table = &mut self.sequences.at_mut(slot).table;
            if held.is_some() {
                present.push(table.len());
            }
            table.push(block);
        }
        in_flight
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

    /// Adopts the match under way. Returns its rows, its blocks, and how many of these an open step
    /// computes.
    fn adopt(&mut self, slot: u32) -> (usize, usize, usize) {
        let matched = std::mem::take(&mut self.matched);
        let rows = matched.rows();
        let Some(&tip) = matched.nodes.last() else {
            self.matched = matched;
            return (0, 0, 0);
        };
        let (mut blocks, mut in_flight) = (0, 0);
        for block in matched.blocks.iter().copied().filter_map(BlockId::some) {
            self.blocks[block.at()].used_again = true;
            self.hold_for_sequence(block);
            blocks += 1;
            in_flight += usize::from(!self.is_ready(block));
        }
        let seq = self.sequences.at_mut(slot);
        seq.table.extend_from_slice(&matched.blocks);
        let blocks_before = seq.chain.blocks;
        seq.chain = Chain {
            tip,
            blocks: blocks_before + rows,
            private: false,
        };
        seq.ahead = (seq.chain.blocks * self.config.block_size).min(seq.tokens.len() - 1);
        self.matched = matched;
        (rows, blocks, in_flight)
    }
}
