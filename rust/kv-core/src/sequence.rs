//! Sequences: tokens, block table, how much is computed, where they stand among the contents.

use std::fmt;
use std::mem::offset_of;
use std::num::NonZero;

use crate::contents::Spot;
use crate::error::Error;
use crate::ids::SeqKey;
use crate::table::BlockTable;

/// Where a sequence stands among the contents: its first rows are those on the path to `tip`.
/// They are ready, or computed by an open step; shared or shareable, and never written again.
#[repr(C)] // the rows belong to the hot line of a sequence, the tip does not
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    rows: u32,
    pub(crate) tip: Spot,
}

impl Registered {
    #[inline]
    pub(crate) fn new(tip: Spot, rows: usize) -> Self {
        let rows = rows as u32;
        Self { rows, tip }
    }

    pub(crate) fn at_root(root: Spot) -> Self {
        Self::new(root, 0)
    }

    #[inline]
    pub(crate) fn rows(&self) -> usize {
        self.rows as usize
    }
}

/// A row of the logits of a step: twice that and one more, so that none needs no room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleRow(NonZero<u32>);

impl SampleRow {
    #[inline]
    pub(crate) fn new(row: usize) -> Self {
        Self(NonZero::<u32>::MIN | (row as u32) << 1)
    }

    /// What stands for the token that is sampled there, which is not known: -1 - row.
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

/// In the first cache line what the plan and the commit of a decode read and write, but for the table,
/// which is in the second; the ends of `tokens` and `table` are elsewhere.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    /// Where the open plans that hold it will have brought it; `computed` if none does.
    pub(crate) planned_end: usize,
    /// Tokens whose KV is in the table's blocks.
    pub(crate) computed: usize,
    /// The open plans that hold it, by their seats.
    pub(crate) plans: Seats,
    /// Tokens that open plans sample for it: their positions are known, their values are not.
    pub(crate) pending: u8,
    /// An open plan computes drafts for it: where it ends is not known.
    pub(crate) speculating: bool,
    /// Its handle is gone or it was freed; it lives on in an open plan.
    pub(crate) dropped: bool,
    /// The row of the newest plan that samples the last pending token, if any is.
    pub(crate) sample_row: SampleRow,
    /// Rows before this one may be shared with a fork although no content is registered for them.
    pub(crate) shared_rows: u32,
    pub(crate) registered: Registered,
    /// Changes when an entry of the table changes other than by growth.
    pub(crate) table_version: u32,
    pub(crate) table: BlockTable,
    pub(crate) root: Spot,
    /// Tokens reused from the cache since the sequence was last without blocks.
    pub(crate) cached: usize,
    /// False: always computes its prompt (its blocks are registered all the same).
    pub(crate) read_cache: bool,
}

const _: () = assert!(offset_of!(Sequence, registered) + size_of::<u32>() == 64);
const _: () = assert!(offset_of!(Sequence, root) == 128);

/// Which of the open plans, of which there are two at most: each has a seat of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seats(pub(crate) u8);

impl Seats {
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
    fn new(id: u64, tokens: Vec<u32>, table: BlockTable, root: Spot, read_cache: bool) -> Self {
        Self {
            id,
            tokens,
            planned_end: 0,
            computed: 0,
            plans: Seats::NONE,
            pending: 0,
            speculating: false,
            dropped: false,
            sample_row: SampleRow::new(0),
            shared_rows: 0,
            registered: Registered::at_root(root),
            table_version: 0,
            table,
            root,
            cached: 0,
            read_cache,
        }
    }

