//! Sequences: tokens, block table, and how much of them is computed and registered.

use std::fmt;
use std::mem::offset_of;
use std::num::NonZero;
use std::ops::Deref;

use crate::error::Error;
use crate::explain::Miss;
use crate::ids::{BlockId, NodePosition, SeqKey};
use crate::switch::{Label, Labelled, Switch};
use crate::sync::Arc;
use crate::table::BlockTable;

/// The registered prefix of a sequence: its blocks are those on the path to `last` in the radix tree. They are
/// ready, or an open step computes them, and they are never written again.
#[repr(C)] // `num_indices` is in the first cache line of a sequence, `last` is not
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registered {
    num_indices: u32,
    pub(crate) last: NodePosition,
}

impl Registered {
    #[inline]
    pub(crate) fn new(last: NodePosition, num_indices: usize) -> Self {
        let num_indices = num_indices as u32;
        Self { num_indices, last }
    }

    pub(crate) fn at_root(root: NodePosition) -> Self {
        Self::new(root, 0)
    }

    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.num_indices as usize
    }
}

/// A row of the logits of a step, stored as `2 * row + 1`, so that `Option<SampleRow>` takes no more space.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleRow(NonZero<u32>);

impl Default for SampleRow {
    fn default() -> Self {
        Self::new(0)
    }
}

impl SampleRow {
    #[inline]
    pub(crate) fn new(row: usize) -> Self {
        Self(NonZero::<u32>::MIN | (row as u32) << 1)
    }

    /// The placeholder in `input_ids` for the token sampled there: -1 - row.
    #[inline]
    pub(crate) fn as_input(self) -> i64 {
        -1 - i64::from(self.0.get() >> 1)
    }
}

impl fmt::Debug for SampleRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.get() >> 1)
    }
}

/// The state of a sequence. The first cache line has what planning and committing a decode read and write, except the
/// table, which is in the second.
#[derive(Default)]
#[repr(C, align(64))]
pub(crate) struct SequenceState {
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    /// Tokens computed once the open plans are committed.
    pub(crate) planned_end: usize,
    /// Tokens whose KV is in the table's blocks.
    pub(crate) computed: usize,
    /// The open plans that it is in.
    pub(crate) plans: PlanSet,
    /// Pending tokens: open plans sample them, so their positions are known and their values are not.
    pub(crate) pending: u8,
    /// An open plan computes drafts for it, so its end is not known.
    pub(crate) speculating: bool,
    /// It was dropped or freed, and an open plan still holds it.
    pub(crate) dropped: bool,
    /// The row of the newest plan that samples the last pending token.
    pub(crate) sample_row: SampleRow,
    /// Logical blocks before this index may be shared with a fork, registered or not.
    pub(crate) shared_indices: u32,
    pub(crate) registered: Registered,
    /// Incremented whenever the table changes other than by growth.
    pub(crate) table_version: u32,
    pub(crate) table: BlockTable,
    pub(crate) root: NodePosition,
    /// Cached tokens that it reuses, since it was last without blocks.
    pub(crate) cached: u32,
    /// Tokens that its own transfers restored, since then.
    pub(crate) restored: u32,
    /// Of the cached tokens: those that an open step was to compute, and those copied from a part of a block.
    pub(crate) in_flight: u32,
    pub(crate) copied: u32,
    /// Leading logical blocks that may stay cached when it ends.
    pub(crate) kept_indices: u32,
    /// The version of the weights with which it began.
    pub(crate) weights_version: u32,
    /// Why its first prefill computes tokens, if misses are explained.
    pub(crate) miss: Option<Box<Miss>>,
    /// The kept states of a model that has any.
    pub(crate) state: Option<Box<StateTrack>>,
    /// Where its namespace switches.
    pub(crate) switch: Option<Arc<Switch>>,
    /// False: it computes its whole prompt. Its blocks are registered all the same.
    pub(crate) read_cache: bool,
    /// Earlier weights computed its first tokens: it goes on over its blocks, none of which is registered, matched or
    /// merged. It has computed tokens, so it is at no boundary of its registered prefix, which is empty.
    pub(crate) is_private: bool,
}

/// The snapshots that a sequence has loaded, left and wants. It has a running state if it has computed anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateTrack {
    /// The position of the last snapshot that it loaded or left.
    pub(crate) last_kept: usize,
    /// The position of the snapshot that its last answer has left, which the next one replaces; 0: none.
    pub(crate) answer: usize,
    /// The block boundaries at which a snapshot is wanted, in order.
    pub(crate) wanted: Vec<usize>,
}

/// A sequence. Its state can be read everywhere, and is changed by its own methods only.
pub(crate) struct Sequence(SequenceState);

impl Deref for Sequence {
    type Target = SequenceState;

    #[inline]
    fn deref(&self) -> &SequenceState {
        &self.0
    }
}

