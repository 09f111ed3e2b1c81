//! Admission: decodes, drafts, prefills; whether there is room and budget.

use std::collections::HashSet;

use super::plan::{Extra, Plan, Prefill};
use super::{State, Steps};
use crate::contents::Spot;
use crate::error::Error;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::matching::Wanted;
use crate::sequence::Seats;

/// What a prefill asks for.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) max_tokens: usize,
    pub(crate) reserve: Option<usize>,
    pub(crate) replay: usize,
}

/// A content that lends its first tokens to a sequence whose match ends inside it.
#[derive(Clone, Copy)]
struct Lent {
    content: Spot,
    tokens: usize,
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

impl Steps {
    /// Plans one token for each of `sequences`; the positions of those that did not fit.
    pub(crate) fn decode(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> Result<Vec<usize>, Error> {
        let plan = self.newest_plan(plan)?;
        let (seat, before) = (plan.seat, plan.entries.len());
        // No block is taken before all of them were looked at.
        let mut position = self.push_decodes(state, sequences, lookahead);
        if let Err(error) = check_decodes(state, seat, &sequences[position..]) {
            self.beginning.clear();
            while self.newest().entries.len() > before {
                self.undo_last(state);
            }
            return Err(error);
        }
        self.begin_rows(state);
        let mut misfits = Vec::new();
        while let Some(&key) = sequences.get(position) {
            if !self.plan_decode(state, key.slot, lookahead) {
                misfits.push(position);
            }
            position += 1;
            position += self.push_decodes(state, &sequences[position..], lookahead);
            self.begin_rows(state);
        }
        Ok(misfits)
    }

    fn plan_decode(&mut self, state: &mut State, slot: u32, lookahead: usize) -> bool {
        let plan = self.newest();
        if plan.budget_left == 0 {
            return false;
        }
        let needed = state.blocks_to_write(slot, lookahead.saturating_add(1));
        if needed > state.pool.available() {
            return false;
        }
        self.enter(state, slot, (1, lookahead), None);
        true
    }

    /// Plans a sequence that has one token left to compute together with `drafts` that may follow it.
    pub(crate) fn speculate(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        self.newest_plan(plan)?;
        let seq = state.seqs.get(key)?;
        if seq.pending > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        seq.check_decode(self.newest_plan(plan)?.seat)?;
        let len = 1 + drafts.len();
        let needed = state.blocks_to_write(key.slot, len);
        let available = state.pool.available();
        if len > self.newest().budget_left {
            return Ok(Prefill::NoBudget);
        }
        if needed > available {
            return Ok(Prefill::NoRoom { needed, available });
        }
        let mut extra = Extra::new(state.seqs.at(key.slot).registered);
        extra.drafts = drafts.to_vec();
        self.enter(state, key.slot, (len, 0), Some(extra));
        Ok(Prefill::Planned {
            cached_tokens: 0,
            tokens: len,
            samples: true,
        })
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    pub(crate) fn prefill(
        &mut self,
        state: &mut State,
        plan: PlanKey,
        key: SeqKey,
        asked: Asked,
    ) -> Result<Prefill, Error> {
        let &Plan {
            seat, budget_left, ..
        } = self.newest_plan(plan)?;
        let seq = state.seqs.get(key)?;
        let sequence = seq.id;
        if seq.plans.meets(seat) || seq.pending > 0 || seq.speculating {
            return Err(Error::InPlan { sequence });
        }
        if seq.left() == 0 {
            return Err(Error::NothingToCompute { sequence });
        }
        if asked.max_tokens.min(budget_left) == 0 {
            return Ok(Prefill::NoBudget);
        }
        Ok(self.prefill_found(state, key.slot, asked))
    }

    /// Looks for what is cached, and plans what is to be computed behind it.
    fn prefill_found(&mut self, state: &mut State, slot: u32, asked: Asked) -> Prefill {
        let mut lent = match state.find_match(slot, asked.replay) {
            true => state.find_lender(slot),
            false => None,
        };
        loop {
            match self.prefill_behind(state, slot, asked, lent) {
                // Nobody waits for the sake of a block that could be copied.
                Prefill::NoRoom { .. } if lent.is_some() => lent = None,
                answer => return answer,
            }
        }
    }

    /// Plans what is to be computed behind the match under way and what is `lent`.
    fn prefill_behind(
        &mut self,
        state: &mut State,
        slot: u32,
        asked: Asked,
        lent: Option<Lent>,
    ) -> Prefill {
        let Asked {
            max_tokens,
            reserve,
            replay,
        } = asked;
        let most = max_tokens.min(self.newest().budget_left);
        let (start, cached_end, replay) = state.begins(slot, lent, replay);
        if start.saturating_add(most) < cached_end {
            return Prefill::NoBudget; // what is computed again is so in one step
        }
        let seq = state.seqs.at(slot);
        let rest = seq.tokens.len() - start;
        let len = match chunk(start, rest, most, state.groups.block_size()) {
            len if start + len < cached_end => most,
            len => len,
        };
        let copies = match (state.matched.rows, lent) {
            (0, None) => state.must_copy(slot, start).count(),
            _ => 0,
        };
        let new = match reserve {
            None => state.new_blocks(slot, start + len),
            Some(spare) => {
                let whole = state.blocks_to_come(slot, start + len, max_tokens);
                whole.saturating_add(spare)
            }
        };
        let new = new.saturating_add(copies);
        let available = state.pool.available();
        // Where there is room even if all that was found has to be revived, nobody counts.
        let found = state.matched.blocks.len() + lent.map_or(0, |_| state.groups.len());
        if new.saturating_add(found) > available {
            let needed = new.saturating_add(state.revived(slot, lent));
            if needed > available {
                return Prefill::NoRoom { needed, available };
            }
        }
        let seq = state.seqs.at(slot);
        let cached_tokens = start - seq.planned_end;
        let samples = start + len == seq.tokens.len();
        let mut extra = Extra::new(seq.registered);
        extra.prefill = true;
        (extra.reused_tokens, extra.replay) = (cached_tokens, replay);
        if let Some(Lent { content, tokens }) = lent {
            extra.lent.extend(state.pool.contents.blocks(content));
            extra.lent_tokens = tokens;
        }
        self.enter(state, slot, (len, 0), Some(extra));
        Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        }
    }
}

/// Whether a plan may compute the last token of each of these.
fn check_decodes(state: &State, plan: Seats, sequences: &[SeqKey]) -> Result<(), Error> {
    let mut seen = HashSet::new();
    for &key in sequences {
        let seq = state.seqs.get(key)?;
        seq.check_decode(plan)?;
        if !seen.insert(key.slot) {
            return Err(Error::InPlan { sequence: seq.id });
        }
    }
    Ok(())
}

impl State {
    /// The groups whose block of the row of `position` writing there must not change: other sequences hold
    /// it too, or it is a registered content of which a fork kept the beginning only.
    #[inline]
    pub(super) fn must_copy(&self, slot: u32, position: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups_shared_at(slot, position, |block| self.pool.seq_refs(block) > 1)
    }

