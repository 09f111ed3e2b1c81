//! Admission: whether blocks and budget suffice for decodes, drafts and prefills.

use std::collections::HashSet;

use super::answers::Prefill;
use super::enter::NewTokens;
use super::plan::{Details, PrefillWork, Work};
use crate::error::Error;
use crate::ids::{BlockId, NodePosition, PlanKey, SeqKey};
use crate::pool::Purpose;
use crate::sequence::PlanSet;
use crate::state::State;
use crate::switch::Labelled;

/// Options of [`BlockManager::prefill_again`](crate::BlockManager::prefill_again).
#[derive(Clone, Copy, Debug)]
pub struct PrefillRequest {
    /// The most tokens to compute in this step.
    pub max_tokens: usize,
    /// If given, this many blocks must remain available beside those of all known tokens.
    pub spare_blocks: Option<usize>,
    /// Cached tokens that are computed again.
    pub replay: usize,
}

/// A cached block that a match ends inside of: its first tokens are copied.
#[derive(Clone, Copy)]
pub(super) struct CopySource {
    position: NodePosition,
    tokens: usize,
}

/// How many of `rest` tokens from `start` on to compute: at most `max_tokens`, up to a block boundary if not all.
pub(super) fn chunk(start: usize, rest: usize, max_tokens: usize, block_size: usize) -> usize {
    if rest <= max_tokens {
        return rest;
    }
    let boundary = (start + max_tokens) / block_size * block_size;
    match boundary > start {
        true => boundary - start,
        false => max_tokens,
    }
}

