//! Planning: decodes, drafts, prefills; matching, adopting, sharing in flight, copying on write.

use crate::blocks::Block;
use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::manager::BlockManager;
use crate::plan::{Before, Entry, Prefill};
use crate::sequence::Chain;
use crate::trace::Call;
use crate::tree::Step;

/// What an entry takes beside the tokens that it computes.
struct Extent {
    matched: usize,
    prefill: bool,
    lookahead: usize,
    drafts: Box<[u32]>,
}

impl Extent {
    fn prefill(matched: usize) -> Self {
        Self {
            matched,
            prefill: true,
            lookahead: 0,
            drafts: Box::default(),
        }
    }

    fn reserving(lookahead: usize) -> Self {
        Self {
            matched: 0,
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
            |it| Call::decode(plan.serial, it.ids(sequences), lookahead),
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

    /// The table index of the block that writing at `position` must not change: other sequences hold
    /// it too, or it is a registered content of which a fork kept the beginning only.
    #[inline]
    fn must_copy(&self, slot: u32, position: usize) -> Option<usize> {
        let seq = self.sequences.at(slot);
        let index = position / self.config.block_size;
        let block = seq.table.get(index).filter(|_| index >= seq.chain.blocks)?;
        let Block { seq_refs, node, .. } = self.blocks[block.at()];
        (seq_refs > 1 || node != NodeIdx::NONE).then_some(index)
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
        let blocks = seq
            .ahead
            .saturating_add(len)
            .div_ceil(self.config.block_size);
        blocks.saturating_sub(seq.table.len())
            + usize::from(self.must_copy(slot, seq.ahead).is_some())
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
        self.note(
            |it| Call::speculate(plan.serial, it.id(key), drafts),
            answer,
        );
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
    /// nor computed, including what sequences planned before it in this step compute. A sequence whose every token is cached computes its last one, takes no block
    /// and writes nothing. `reserve: None` asks for the blocks of this step's tokens only;
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
            |it| Call::prefill(plan.serial, it.id(key), max_tokens, reserve),
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
        let seq = self.sequences.at(key.slot);
        let matched = self.matched.len();
        let table_len = seq.table.len() + matched;
        let start = match matched {
            0 => seq.ahead,
            _ => (table_len * block_size).min(seq.tokens.len() - 1),
        };
        let rest = seq.tokens.len() - start;
        let len = chunk(start, rest, max_tokens.min(budget), block_size);
        if len == 0 {
            return Ok(Prefill::NoBudget);
        }
        let copies = match matched {
            0 => usize::from(self.must_copy(key.slot, start).is_some()),
            _ => 0,
        };
        let seq = self.sequences.at(key.slot);
        let blocks_for =
            |tokens: usize| tokens.div_ceil(block_size).saturating_sub(table_len) + copies;
        let needed = match reserve {
            None => revived + blocks_for(start + len),
            Some(spare) => (revived + blocks_for(seq.tokens.len())).saturating_add(spare),
        };
        let available = self.queue.len();
        if needed > available {
            return Ok(Prefill::NoRoom { needed, available });
        }
        let cached_tokens = start - seq.ahead;
        let samples = start + len == seq.tokens.len();
        let seq = self.sequences.at_mut(key.slot);
        seq.planned += 1;
        seq.last_plan = plan.serial;
        self.push_entry(key.slot, len, Extent::prefill(matched));
        Ok(Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        })
    }

    /// Walks the tree from where the sequence stands, if that is a block boundary; leaves the hits
    /// in `self.matched` and returns how many of them are in the queue now.
    fn find_match(&mut self, slot: u32) -> usize {
        self.matched.clear();
        let block_size = self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let on_boundary =
            seq.chain.blocks == seq.table.len() && seq.ahead == seq.table.len() * block_size;
        let may_match = self.config.prefix_caching && seq.read_cache && !seq.chain.private;
        if !on_boundary || !may_match {
            return 0;
        }
        let mut revived = 0;
        let mut tip = seq.chain.tip;
        let blocks = seq.tokens.chunks_exact(block_size).enumerate();
        for (index, tokens) in blocks.skip(seq.chain.blocks) {
            match self.tree.step(tip, tokens, seq.hashes.get(index).copied()) {
                Step::Found(node) => {
                    let Some(block) = self.tree.block(node) else {
                        break;
                    };
                    if index == seq.hashes.len() {
                        seq.hashes.push(self.tree.hash(node));
                    }
                    revived += usize::from(self.queue.contains(block));
                    self.matched.push((node, block));
                    tip = node;
                }
                Step::Missing(hash) | Step::Collision(hash) => {
                    if index == seq.hashes.len() {
                        seq.hashes.push(hash);
                    }
                    break;
                }
            }
        }
        revived
    }

    /// Puts a sequence into the plan: adopts `self.matched[..matched]`, then allocates for `len`
    /// tokens and what is reserved beyond. Room and budget were counted before.
    #[inline]
    fn push_entry(&mut self, slot: u32, len: usize, extent: Extent) {
        let Extent {
            matched,
            prefill,
            lookahead,
            drafts,
        } = extent;
        let block_size = self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let before = Before {
            table_len: seq.table.len(),
            ahead: seq.ahead,
            chain: seq.chain,
            copied: None,
        };
        if matched > 0 {
            self.adopt(slot);
        }
        let start = self.sequences.at(slot).ahead;
        let copied = self.must_copy(slot, start);
        let before = Before {
            copied: copied.map(|index| (index, self.copy_block(slot, index))),
            ..before
        };
        let seq = self.sequences.at(slot);
        let end = start + len;
        let samples = end == seq.tokens.len() + seq.pending + drafts.len();
        let pending_row = (seq.pending > 0).then_some(seq.sample_row);
        let write_from = seq.chain.blocks * block_size;
        let announce_from = seq.chain.blocks;
        let blocks = (end + lookahead).div_ceil(block_size);
        let missing = blocks.saturating_sub(seq.table.len());
        for _ in 0..missing {
            let block = self.allocate();
            self.sequences.at_mut(slot).table.push(block);
        }
        let adopted = start - before.ahead;
        let in_flight = self.matched[..matched]
            .iter()
            .filter(|(node, _)| !self.is_ready(*node))
            .count();
        let announced = if prefill { self.announce(slot, end) } else { 0 };
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
            write_from,
            adopted,
            matched,
            in_flight,
            announced,
            announce_from,
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

    /// Copy on write: the sequence gets a copy of its block `index`. Returns the source, which the plan
    /// holds until it is closed: whatever becomes of its other holders, it is still to be read.
    fn copy_block(&mut self, slot: u32, index: usize) -> BlockId {
        let copy = self.allocate();
        let seq = self.sequences.at_mut(slot);
        let source = std::mem::replace(&mut seq.table[index], copy);
        seq.table_version += 1;
        self.shared.hold(source);
        self.let_go_for_sequence(source);
        let plan = self.plan_mut();
        plan.copies.push((source, copy));
        plan.fenced.push(source);
        source
    }

    /// In-flight sharing: contents that will be full at `end` enter the tree now, as computed by this
    /// step, so that sequences planned later in it share them. Those that are known already are left
    /// to the commit. Returns how many blocks were announced.
    fn announce(&mut self, slot: u32, end: usize) -> usize {
        let block_size = self.config.block_size;
        let seq = self.sequences.at(slot);
        let from = seq.chain.blocks;
        if !self.config.in_flight_sharing || !self.config.prefix_caching || seq.chain.private {
            return 0;
        }
        let step = self.plan_mut().step();
        for index in from..end / block_size {
            let seq = self.sequences.at(slot);
            let (tip, mine) = (seq.chain.tip, seq.table[index]);
            let tokens = &seq.tokens[index * block_size..][..block_size];
            let found = self.tree.step(tip, tokens, seq.hashes.get(index).copied());
            let node = match found {
                Step::Missing(hash) => self.tree.insert(tip, tokens, hash, mine, step),
                Step::Found(node) if self.tree.block(node).is_none() => {
                    self.tree.set_block(node, mine, step);
                    node
                }
                Step::Found(_) | Step::Collision(_) => return index - from,
            };
            self.note_stored(node, mine);
            self.stand_on(slot, index, node);
        }
        (end / block_size).saturating_sub(from)
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

    fn adopt(&mut self, slot: u32) {
        let matched = std::mem::take(&mut self.matched);
        for &(_, block) in &matched {
            self.blocks[block.at()].used_again = true;
            self.hold_for_sequence(block);
        }
        let seq = self.sequences.at_mut(slot);
        seq.table.extend(matched.iter().map(|&(_, block)| block));
        let covered = seq.table.len() * self.config.block_size;
        seq.ahead = covered.min(seq.tokens.len() - 1);
        seq.chain = Chain {
            tip: matched.last().map_or(seq.chain.tip, |&(node, _)| node),
            blocks: seq.table.len(),
            private: false,
        };
        self.matched = matched;
    }
}
