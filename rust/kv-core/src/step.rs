//! One step: plan decodes and prefills, fill the inputs, then commit or roll back.
//!
//! Planning moves blocks at once and remembers how to undo it; a content comes into being only at
//! commit, when its KV has been computed. A commit looks every block that became full up once more
//! (late merge), so a content never has two registered blocks.

use std::collections::HashSet;

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::manager::{Block, BlockManager};
use crate::sequence::Chain;
use crate::shared::PlanHandle;
use crate::tree::Step;

/// The answer to [`BlockManager::prefill`] and [`BlockManager::speculate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The sequence is in the plan.
    Planned {
        /// Tokens adopted from the cache by this call.
        cached_tokens: usize,
        /// Tokens to compute: what the budget was charged.
        tokens: usize,
        /// Whether the step reaches the last known token, so that its logits give the next one.
        samples: bool,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed, idle ones that a match would revive and the reserve included.
        needed: usize,
        /// Blocks free or idle.
        available: usize,
    },
    /// No token may be computed: the budget (or `max_tokens`) is used up; nothing was changed.
    NoBudget,
}

/// A table entry that a commit moved to the block which held the content first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The sequence's id.
    pub sequence: u64,
    /// Index in its block table.
    pub index: usize,
    /// The duplicate, given back.
    pub old_block: BlockId,
    /// The block that holds the content.
    pub new_block: BlockId,
}

/// What a sequence was before the plan touched it.
struct Before {
    table_len: usize,
    ahead: usize,
    chain: Chain,
    /// The partial block that the entry copied to write on: its index, and what it was.
    copied: Option<(usize, BlockId)>,
}

pub(crate) struct Entry {
    pub(crate) slot: u32,
    /// First position to compute.
    pub(crate) start: usize,
    /// Positions to compute.
    pub(crate) len: usize,
    pub(crate) samples: bool,
    /// The row of the plan before that samples the token it computes, if that is still pending.
    pub(crate) pending_row: Option<usize>,
    /// Speculated tokens after the last known one: computed, never registered unless accepted.
    pub(crate) drafts: Box<[u32]>,
    /// Positions before this one are there already, or written by another entry of the step.
    pub(crate) write_from: usize,
    /// Tokens adopted from the cache by this entry.
    adopted: usize,
    /// Blocks adopted.
    matched: usize,
    /// Of these, blocks that an open step computes.
    in_flight: usize,
    /// Contents that this entry will compute and that others may share already: how many blocks of
    /// the table from `announce_from` on.
    announced: usize,
    announce_from: usize,
    prefill: bool,
    before: Before,
}

impl Entry {
    /// Rows whose logits give a token.
    pub(crate) fn rows(&self) -> usize {
        usize::from(self.samples) + self.drafts.len()
    }
}

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

/// An open step. The contents that it computes carry its number; they are ready once it is closed.
pub(crate) struct Plan {
    pub(crate) key: PlanKey,
    pub(crate) entries: Vec<Entry>,
    pub(crate) budget_left: usize,
    pub(crate) num_tokens: usize,
    pub(crate) num_samples: usize,
    /// Blocks to copy before the step, source and destination.
    pub(crate) copies: Vec<(BlockId, BlockId)>,
    /// Blocks that the step reads beside its sequences' own: held until it is closed.
    pub(crate) fenced: Vec<BlockId>,
}

impl Plan {
    /// The plan's number as contents carry it. It wraps after 2^32 steps; a content that old which is
    /// mistaken for one of the open step is missed by a lease once, and nothing else.
    pub(crate) fn step(&self) -> u32 {
        self.key.serial as u32
    }
}

