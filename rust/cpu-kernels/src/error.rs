//! Errors in the arrays and settings of a call.

use std::fmt;

use crate::isa::Isa;

/// Arrays or options that do not fit. The call that gave it has written nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// A number of threads, of heads, a dimension, a block size or a window is zero.
    Zero(&'static str),
    /// An array has another number of elements than the others ask for.
    Length {
        /// The array.
        name: &'static str,
        /// The length that the other arrays require.
        expected: usize,
        /// Its length.
        found: usize,
    },
    /// Sizes whose product does not fit this machine's addresses.
    TooLarge,
    /// Memory for a weight that the system does not give.
    OutOfMemory {
        /// Its size.
        bytes: usize,
    },
    /// Query heads that do not share the KV heads evenly.
    Heads {
        /// Heads of the query.
        query: usize,
        /// Heads of the cache.
        kv: usize,
    },
    /// `starts` does not begin with 0, or falls.
    Starts {
        /// Index in the array.
        at: usize,
        /// The value.
        value: i32,
    },
    /// A sequence that is shorter than its new tokens.
    SeqLen {
        /// Index of the sequence.
        sequence: usize,
        /// Its length.
        len: i32,
        /// Its new tokens.
        new: usize,
    },
    /// A sequence that needs more blocks than its row of the block table has.
    TableWidth {
        /// Index of the sequence.
        sequence: usize,
        /// Blocks it needs.
        needed: usize,
        /// Columns there are.
        width: usize,
    },
    /// A block id that the cache does not have.
    Block {
        /// Index of the sequence.
        sequence: usize,
        /// The id.
        block: i32,
        /// Blocks of the cache.
        num_blocks: usize,
    },
    /// A prefix that does not lie in its parent, or that its sequences' block tables do not share.
    Prefix {
        /// Index of the prefix.
        prefix: usize,
    },
    /// A slot that the cache does not have.
    Slot {
        /// Index of the row.
        row: usize,
        /// The slot.
        slot: i64,
        /// Slots of the cache.
        num_slots: usize,
    },
    /// An index beyond what it counts: a row, a token, or a number of tokens.
    Index {
        /// The array of indices.
        name: &'static str,
        /// Index in that array.
        at: usize,
        /// The value.
        value: i64,
        /// Values there are, from 0 on.
        count: usize,
    },
    /// An output that a weight does not have.
    Output {
        /// Index in the array.
        at: usize,
        /// The output.
        output: i64,
        /// Outputs of the weight.
        num_outputs: usize,
    },
    /// Inputs of a quantised weight that are not whole blocks.
    Inputs {
        /// Their number.
        in_features: usize,
        /// Weights of a block.
        block: usize,
    },
    /// A size of groups that is not known.
    GroupSize(usize),
    /// A quantised weight's scale or minimum that is infinite or not a number.
    Scale {
        /// The output.
        output: usize,
        /// The first input that it scales.
        input: usize,
    },
    /// A weight that is infinite or not a number.
    Weight {
        /// Its output.
        output: usize,
        /// Its input.
        input: usize,
    },
    /// A cache of other blocks than the step was made for.
    OtherCache {
        /// Number and size of the cache's blocks.
        found: (usize, usize),
        /// Those of the step.
        expected: (usize, usize),
    },
    /// A soft cap that is not above 0.
    Softcap(f32),
    /// Numbers of a head to be turned that are odd, none, or more than the head has; or a step of 0.
    Layout {
        /// Numbers to be turned.
        size: usize,
        /// Columns from one angle to the next.
        step: usize,
        /// Numbers of a head.
        dim: usize,
    },
    /// Threads that the system does not give.
    Threads(String),
    /// [`Isa::SWITCH`] names no level of instructions.
    UnknownIsa(String),
    /// A level of instructions that this machine lacks.
    Isa {
        /// The level.
        asked: Isa,
        /// The best that the machine has.
        best: Isa,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero(name) => write!(f, "{name} is 0: it must be at least 1"),
            Self::Length {
                name,
                expected,
                found,
            } => {
                write!(
                    f,
                    "{name} has {found} elements, the other arrays ask for {expected}"
                )
            }
            Self::TooLarge => write!(f, "the product of the sizes is beyond this machine"),
            Self::OutOfMemory { bytes } => {
                write!(f, "the system gives no memory for {bytes} bytes of weights")
            }
            Self::Heads { query, kv } => {
                write!(f, "{query} query heads cannot share {kv} KV heads evenly")
            }
            Self::Starts { at, value } => write!(
                f,
                "query_start_loc[{at}]={value}: it begins with 0 and never falls"
            ),
            Self::SeqLen { sequence, len, new } => write!(
                f,
                "seq_lens[{sequence}]={len}, but the sequence has {new} new tokens"
            ),
            Self::TableWidth {
                sequence,
                needed,
                width,
            } => write!(
                f,
                "sequence {sequence} needs {needed} blocks, block_tables has {width} columns"
            ),
            Self::Block {
                sequence,
                block,
                num_blocks,
            } => write!(
                f,
                "block {block} of sequence {sequence} is not one of the {num_blocks} of the cache"
            ),
            Self::Prefix { prefix } => write!(
                f,
                "prefix {prefix} does not begin where its parent ends, or its sequences do not have its \
                 blocks in common before their new tokens: give what StepPlan.fill wrote for these tables"
            ),
            Self::Slot {
                row,
                slot,
                num_slots,
            } => write!(
                f,
                "slot {slot} of row {row} is neither -1 nor one of the {num_slots} of the cache"
            ),
            Self::OtherCache { found, expected } => write!(
                f,
                "the cache has {} blocks of {}, the step was made for {} blocks of {}",
                found.0, found.1, expected.0, expected.1
            ),
            Self::Softcap(value) => write!(f, "softcap={value}: it must be above 0"),
            Self::Layout { size, step, dim } => write!(
                f,
                "rotation of {size} of {dim} numbers by every {step}th angle: they must be even, 2 to {dim}, and \
                 the step at least 1"
            ),
            Self::Index {
                name,
                at,
                value,
                count,
            } => write!(f, "{name}[{at}]={value} is not below {count}, or negative"),
            Self::Output {
                at,
                output,
                num_outputs,
            } => write!(
                f,
                "outputs[{at}]={output}: the weight has outputs 0 to {}",
                num_outputs - 1
            ),
            Self::Inputs { in_features, block } => write!(
                f,
                "in_features={in_features}: it must be a multiple of {block}, the weights of a block"
            ),
            Self::GroupSize(size) => write!(f, "group_size={size}: use 32, 64 or 128"),
            Self::Scale { output, input } => write!(
                f,
                "the scale of output {output} from input {input} on is not finite"
            ),
            Self::Weight { output, input } => write!(
                f,
                "the weight of output {output} for input {input} is not finite"
            ),
            Self::Threads(why) => write!(f, "threads could not be started: {why}"),
            Self::UnknownIsa(name) => write!(
                f,
                "{}={name:?} is not known: use {}",
                Isa::SWITCH,
                Isa::ALL.map(Isa::name).join(", ")
            ),
            Self::Isa { asked, best } => write!(
                f,
                "this processor has no {}: the best level it has is {}",
                asked.name(),
                best.name()
            ),
        }
    }
}

impl std::error::Error for Error {}
