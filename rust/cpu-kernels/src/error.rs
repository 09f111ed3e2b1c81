//! Errors in the arrays and settings of a call.

use std::fmt;

use crate::isa::Isa;

/// Invalid arrays or options. The call has written nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// A number of threads, of heads, a dimension, a block size or a window is zero.
    Zero(&'static str),
    /// The length of an array contradicts the other arrays.
    Length {
        /// The array.
        name: &'static str,
        /// The length that the other arrays require.
        expected: usize,
        /// Its length.
        found: usize,
    },
    /// The product of the sizes exceeds the address space.
    TooLarge,
    /// Memory for a weight cannot be allocated.
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
    /// `query_start_loc` does not begin with 0, or decreases.
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
    /// A prefix outside its parent, or one that its sequences' block tables do not share.
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
    /// A slot that a layer's states do not have.
    StateSlot {
        /// The array of slots.
        name: &'static str,
        /// Index of the sequence.
        at: usize,
        /// The slot.
        value: i64,
        /// Slots of the states, if they are known.
        num_slots: Option<usize>,
    },
    /// A slot that one sequence writes and another one reads or writes.
    SharedState {
        /// The slot.
        slot: usize,
        /// Two of the sequences.
        sequences: (usize, usize),
    },
    /// Heads that do not share the heads of keys evenly.
    Groups {
        /// Heads.
        heads: usize,
        /// Heads of keys.
        groups: usize,
    },
    /// An index out of range: of a row, of a token, or a number of tokens.
    Index {
        /// The array of indices.
        name: &'static str,
        /// Index in that array.
        at: usize,
        /// The value.
        value: i64,
        /// The valid values are below it.
        count: usize,
    },
    /// An output out of range.
    Output {
        /// Index in the array.
        at: usize,
        /// The output.
        output: i64,
        /// Outputs of the weight.
        num_outputs: usize,
    },
    /// The inputs of a quantised weight are not whole blocks.
    Inputs {
        /// Their number.
        in_features: usize,
        /// Weights of a block.
        block: usize,
    },
    /// An unsupported group size.
    GroupSize(usize),
    /// A scale or minimum of a quantised weight is infinite or NaN.
    Scale {
        /// The output.
        output: usize,
        /// The first input that it scales.
        input: usize,
    },
    /// A weight is infinite or NaN.
    Weight {
        /// Its output.
        output: usize,
        /// Its input.
        input: usize,
    },
    /// The cache has other blocks than the step.
    OtherCache {
        /// Number and size of the cache's blocks.
        found: (usize, usize),
        /// Those of the step.
        expected: (usize, usize),
    },
    /// A soft cap that is not above 0.
    Softcap(f32),
    /// An odd number of rotated numbers, none, or more than a head has; or a step of 0.
    Layout {
        /// Rotated numbers of a head.
        size: usize,
        /// Columns from one angle to the next.
        step: usize,
        /// Numbers of a head.
        dim: usize,
    },
    /// Threads cannot be started.
    Threads(String),
    /// [`Isa::SWITCH`] names no instruction level.
    UnknownIsa(String),
    /// The processor lacks an instruction level.
    Isa {
        /// The level.
        wanted: Isa,
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
                    "{name} has {found} elements, the other arrays require {expected}"
                )
            }
            Self::TooLarge => write!(f, "the product of the sizes exceeds the address space"),
            Self::OutOfMemory { bytes } => {
                write!(f, "cannot allocate {bytes} bytes for weights")
            }
            Self::Heads { query, kv } => {
                write!(f, "{query} query heads cannot share {kv} KV heads evenly")
            }
            Self::Starts { at, value } => write!(
                f,
                "query_start_loc[{at}]={value}: it must begin with 0 and never decrease"
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
                "prefix {prefix} does not begin where its parent ends, or its sequences do not share its \
                 blocks before their new tokens: pass the arrays that StepPlan.fill wrote for these tables"
            ),
            Self::Slot {
                row,
                slot,
                num_slots,
            } => write!(
                f,
                "slot {slot} of row {row} is neither -1 nor one of the {num_slots} of the cache"
            ),
            Self::StateSlot {
                name,
                at,
                value,
                num_slots,
            } => match num_slots {
                None => write!(f, "{name}[{at}]={value}: it must be a slot, or -1 for none"),
                Some(count) => write!(
                    f,
                    "{name}[{at}]={value} is neither -1 nor one of the {count} slots of the states"
                ),
            },
            Self::SharedState {
                slot,
                sequences: (first, second),
            } => write!(
                f,
                "slot {slot} is written by one of the sequences {first} and {second} and used by the other: copy the \
                 state first"
            ),
            Self::Groups { heads, groups } => {
                write!(
                    f,
                    "{heads} heads cannot share {groups} heads of keys evenly"
                )
            }
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
            } => write!(f, "{name}[{at}]={value} is not in 0..{count}"),
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
                "in_features={in_features}: it must be a multiple of the block size, {block}"
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
            Self::Isa { wanted, best } => write!(
                f,
                "this processor has no {}: the best level it has is {}",
                wanted.name(),
                best.name()
            ),
        }
    }
}

impl std::error::Error for Error {}