impl State {
    /// Plans one token for each of `sequences`. Returns the positions of those that were rejected.
    pub(crate) fn decode(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> Result<Vec<usize>, Error> {
        let plan = self.steps.newest_plan(plan)?;
        let (bit, before) = (plan.bit, plan.entries.len());
        // All sequences are checked before any block is allocated.
        let mut position = self.push_decodes(sequences, lookahead);
        if let Err(error) = check_decodes(self, bit, &sequences[position..]) {
            self.steps.beginning.clear();
            while self.steps.newest().entries.len() > before {
                self.undo_last();
            }
            return Err(error);
        }
        self.begin_indices();
        let mut rejected = Vec::new();
        while let Some(&key) = sequences.get(position) {
            if !self.plan_decode(key.seq_idx, lookahead) {
                rejected.push(position);
            }
            position += 1;
            position += self.push_decodes(&sequences[position..], lookahead);
            self.begin_indices();
        }
        if self.has_state() {
            self.plan_decode_states(before, true);
        }
        Ok(rejected)
    }

    fn plan_decode(&mut self, seq_idx: u32, lookahead: usize) -> bool {
        let plan = self.steps.newest();
        if plan.budget_left == 0 {
            return false;
        }
        let needed = self.blocks_to_write(seq_idx, lookahead.saturating_add(1));
        if needed > self.pool.available() {
            return false;
        }
        let tokens = NewTokens {
            computed: 1,
            lookahead,
        };
        self.enter(seq_idx, tokens, None);
        true
    }

    /// Plans a sequence that has one token left to compute, together with `drafts` after it.
    pub(crate) fn speculate(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        self.steps.newest_plan(plan)?;
        let seq = self.seqs.get(key)?;
        if seq.pending > 0 {
            return Err(Error::InPlan { sequence: seq.id });
        }
        seq.check_decode(self.steps.newest_plan(plan)?.bit)?;
        let len = 1 + drafts.len();
        let needed = self.blocks_to_write(key.seq_idx, len);
        let available = self.pool.available();
        if len > self.steps.newest().budget_left {
            return Ok(Prefill::NoBudget);
        }
        if needed > available {
            return Ok(Prefill::NoRoom { needed, available });
        }
        self.enter(key.seq_idx, NewTokens::computed(1), None);
        let last = self.steps.newest().entries.len() - 1;
        if self.has_state() {
            self.plan_decode_states(last, false);
        }
        self.extend_decode(last, drafts);
        Ok(Prefill::Planned {
            cached_tokens: 0,
            tokens: len,
            samples: true,
        })
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    pub(crate) fn prefill(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        request: PrefillRequest,
    ) -> Result<Prefill, Error> {
        let plan = self.steps.newest_plan(plan)?;
        let budget_left = plan.budget_left;
        let seq = self.seqs.get(key)?;
        let sequence = seq.id;
        if seq.plans.meets(plan.bit) || seq.pending > 0 || seq.speculating {
            return Err(Error::InPlan { sequence });
        }
        if seq.num_unplanned() == 0 {
            return Err(Error::NothingToCompute { sequence });
        }
        if request.max_tokens.min(budget_left) == 0 {
            return Ok(Prefill::NoBudget);
        }
        Ok(self.match_and_plan(key.seq_idx, request))
    }

    /// Matches the sequence, and plans the tokens after the match.
    fn match_and_plan(&mut self, seq_idx: u32, request: PrefillRequest) -> Prefill {
        let mut source = None;
        let replay = request.replay;
        if self.find_match(seq_idx, Purpose::Prefill { replay }) {
            if self.pool.any_loading()
                && let Some(transfer) = self.awaited_transfer(seq_idx, replay)
            {
                return Prefill::Loading { transfer };
            }
            source = self.find_copy_source(seq_idx);
        }
        if self.has_state() && self.awaits_state(seq_idx) {
            return Prefill::Computing;
        }
        if self.pool.history.is_some() {
            self.explain_prefill(seq_idx);
        }
        if self.has_state() {
            return self.plan_with_state(seq_idx, request);
        }
        loop {
            match self.plan_after_match(seq_idx, request, source) {
                // A partial copy must not delay a prefill.
                Prefill::NoRoom { .. } if source.is_some() => source = None,
                answer => return answer,
            }
        }
    }

    /// Plans the tokens after the current match and the copied tokens of `source`.
    fn plan_after_match(
        &mut self,
        seq_idx: u32,
        request: PrefillRequest,
        source: Option<CopySource>,
    ) -> Prefill {
        let max_tokens = request.max_tokens;
        let limit = max_tokens.min(self.steps.newest().budget_left);
        let (start, cached_end, replay) = self.start_after_match(seq_idx, source, request.replay);
        if start.saturating_add(limit) < cached_end {
            return Prefill::NoBudget; // a replay is computed in one step
        }
        let seq = self.seqs.at(seq_idx);
        let rest = seq.tokens.len() - start;
        let len = match chunk(start, rest, limit, self.groups.block_size()) {
            len if start + len < cached_end => limit,
            len => len,
        };
        let copies = match (self.matched.num_indices, source) {
            (0, None) => self.must_copy(seq_idx, start).count(),
            _ => 0,
        };
        let new = match request.spare_blocks {
            None => self.new_blocks(seq_idx, start + len),
            Some(spare) => {
                let whole = self.blocks_to_come(seq_idx, start + len, max_tokens);
                whole.saturating_add(spare)
            }
        };
        let new = new.saturating_add(copies);
        let available = self.pool.available();
        // Revived blocks are counted only if the pool has too few blocks for the whole match.
        let matched = self.matched.blocks.len() + source.map_or(0, |_| self.groups.len());
        if new.saturating_add(matched) > available {
            let needed = new.saturating_add(self.num_revived(seq_idx, source));
            if needed > available {
                return Prefill::NoRoom { needed, available };
            }
        }
        let seq = self.seqs.at(seq_idx);
        let cached_tokens = start - seq.planned_end;
        let samples = start + len == seq.tokens.len();
        let blocks = |of: CopySource| self.pool.tree().blocks(of.position).collect();
        let details = Details::new(Work::Prefill(PrefillWork {
            reused_tokens: cached_tokens,
            replay,
            copy_sources: source.map_or(Vec::new(), blocks),
            copied_tokens: source.map_or(0, |source| source.tokens),
            ..PrefillWork::default()
        }));
        self.enter(seq_idx, NewTokens::computed(len), Some(details));
        Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        }
    }
}

/// Whether a plan may compute the last token of each of these sequences.
fn check_decodes(state: &State, plan: PlanSet, sequences: &[SeqKey]) -> Result<(), Error> {
    let mut seen = HashSet::new();
    for &key in sequences {
        let seq = state.seqs.get(key)?;
        seq.check_decode(plan)?;
        if !seen.insert(key.seq_idx) {
            return Err(Error::InPlan { sequence: seq.id });
        }
    }
    Ok(())
}

impl State {
    /// Layer groups whose block at `position` must be copied before it is written: other sequences hold it, or it is
    /// cached and a fork kept only its beginning.
    pub(super) fn must_copy(
        &self,
        seq_idx: u32,
        position: usize,
    ) -> impl Iterator<Item = usize> + '_ {
        // A pin may hold a block that was registered, and that a private sequence goes on writing.
        let is_private = self.seqs.at(seq_idx).is_private;
        let is_pinned = move |block| is_private && self.pool.shared().pin_refs_of(block) > 0;
        self.groups_shared_at(seq_idx, position, move |block| {
            self.pool.seq_refs(block) > 1 || is_pinned(block)
        })
    }

