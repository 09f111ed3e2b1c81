//! A state of the model.

use std::hash::{Hash, Hasher};

use crate::pool::{BlockId, Pool};
use crate::tokens::Tokens;

/// How many sequences there are.
pub const NUM_SEQUENCES: usize = 2;

/// A sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Known tokens.
    pub tokens: Tokens,
    /// Tokens whose KV is computed and committed.
    pub computed: usize,
    /// The same once the open steps are committed.
    pub planned: usize,
    /// Tokens that open steps sample: position known, value not.
    pub pending: usize,
    /// Leading blocks that are cached, or that an open step computes and shares.
    pub registered: usize,
    /// Its blocks.
    pub table: Vec<BlockId>,
    /// It was freed while an open step had it.
    pub dropped: bool,
}

/// A sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The sequence.
    pub seq: usize,
    /// First position that it computes.
    pub start: usize,
    /// Positions that it computes.
    pub len: usize,
    /// Positions before this one are not written.
    pub write_from: usize,
    /// Whether it reaches the last known or pending token.
    pub samples: bool,
    /// Blocks that this entry registered before they are computed.
    pub preregistered: usize,
    /// The block table that the device reads: the one at the time of planning.
    pub table: Vec<BlockId>,
    /// For a rollback: blocks, registered blocks and planned tokens as they were before.
    pub before: (usize, usize, usize),
}

/// An open step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// In the order of planning.
    pub entries: Vec<Entry>,
    /// Blocks that it reads and that left the tables meanwhile.
    pub pinned: Vec<BlockId>,
}

/// A pin: a cached prefix that it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The prefix.
    pub tokens: Tokens,
    /// Its blocks.
    pub blocks: Vec<BlockId>,
}

/// An open transfer: KV from outside the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The sequence that asked for it, while it lives.
    pub owner: Option<usize>,
    /// The prefix up to the end of the last block that it fills.
    pub tokens: Tokens,
    /// The blocks that it fills.
    pub blocks: Vec<BlockId>,
    /// The cached blocks before them.
    pub held: Vec<BlockId>,
}

/// A state. Two states that differ in the numbers of blocks only have the same hash, so the checker explores one of
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The blocks.
    pub pool: Pool,
    /// The sequences, by number.
    pub sequences: [Option<Sequence>; NUM_SEQUENCES],
    /// The open steps, oldest first.
    pub steps: Vec<Step>,
    /// The pin.
    pub pin: Option<Pin>,
    /// The transfer.
    pub transfer: Option<Transfer>,
    /// A step has read KV of other tokens than it should, or none.
    pub misread: bool,
}

impl State {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            pool: Pool::new(num_blocks),
            sequences: [const { None }; NUM_SEQUENCES],
            steps: Vec::new(),
            pin: None,
            transfer: None,
            misread: false,
        }
    }

    /// The live sequences, with their numbers.
    pub fn live(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let numbered = self.sequences.iter().enumerate();
        numbered.filter_map(|(seq, sequence)| Some((seq, sequence.as_ref()?)))
    }

    /// The sequence of a number.
    pub(crate) fn at(&self, seq: usize) -> &Sequence {
        self.sequences[seq].as_ref().expect("a live sequence")
    }

    pub(crate) fn at_mut(&mut self, seq: usize) -> &mut Sequence {
        self.sequences[seq].as_mut().expect("a live sequence")
    }

    /// Whether an open step has the sequence.
    pub fn is_planned(&self, seq: usize) -> bool {
        let mut entries = self.steps.iter().flat_map(|step| &step.entries);
        entries.any(|entry| entry.seq == seq)
    }

    /// Blocks in the order in which they occur in tables, steps, the pin and the queue.
    fn blocks_by_occurrence(&self) -> impl Iterator<Item = BlockId> {
        let tables = self.live().flat_map(|(_, sequence)| &sequence.table);
        let read = self.steps.iter().flat_map(|step| {
            let tables = step.entries.iter().flat_map(|entry| &entry.table);
            tables.chain(&step.pinned)
        });
        let pinned = self.pin.iter().flat_map(|pin| &pin.blocks);
        let transfer = self.transfer.iter();
        let moved = transfer.flat_map(|transfer| transfer.blocks.iter().chain(&transfer.held));
        let queued = self.pool.evictable.iter().chain(&self.pool.free);
        let held = tables.chain(read).chain(pinned).chain(moved);
        held.chain(queued).copied()
    }
}

/// Block numbers that do not depend on the history: the order of first occurrence.
struct Renaming {
    names: [BlockId; Self::CAPACITY],
    order: Vec<BlockId>,
}

impl Renaming {
    const CAPACITY: usize = 8;
    const NONE: BlockId = BlockId::MAX;

    fn of(state: &State) -> Self {
        let (mut names, mut order) = ([Self::NONE; Self::CAPACITY], Vec::new());
        // A leaked block occurs nowhere.
        let all = 0..state.pool.blocks.len() as BlockId;
        for block in state.blocks_by_occurrence().chain(all) {
            let name = &mut names[usize::from(block)];
            if *name == Self::NONE {
                *name = order.len() as BlockId;
                order.push(block);
            }
        }
        Self { names, order }
    }

    fn hash(&self, blocks: &[BlockId], hasher: &mut impl Hasher) {
        blocks.len().hash(hasher);
        for &block in blocks {
            self.names[usize::from(block)].hash(hasher);
        }
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let names = Renaming::of(self);
        for &block in &names.order {
            let block = self.pool.block(block);
            (block.seq_refs, block.step_pins, block.pin_refs).hash(hasher);
            (block.cached, block.computed_in).hash(hasher);
            (block.is_loading, block.kv).hash(hasher);
        }
        names.hash(&self.pool.free, hasher);
        names.hash(&self.pool.evictable, hasher);
        for sequence in &self.sequences {
            let Some(sequence) = sequence else {
                false.hash(hasher);
                continue;
            };
            (sequence.tokens, sequence.dropped).hash(hasher);
            (sequence.computed, sequence.planned).hash(hasher);
            (sequence.pending, sequence.registered).hash(hasher);
            names.hash(&sequence.table, hasher);
        }
        self.steps.len().hash(hasher);
        for step in &self.steps {
            step.entries.len().hash(hasher);
            for entry in &step.entries {
                (entry.seq, entry.start, entry.len, entry.write_from).hash(hasher);
                (entry.samples, entry.preregistered, entry.before).hash(hasher);
                names.hash(&entry.table, hasher);
            }
            names.hash(&step.pinned, hasher);
        }
        self.pin.is_some().hash(hasher);
        if let Some(pin) = &self.pin {
            pin.tokens.hash(hasher);
            names.hash(&pin.blocks, hasher);
        }
        self.transfer.is_some().hash(hasher);
        if let Some(transfer) = &self.transfer {
            (transfer.owner, transfer.tokens).hash(hasher);
            names.hash(&transfer.blocks, hasher);
            names.hash(&transfer.held, hasher);
        }
        self.misread.hash(hasher);
    }
}