    /// The groups whose block of the row of `position` was shared with a fork, and is `held` by others or a
    /// registered content still.
    #[inline]
    pub(super) fn groups_shared_at(
        &self,
        slot: u32,
        position: usize,
        held: impl Fn(BlockId) -> bool,
    ) -> impl Iterator<Item = usize> {
        let seq = self.seqs.at(slot);
        let row = self.groups.row_of(position);
        let groups = 0..self.groups.len() * usize::from(seq.may_share(row));
        groups.filter(move |&group| {
            let block = seq.table.at(group, row);
            held(block) || self.pool.content(block).is_some()
        })
    }

    /// Blocks to allocate before the sequence can write its next `len` positions.
    #[inline]
    fn blocks_to_write(&self, slot: u32, len: usize) -> usize {
        let seq = self.seqs.at(slot);
        let rows = self.groups.rows(seq.planned_end.saturating_add(len));
        let new = rows.saturating_sub(seq.table.rows());
        let new = new.saturating_mul(self.groups.len());
        new.saturating_add(self.must_copy(slot, seq.planned_end).count())
    }

    /// Rows to allocate so that the table, with the match under way, reaches `end` tokens.
    fn new_rows(&self, slot: u32, end: usize) -> usize {
        let held = self.seqs.at(slot).table.rows() + self.matched.rows;
        self.groups.rows(end).saturating_sub(held)
    }

