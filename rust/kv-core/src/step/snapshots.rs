//! Snapshots of states in a step: where a chunk is cut to keep one, which ones are loaded before the step and written
//! after it.
//!
//! ```text
//!   cached keys and values   ================================|
//!   snapshots                        S           S
//!   the step's tokens                            |-----------C----------E--
//!                                                  slots -1  branch     end of the prompt
//! ```
//!
//! A chunk ends where a state is kept: at a *wanted* position, at a *branch point* (the end of cached keys and values
//! after the last snapshot), at the last block boundary of the prompt, and every `cadence` tokens, where the snapshot is
//! spare. Decodes keep one every `min_tokens` tokens, which replaces the one before.

use super::admit::PrefillRequest;
use super::admit::chunk;
use super::answers::Prefill;
use super::enter::NewTokens;
use super::plan::{Details, Entry, PrefillWork, Work};
use super::state_work::{Cut, Kind, Save, StateWork};
use crate::config::StateConfig;
use crate::error::Error;
use crate::ids::{BlockId, NodePosition, PlanKey, SeqKey};
use crate::sequence::StateTrack;
use crate::state::State;

/// A copy between a sequence's running state and the blocks of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// The sequence's id.
    pub sequence: u64,
    /// The tokens that the state stands for.
    pub position: usize,
    /// The blocks of the snapshot, in the order of its bytes; none: the state of no token.
    pub blocks: Vec<BlockId>,
}

/// The snapshots of a prefill whose prompt has `len` tokens: the tokens between spare ones. At most `max_spare` of them fit.
fn cadence(
    config: &StateConfig,
    last_boundary: usize,
    block_size: usize,
    max_spare: usize,
) -> usize {
    let mut cadence = config.cadence.next_multiple_of(block_size);
    while cadence > 0 && last_boundary / cadence > max_spare {
        cadence *= 2;
    }
    cadence
}

impl State {
    /// Whether the model has state layers.
    #[inline]
    pub(crate) fn has_state(&self) -> bool {
        self.pool.snapshots().is_some()
    }

    /// Whether an open step computes tokens that a sequence without a state would match.
    pub(super) fn awaits_state(&self, seq_idx: u32) -> bool {
        let is_fresh = self.seqs.at(seq_idx).planned_end == 0;
        let mut matched = self.matched_blocks(seq_idx);
        is_fresh && matched.any(|block| !self.pool.is_ready(block))
    }

    /// The first position after `start`, up to `end`, at which a prefill keeps a state, given the current match.
    fn next_cut(&self, seq_idx: u32, start: usize, end: usize) -> Option<Cut> {
        let snapshots = self.pool.snapshots()?;
        if !self.caching || self.seqs.at(seq_idx).is_private {
            return None;
        }
        let (seq, config) = (self.seqs.at(seq_idx), &snapshots.config);
        let size = self.groups.block_size();
        let track = seq.state.as_deref();
        let last_kept = match self.matched.snapshot {
            NodePosition::NONE => track.map_or(0, |track| track.last_kept),
            _ => start,
        };
        let is_apart = |&position: &usize| position >= last_kept + config.min_tokens;
        let in_chunk = |position: &usize| start < *position && *position <= end;
        let last = self.groups.index_of(seq.tokens.len() - 1) * size;
        let cached = (seq.registered.end() + self.matched.num_indices) * size;
        let cadence = cadence(config, last, size, snapshots.max_spare());
        let wanted = track.iter().flat_map(|track| &track.wanted).copied();
        let kept = [cached.min(last), last].into_iter().filter(is_apart);
        let kept = wanted.chain(kept).filter(in_chunk).min();
        let first = (start + 1).max(last_kept + config.min_tokens);
        let spare = (cadence > 0).then(|| first.next_multiple_of(cadence));
        let spare = spare.filter(in_chunk);
        let spare = spare.filter(|&spare| kept.is_none_or(|kept| spare < kept));
        let of_kind = |kind| move |position| Cut { position, kind };
        spare
            .map(of_kind(Kind::Spare))
            .or(kept.map(of_kind(Kind::Prompt)))
    }