/// For the tests of validators, which corrupt it.
#[cfg(test)]
impl std::ops::DerefMut for Sequence {
    fn deref_mut(&mut self) -> &mut SequenceState {
        &mut self.0
    }
}

const _: () = assert!(offset_of!(SequenceState, registered) + size_of::<u32>() == 64);
const _: () = assert!(offset_of!(SequenceState, root) == 128);
#[cfg(all(not(loom), target_pointer_width = "64"))]
const _: () = assert!(size_of::<SequenceState>() == 192);

/// A set of open plans, of which there are at most two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanSet(pub(crate) u8);

impl PlanSet {
    pub(crate) const NONE: Self = Self(0);
    pub(crate) const FIRST: Self = Self(1);
    pub(crate) const SECOND: Self = Self(2);

    #[inline]
    pub(crate) fn meets(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }

    #[inline]
    pub(crate) fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    #[inline]
    pub(crate) fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }
}

impl Sequence {
    #[inline]
    fn new(
        id: u64,
        tokens: Vec<u32>,
        table: BlockTable,
        root: NodePosition,
        read_cache: bool,
        weights_version: u32,
    ) -> Self {
        Self(SequenceState {
            id,
            tokens,
            registered: Registered::at_root(root),
            table,
            root,
            kept_indices: u32::MAX,
            read_cache,
            weights_version,
            ..SequenceState::default()
        })
    }

    /// Tokens that no open plan computes yet, pending ones included.
    #[inline]
    pub(crate) fn num_unplanned(&self) -> usize {
        (self.tokens.len() + usize::from(self.pending)).saturating_sub(self.planned_end)
    }

    /// True if its block at `index` may be shared with a fork and is not written yet.
    #[inline]
    pub(crate) fn may_share(&self, index: usize) -> bool {
        (self.registered.end()..self.shared_indices as usize).contains(&index)
    }