    /// Layer groups whose block at `position` was shared with a fork, and is still `held` by others or cached.
    pub(super) fn groups_shared_at(
        &self,
        seq_idx: u32,
        position: usize,
        held: impl Fn(BlockId) -> bool,
    ) -> impl Iterator<Item = usize> {
        let seq = self.seqs.at(seq_idx);
        let index = self.groups.index_of(position);
        let groups = 0..self.groups.len() * usize::from(seq.may_share(index));
        groups.filter(move |&group| {
            let block = seq.table.at(group, index);
            held(block) || self.pool.cached_at(block).is_some()
        })
    }

    /// Blocks to allocate before the sequence can write its next `len` positions.
    fn blocks_to_write(&self, seq_idx: u32, len: usize) -> usize {
        let seq = self.seqs.at(seq_idx);
        let indices = self.groups.end_of(seq.planned_end.saturating_add(len));
        let new = indices.saturating_sub(seq.table.end());
        let new = new.saturating_mul(self.groups.len());
        new.saturating_add(self.must_copy(seq_idx, seq.planned_end).count())
    }

    /// Logical blocks to allocate for the table, with the current match, to reach `end` tokens.
    fn new_indices(&self, seq_idx: u32, end: usize) -> usize {
        let held = self.seqs.at(seq_idx).table.end() + self.matched.num_indices;
        self.groups.end_of(end).saturating_sub(held)
    }

    pub(super) fn new_blocks(&self, seq_idx: u32, end: usize) -> usize {
        self.new_indices(seq_idx, end) * self.groups.len()
    }

    /// Blocks to allocate until all known tokens are computed: in a step that ends at `end`, then in steps of at
    /// most `max_tokens`. Blocks that slide out of a window meanwhile are reused.
    pub(super) fn blocks_to_come(&self, seq_idx: u32, end: usize, max_tokens: usize) -> usize {
        let seq = self.seqs.at(seq_idx);
        let now = self.new_indices(seq_idx, end);
        if !self.groups.have_windows() {
            return self.new_blocks(seq_idx, seq.tokens.len());
        }
        let indices = seq.table.end() + self.matched.num_indices;
        let come = |group: usize| {
            // Blocks that slide out of a window with the match stay pinned by the plan.
            let start = match self.matched.num_indices {
                0 => seq.table.start(group),
                matched => {
                    let end = seq.registered.end() + matched;
                    let seen = self.groups.first_index_of(group, end, self.matched.replay);
                    seen.max(seq.table.start(group))
                }
            };
            let peak = self.groups.peak(group, seq.tokens.len(), max_tokens);
            peak.saturating_sub(indices - start).max(now)
        };
        (0..self.groups.len()).map(come).sum()
    }

    /// The position at which computing begins, the end of the cached tokens (the current match and the copied tokens),
    /// and how many tokens are replayed: at most `replay` cached tokens, and the last known one in any case.
    fn start_after_match(
        &self,
        seq_idx: u32,
        source: Option<CopySource>,
        replay: usize,
    ) -> (usize, usize, usize) {
        let seq = self.seqs.at(seq_idx);
        let cached = self.matched.num_indices * self.groups.block_size();
        let cached = cached + source.map_or(0, |source| source.tokens);
        let (end, replay) = (seq.planned_end + cached, replay.min(cached));
        let start = match cached {
            0 => end,
            _ => (end - replay).min(seq.tokens.len() - 1),
        };
        (start, end, replay)
    }