    /// Blocks that a prefill takes from `start` to `end`, after the current match.
    fn blocks_needed(
        &self,
        seq_idx: u32,
        start: usize,
        end: usize,
        request: PrefillRequest,
    ) -> usize {
        let new = match request.spare_blocks {
            None => self.new_blocks(seq_idx, end),
            Some(spare) => {
                let whole = self.blocks_to_come(seq_idx, end, request.max_tokens);
                whole.saturating_add(spare)
            }
        };
        let copies = match self.matched.num_indices {
            0 => self.must_copy(seq_idx, start).count(),
            _ => 0,
        };
        let snapshot = self.matched.snapshot.some();
        let snapshot = snapshot.and_then(|at| self.pool.snapshot_at(at));
        let loaded = snapshot.unwrap_or_default().iter();
        let loaded = loaded.filter(|&&block| self.pool.is_queued(block)).count();
        new.saturating_add(copies + loaded + self.num_revived(seq_idx, None))
    }

    /// Plans the tokens after the state that the current match continues. Those before the end of the match are computed
    /// for the state alone.
    pub(super) fn plan_with_state(&mut self, seq_idx: u32, request: PrefillRequest) -> Prefill {
        let limit = request.max_tokens.min(self.steps.newest().budget_left);
        let (seq, start) = (self.seqs.at(seq_idx), self.matched.start);
        let rest = seq.tokens.len() - start;
        let end = start + chunk(start, rest, limit, self.groups.block_size());
        let available = self.pool.available();
        let blocks = self.pool.snapshots().map_or(0, |of| of.config.blocks);
        let cut = self.next_cut(seq_idx, start, end).filter(|cut| {
            let needed = self.blocks_needed(seq_idx, start, cut.position, request);
            needed.saturating_add(blocks) <= available
        });
        let end = cut.map_or(end, |cut| cut.position);
        let needed = self.blocks_needed(seq_idx, start, end, request);
        if needed > available {
            // The blocks of the snapshot may be those that it lacks: if nothing else runs, it never gets them.
            let may_wait = seq.planned_end == 0 && self.pool.usage().active > 0;
            if may_wait || self.matched.num_indices == 0 {
                return Prefill::NoRoom { needed, available };
            }
            self.matched.begin(seq.registered.last, 0);
            (self.matched.snapshot, self.matched.start) = (NodePosition::NONE, seq.planned_end);
            return self.plan_with_state(seq_idx, request);
        }
        self.enter_with_state(seq_idx, start..end, cut)
    }

    /// Adds a prefill of these positions to the plan, with the snapshots that it loads and writes.
    fn enter_with_state(
        &mut self,
        seq_idx: u32,
        positions: std::ops::Range<usize>,
        cut: Option<Cut>,
    ) -> Prefill {
        let (start, len) = (positions.start, positions.len());
        let seq = self.seqs.at(seq_idx);
        let cached_tokens = start - seq.planned_end;
        let samples = positions.end == seq.tokens.len();
        let cached = (seq.registered.end() + self.matched.num_indices) * self.groups.block_size();
        let last_kept = seq.track().last_kept;
        let load = match self.matched.snapshot.some() {
            // Before anything is allocated, which could evict it.
            Some(snapshot) => Some((start, self.pool.pin_snapshot(snapshot))),
            None => (start == 0).then(|| (0, Vec::new())),
        };
        let replay = match self.matched.num_indices {
            0 => 0,
            _ => cached - start,
        };
        let details = Details::new(Work::Prefill(PrefillWork {
            reused_tokens: cached_tokens,
            replay,
            ..PrefillWork::default()
        }));
        self.enter(seq_idx, NewTokens::computed(len), Some(details));
        if load.is_some() {
            self.seqs.at_mut(seq_idx).track_mut().last_kept = start;
        }
        let save = cut.map(|cut| self.take_save(seq_idx, cut));
        self.push_state_work(seq_idx, last_kept, load, save);
        Prefill::Planned {
            cached_tokens,
            tokens: len,
            samples,
        }
    }