/// A look at an open plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanView {
    /// Tokens to compute.
    pub num_tokens: usize,
    /// Sequences in the plan.
    pub num_sequences: usize,
    /// Rows whose logits give a token: one per sequence that reaches its last known token, and one more
    /// for each of its drafts.
    pub num_samples: usize,
    /// Tokens that may still be planned.
    pub budget_left: usize,
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
    /// Opens a step that may compute `token_budget` tokens.
    ///
    /// Two may be open: the second is planned while the first one runs, before its tokens are known
    /// (see [`BlockManager::decode`]). They are committed in order.
    pub fn begin_step(&mut self, token_budget: usize) -> Result<PlanHandle, Error> {
        self.read_mail();
        if let (Some(oldest), 2..) = (self.open.front(), self.open.len()) {
            return Err(Error::PlanOpen {
                plan: oldest.key.serial,
            });
        }
        self.plans += 1;
        let key = PlanKey {
            manager: self.shared.manager,
            serial: self.plans,
        };
        self.open.push_back(Plan {
            key,
            entries: Vec::new(),
            budget_left: token_budget,
            num_tokens: 0,
            num_samples: 0,
            copies: Vec::new(),
            fenced: Vec::new(),
        });
        Ok(PlanHandle::new(&self.shared, key))
    }

    fn open_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        if key.manager != self.shared.manager {
            return Err(Error::Foreign("plan"));
        }
        let found = self.open.iter().find(|plan| plan.key == key);
        found.ok_or(Error::PlanClosed { plan: key.serial })
    }

    /// The plan, which must be the newest: the one that is planned into.
    fn newest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match self.open.back() {
            Some(newest) if newest.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: newest.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    /// The plan, which must be the oldest: the one that is committed.
    fn oldest_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        let plan = self.open_plan(key)?;
        match self.open.front() {
            Some(oldest) if oldest.key != key => Err(Error::PlanOrder {
                plan: key.serial,
                first: oldest.key.serial,
            }),
            _ => Ok(plan),
        }
    }

    fn plan_mut(&mut self) -> &mut Plan {
        self.open.back_mut().expect("checked by newest_plan")
    }

    /// The figures of an open plan.
    pub fn plan_view(&self, key: PlanKey) -> Result<PlanView, Error> {
        let plan = self.open_plan(key)?;
        Ok(PlanView {
            num_tokens: plan.num_tokens,
            num_sequences: plan.entries.len(),
            num_samples: plan.num_samples,
            budget_left: plan.budget_left,
        })
    }

    /// Blocks that must be copied before the step runs, as (source, destination), in order.
    pub fn copies(&self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        Ok(&self.open_plan(key)?.copies)
    }

    pub(crate) fn plan_of(&self, key: PlanKey) -> Result<&Plan, Error> {
        self.open_plan(key)
    }

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
    fn unmark(&mut self, slot: u32) {
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
        let Block { seq_refs, node } = self.blocks[block.at()];
        (seq_refs > 1 || node != NodeIdx::NONE).then_some(index)
    }

    #[inline]
    fn plan_decode(&mut self, slot: u32, lookahead: usize) -> bool {
        if self.plan_mut().budget_left == 0
            || self.blocks_to_write(slot, 1 + lookahead) > self.queue.len()
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
        let blocks = (seq.ahead + len).div_ceil(self.config.block_size);
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
            self.blocks[mine.at()].node = node;
            self.stand_on(slot, index, node);
        }
        (end / block_size).saturating_sub(from)
    }

    /// The sequence's block `index` holds `node`.
    #[inline]
    fn stand_on(&mut self, slot: u32, index: usize, node: NodeIdx) {
        let hash = self.tree.hash(node);
        let seq = self.sequences.at_mut(slot);
        seq.note_hash(index, hash);
        seq.chain.tip = node;
        seq.chain.blocks = index + 1;
    }

    fn adopt(&mut self, slot: u32) {
        let matched = std::mem::take(&mut self.matched);
        for &(_, block) in &matched {
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

    /// Takes a sequence out of the plan again, as if it had not been planned.
    ///
    /// Sequences that share what it was to compute in this step are taken out with it; returns
    /// their ids, in plan order.
    pub fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<Vec<u64>, Error> {
        self.read_mail();
        let plan = self.newest_plan(plan)?;
        let sequence = self.sequences.get(key)?.id;
        let at = plan.entries.iter().position(|entry| entry.slot == key.slot);
        let at = at.ok_or(Error::NotPlanned { sequence })?;
        let out = self.dependents(at);
        let mut ids = Vec::new();
        for &at in out.iter().rev() {
            let plan = self.plan_mut();
            let entry = plan.entries.remove(at);
            plan.budget_left += entry.len;
            plan.num_tokens -= entry.len;
            plan.num_samples -= entry.rows();
            ids.push(self.sequences.at(entry.slot).id);
            self.undo(entry);
        }
        ids.pop();
        ids.reverse();
        self.number_rows();
        Ok(ids)
    }

    /// Rows move up when an entry goes.
    fn number_rows(&mut self) {
        let Some(plan) = self.open.back() else {
            return;
        };
        let mut row = 0;
        for entry in &plan.entries {
            if entry.samples {
                self.sequences.at_mut(entry.slot).sample_row = row;
            }
            row += entry.rows();
        }
    }

    /// The entry at `first` and all later ones that adopted, directly or not, what it computes.
    fn dependents(&mut self, first: usize) -> Vec<usize> {
        let entries = &self.plan_mut().entries;
        let in_flight = entries[first..].iter().any(|entry| entry.in_flight > 0);
        if entries[first].announced == 0 || !in_flight {
            return vec![first];
        }
        let entries = &self.open.back().expect("open").entries;
        let table = |entry: &Entry| &self.sequences.at(entry.slot).table;
        let mut out = vec![first];
        let mut gone: HashSet<BlockId> = HashSet::new();
        for (at, entry) in entries.iter().enumerate().skip(first) {
            let adopted = &table(entry)
                [entry.before.table_len..entry.announce_from.max(entry.before.table_len)];
            let depends = entry.in_flight > 0 && adopted.iter().any(|block| gone.contains(block));
            if depends {
                out.push(at);
            }
            if depends || at == first {
                gone.extend(&table(entry)[entry.announce_from..][..entry.announced]);
            }
        }
        out
    }

    fn undo(&mut self, entry: Entry) {
        let (slot, before) = (entry.slot, &entry.before);
        for index in (entry.announce_from..entry.announce_from + entry.announced).rev() {
            let block = self.sequences.at(slot).table[index];
            self.forget(block);
        }
        self.release_table(slot, before.table_len);
        if let Some((index, source)) = before.copied {
            self.hold_for_sequence(source);
            let seq = self.sequences.at_mut(slot);
            let copy = std::mem::replace(&mut seq.table[index], source);
            seq.table_version += 1;
            self.let_go_for_sequence(copy);
            if let Some(plan) = self.open.back_mut() {
                plan.copies.retain(|&(_, to)| to != copy);
            }
        }
        self.unmark(slot);
        let seq = self.sequences.at_mut(slot);
        seq.ahead = before.ahead;
        seq.pending -= usize::from(entry.samples);
        seq.speculating = false;
        // Otherwise the chain is what it was, or what a commit of the plan before has made of it.
        if entry.matched > 0 || entry.announced > 0 {
            seq.chain = before.chain;
        }
        if let (true, Some(row)) = (seq.pending > 0, entry.pending_row) {
            seq.sample_row = row;
        }
        if seq.dropped {
            self.drop_sequence(slot);
        }
    }

    /// Undoes the plan. Sequences are what they were before it; dropped ones end now.
    pub fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        self.read_mail();
        self.newest_plan(plan)?;
        self.roll_back_newest();
        Ok(())
    }

    /// Rolls back the plan, if it is open, after those that were planned on top of it.
    pub(crate) fn roll_back_from(&mut self, key: PlanKey) {
        if self.open_plan(key).is_err() {
            return;
        }
        while self
            .open
            .back()
            .is_some_and(|plan| plan.key.serial >= key.serial)
        {
            self.roll_back_newest();
        }
    }

    fn roll_back_newest(&mut self) {
        while let Some(entry) = self.plan_mut().entries.pop() {
            self.undo(entry);
        }
        let plan = self.open.pop_back().expect("checked by newest_plan");
        self.lift_fence(plan.fenced);
        self.stats.rolled_back_steps += 1;
    }

    /// Takes the step as computed: `sampled` holds one token per sampling row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that held the content
    /// first, and reports the latter. Appends the sampled tokens to their sequences. In a plan with
    /// drafts use [`BlockManager::commit_accepted`].
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Redirect>, Error> {
        let entries = &self.oldest_plan(plan)?.entries;
        let expected = entries.iter().filter(|entry| entry.samples).count();
        if sampled.len() != expected {
            return Err(Error::SampleCount {
                expected,
                given: sampled.len(),
            });
        }
        self.commit_accepted(plan, sampled, &vec![1; expected])
    }

    /// Takes the step as computed: `counts` says how many tokens each sampling sequence accepted, in
    /// plan order, and `tokens` holds them, one sequence after the other.
    ///
    /// A sequence accepts the drafts that turned out right and one token after them.
    pub fn commit_accepted(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Redirect>, Error> {
        self.read_mail();
        self.check_accepted(plan, tokens, counts)?;
        let Plan {
            key,
            entries,
            copies,
            fenced,
            ..
        } = self.open.pop_front().expect("checked above");
        self.shared.close_plan(key);
        let mut redirects = Vec::new();
        let (mut tokens, mut counts) = (tokens, counts.iter());
        // First: what a later entry announced may be the parent of what an earlier one registers.
        for entry in &entries {
            for index in entry.announce_from..entry.announce_from + entry.announced {
                self.tell_stored(entry.slot, index);
            }
        }
        for entry in &entries {
            let mut end = entry.start + entry.len;
            if entry.samples
                && let Some(&count) = counts.next()
            {
                let (accepted, rest) = tokens.split_at(count);
                tokens = rest;
                let seq = self.sequences.at_mut(entry.slot);
                seq.tokens.extend_from_slice(accepted);
                seq.pending -= 1;
                end -= entry.drafts.len() + 1 - count;
                self.stats.draft_tokens += entry.drafts.len() as u64;
                self.stats.accepted_draft_tokens += count as u64 - 1;
            }
            self.commit_entry(entry, end, key.serial as u32, &mut redirects);
            self.close_entry(entry);
        }
        // Afterwards: a dropped sequence's blocks are there for the whole batch to merge into.
        for entry in &entries {
            let seq = self.sequences.at(entry.slot);
            if seq.dropped && seq.planned == 0 {
                self.drop_sequence(entry.slot);
            }
        }
        self.lift_fence(fenced);
        self.stats.copied_blocks += copies.len() as u64;
        self.stats.committed_steps += 1;
        Ok(redirects)
    }

    /// A committed plan does not hold the sequence any more.
    fn close_entry(&mut self, entry: &Entry) {
        let seq = self.sequences.at_mut(entry.slot);
        seq.planned -= 1;
        seq.cached += entry.adopted;
        if !entry.drafts.is_empty() {
            seq.speculating = false;
            seq.ahead = seq.computed;
        }
        if seq.planned == 0 {
            seq.last_plan = 0;
        }
    }

    fn check_accepted(&self, plan: PlanKey, tokens: &[u32], counts: &[usize]) -> Result<(), Error> {
        let entries = &self.oldest_plan(plan)?.entries;
        let sampling = entries.iter().filter(|entry| entry.samples);
        let (expected, given) = (sampling.clone().count(), counts.len());
        if expected != given {
            return Err(Error::SampleCount { expected, given });
        }
        let total: usize = counts.iter().sum();
        if total != tokens.len() {
            return Err(Error::SampleCount {
                expected: total,
                given: tokens.len(),
            });
        }
        let mut rest = tokens;
        for (entry, &accepted) in sampling.zip(counts) {
            let (mine, others) = rest.split_at(accepted);
            rest = others;
            let drafts = entry.drafts.len();
            let fits = (1..=drafts + 1).contains(&accepted);
            if !fits || mine[..accepted - 1] != entry.drafts[..accepted - 1] {
                return Err(Error::Accepted {
                    sequence: self.sequences.at(entry.slot).id,
                    accepted,
                    drafts,
                });
            }
        }
        Ok(())
    }

    fn lift_fence(&mut self, fenced: Vec<BlockId>) {
        for block in fenced {
            if self.shared.let_go(block) {
                self.enter_queue(block);
            }
        }
    }

    #[inline]
    fn commit_entry(
        &mut self,
        entry: &Entry,
        end: usize,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) {
        let stats = &mut self.stats;
        stats.computed_tokens += entry.len as u64;
        stats.registered_blocks += entry.announced as u64;
        stats.in_flight_blocks += entry.in_flight as u64;
        if entry.prefill {
            stats.prompt_tokens += (entry.adopted + entry.len) as u64;
            stats.cached_tokens += entry.adopted as u64;
            stats.hit_blocks += entry.matched as u64;
        }
        let seq = self.sequences.at_mut(entry.slot);
        seq.computed = end;
        let full = seq.computed / self.config.block_size;
        if full > seq.chain.blocks && !seq.chain.private && self.config.prefix_caching {
            for index in seq.chain.blocks..full {
                if !self.register(entry.slot, index, step, redirects) {
                    break;
                }
            }
        }
    }

    /// Late merge of one block that became full. False if it has no name, for good or for now.
    fn register(
        &mut self,
        slot: u32,
        index: usize,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) -> bool {
        let block_size = self.config.block_size;
        let seq = self.sequences.at(slot);
        let mine = seq.table[index];
        let tip = seq.chain.tip;
        let tokens = &seq.tokens[index * block_size..][..block_size];
        let node = match self.tree.step(tip, tokens, seq.hashes.get(index).copied()) {
            Step::Missing(hash) => {
                let node = self.tree.insert(tip, tokens, hash, mine, step);
                self.own(node, slot, index);
                node
            }
            // The step after this one is to compute it: it may yet be rolled back. Asked again later.
            Step::Found(node) if self.tree.block(node).is_some() && !self.is_ready(node) => {
                return false;
            }
            Step::Found(node) => {
                self.merge(slot, index, node, step, redirects);
                node
            }
            Step::Collision(_) => {
                self.sequences.at_mut(slot).chain.private = true;
                self.stats.collisions += 1;
                return false;
            }
        };
        self.stand_on(slot, index, node);
        true
    }

    /// A table entry whose content is known already.
    fn merge(
        &mut self,
        slot: u32,
        index: usize,
        node: NodeIdx,
        step: u32,
        redirects: &mut Vec<Redirect>,
    ) {
        let seq = self.sequences.at(slot);
        let (sequence, mine) = (seq.id, seq.table[index]);
        match self.tree.block(node) {
            // The content had lost its block: it has one again.
            None => {
                self.tree.set_block(node, mine, step);
                self.own(node, slot, index);
            }
            // A fork shares the block and came first.
            Some(first) if first == mine => {}
            // An idle block (a dangling mapping): the new one takes the content over.
            Some(old) if self.queue.contains(old) => {
                self.leave_queue(old);
                self.blocks[old.at()].node = NodeIdx::NONE;
                self.enter_queue(old);
                self.tree.set_block(node, mine, step);
                self.blocks[mine.at()].node = node;
                self.stats.taken_over_blocks += 1;
            }
            // In use: the first one wins.
            Some(first) => {
                self.hold_for_sequence(first);
                let seq = self.sequences.at_mut(slot);
                seq.table[index] = first;
                seq.table_version += 1;
                // A step that is planned already may still read the duplicate.
                if let Some(plan) = self.open.back_mut() {
                    self.shared.hold(mine);
                    plan.fenced.push(mine);
                }
                self.let_go_for_sequence(mine);
                self.stats.merged_blocks += 1;
                redirects.push(Redirect {
                    sequence,
                    index,
                    old_block: mine,
                    new_block: first,
                });
            }
        }
    }

    fn own(&mut self, node: NodeIdx, slot: u32, index: usize) {
        let block = self.sequences.at(slot).table[index];
        self.blocks[block.at()].node = node;
        self.stats.registered_blocks += 1;
        self.tell_stored(slot, index);
    }
}