    /// Tokens, pending ones included, that no open plan computes yet.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        (self.tokens.len() + usize::from(self.pending)).saturating_sub(self.planned_end)
    }

    /// Whether its block of a row may be a fork's too, and is to be written.
    #[inline]
    pub(crate) fn may_share(&self, row: usize) -> bool {
        (self.registered.rows()..self.shared_rows as usize).contains(&row)
    }

    /// The row that samples its last pending token.
    #[inline]
    pub(crate) fn pending_row(&self) -> Option<SampleRow> {
        (self.pending > 0).then_some(self.sample_row)
    }

    #[inline]
    fn answers_to(&self, key: SeqKey, manager: u32) -> bool {
        self.id == key.id && key.manager == manager && !self.dropped
    }

    /// Whether a plan may compute its last token.
    pub(crate) fn check_decode(&self, plan: Seats) -> Result<(), Error> {
        let (sequence, uncomputed) = (self.id, self.left());
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

    /// A plan computes it up to `end`, and samples a token in a row if it comes to its last one.
    #[inline]
    pub(crate) fn plan_to(&mut self, plan: Seats, end: usize, row: Option<SampleRow>) {
        self.plans = self.plans.with(plan);
        self.planned_end = end;
        if let Some(row) = row {
            self.pending += 1;
            self.sample_row = row;
        }
    }

    /// A plan that holds it is committed. Whether it ends with that.
    #[inline]
    pub(crate) fn leave_plan(&mut self, plan: Seats) -> bool {
        self.plans = self.plans.without(plan);
        self.dropped && self.plans == Seats::NONE
    }

    /// Where it is without any plan.
    pub(crate) fn set_computed(&mut self, computed: usize) {
        (self.computed, self.planned_end) = (computed, computed);
    }
}

/// All sequences of a manager, by slot; keys are checked at every use. A slot without one has the id 0.
pub(crate) struct Sequences {
    manager: u32,
    groups: usize,
    slots: Vec<Sequence>,
    vacant: Vec<u32>,
    next_id: u64,
}

impl Sequences {
    pub(crate) fn new(manager: u32, groups: usize) -> Self {
        Self {
            manager,
            groups,
            slots: Vec::new(),
            vacant: Vec::new(),
            next_id: 0,
        }
    }

    /// How many there have been.
    pub(crate) fn made(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn insert(&mut self, tokens: Vec<u32>, root: Spot, read_cache: bool) -> SeqKey {
        self.next_id += 1;
        let table = BlockTable::new(self.groups);
        let sequence = Sequence::new(self.next_id, tokens, table, root, read_cache);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = sequence;
                slot
            }
            None => {
                self.slots.push(sequence);
                (self.slots.len() - 1) as u32
            }
        };
        SeqKey {
            manager: self.manager,
            slot,
            id: self.next_id,
        }
    }

    /// The sequence behind a caller's key.
    #[inline]
    pub(crate) fn get(&self, key: SeqKey) -> Result<&Sequence, Error> {
        match self.slots.get(key.slot as usize) {
            Some(seq) if seq.answers_to(key, self.manager) => Ok(seq),
            _ => Err(no_sequence(key, self.manager)),
        }
    }

    /// The sequence, if a plan may compute its last token and it shares no row that it would write.
    #[inline]
    pub(crate) fn decoding(&mut self, key: SeqKey, plan: Seats) -> Option<&mut Sequence> {
        let seq = self.slots.get_mut(key.slot as usize)?;
        let is_it = seq.id == key.id && key.manager == self.manager;
        let is_in = seq.plans.meets(plan) | seq.speculating | seq.dropped;
        let left_one = seq.tokens.len() + usize::from(seq.pending) == seq.planned_end + 1;
        let shares = seq.shared_rows > seq.registered.rows;
        (is_it && !is_in && left_one && !shares).then_some(seq)
    }

    /// The sequence of a slot that is known to have one.
    #[inline]
    pub(crate) fn at(&self, slot: u32) -> &Sequence {
        &self.slots[slot as usize]
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, slot: u32) -> &mut Sequence {
        &mut self.slots[slot as usize]
    }

    /// Where the sequence stood, and its root.
    pub(crate) fn remove(&mut self, slot: u32) -> (Registered, Spot) {
        self.vacant.push(slot);
        let seq = self.at_mut(slot);
        (seq.id, seq.tokens, seq.table) = (0, Vec::new(), BlockTable::new(1));
        (seq.registered, seq.root)
    }

    pub(crate) fn iter_slots(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.slots).filter(|(_, seq)| seq.id > 0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.iter_slots().map(|(_, seq)| seq)
    }
}

#[cold]
fn no_sequence(key: SeqKey, manager: u32) -> Error {
    match key.manager == manager {
        true => Error::FreedSequence { sequence: key.id },
        false => Error::Foreign {
            what: "sequence",
            id: key.id,
        },
    }
}