    fn take_save(&mut self, seq_idx: u32, cut: Cut) -> Save {
        let blocks = self.pool.take_for_snapshot(cut.kind == Kind::Spare);
        self.seqs.at_mut(seq_idx).track_mut().last_kept = cut.position;
        Save { cut, blocks }
    }

    fn push_state_work(
        &mut self,
        seq_idx: u32,
        last_kept: usize,
        load: Option<(usize, Vec<BlockId>)>,
        save: Option<Save>,
    ) {
        if load.is_some() || save.is_some() {
            self.state_work.push(StateWork {
                plan: self.steps.newest().key.serial,
                seq_idx,
                last_kept,
                load,
                save,
            });
        }
    }

    /// Plans the states of the newest plan's decodes, from entry `first` on: those that begin at the first token, and
    /// those to keep because they have come far enough, while blocks are left for all decodes to begin a logical block.
    #[cold]
    pub(super) fn plan_decode_states(&mut self, first: usize, saves: bool) {
        let Some(StateConfig {
            blocks, min_tokens, ..
        }) = self.pool.snapshots().map(|of| of.config)
        else {
            return;
        };
        let size = self.groups.block_size();
        let interval = min_tokens.max(1).next_multiple_of(size);
        let entries = &self.steps.newest().entries[first..];
        let reserve = entries.len() * self.groups.len();
        let due = |entry: &&Entry| entry.start == 0 || entry.end().is_multiple_of(interval);
        let due = entries.iter().filter(due);
        let due: Vec<(u32, usize, usize)> = due
            .map(|entry| (entry.seq_idx, entry.start, entry.end()))
            .collect();
        for (seq_idx, start, position) in due {
            let seq = self.seqs.at(seq_idx);
            let (last_kept, registers) = (seq.track().last_kept, self.caching && !seq.is_private);
            let is_due = position.is_multiple_of(interval) && position >= last_kept + min_tokens;
            let has_room = self.pool.available() >= blocks + reserve;
            let save = (saves && is_due && registers && has_room).then(|| {
                let kind = Kind::Answer;
                self.take_save(seq_idx, Cut { position, kind })
            });
            let load = (start == 0).then(|| (0, Vec::new()));
            self.push_state_work(seq_idx, last_kept, load, save);
        }
    }

    /// Keeps no state of a decode of the newest plan.
    #[cold]
    pub(super) fn drop_save(&mut self, seq_idx: u32) {
        let plan = self.steps.newest().key.serial;
        let mut works = self.state_work.iter_mut();
        let work = works.find(|work| work.plan == plan && work.seq_idx == seq_idx);
        let Some(work) = work else { return };
        self.seqs.at_mut(seq_idx).track_mut().last_kept = work.last_kept;
        if let Some(save) = work.save.take() {
            save.blocks.iter().for_each(|&block| self.pool.unpin(block));
        }
    }

    /// Removes a sequence's snapshots from the newest plan.
    #[cold]
    pub(super) fn undo_state_work(&mut self, seq_idx: u32) {
        let plan = self.steps.newest().key.serial;
        let is_its = |work: &StateWork| work.plan == plan && work.seq_idx == seq_idx;
        let Some(at) = self.state_work.iter().position(is_its) else {
            return;
        };
        let work = self.state_work.remove(at);
        self.seqs.at_mut(seq_idx).track_mut().last_kept = work.last_kept;
        work.blocks().for_each(|block| self.pool.unpin(block));
    }