    fn new_blocks(&self, slot: u32, end: usize) -> usize {
        self.new_rows(slot, end) * self.groups.len()
    }

    /// Blocks to allocate, at once and for good, until all known tokens are computed: in a step that
    /// ends at `end`, then in steps of at most `max_tokens`. What slides out of a window meanwhile is
    /// used again.
    fn blocks_to_come(&self, slot: u32, end: usize, max_tokens: usize) -> usize {
        let seq = self.seqs.at(slot);
        let now = self.new_rows(slot, end);
        if !self.groups.have_windows() {
            return self.new_blocks(slot, seq.tokens.len());
        }
        let rows = seq.table.rows() + self.matched.rows;
        let come = |group: usize| {
            // What the match puts out of sight is the plan's.
            let start = match self.matched.rows {
                0 => seq.table.start(group),
                matched => {
                    let end = seq.registered.rows() + matched;
                    let seen = self.groups.first_row_of(group, end, self.matched.replay);
                    seen.max(seq.table.start(group))
                }
            };
            let peak = self.groups.peak(group, seq.tokens.len(), max_tokens);
            peak.saturating_sub(rows - start).max(now)
        };
        (0..self.groups.len()).map(come).sum()
    }

    /// Where computing begins, where what is cached ends (the match under way and what is lent), and how
    /// many tokens are replayed: the last of what is cached, at most `replay`, are computed again, and the
    /// last known one in any case.
    fn begins(&self, slot: u32, lent: Option<Lent>, replay: usize) -> (usize, usize, usize) {
        let seq = self.seqs.at(slot);
        let cached = self.matched.rows * self.groups.block_size();
        let cached = cached + lent.map_or(0, |lent| lent.tokens);
        let (end, replay) = (seq.planned_end + cached, replay.min(cached));
        let start = match cached {
            0 => end,
            _ => (end - replay).min(seq.tokens.len() - 1),
        };
        (start, end, replay)
    }

    /// What the match under way ends in: a content that has its next tokens, an eighth of a block at
    /// least, and is there. Not one that an open step computes: copies come before the step.
    fn find_lender(&self, slot: u32) -> Option<Lent> {
        if !self.lending {
            return None;
        }
        let (seq, size) = (self.seqs.at(slot), self.groups.block_size());
        let row = (seq.registered.rows() + self.matched.rows) * size;
        // The last token is computed.
        let end = (seq.tokens.len() - 1).min(row + size);
        let least = size.div_ceil(8);
        let tokens = seq.tokens.get(row..end)?;
        if tokens.len() < least {
            return None;
        }
        let found = self.pool.nearest(self.matched.tip, tokens, least);
        found.map(|(content, tokens)| Lent { content, tokens })
    }

    /// Goes on from where the sequence stands, if that is a block boundary: whether it is, and the cache may
    /// be read. Leaves the hits in `self.matched`. Rows that it has reserved past the boundary come after them.
    fn find_match(&mut self, slot: u32, replay: usize) -> bool {
        let seq = self.seqs.at(slot);
        let (tip, rows) = (seq.registered.tip, seq.registered.rows());
        let on_boundary = seq.planned_end == rows * self.groups.block_size();
        if !on_boundary || !self.caching || !seq.read_cache {
            self.matched.clear(tip);
            return false;
        }
        let from = (tip, rows);
        let wanted = Wanted::Replay(replay);
        self.matched
            .walk(&mut self.pool, &self.groups, &seq.tokens, from, wanted);
        true
    }

    /// Blocks of the match under way and of what is lent that are in the queue now, as far as a token after
    /// the match sees them.
    fn revived(&self, slot: u32, lent: Option<Lent>) -> usize {
        let from = self.seqs.at(slot).registered.rows();
        let groups = self.groups.len();
        let blocks = self.matched.blocks.iter().enumerate();
        let seen = blocks.filter(|(place, _)| {
            let (row, group) = (from + place / groups, place % groups);
            let end = from + self.matched.rows;
            row >= self.groups.first_row_of(group, end, self.matched.replay)
        });
        let lent = lent.into_iter();
        let lent = lent.flat_map(|lent| self.pool.contents.blocks(lent.content));
        let found = seen.map(|(_, &block)| block).chain(lent);
        found.filter(|&block| self.pool.is_queued(block)).count()
    }
}