    /// Its tokens, with the switch of its namespace.
    #[inline]
    pub(crate) fn labelled(&self) -> Labelled<'_> {
        Labelled {
            tokens: &self.tokens,
            switch: self.switch.as_deref(),
        }
    }

    /// The label of a logical block.
    #[inline]
    pub(crate) fn label(&self, index: usize) -> Option<&Label> {
        self.labelled().label(index)
    }

    /// The row that samples its last pending token, if it has one.
    #[inline]
    pub(crate) fn pending_row(&self) -> Option<SampleRow> {
        (self.pending > 0).then_some(self.sample_row)
    }

    #[inline]
    fn answers_to(&self, key: SeqKey, manager: u32) -> bool {
        self.id == key.id && key.manager == manager && !self.dropped
    }

    /// Checks that a plan may compute its last token.
    pub(crate) fn check_decode(&self, plan: PlanSet) -> Result<(), Error> {
        let (sequence, uncomputed) = (self.id, self.num_unplanned());
        if self.plans.meets(plan) || self.speculating {
            return Err(Error::InPlan { sequence });
        }
        match uncomputed {
            1 => Ok(()),
            _ => Err(Error::NotDecoding {
                sequence,
                uncomputed,
            }),
        }
    }

    /// Adds a plan that computes it up to `end` and samples its next token in `row`, if it reaches the last one.
    #[inline]
    pub(crate) fn plan_to(&mut self, plan: PlanSet, end: usize, row: Option<SampleRow>) {
        self.0.plans = self.plans.with(plan);
        self.0.planned_end = end;
        if let Some(row) = row {
            self.0.pending += 1;
            self.0.sample_row = row;
        }
    }

    /// Adds `count` drafts after the last token to its newest plan.
    pub(crate) fn plan_drafts(&mut self, count: usize) {
        self.0.planned_end += count;
        self.0.speculating = true;
    }

    /// Starts its next plan after `tokens` cached tokens.
    pub(crate) fn skip_cached(&mut self, tokens: usize) {
        self.0.planned_end += tokens;
    }

    /// Sets the row that samples its last pending token.
    pub(crate) fn set_sample_row(&mut self, row: SampleRow) {
        self.0.sample_row = row;
    }

    /// Undoes `plan_to` and `plan_drafts`: it is planned to `end` again, and `row` samples its last pending token.
    pub(crate) fn unplan(
        &mut self,
        plan: PlanSet,
        end: usize,
        samples: bool,
        row: Option<SampleRow>,
    ) {
        self.0.plans = self.plans.without(plan);
        self.0.planned_end = end;
        self.0.pending -= u8::from(samples);
        self.0.speculating = false;
        if let (true, Some(row)) = (self.pending > 0, row) {
            self.0.sample_row = row;
        }
    }

    /// Replaces its oldest pending token by its value.
    #[inline]
    pub(crate) fn push_sampled(&mut self, token: u32) {
        self.0.tokens.push(token);
        self.0.pending -= 1;
    }

    /// Commits a plan that computed it up to `end`. Returns whether the sequence ends with it.
    #[inline]
    pub(crate) fn commit(&mut self, plan: PlanSet, end: usize) -> bool {
        self.0.computed = end;
        self.0.plans = self.plans.without(plan);
        self.dropped && self.plans == PlanSet::NONE
    }

    /// After `commit` of a plan with drafts: `accepted` tokens follow the sampled one, and `rejected` drafts that it
    /// computed do not.
    pub(crate) fn accept_drafts(&mut self, accepted: &[u32], rejected: usize) {
        self.0.tokens.extend_from_slice(accepted);
        self.set_computed(self.computed - rejected);
        self.0.speculating = false;
    }

    /// Counts cached tokens that it reuses, and tokens that its own transfer restored.
    pub(crate) fn count_reused(&mut self, cached: usize, restored: usize) {
        self.0.cached += cached as u32;
        self.0.restored += restored as u32;
    }

    /// Counts those of the reused tokens that were in flight, and those that were copied.
    pub(crate) fn count_sources(&mut self, in_flight: usize, copied: usize) {
        self.0.in_flight += in_flight as u32;
        self.0.copied += copied as u32;
    }

    /// The snapshots that it has loaded, left and wants.
    pub(crate) fn track(&self) -> StateTrack {
        self.state.as_deref().cloned().unwrap_or_default()
    }

    /// As `track`, to change it.
    pub(crate) fn track_mut(&mut self) -> &mut StateTrack {
        self.0.state.get_or_insert_default()
    }

    pub(crate) fn set_miss(&mut self, miss: Option<Box<Miss>>) {
        self.0.miss = miss;
    }

    /// Sets its computed tokens, outside a plan.
    pub(crate) fn set_computed(&mut self, computed: usize) {
        (self.0.computed, self.0.planned_end) = (computed, computed);
    }

    pub(crate) fn append(&mut self, tokens: &[u32]) {
        self.0.tokens.extend_from_slice(tokens);
    }

    #[inline]
    pub(crate) fn register(&mut self, registered: Registered) {
        self.0.registered = registered;
    }

    /// Marks the logical blocks before `end` as shared with a fork.
    pub(crate) fn share_indices(&mut self, end: usize) {
        self.0.shared_indices = self.shared_indices.max(end as u32);
    }

    /// Lets only its first `count` logical blocks stay cached when it ends.
    pub(crate) fn keep_indices(&mut self, count: usize) {
        self.0.kept_indices = count.min(u32::MAX as usize) as u32;
    }

    /// Marks it as dropped or freed.
    pub(crate) fn set_dropped(&mut self) {
        self.0.dropped = true;
    }

    /// The weights have changed, outside a plan: none of its blocks is registered any more. `full`: its logical blocks
    /// whose tokens are all computed, of `end` that have computed ones. The block after the full ones may be written
    /// once it has been copied.
    pub(crate) fn unregister(&mut self, full: usize, end: usize) {
        let is_shared =
            end > full && self.registered.end().max(self.shared_indices as usize) > full;
        self.0.shared_indices = if is_shared { full as u32 + 1 } else { 0 };
        self.0.registered = Registered::at_root(self.root);
        self.0.is_private = self.computed > 0;
        if let Some(track) = &mut self.0.state {
            track.answer = 0;
        }
    }

    /// A private sequence, once `full` logical blocks are computed, which are not written again.
    pub(crate) fn unshare_indices(&mut self, full: usize) {
        if self.shared_indices as usize <= full {
            self.0.shared_indices = 0;
        }
    }

    /// Lets its namespace switch; it has no blocks.
    pub(crate) fn set_switch(&mut self, switch: Option<Arc<Switch>>) {
        self.0.switch = switch;
    }

    /// It has computed nothing, and begins with these weights.
    pub(crate) fn begin_with(&mut self, weights_version: u32) {
        (self.0.weights_version, self.0.is_private) = (weights_version, false);
    }

    /// A fork of a private sequence goes on over its blocks.
    pub(crate) fn go_on_with(&mut self, weights_version: u32) {
        (self.0.weights_version, self.0.is_private) = (weights_version, true);
    }

    /// Replaces its table, outside a plan: `computed` tokens are in it, and `registered` is its registered prefix.
    pub(crate) fn set_table(&mut self, table: BlockTable, registered: Registered, computed: usize) {
        (self.0.table, self.0.registered) = (table, registered);
        (self.0.cached, self.0.restored, self.0.shared_indices) = (0, 0, 0);
        (self.0.in_flight, self.0.copied) = (0, 0);
        self.set_computed(computed);
    }

    /// Inserts matched blocks after its registered ones. Those before `seen` of a group slide out of its window, and go
    /// to `slid`.
    #[inline(always)] // every hit comes here
    pub(crate) fn insert_match(
        &mut self,
        matched: BlockTable,
        registered: Registered,
        seen: impl Fn(usize) -> usize,
        slid: &mut Vec<(usize, BlockId)>,
    ) {
        let (at, table) = (self.registered.end(), &mut self.0.table);
        for group in 0..table.groups() {
            table.slide(group, seen(group).min(at), |block| {
                slid.push((group, block))
            });
        }
        let only_grows = slid.is_empty() && table.end() == at;
        self.0.table_version += u32::from(!only_grows);
        self.0.table.insert(at, matched);
        self.register(registered);
    }

    /// Changes its table other than by growth.
    #[inline]
    pub(crate) fn change_table<R>(&mut self, change: impl FnOnce(&mut BlockTable) -> R) -> R {
        self.0.table_version += 1;
        change(&mut self.0.table)
    }

    /// Appends blocks to its table, by logical block, then by layer group.
    #[inline]
    pub(crate) fn push_indices(&mut self, blocks: &[BlockId]) {
        self.0.table.push_indices(blocks);
    }

    /// The blocks of a table of one group, to append to.
    #[inline]
    pub(crate) fn tail_of_one(&mut self) -> &mut Vec<BlockId> {
        self.0.table.tail_of_one()
    }
}

