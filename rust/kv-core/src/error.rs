//! Misuse. Running out of blocks or budget is an answer, not an error.

use crate::eviction::Eviction;

/// Why a call was refused. The call that returns one has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `block_size` outside `1..=65536`.
    #[error("block_size must be 1 to 65536, got {0}")]
    BlockSize(usize),
    /// `num_blocks` outside `1..=2^31`.
    #[error("num_blocks must be 1 to 2147483648, got {0}")]
    NumBlocks(usize),
    /// So many layer groups; 1 to 64 are possible.
    #[error("a pool has 1 to 64 layer groups, got {0}")]
    Groups(usize),
    /// A sliding window of so many tokens; at least one is needed.
    #[error("a layer group's window must be at least 1 token (or none), got {0}")]
    Window(usize),
    /// No eviction policy of this name.
    #[error("eviction={0:?} is not known; the policies are {known}", known = names(&Eviction::NAMES))]
    UnknownPolicy(Box<str>),
    /// `hash_bits` outside `0..=128`.
    #[error("hash_bits must be 0 to 128, got {0}")]
    HashBits(u32),
    /// The tables of a pool this large do not fit into memory.
    #[error(
        "the tables of {num_blocks} blocks do not fit into memory; ask for fewer blocks or a larger block_size"
    )]
    OutOfMemory {
        /// Blocks asked for.
        num_blocks: usize,
    },
    /// A namespace of more than 65,536 bytes.
    #[error("a namespace has at most 65536 bytes, got {bytes}; hash what is longer")]
    Namespace {
        /// Its length in bytes.
        bytes: usize,
    },
    /// A sequence without tokens.
    #[error("a sequence needs at least one token, got none")]
    EmptySequence,
    /// The sequence was freed.
    #[error("sequence {sequence} was freed; make a new one")]
    FreedSequence {
        /// The sequence's id.
        sequence: u64,
    },
    /// A handle of another manager.
    #[error("{what} {id} belongs to another BlockManager; use it there")]
    Foreign {
        /// Sequence or plan.
        what: &'static str,
        /// Its number there.
        id: u64,
    },
    /// A lease of another manager.
    #[error("this lease of {tokens} tokens belongs to another BlockManager; match the prefix here")]
    ForeignLease {
        /// Tokens that it covers.
        tokens: usize,
    },
    /// The lease was released.
    #[error("this lease was released; match the prefix again")]
    ReleasedLease,
    /// The lease's tokens (or namespace) are not a prefix of the sequence's.
    #[error(
        "the lease's {lease_tokens} tokens are not a prefix of the sequence's {sequence_tokens} in the same namespace"
    )]
    LeaseMismatch {
        /// Tokens that the lease covers.
        lease_tokens: usize,
        /// Tokens of the sequence.
        sequence_tokens: usize,
    },
    /// `fork` at more tokens than the sequence has, or at none.
    #[error("a fork keeps 1 to {sequence_tokens} tokens of this sequence, got {num_tokens}")]
    ForkLength {
        /// Tokens asked for.
        num_tokens: usize,
        /// Tokens of the sequence.
        sequence_tokens: usize,
    },
    /// `attach` on a sequence that holds blocks already.
    #[error(
        "a lease is attached to a sequence without blocks, this one holds {blocks}; reset it first"
    )]
    NotFresh {
        /// Blocks in its table.
        blocks: usize,
    },
    /// The call needs a sequence that no open plan holds.
    #[error(
        "sequence {sequence} is in an open plan; commit it, roll it back or cancel the sequence first"
    )]
    InPlan {
        /// The sequence's id.
        sequence: u64,
    },
    /// `cancel` of a sequence that is not in the plan.
    #[error("sequence {sequence} is not in this plan")]
    NotPlanned {
        /// The sequence's id.
        sequence: u64,
    },
    /// `decode` of a sequence that has not exactly one token left to compute.
    #[error(
        "decode computes one token, sequence {sequence} has {uncomputed} left to compute; use prefill"
    )]
    NotDecoding {
        /// The sequence's id.
        sequence: u64,
        /// Tokens whose KV is not computed.
        uncomputed: usize,
    },
    /// `prefill` of a sequence whose every token is computed.
    #[error("every token of sequence {sequence} is computed already")]
    NothingToCompute {
        /// The sequence's id.
        sequence: u64,
    },
    /// `begin_step` while two plans are open.
    #[error("two steps are open; commit step {plan} or roll the later one back first")]
    PlanOpen {
        /// The open plan.
        plan: u64,
    },
    /// Plans are committed oldest first, and planned into, cancelled from and rolled back newest first.
    #[error(
        "step {plan} is out of turn, step {first} comes first: steps are committed oldest first, and planned into and rolled back newest first"
    )]
    PlanOrder {
        /// The plan out of turn.
        plan: u64,
        /// The one whose turn it is.
        first: u64,
    },
    /// The plan was committed or rolled back.
    #[error("step {plan} was committed or rolled back already")]
    PlanClosed {
        /// The closed plan.
        plan: u64,
    },
    /// `publish` of tokens for which the sequence has no slots.
    #[error(
        "sequence {sequence} has slots for {slots} tokens, {end} cannot be computed; extend it first"
    )]
    NotExtended {
        /// The sequence's id.
        sequence: u64,
        /// Tokens that would be computed.
        end: usize,
        /// Tokens for which its blocks have slots.
        slots: usize,
    },
    /// `publish` of tokens in a block that others hold, too.
    #[error(
        "sequence {sequence} would write on block {block}, which others hold too; extend it first"
    )]
    SharedBlock {
        /// The sequence's id.
        sequence: u64,
        /// The block.
        block: u32,
    },
    /// `publish` of more tokens than are known.
    #[error(
        "{known} tokens of sequence {sequence} are known, {end} cannot be computed; hand them over"
    )]
    NotKnown {
        /// The sequence's id.
        sequence: u64,
        /// Tokens that would be computed.
        end: usize,
        /// Tokens known, those of the call included.
        known: usize,
    },
    /// `trim` to fewer tokens than are computed.
    #[error(
        "{computed} tokens of this sequence are computed, it cannot be trimmed to {num_tokens}"
    )]
    TrimBelowComputed {
        /// Tokens to keep blocks for.
        num_tokens: usize,
        /// Tokens whose KV is there.
        computed: usize,
    },
    /// `commit` with other tokens than a sequence's drafts, or with too many or too few of them.
    #[error(
        "sequence {sequence} had {drafts} drafts: it accepts 1 to {} tokens, all but the last of them its drafts; got {accepted}",
        drafts + 1
    )]
    Accepted {
        /// The sequence's id.
        sequence: u64,
        /// Tokens accepted.
        accepted: usize,
        /// Drafts that the step computed.
        drafts: usize,
    },
    /// `draft` with other numbers of sequences, counts and drafts than belong together.
    #[error("the counts of draft belong to {expected} sequences or drafts, {given} were given")]
    DraftCount {
        /// Sequences, or drafts that the counts add up to.
        expected: usize,
        /// Counts, or drafts given.
        given: usize,
    },
    /// `commit` with a wrong number of tokens.
    #[error("the plan samples {expected} tokens, commit was given {given}")]
    SampleCount {
        /// Rows of the plan that sample.
        expected: usize,
        /// Tokens given.
        given: usize,
    },
    /// No such layer group.
    #[error("there are {groups} layer groups, got group={group}")]
    UnknownGroup {
        /// The group asked for.
        group: usize,
        /// Groups of the pool.
        groups: usize,
    },
    /// A limit that leaves nothing to share.
    #[error("{name} must be at least {least}, got {given}")]
    TooFew {
        /// The argument.
        name: &'static str,
        /// The least that it can be.
        least: usize,
        /// What was given.
        given: usize,
    },
    /// An input array is too small for the plan.
    #[error("array {name} holds {given} elements per row, this plan needs {needed}")]
    BufferTooSmall {
        /// The array's name.
        name: &'static str,
        /// Elements (or columns) needed.
        needed: usize,
        /// Elements (or columns) there.
        given: usize,
    },
    /// A number does not fit an int32 array.
    #[error("array {name} is int32 and cannot hold {value}; use int64")]
    BufferTooNarrow {
        /// The array's name.
        name: &'static str,
        /// The number.
        value: u64,
    },
    /// `record` while a recording is under way.
    #[error("this manager is being recorded already; call stop_recording() first")]
    Recording,
    /// `record` on a manager that has been used.
    #[error(
        "a recording begins with a new manager, this one has had {sequences} sequences and {steps} steps; make a new one and record it first"
    )]
    NotNew {
        /// Sequences that it has had.
        sequences: u64,
        /// Steps that it has had.
        steps: u64,
    },
    /// No such block.
    #[error("block {block} is outside the pool of {num_blocks}")]
    UnknownBlock {
        /// The id asked for.
        block: u32,
        /// Blocks in the pool.
        num_blocks: usize,
    },
}

fn names<T>(known: &[(&str, T)]) -> String {
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}
