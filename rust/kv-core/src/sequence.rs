//! Sequences: tokens, block table, how much is computed, where in the tree of contents they stand.

use crate::error::Error;
use crate::ids::{BlockId, NodeIdx, SeqKey};

/// Where a sequence stands in the tree of contents.
///
/// Its first `blocks` table entries are the blocks of the nodes on the path to `tip`: ready, or
/// computed by an open step; shared or shareable, and never written again after that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    pub(crate) tip: NodeIdx,
    pub(crate) blocks: usize,
    /// A collision was met: what follows has no name and is shared with no one.
    pub(crate) private: bool,
}

impl Chain {
    pub(crate) fn at_root(root: NodeIdx) -> Self {
        Self {
            tip: root,
            blocks: 0,
            private: false,
        }
    }
}

pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Vec<BlockId>,
    /// Tokens whose KV is in the table's blocks.
    pub(crate) computed: usize,
    /// Tokens adopted from the cache since the sequence was last without blocks.
    pub(crate) cached: usize,
    pub(crate) root: NodeIdx,
    pub(crate) chain: Chain,
    /// Content hashes of the leading blocks, as far as they were needed: no token is hashed twice,
    /// not even after a preemption.
    pub(crate) hashes: Vec<u128>,
    /// False: always computes its prompt (its blocks are registered all the same).
    pub(crate) read_cache: bool,
    /// Rows before this one may be shared with a fork although no content is registered for them.
    pub(crate) shared_rows: usize,
    /// Where the open plans that hold it will have brought it; `computed` if none does.
    pub(crate) ahead: usize,
    /// Tokens that open plans sample for it: their positions are known, their values are not.
    pub(crate) pending: usize,
    /// The row of the newest plan that samples the last of these.
    pub(crate) sample_row: usize,
    /// An open plan computes drafts for it: where it ends is not known.
    pub(crate) speculating: bool,
    /// Open plans that hold it.
    pub(crate) planned: u8,
    /// The newest of them.
    pub(crate) last_plan: u64,
    /// Its handle is gone or it was freed; it lives on in an open plan.
    pub(crate) dropped: bool,
    /// Changes when an entry of the table changes other than by growth.
    pub(crate) table_version: u32,
}

impl Sequence {
    /// Tokens, pending ones included, that no open plan computes yet.
    pub(crate) fn left(&self) -> usize {
        (self.tokens.len() + self.pending).saturating_sub(self.ahead)
    }

    /// Where it stands without any plan.
    pub(crate) fn stand(&mut self, computed: usize) {
        (self.computed, self.ahead) = (computed, computed);
    }

    /// Keeps the hash of block `index`, which the walk has just learnt.
    #[inline]
    pub(crate) fn note_hash(&mut self, index: usize, hash: u128) {
        if index == self.hashes.len() {
            self.hashes.push(hash);
        }
    }
}

/// All sequences of a manager, by slot; keys are checked at every use.
pub(crate) struct SequenceTable {
    manager: u32,
    slots: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    next_id: u64,
}

impl SequenceTable {
    pub(crate) fn new(manager: u32) -> Self {
        Self {
            manager,
            slots: Vec::new(),
            vacant: Vec::new(),
            next_id: 0,
        }
    }

    /// How many there have been.
    pub(crate) fn made(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn insert(&mut self, tokens: Vec<u32>, root: NodeIdx, read_cache: bool) -> SeqKey {
        self.next_id += 1;
        let tenant = Some(Sequence {
            id: self.next_id,
            tokens,
            table: Vec::new(),
            computed: 0,
            cached: 0,
            root,
            chain: Chain::at_root(root),
            hashes: Vec::new(),
            read_cache,
            shared_rows: 0,
            ahead: 0,
            pending: 0,
            sample_row: 0,
            speculating: false,
            planned: 0,
            last_plan: 0,
            dropped: false,
            table_version: 0,
        });
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = tenant;
                slot
            }
            None => {
                self.slots.push(tenant);
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
        if key.manager != self.manager {
            return Err(Error::Foreign {
                what: "sequence",
                id: key.id,
            });
        }
        match &self.slots[key.slot as usize] {
            Some(seq) if seq.id == key.id && !seq.dropped => Ok(seq),
            _ => Err(Error::FreedSequence { sequence: key.id }),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: SeqKey) -> Result<&mut Sequence, Error> {
        self.get(key)?;
        Ok(self.at_mut(key.slot))
    }

    /// The tenant of a slot that is known to have one.
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
