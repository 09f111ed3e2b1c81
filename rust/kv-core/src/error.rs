//! Misuse. Running out of blocks or budget is an answer, not an error.

use std::fmt;

use crate::eviction::Eviction;

/// Why a call was refused. The call that returns one has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// `block_size` outside `1..=65536`.
    BlockSize(usize),
    /// `num_blocks` outside `1..=2^31`.
    NumBlocks(usize),
    /// So many layer groups; 1 to 64 are possible.
    Groups(usize),
    /// A sliding window of so many tokens; at least one is needed.
    Window(usize),
    /// No eviction policy of this name.
    UnknownPolicy(Box<str>),
    /// `hash_bits` outside `0..=128`.
    HashBits(u32),
    /// The tables of a pool this large do not fit into memory.
    OutOfMemory {
        /// Blocks asked for.
        num_blocks: usize,
    },
    /// A namespace of more than 65,536 bytes.
    Namespace {
        /// Its length in bytes.
        bytes: usize,
    },
    /// A sequence without tokens.
    EmptySequence,
    /// The sequence was freed.
    FreedSequence {
        /// The sequence's id.
        sequence: u64,
    },
    /// A handle of another manager.
    Foreign {
        /// Sequence or plan.
        what: &'static str,
        /// Its number there.
        id: u64,
    },
    /// A lease of another manager.
    ForeignLease {
        /// Tokens that it covers.
        tokens: usize,
    },
    /// The lease was released.
    ReleasedLease,
    /// The lease's tokens (or namespace) are not a prefix of the sequence's.
    LeaseMismatch {
        /// Tokens that the lease covers.
        lease_tokens: usize,
        /// Tokens of the sequence.
        sequence_tokens: usize,
    },
    /// `fork` at more tokens than the sequence has, or at none.
    ForkLength {
        /// Tokens asked for.
        num_tokens: usize,
        /// Tokens of the sequence.
        sequence_tokens: usize,
    },
    /// `attach` on a sequence that holds blocks already.
    NotFresh {
        /// Blocks in its table.
        blocks: usize,
    },
    /// The call needs a sequence that no open plan holds.
    InPlan {
        /// The sequence's id.
        sequence: u64,
    },
    /// `cancel` of a sequence that is not in the plan.
    NotPlanned {
        /// The sequence's id.
        sequence: u64,
    },
    /// `decode` of a sequence that has not exactly one token left to compute.
    NotDecoding {
        /// The sequence's id.
        sequence: u64,
        /// Tokens whose KV is not computed.
        uncomputed: usize,
    },
    /// `prefill` of a sequence whose every token is computed.
    NothingToCompute {
        /// The sequence's id.
        sequence: u64,
    },
    /// `begin_step` while two plans are open.
    PlanOpen {
        /// The open plan.
        plan: u64,
    },
    /// Plans are committed oldest first, and planned into, cancelled from and rolled back newest first.
    PlanOrder {
        /// The plan out of turn.
        plan: u64,
        /// The one whose turn it is.
        first: u64,
    },
    /// The plan was committed or rolled back.
    PlanClosed {
        /// The closed plan.
        plan: u64,
    },
    /// `trim` to fewer tokens than are computed.
    TrimBelowComputed {
        /// Tokens to keep blocks for.
        num_tokens: usize,
        /// Tokens whose KV is there.
        computed: usize,
    },
    /// `commit` with other tokens than a sequence's drafts, or with too many or too few of them.
    Accepted {
        /// The sequence's id.
        sequence: u64,
        /// Tokens accepted.
        accepted: usize,
        /// Drafts that the step computed.
        drafts: usize,
    },
    /// `commit` with a wrong number of tokens.
    SampleCount {
        /// Rows of the plan that sample.
        expected: usize,
        /// Tokens given.
        given: usize,
    },
    /// An input array is too small for the plan.
    BufferTooSmall {
        /// The array's name.
        name: &'static str,
        /// Elements (or columns) needed.
        needed: usize,
        /// Elements (or columns) there.
        given: usize,
    },
    /// A number does not fit an int32 array.
    BufferTooNarrow {
        /// The array's name.
        name: &'static str,
        /// The number.
        value: u64,
    },
    /// `record` while a recording is under way.
    Recording,
    /// `record` on a manager that has been used.
    NotNew {
        /// Sequences that it has had.
        sequences: u64,
        /// Steps that it has had.
        steps: u64,
    },
    /// No such block.
    UnknownBlock {
        /// The id asked for.
        block: u32,
        /// Blocks in the pool.
        num_blocks: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Error::*;
        match self {
            BlockSize(got) => write!(f, "block_size must be 1 to 65536, got {got}"),
            NumBlocks(got) => write!(f, "num_blocks must be 1 to 2147483648, got {got}"),
            Groups(got) => write!(f, "a pool has 1 to 64 layer groups, got {got}"),
            Window(got) => write!(
                f,
                "a layer group's window must be at least 1 token (or none), got {got}"
            ),
            Namespace { bytes } => write!(
                f,
                "a namespace has at most 65536 bytes, got {bytes}; hash what is longer"
            ),
            UnknownPolicy(name) => {
                let known = Eviction::NAMES.map(|(known, _)| known).join(", ");
                write!(
                    f,
                    "eviction={name:?} is not known; the policies are {known}"
                )
            }
            HashBits(got) => write!(f, "hash_bits must be 0 to 128, got {got}"),
            OutOfMemory { num_blocks } => write!(
                f,
                "the tables of {num_blocks} blocks do not fit into memory; ask for fewer blocks or a larger block_size"
            ),
            EmptySequence => write!(f, "a sequence needs at least one token, got none"),
            FreedSequence { sequence } => {
                write!(f, "sequence {sequence} was freed; make a new one")
            }
            Foreign { what, id } => {
                write!(
                    f,
                    "{what} {id} belongs to another BlockManager; use it there"
                )
            }
            ForeignLease { tokens } => write!(
                f,
                "this lease of {tokens} tokens belongs to another BlockManager; match the prefix here"
            ),
            ReleasedLease => write!(f, "this lease was released; match the prefix again"),
            LeaseMismatch {
                lease_tokens,
                sequence_tokens,
            } => write!(
                f,
                "the lease's {lease_tokens} tokens are not a prefix of the sequence's {sequence_tokens} in the same namespace"
            ),
            ForkLength {
                num_tokens,
                sequence_tokens,
            } => write!(
                f,
                "a fork keeps 1 to {sequence_tokens} tokens of this sequence, got {num_tokens}"
            ),
            NotFresh { blocks } => write!(
                f,
                "a lease is attached to a sequence without blocks, this one holds {blocks}; reset it first"
            ),
            InPlan { sequence } => write!(
                f,
                "sequence {sequence} is in an open plan; commit it, roll it back or cancel the sequence first"
            ),
            NotPlanned { sequence } => write!(f, "sequence {sequence} is not in this plan"),
            NotDecoding {
                sequence,
                uncomputed,
            } => write!(
                f,
                "decode computes one token, sequence {sequence} has {uncomputed} left to compute; use prefill"
            ),
            NothingToCompute { sequence } => {
                write!(f, "every token of sequence {sequence} is computed already")
            }
            PlanOpen { plan } => write!(
                f,
                "two steps are open; commit step {plan} or roll the later one back first"
            ),
            PlanOrder { plan, first } => write!(
                f,
                "step {plan} is out of turn, step {first} comes first: steps are committed oldest first, and planned into and rolled back newest first"
            ),
            PlanClosed { plan } => write!(f, "step {plan} was committed or rolled back already"),
            TrimBelowComputed {
                num_tokens,
                computed,
            } => write!(
                f,
                "{computed} tokens of this sequence are computed, it cannot be trimmed to {num_tokens}"
            ),
            Accepted {
                sequence,
                accepted,
                drafts,
            } => write!(
                f,
                "sequence {sequence} had {drafts} drafts: it accepts 1 to {} tokens, all but the last of them its drafts; got {accepted}",
                drafts + 1
            ),
            SampleCount { expected, given } => write!(
                f,
                "the plan samples {expected} tokens, commit was given {given}"
            ),
            BufferTooSmall {
                name,
                needed,
                given,
            } => write!(
                f,
                "array {name} holds {given} elements per row, this plan needs {needed}"
            ),
            BufferTooNarrow { name, value } => write!(
                f,
                "array {name} is int32 and cannot hold {value}; use int64"
            ),
            Recording => write!(
                f,
                "this manager is being recorded already; call stop_recording() first"
            ),
            NotNew { sequences, steps } => write!(
                f,
                "a recording begins with a new manager, this one has had {sequences} sequences and {steps} steps; make a new one and record it first"
            ),
            UnknownBlock { block, num_blocks } => {
                write!(f, "block {block} is outside the pool of {num_blocks}")
            }
        }
    }
}

impl std::error::Error for Error {}