/// All sequences of a manager, by index. A vacant index has the id 0.
#[derive(Default)]
pub(crate) struct Sequences {
    manager: u32,
    groups: usize,
    sequences: Vec<Sequence>,
    vacant: Vec<u32>,
    next_id: u64,
}

impl Sequences {
    pub(crate) fn new(manager: u32, groups: usize) -> Self {
        Self {
            manager,
            groups,
            ..Self::default()
        }
    }

    /// Sequences created so far.
    #[cfg(feature = "trace")]
    pub(crate) fn num_created(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn insert(
        &mut self,
        tokens: Vec<u32>,
        root: NodePosition,
        read_cache: bool,
        weights_version: u32,
    ) -> SeqKey {
        self.next_id += 1;
        let table = BlockTable::new(self.groups);
        let sequence = Sequence::new(
            self.next_id,
            tokens,
            table,
            root,
            read_cache,
            weights_version,
        );
        let seq_idx = match self.vacant.pop() {
            Some(seq_idx) => {
                self.sequences[seq_idx as usize] = sequence;
                seq_idx
            }
            None => {
                self.sequences.push(sequence);
                (self.sequences.len() - 1) as u32
            }
        };
        SeqKey {
            manager: self.manager,
            seq_idx,
            id: self.next_id,
        }
    }

    #[inline]
    pub(crate) fn get(&self, key: SeqKey) -> Result<&Sequence, Error> {
        match self.sequences.get(key.seq_idx as usize) {
            Some(seq) if seq.answers_to(key, self.manager) => Ok(seq),
            _ => Err(no_sequence(key, self.manager)),
        }
    }

    /// The sequence, if a plan may compute its last token without a copy on write.
    #[inline]
    pub(crate) fn decoding(&mut self, key: SeqKey, plan: PlanSet) -> Option<&mut Sequence> {
        let seq = self.sequences.get_mut(key.seq_idx as usize)?;
        let matches = seq.id == key.id && key.manager == self.manager;
        let is_held = seq.plans.meets(plan) | seq.speculating | seq.dropped;
        let has_one_left = seq.tokens.len() + usize::from(seq.pending) == seq.planned_end + 1;
        let shares = seq.shared_indices > seq.registered.num_indices;
        (matches && !is_held && has_one_left && !shares).then_some(seq)
    }

    /// The sequence at an index that is not vacant.
    #[inline]
    pub(crate) fn at(&self, seq_idx: u32) -> &Sequence {
        &self.sequences[seq_idx as usize]
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, seq_idx: u32) -> &mut Sequence {
        &mut self.sequences[seq_idx as usize]
    }

    /// Removes a sequence. Returns its registered prefix and its root.
    pub(crate) fn remove(&mut self, seq_idx: u32) -> (Registered, NodePosition) {
        self.vacant.push(seq_idx);
        let seq = &mut self.at_mut(seq_idx).0;
        (seq.id, seq.tokens, seq.table) = (0, Vec::new(), BlockTable::new(1));
        seq.switch = None;
        (seq.registered, seq.root)
    }

    pub(crate) fn enumerate(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.sequences).filter(|(_, seq)| seq.id > 0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.enumerate().map(|(_, seq)| seq)
    }
}

#[cold]
fn no_sequence(key: SeqKey, manager: u32) -> Error {
    match key.manager == manager {
        true => Error::FreedSequence { sequence: key.id },
        false => Error::WrongManager {
            what: "sequence",
            id: key.id,
        },
    }
}
