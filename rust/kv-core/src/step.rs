//! One step: plan decodes and prefills, fill the inputs, then commit or roll back.
//!
//! Planning moves blocks at once and remembers how to undo it; a content comes into being only at
//! commit, when its KV has been computed. A commit looks every block that became full up once more
//! (late merge), so a content never has two registered blocks.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::manager::BlockManager;
use crate::sequence::Chain;
use crate::shared::PlanHandle;
use crate::tree::Step;

/// The answer to [`BlockManager::prefill`].
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
    computed: usize,
    cached: usize,
    chain: Chain,
}

pub(crate) struct Entry {
    pub(crate) slot: u32,
    /// First position to compute.
    pub(crate) start: usize,
    /// Positions to compute.
    pub(crate) len: usize,
    pub(crate) samples: bool,
    /// Tokens adopted from the cache by this entry.
    adopted: usize,
    prefill: bool,
    before: Before,
}

/// The open step.
pub(crate) struct Plan {
    pub(crate) key: PlanKey,
    pub(crate) entries: Vec<Entry>,
    pub(crate) budget_left: usize,
    pub(crate) num_tokens: usize,
    pub(crate) num_samples: usize,
}

/// A look at an open plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanView {
    /// Tokens to compute.
    pub num_tokens: usize,
    /// Sequences in the plan.
    pub num_sequences: usize,
    /// Rows whose logits give a token.
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
    pub fn begin_step(&mut self, token_budget: usize) -> Result<PlanHandle, Error> {
        self.read_mail();
        if let Some(plan) = &self.open {
            return Err(Error::PlanOpen {
                plan: plan.key.serial,
            });
        }
        self.plans += 1;
        let key = PlanKey {
            manager: self.shared.manager,
            serial: self.plans,
        };
        self.open = Some(Plan {
            key,
            entries: Vec::new(),
            budget_left: token_budget,
            num_tokens: 0,
            num_samples: 0,
        });
        Ok(PlanHandle::new(&self.shared, key))
    }

    fn open_plan(&self, key: PlanKey) -> Result<&Plan, Error> {
        if key.manager != self.shared.manager {
            return Err(Error::Foreign("plan"));
        }
        match &self.open {
            Some(plan) if plan.key == key => Ok(plan),
            _ => Err(Error::PlanClosed { plan: key.serial }),
        }
    }

    fn plan_mut(&mut self) -> &mut Plan {
        self.open.as_mut().expect("checked by open_plan")
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

    pub(crate) fn plan_of(&self, key: PlanKey) -> Result<&Plan, Error> {
        self.open_plan(key)
    }

    /// Plans one token for each of `sequences`, in their order, as far as blocks and budget reach.
    ///
    /// Returns the positions (in `sequences`) of those that did not fit; they are unchanged. Each
    /// must have exactly one token left to compute. On misuse none is planned.
    pub fn decode(&mut self, plan: PlanKey, sequences: &[SeqKey]) -> Result<Vec<usize>, Error> {
        self.read_mail();
        self.open_plan(plan)?;
        for (position, &key) in sequences.iter().enumerate() {
            if let Err(error) = self.mark_for_decode(key) {
                for key in &sequences[..position] {
                    self.sequences.at_mut(key.slot).planned = false;
                }
                return Err(error);
            }
        }
        let mut misfits = Vec::new();
        for (position, key) in sequences.iter().enumerate() {
            if !self.plan_decode(key.slot) {
                self.sequences.at_mut(key.slot).planned = false;
                misfits.push(position);
            }
        }
        Ok(misfits)
    }

    #[inline]
    fn mark_for_decode(&mut self, key: SeqKey) -> Result<(), Error> {
        let seq = self.sequences.get_mut(key)?;
        let (sequence, uncomputed) = (seq.id, seq.uncomputed());
        if seq.planned {
            return Err(Error::InPlan { sequence });
        }
        if uncomputed != 1 {
            return Err(Error::NotDecoding {
                sequence,
                uncomputed,
            });
        }
        seq.planned = true;
        Ok(())
    }

    #[inline]
    fn plan_decode(&mut self, slot: u32) -> bool {
        let seq = self.sequences.at(slot);
        let needs_block = seq.computed / self.config.block_size >= seq.table.len();
        if self.plan_mut().budget_left == 0 || (needs_block && self.queue.len() == 0) {
            return false;
        }
        self.push_entry(slot, 1, 0, false);
        true
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    ///
    /// A chunk that does not reach the last known token ends on a block boundary if it can, because on
    /// a block boundary the index is asked first: what is cached is adopted, and neither charged
    /// nor computed. A sequence whose every token is cached computes its last one, takes no block
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
        let budget = self.open_plan(plan)?.budget_left;
        let seq = self.sequences.get(key)?;
        let sequence = seq.id;
        if seq.planned {
            return Err(Error::InPlan { sequence });
        }
        if seq.uncomputed() == 0 {
            return Err(Error::NothingToCompute { sequence });
        }
        let block_size = self.config.block_size;
        let revived = self.find_match(key.slot);
        let seq = self.sequences.at(key.slot);
        let matched = self.matched.len();
        let table_len = seq.table.len() + matched;
        let start = match matched {
            0 => seq.computed,
            _ => (table_len * block_size).min(seq.tokens.len() - 1),
        };
        let rest = seq.tokens.len() - start;
        let len = chunk(start, rest, max_tokens.min(budget), block_size);
        if len == 0 {
            return Ok(Prefill::NoBudget);
        }
        let blocks_for = |tokens: usize| tokens.div_ceil(block_size).saturating_sub(table_len);
        let needed = match reserve {
            None => revived + blocks_for(start + len),
            Some(spare) => (revived + blocks_for(seq.tokens.len())).saturating_add(spare),
        };
        let available = self.queue.len();
        if needed > available {
            return Ok(Prefill::NoRoom { needed, available });
        }
        let cached_tokens = start - seq.computed;
        let samples = start + len == seq.tokens.len();
        self.push_entry(key.slot, len, matched, true);
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
            seq.chain.blocks == seq.table.len() && seq.computed == seq.table.len() * block_size;
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
    /// tokens. Room and budget were counted before.
    #[inline]
    fn push_entry(&mut self, slot: u32, len: usize, matched: usize, prefill: bool) {
        let block_size = self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let before = Before {
            table_len: seq.table.len(),
            computed: seq.computed,
            cached: seq.cached,
            chain: seq.chain,
        };
        seq.planned = true;
        if matched > 0 {
            self.adopt(slot);
        }
        let seq = self.sequences.at(slot);
        let start = seq.computed;
        let end = start + len;
        let samples = end == seq.tokens.len();
        let missing = end.div_ceil(block_size).saturating_sub(seq.table.len());
        for _ in 0..missing {
            let block = self.allocate();
            self.sequences.at_mut(slot).table.push(block);
        }
        let adopted = start - before.computed;
        let plan = self.plan_mut();
        plan.budget_left -= len;
        plan.num_tokens += len;
        plan.num_samples += usize::from(samples);
        plan.entries.push(Entry {
            slot,
            start,
            len,
            samples,
            adopted,
            prefill,
            before,
        });
    }

    fn adopt(&mut self, slot: u32) {
        let matched = std::mem::take(&mut self.matched);
        for &(_, block) in &matched {
            self.hold_for_sequence(block);
        }
        let seq = self.sequences.at_mut(slot);
        seq.table.extend(matched.iter().map(|&(_, block)| block));
        let covered = seq.table.len() * self.config.block_size;
        let start = covered.min(seq.tokens.len() - 1);
        seq.cached += start - seq.computed;
        seq.computed = start;
        seq.chain = Chain {
            tip: matched.last().map_or(seq.chain.tip, |&(node, _)| node),
            blocks: seq.table.len(),
            private: false,
        };
        self.matched = matched;
    }

    /// Takes a sequence out of the plan again, as if it had not been planned.
    pub fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        let plan = self.open_plan(plan)?;
        let sequence = self.sequences.get(key)?.id;
        let at = plan.entries.iter().position(|entry| entry.slot == key.slot);
        let at = at.ok_or(Error::NotPlanned { sequence })?;
        let plan = self.plan_mut();
        let entry = plan.entries.remove(at);
        plan.budget_left += entry.len;
        plan.num_tokens -= entry.len;
        plan.num_samples -= usize::from(entry.samples);
        self.undo(entry);
        Ok(())
    }

    fn undo(&mut self, entry: Entry) {
        let Entry { slot, before, .. } = entry;
        self.release_table(slot, before.table_len);
        let seq = self.sequences.at_mut(slot);
        seq.computed = before.computed;
        seq.cached = before.cached;
        seq.chain = before.chain;
        seq.planned = false;
        if seq.dropped {
            self.drop_sequence(slot);
        }
    }

    /// Undoes the plan. Sequences are what they were before it; dropped ones end now.
    pub fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        self.read_mail();
        self.open_plan(plan)?;
        self.roll_back_open(plan);
        Ok(())
    }

    pub(crate) fn roll_back_open(&mut self, key: PlanKey) {
        if self.open_plan(key).is_err() {
            return;
        }
        let plan = self.open.take().expect("checked above");
        self.shared.close_plan(key);
        for entry in plan.entries.into_iter().rev() {
            self.undo(entry);
        }
        self.stats.rolled_back_steps += 1;
    }

    /// Takes the step as computed: `sampled` holds one token per sampling row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that held the content
    /// first, and reports the latter. Appends the sampled tokens to their sequences.
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Redirect>, Error> {
        self.read_mail();
        let expected = self.open_plan(plan)?.num_samples;
        if sampled.len() != expected {
            return Err(Error::SampleCount {
                expected,
                given: sampled.len(),
            });
        }
        let Plan { key, entries, .. } = self.open.take().expect("checked above");
        self.shared.close_plan(key);
        let mut redirects = Vec::new();
        let mut sampled = sampled.iter();
        for entry in &entries {
            self.commit_entry(entry, &mut redirects);
            let seq = self.sequences.at_mut(entry.slot);
            if entry.samples {
                seq.tokens.extend(sampled.next());
            }
            seq.planned = false;
        }
        // Afterwards: a dropped sequence's blocks are there for the whole batch to merge into.
        for entry in &entries {
            if self.sequences.at(entry.slot).dropped {
                self.drop_sequence(entry.slot);
            }
        }
        self.stats.committed_steps += 1;
        Ok(redirects)
    }

    #[inline]
    fn commit_entry(&mut self, entry: &Entry, redirects: &mut Vec<Redirect>) {
        let stats = &mut self.stats;
        stats.computed_tokens += entry.len as u64;
        if entry.prefill {
            stats.prompt_tokens += (entry.adopted + entry.len) as u64;
            stats.cached_tokens += entry.adopted as u64;
            let hits = entry.adopted.div_ceil(self.config.block_size);
            stats.hit_blocks += hits as u64;
        }
        let seq = self.sequences.at_mut(entry.slot);
        seq.computed = entry.start + entry.len;
        let full = seq.computed / self.config.block_size;
        if full > seq.chain.blocks && !seq.chain.private && self.config.prefix_caching {
            for index in seq.chain.blocks..full {
                if !self.register(entry.slot, index, redirects) {
                    break;
                }
            }
        }
    }

    /// Late merge of one block that became full. False if it stays private.
    fn register(&mut self, slot: u32, index: usize, redirects: &mut Vec<Redirect>) -> bool {
        let block_size = self.config.block_size;
        let seq = self.sequences.at_mut(slot);
        let mine = seq.table[index];
        let tip = seq.chain.tip;
        let tokens = &seq.tokens[index * block_size..][..block_size];
        let node = match self.tree.step(tip, tokens, seq.hashes.get(index).copied()) {
            Step::Missing(hash) => {
                let node = self.tree.insert(tip, tokens, hash, mine);
                self.own(node, mine);
                node
            }
            Step::Found(node) => {
                self.merge(slot, index, node, redirects);
                node
            }
            Step::Collision(_) => {
                seq.chain.private = true;
                self.stats.collisions += 1;
                return false;
            }
        };
        let hash = self.tree.hash(node);
        let seq = self.sequences.at_mut(slot);
        seq.note_hash(index, hash);
        seq.chain.tip = node;
        seq.chain.blocks = index + 1;
        true
    }

    /// A table entry whose content is known already.
    fn merge(&mut self, slot: u32, index: usize, node: NodeIdx, redirects: &mut Vec<Redirect>) {
        let seq = self.sequences.at(slot);
        let (sequence, mine) = (seq.id, seq.table[index]);
        match self.tree.block(node) {
            // The content had lost its block: it has one again.
            None => {
                self.tree.set_block(node, mine);
                self.own(node, mine);
            }
            // An idle block (a dangling mapping): the new one takes the content over.
            Some(old) if self.queue.contains(old) => {
                self.leave_queue(old);
                self.blocks[old.at()].node = NodeIdx::NONE;
                self.enter_queue(old);
                self.tree.set_block(node, mine);
                self.blocks[mine.at()].node = node;
                self.stats.taken_over_blocks += 1;
            }
            // In use: the first one wins.
            Some(first) => {
                self.hold_for_sequence(first);
                let seq = self.sequences.at_mut(slot);
                seq.table[index] = first;
                seq.table_version += 1;
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

    fn own(&mut self, node: NodeIdx, block: BlockId) {
        self.blocks[block.at()].node = node;
        self.stats.registered_blocks += 1;
    }
}