    /// The block that the current match ends inside of: it agrees with at least an eighth of a block of the next
    /// tokens, and no open step computes it, because copies come before the step.
    fn find_copy_source(&self, seq_idx: u32) -> Option<CopySource> {
        let seq = self.seqs.at(seq_idx);
        self.copy_source(
            seq.labelled(),
            seq.registered.end() + self.matched.num_indices,
        )
    }

    /// How many tokens of a prompt would be copied after the current match of its first logical blocks.
    pub(crate) fn num_copied(&self, tokens: Labelled<'_>) -> usize {
        let source = self.copy_source(tokens, self.matched.num_indices);
        source.map_or(0, |source| source.tokens)
    }

    fn copy_source(&self, prompt: Labelled<'_>, indices: usize) -> Option<CopySource> {
        if !self.partial_reuse {
            return None;
        }
        let size = self.groups.block_size();
        let index = indices * size;
        // The last token is always computed.
        let end = prompt.tokens.len().saturating_sub(1).min(index + size);
        let min_tokens = size.div_ceil(8);
        let tokens = prompt.tokens.get(index..end)?;
        if tokens.len() < min_tokens {
            return None;
        }
        let last = self.matched.last;
        let label = prompt.label(indices);
        let best = { &self.pool }.longest_partial_match(last, tokens, label, min_tokens);
        best.map(|(position, tokens)| CopySource { position, tokens })
    }

    /// Matches the tokens after the sequence's position into `self.matched`, if it is a block boundary and the sequence
    /// may read the cache; false if not. Logical blocks that are allocated already come after the match.
    pub(super) fn find_match(&mut self, seq_idx: u32, purpose: Purpose) -> bool {
        let seq = self.seqs.at(seq_idx);
        let registered = seq.registered;
        let on_boundary = seq.planned_end == registered.end() * self.groups.block_size();
        if !on_boundary || !self.caching || !seq.read_cache {
            self.matched.begin(registered.last, 0);
            (self.matched.snapshot, self.matched.start) = (NodePosition::NONE, seq.planned_end);
            return false;
        }
        let (matched, groups, pool) = (&mut self.matched, &self.groups, &mut self.pool);
        let tokens = seq.labelled();
        if pool.snapshots().is_some() {
            let limits = (seq.planned_end, seq.tokens.len() - 1);
            pool.find_match_with_state(matched, groups, tokens, registered, purpose, limits);
            return true;
        }
        pool.find_match(matched, groups, tokens, registered, purpose);
        true
    }

    /// Blocks of the current match that a token after it reads.
    pub(crate) fn matched_blocks(&self, seq_idx: u32) -> impl Iterator<Item = BlockId> + '_ {
        self.matched_blocks_after(self.seqs.at(seq_idx).registered.end())
    }

    /// As `matched_blocks`, if the match follows `from` logical blocks.
    pub(crate) fn matched_blocks_after(&self, from: usize) -> impl Iterator<Item = BlockId> + '_ {
        let groups = self.groups.len();
        let blocks = self.matched.blocks.iter().enumerate();
        let seen = blocks.filter(move |(entry, _)| {
            let (index, group) = (from + entry / groups, entry % groups);
            let end = from + self.matched.num_indices;
            index >= self.groups.first_index_of(group, end, self.matched.replay)
        });
        seen.map(|(_, &block)| block)
    }

    /// Evictable blocks among those of the copy source and those of the current match that a later token reads.
    pub(super) fn num_revived(&self, seq_idx: u32, source: Option<CopySource>) -> usize {
        let source = source.into_iter();
        let source = source.flat_map(|source| self.pool.tree().blocks(source.position));
        let reused = self.matched_blocks(seq_idx).chain(source);
        reused.filter(|&block| self.pool.is_queued(block)).count()
    }
}