    /// Caches the snapshots that a committed plan has written.
    pub(super) fn close_state_work(&mut self, plan: u64, step: u32) {
        let all = std::mem::take(&mut self.state_work);
        let (done, open) = all.into_iter().partition(|work| work.plan == plan);
        self.state_work = open;
        let done: Vec<StateWork> = done;
        for work in done {
            self.pool.stats.loaded_snapshots +=
                u64::from(work.load.as_ref().is_some_and(|load| load.0 > 0));
            if let Some(Save { cut, blocks }) = &work.save {
                self.store_state(work.seq_idx, *cut, blocks, step);
            }
            work.blocks().for_each(|block| self.pool.unpin(block));
        }
    }

    /// Caches a snapshot, if the blocks of its prefix are cached.
    fn store_state(&mut self, seq_idx: u32, cut: Cut, blocks: &[BlockId], step: u32) {
        let seq = self.seqs.at(seq_idx);
        let Some(position) = self.kept_position(seq_idx, cut.position) else {
            return;
        };
        let before = seq.state.as_deref().map_or(0, |track| track.answer);
        let is_spare = cut.kind == Kind::Spare;
        let is_stored = self.pool.store_snapshot(position, blocks, step, is_spare);
        if !is_stored || cut.kind != Kind::Answer {
            return;
        }
        self.seqs.at_mut(seq_idx).track_mut().answer = cut.position;
        if before > 0
            && let Some(before) = self.kept_position(seq_idx, before)
        {
            self.pool.drop_unused_snapshot(before);
        }
    }

    /// Where a snapshot of a sequence's first tokens is cached, if these are registered.
    pub(super) fn kept_position(&self, seq_idx: u32, num_tokens: usize) -> Option<NodePosition> {
        let registered = self.seqs.at(seq_idx).registered;
        let after = registered
            .end()
            .checked_sub(self.groups.index_of(num_tokens))?;
        Some(self.pool.tree().ancestor(registered.last, after))
    }

    /// A sequence releases its blocks: the snapshots of its prefixes are as recent as these.
    pub(crate) fn leave_snapshots(&mut self, seq_idx: u32) {
        if self.has_state() {
            let last = self.seqs.at(seq_idx).registered.last;
            self.pool.touch_snapshots(last);
            let track = self.seqs.at_mut(seq_idx).track_mut();
            (track.last_kept, track.answer) = (0, 0);
        }
    }

    pub(crate) fn want_snapshots(&mut self, key: SeqKey, positions: &[usize]) -> Result<(), Error> {
        self.seqs.get(key)?;
        if self.has_state() {
            let size = self.groups.block_size();
            let mut wanted: Vec<usize> = positions.iter().map(|at| at / size * size).collect();
            wanted.sort_unstable();
            wanted.dedup();
            let StateTrack { wanted: own, .. } = self.seqs.at_mut(key.seq_idx).track_mut();
            *own = wanted;
        }
        Ok(())
    }

    pub(crate) fn state_loads(&self, plan: PlanKey) -> Result<Vec<StateCopy>, Error> {
        self.state_copies(plan, |work| work.load.clone())
    }

    pub(crate) fn state_saves(&self, plan: PlanKey) -> Result<Vec<StateCopy>, Error> {
        let save = |work: &StateWork| {
            let save = work.save.as_ref();
            save.map(|save| (save.cut.position, save.blocks.clone()))
        };
        self.state_copies(plan, save)
    }

    fn state_copies(
        &self,
        plan: PlanKey,
        copy: impl Fn(&StateWork) -> Option<(usize, Vec<BlockId>)>,
    ) -> Result<Vec<StateCopy>, Error> {
        let serial = self.steps.open_plan(plan)?.key.serial;
        let works = self.state_work.iter().filter(|work| work.plan == serial);
        let copies = works.filter_map(|work| {
            let (position, blocks) = copy(work)?;
            let sequence = self.seqs.at(work.seq_idx).id;
            Some(StateCopy {
                sequence,
                position,
                blocks,
            })
        });
        Ok(copies.collect())
    }

    /// Blocks that open plans write snapshots to.
    pub(crate) fn pending_state_blocks(&self) -> usize {
        let saves = self.state_work.iter().filter_map(|work| work.save.as_ref());
        saves.map(|save| save.blocks.len()).sum()
    }
}
