//! Planning: decodes, drafts, prefills; whether there is room and budget. What goes in: `entering.rs`.

use crate::blocks::Block;
use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, PlanKey, SeqKey};
use crate::manager::BlockManager;
use crate::matching::Prompt;
use crate::plan::{More, Prefill};
use crate::trace::{Call, ids};

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
        let mut growing = 0;
        for (position, &key) in sequences.iter().enumerate() {
            match self.mark_for_decode(plan, key) {
                Ok(full) => growing += usize::from(full),
                Err(error) => {
                    for key in &sequences[..position] {
                        self.unmark(key.slot);
                    }
                    return Err(error);
                }
            }
        }
        self.expect_allocations(growing);
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

    /// Whether its table is full, so that the next position needs a row more.
    #[inline]
    fn mark_for_decode(&mut self, plan: PlanKey, key: SeqKey) -> Result<bool, Error> {
        let (serial, groups) = (plan.serial, &self.groups);
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
        Ok(seq.ahead * groups.len() >= seq.table.len() * groups.block_size())
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
    pub(crate) fn must_copy(&self, slot: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        let seq = self.sequences.at(slot);
        let (groups, row) = (self.groups.len(), self.groups.row_of(position));
        let partial = (seq.chain.blocks..seq.shared_rows).contains(&row);
        let entries = row * groups..(row + usize::from(partial)) * groups;
        entries.filter(|&at| {
            let Block { seq_refs, node, .. } = self.blocks[seq.table[at].at()];
            seq_refs > 1 || node != NodeIdx::NONE
        })
    }

    #[inline]
    fn plan_decode(&mut self, slot: u32, lookahead: usize) -> bool {
        let needed = self.blocks_to_write(slot, lookahead.saturating_add(1));
        if self.plan_mut().budget_left == 0 || (needed > 0 && needed > self.queue.len()) {
            return false;
        }
        match needed {
            0 => self.note_entry(slot, self.before(slot), 1, None),
            _ => self.push_entry(slot, 1, lookahead, None),
        }
        true
    }

    /// Blocks to allocate before the sequence can write its next `len` positions.
    #[inline]
    fn blocks_to_write(&self, slot: u32, len: usize) -> usize {
        let seq = self.sequences.at(slot);
        let rows = self.groups.rows(seq.ahead.saturating_add(len));
        let new = rows
            .saturating_mul(self.groups.len())
            .saturating_sub(seq.table.len());
        new + self.must_copy(slot, seq.ahead).count()
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
        self.mark_for_decode(plan, key)?;
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
            let more = More {
                drafts: drafts.to_vec(),
                ..More::NOTHING
            };
            self.push_entry(key.slot, len, 0, Some(Box::new(more)));
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
    /// every token is cached computes its last one, takes no block and writes nothing.
    ///
    /// `reserve: None` asks for the blocks of this step's tokens only;
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
        self.find_match(key.slot);
        let matched = self.matched.rows;
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
        let new = new.saturating_add(copies);
        let available = self.queue.len();
        // Where there is room even if all that was found has to be revived, nobody counts.
        if new.saturating_add(self.matched.blocks.len()) > available {
            let needed = new.saturating_add(self.revived());
            if needed > available {
                return Ok(Prefill::NoRoom { needed, available });
            }
        }
        let seq = self.sequences.at_mut(key.slot);
        let cached_tokens = start - seq.ahead;
        let samples = start + len == seq.tokens.len();
        seq.planned += 1;
        seq.last_plan = plan.serial;
        let more = More {
            prefill: true,
            ..More::NOTHING
        };
        self.push_entry(key.slot, len, 0, Some(Box::new(more)));
        Ok(Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        })
    }

    /// Blocks to allocate so that the table, with the match under way, reaches `end` tokens.
    fn new_blocks(&self, slot: u32, end: usize) -> usize {
        let groups = self.groups.len();
        let held = self.sequences.at(slot).table.len() + self.matched.rows * groups;
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
        let matched = self.matched.rows;
        let held = |group: usize| {
            // What the match puts out of sight is the plan's.
            let unseen = match matched {
                0 => 0,
                _ => self.groups.first_row(group, seq.chain.blocks + matched),
            };
            let entries = all.clone().skip(unseen * groups + group).step_by(groups);
            entries.filter(|&&block| block != BlockId::NONE).count()
        };
        let come = |group: usize| {
            let peak = self.groups.peak(group, seq.tokens.len(), max_tokens);
            peak.saturating_sub(held(group)).max(now / groups)
        };
        (0..groups).map(come).sum()
    }

    /// Walks the tree from where the sequence stands, if that is a block boundary; leaves the hits
    /// in `self.matched`. Rows that it has reserved past the boundary come after them.
    fn find_match(&mut self, slot: u32) {
        let seq = self.sequences.at_mut(slot);
        let rows = seq.chain.blocks;
        let on_boundary = seq.ahead == rows * self.config.block_size;
        let may_match = self.config.prefix_caching && seq.read_cache && !seq.chain.private;
        if !on_boundary || !may_match {
            self.matched.clear();
            return;
        }
        let prompt = Prompt {
            tokens: &seq.tokens,
            tip: seq.chain.tip,
            rows,
            hashes: Some(&mut seq.hashes),
        };
        self.matched
            .walk(&mut self.tree, &self.groups, prompt, |_| true);
    }

    /// Blocks of the match under way that are in the queue now.
    fn revived(&self) -> usize {
        let blocks = self.matched.blocks.iter().copied();
        let blocks = blocks.filter_map(BlockId::some);
        blocks.filter(|&block| self.queue.contains(block)).count()
    }
}
