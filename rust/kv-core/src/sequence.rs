//! Sequences: tokens, block table, how much is computed, where they stand among the contents.

use crate::contents::Spot;
use crate::error::Error;
use crate::ids::SeqKey;
use crate::table::BlockTable;

/// Where a sequence stands among the contents: its first `rows` rows are those on the path to `tip`.
/// They are ready, or computed by an open step; shared or shareable, and never written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) tip: Spot,
    pub(crate) rows: usize,
}

impl Registered {
    pub(crate) fn at_root(root: Spot) -> Self {
        Self { tip: root, rows: 0 }
    }
}

/// What a decode reads and writes comes first: one cache line, the ends of `tokens` and `table` after it.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    pub(crate) id: u64,
    /// The newest open plan that holds it.
    pub(crate) last_plan: u64,
    /// Tokens whose KV is in the table's blocks.
    pub(crate) computed: usize,
    /// Where the open plans that hold it will have brought it; `computed` if none does.
    pub(crate) planned_end: usize,
    /// Tokens that open plans sample for it: their positions are known, their values are not.
    pub(crate) pending: usize,
    /// The row of the newest plan that samples the last of these.
    pub(crate) sample_row: usize,
    /// Rows before this one may be shared with a fork although no content is registered for them.
    pub(crate) shared_rows: usize,
    /// Changes when an entry of the table changes other than by growth.
    pub(crate) table_version: u32,
    /// Open plans that hold it.
    pub(crate) num_plans: u8,
    /// An open plan computes drafts for it: where it ends is not known.
    pub(crate) speculating: bool,
    /// False: always computes its prompt (its blocks are registered all the same).
    pub(crate) read_cache: bool,
    /// Its handle is gone or it was freed; it lives on in an open plan.
    pub(crate) dropped: bool,
    pub(crate) tokens: Vec<u32>,
    pub(crate) registered: Registered,
    pub(crate) table: BlockTable,
    pub(crate) root: Spot,
    /// Tokens adopted from the cache since the sequence was last without blocks.
    pub(crate) cached: usize,
}

impl Sequence {
    /// Tokens, pending ones included, that no open plan computes yet.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        (self.tokens.len() + self.pending).saturating_sub(self.planned_end)
    }

    #[inline]
    fn answers_to(&self, key: SeqKey, manager: u32) -> bool {
        self.id == key.id && key.manager == manager && !self.dropped
    }

    /// Whether a plan may compute its last token.
    #[inline]
    pub(crate) fn check_decode(&self, plan: u64) -> Result<(), Error> {
        let (sequence, uncomputed) = (self.id, self.left());
        if self.last_plan == plan || self.speculating {
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

    /// A plan holds it, the newest one.
    #[inline]
    pub(crate) fn enter_plan(&mut self, plan: u64) {
        self.num_plans += 1;
        self.last_plan = plan;
    }

    /// The oldest plan that holds it is committed. Whether it ends with that.
    #[inline]
    pub(crate) fn leave_plan(&mut self) -> bool {
        self.num_plans -= 1;
        if self.num_plans == 0 {
            self.last_plan = 0;
        }
        self.num_plans == 0 && self.dropped
    }

    /// Where it is without any plan.
    pub(crate) fn set_computed(&mut self, computed: usize) {
        (self.computed, self.planned_end) = (computed, computed);
    }
}

/// All sequences of a manager, by slot; keys are checked at every use.
pub(crate) struct Sequences {
    manager: u32,
    groups: usize,
    slots: Vec<Option<Sequence>>,
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
        let sequence = Some(Sequence {
            id: self.next_id,
            tokens,
            table: BlockTable::new(self.groups),
            computed: 0,
            planned_end: 0,
            registered: Registered::at_root(root),
            shared_rows: 0,
            pending: 0,
            sample_row: 0,
            last_plan: 0,
            num_plans: 0,
            speculating: false,
            read_cache,
            dropped: false,
            table_version: 0,
            root,
            cached: 0,
        });
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
            Some(Some(seq)) if seq.answers_to(key, self.manager) => Ok(seq),
            _ => Err(no_sequence(key, self.manager)),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: SeqKey) -> Result<&mut Sequence, Error> {
        let manager = self.manager;
        match self.slots.get_mut(key.slot as usize) {
            Some(Some(seq)) if seq.answers_to(key, manager) => Ok(seq),
            _ => Err(no_sequence(key, manager)),
        }
    }

    /// The sequence of a slot that is known to have one.
    #[inline]
    pub(crate) fn at(&self, slot: u32) -> &Sequence {
        self.slots[slot as usize].as_ref().expect("a live slot")
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, slot: u32) -> &mut Sequence {
        self.slots[slot as usize].as_mut().expect("a live slot")
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Sequence {
        self.vacant.push(slot);
        self.slots[slot as usize].take().expect("a live slot")
    }

    pub(crate) fn iter_slots(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, place)| Some((slot as u32, place.as_ref()?)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten()
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
