//! Errors of misuse. Running out of blocks or budget is an answer, not an error.

use std::ops::RangeInclusive;

use crate::eviction::Eviction;

/// Reasons for which a call is refused. It has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the message explains the fields
pub enum Error {
    /// A setting outside its range.
    #[error("{name} must be {min} to {max}, got {given}")]
    OutOfRange {
        name: &'static str,
        min: usize,
        max: usize,
        given: usize,
    },
    /// No eviction policy of this name.
    #[error("eviction={0:?} is not known; the policies are {known}", known = names(&Eviction::NAMES))]
    UnknownPolicy(Box<str>),
    /// The tables of a pool this large do not fit into memory.
    #[error(
        "the tables of {num_blocks} blocks do not fit into memory; ask for fewer blocks or a larger block_size"
    )]
    OutOfMemory { num_blocks: usize },
    /// A namespace of more than 65,536 bytes.
    #[error("a namespace has at most 65536 bytes, got {bytes}; hash a longer one")]
    Namespace { bytes: usize },
    /// A switch to a namespace without a name.
    #[error("the namespace switches at position {position} to an empty name; name the other one")]
    EmptySwitch { position: usize },
    /// A switch after the last position that a sequence can have.
    #[error("the namespace switches at position {position}; a position is at most 4294967295")]
    SwitchPosition { position: usize },
    /// A sequence without tokens.
    #[error("a sequence needs at least one token, got none")]
    EmptySequence,
    /// The sequence was freed.
    #[error("sequence {sequence} was freed; make a new one")]
    FreedSequence { sequence: u64 },
    /// A sequence, plan or transfer of another manager.
    #[error("{what} {id} belongs to another BlockManager; use it there")]
    WrongManager { what: &'static str, id: u64 },
    /// A pin of another manager.
    #[error("this pin of {tokens} tokens belongs to another BlockManager; match the prefix here")]
    PinOfAnotherManager { tokens: usize },
    /// The pin was released.
    #[error("this pin was released; match the prefix again")]
    ReleasedPin,
    /// The pin's tokens (or namespace) are not a prefix of the sequence's.
    #[error(
        "the pin's {pin_tokens} tokens are not a prefix of the sequence's {sequence_tokens} in the same namespace"
    )]
    PinMismatch {
        pin_tokens: usize,
        sequence_tokens: usize,
    },
    /// `attach` of a pin whose blocks earlier weights computed.
    #[error(
        "version {pin_version} of the weights computed this pin of {tokens} tokens, and they are at version {weights_version}; match the prefix again"
    )]
    OldPin {
        tokens: usize,
        pin_version: u32,
        weights_version: u32,
    },
    /// `advance_weights_version` during a step or a transfer.
    #[error(
        "the weights cannot change while {plans} plan{} and {transfers} transfer{} are open; end them first",
        plural(*plans),
        plural(*transfers)
    )]
    WeightsInUse { plans: usize, transfers: usize },
    /// `fork` at more tokens than the sequence has, or at none.
    #[error("a fork keeps 1 to {sequence_tokens} tokens of this sequence, got {num_tokens}")]
    ForkLength {
        num_tokens: usize,
        sequence_tokens: usize,
    },
    /// `attach` to a sequence with blocks.
    #[error(
        "a pin is attached to a sequence without blocks, this one holds {blocks}; reset it first"
    )]
    NotFresh { blocks: usize },
    /// The sequence is in an open plan, and the call needs one that is not.
    #[error(
        "sequence {sequence} is in an open plan; commit it, roll it back or cancel the sequence first"
    )]
    InPlan { sequence: u64 },
    /// `cancel` of a sequence that is not in the plan.
    #[error("sequence {sequence} is not in this plan")]
    NotPlanned { sequence: u64 },
    /// `decode` of a sequence that has not exactly one token left to compute.
    #[error(
        "decode computes one token, sequence {sequence} has {uncomputed} left to compute; use prefill"
    )]
    NotDecoding { sequence: u64, uncomputed: usize },
    /// `prefill` of a sequence whose every token is computed.
    #[error("every token of sequence {sequence} is computed already")]
    NothingToCompute { sequence: u64 },
    /// `begin_step` while two plans are open.
    #[error("two steps are open; commit step {plan} or roll the later one back first")]
    PlanOpen { plan: u64 },
    /// The plan is out of order: the oldest is committed first; the newest is planned into, cancelled from and rolled back
    /// first.
    #[error(
        "step {plan} is out of turn, step {first} comes first: steps are committed oldest first, and planned into and rolled back newest first"
    )]
    PlanOrder { plan: u64, first: u64 },
    /// The plan was committed or rolled back.
    #[error("step {plan} was committed or rolled back already")]
    PlanClosed { plan: u64 },
    /// The transfer has ended.
    #[error("transfer {transfer} has ended already")]
    TransferEnded { transfer: u64 },
    /// `complete` of more blocks than were reserved.
    #[error("transfer {transfer} restores {reserved} blocks, {num_blocks} cannot be complete")]
    TransferBlocks {
        transfer: u64,
        reserved: usize,
        num_blocks: usize,
    },
    /// `keep_snapshot` of a sequence that is not at the end of a block.
    #[error(
        "sequence {sequence} has {computed} computed tokens; a snapshot is kept at the end of a block"
    )]
    SnapshotPosition { sequence: u64, computed: usize },
    /// `publish` of tokens for which the sequence has no slots.
    #[error(
        "sequence {sequence} has slots for {slots} tokens, {end} cannot be computed; extend it first"
    )]
    NotExtended {
        sequence: u64,
        end: usize,
        slots: usize,
    },
    /// `publish` of tokens in a block that others hold.
    #[error(
        "sequence {sequence} would write on block {block}, which others hold too; extend it first"
    )]
    SharedBlock { sequence: u64, block: u32 },
    /// `publish` of more tokens than are known.
    #[error("{known} tokens of sequence {sequence} are known, {end} cannot be computed; pass them")]
    NotKnown {
        sequence: u64,
        end: usize,
        known: usize,
    },
    /// `trim` to fewer tokens than are computed.
    #[error(
        "{computed} tokens of this sequence are computed, it cannot be trimmed to {num_tokens}"
    )]
    TrimBelowComputed { num_tokens: usize, computed: usize },
    /// `commit` of tokens that are not the sequence's drafts, or of too many or too few.
    #[error(
        "sequence {sequence} had {drafts} drafts: it accepts 1 to {} tokens, all but the last of them its drafts; got {accepted}",
        drafts + 1
    )]
    Accepted {
        sequence: u64,
        accepted: usize,
        drafts: usize,
    },
    /// `draft` with numbers of sequences, counts and drafts that do not match.
    #[error("the counts of draft belong to {expected} sequences or drafts, {given} were given")]
    DraftCount { expected: usize, given: usize },
    /// `commit` with a wrong number of tokens.
    #[error("the plan samples {expected} tokens, commit was given {given}")]
    SampleCount { expected: usize, given: usize },
    /// `commit` of a step whose copies the caller has not read.
    #[error(
        "step {plan} copies {copies} block{} before it runs, and copies() was not read since they were planned: carry them out and commit again, or roll the step back; an engine that cannot copy blocks sets partial_reuse=False and does not fork",
        plural(*copies)
    )]
    CopiesNotRead { plan: u64, copies: usize },
    /// No such layer group.
    #[error("there are {groups} layer groups, got group={group}")]
    UnknownGroup { group: usize, groups: usize },
    /// A limit below its minimum.
    #[error("{name} must be at least {min}, got {given}")]
    TooFew {
        name: &'static str,
        min: usize,
        given: usize,
    },
    /// An input array is too small for the plan.
    #[error("array {name} holds {given} elements per row, this plan needs {needed}")]
    BufferTooSmall {
        name: &'static str,
        needed: usize,
        given: usize,
    },
    /// A number does not fit an int32 array.
    #[error("array {name} is int32 and cannot hold {value}; use int64")]
    BufferTooNarrow { name: &'static str, value: u64 },
    /// `record` during a recording.
    #[error("this manager is being recorded already; call stop_recording() first")]
    Recording,
    /// `record` on a manager that has been used.
    #[error(
        "a recording begins with a new manager, this one has had {sequences} sequences and {steps} steps; make a new one and record it first"
    )]
    NotNew { sequences: u64, steps: u64 },
    /// No such block.
    #[error("block {block} is outside the pool of {num_blocks}")]
    UnknownBlock { block: u32, num_blocks: usize },
}

/// Checks a setting.
pub(crate) fn within(
    name: &'static str,
    range: RangeInclusive<usize>,
    given: usize,
) -> Result<(), Error> {
    match range.contains(&given) {
        true => Ok(()),
        false => Err(Error::OutOfRange {
            name,
            min: *range.start(),
            max: *range.end(),
            given,
        }),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn names<T>(known: &[(&str, T)]) -> String {
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}
