//! Operations and answers, as they are written down.

use std::fmt;

use super::code::{Bytes, Field};
use crate::ids::BlockId;
use crate::stats::Ledger;
use crate::step::{Prefill, Redirect};

macro_rules! calls {
    ($($(#[$doc:meta])* $tag:literal $word:ident $name:ident { $($field:ident: $type:ty),* })*) => {
        /// An operation that changes a manager, by the numbers of what it is about: the ids of sequences,
        /// the serials of plans, and leases counted from 1 in the order in which they were granted.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // fields are the arguments of the call of that name
        pub enum Call {
            $($(#[$doc])* $name { $($field: $type),* },)*
        }

        impl Call {
            /// The names of all kinds, in the order of the format.
            pub const KINDS: &[&str] = &[$(stringify!($word)),*];

            /// The name of the call.
            pub fn kind(&self) -> &'static str {
                match self {
                    $(Self::$name { .. } => stringify!($word),)*
                }
            }

            $(
                #[allow(clippy::self_named_constructors)]
                pub(crate) fn $word($($field: impl Into<$type>),*) -> Self {
                    Self::$name { $($field: $field.into()),* }
                }
            )*

            pub(super) fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$name { $($field),* } => {
                        out.push($tag);
                        $($field.put(out);)*
                    })*
                }
            }

            pub(super) fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
                Ok(match from.byte()? {
                    $($tag => Self::$name { $($field: Field::take(from)?),* },)*
                    tag => return Err(format!("no operation has the tag {tag}")),
                })
            }
        }

        impl fmt::Display for Call {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name { $($field),* } => {
                        #[allow(unused_mut)]
                        let mut arguments: Vec<String> = Vec::new();
                        $(arguments.push(format!("{}={}", stringify!($field), $field.words()));)*
                        write!(f, "{}({})", stringify!($word), arguments.join(", "))
                    })*
                }
            }
        }
    };
}

calls! {
    /// [`BlockManager::sequence`](crate::BlockManager::sequence)
    1 sequence Sequence { tokens: Vec<u32>, namespace: Box<[u8]>, read_cache: bool }
    /// [`BlockManager::match_prefix`](crate::BlockManager::match_prefix)
    2 match_prefix MatchPrefix { tokens: Vec<u32>, namespace: Box<[u8]> }
    /// [`BlockManager::lease`](crate::BlockManager::lease)
    3 lease Lease { sequence: u64 }
    /// [`BlockManager::attach`](crate::BlockManager::attach)
    4 attach Attach { sequence: u64, lease: u64 }
    /// [`BlockManager::fork`](crate::BlockManager::fork)
    5 fork Fork { sequence: u64, num_tokens: usize }
    /// [`BlockManager::append`](crate::BlockManager::append)
    6 append Append { sequence: u64, tokens: Vec<u32> }
    /// [`BlockManager::trim`](crate::BlockManager::trim)
    7 trim Trim { sequence: u64, num_tokens: usize }
    /// [`BlockManager::reset`](crate::BlockManager::reset)
    8 reset Reset { sequence: u64 }
    /// [`BlockManager::free`](crate::BlockManager::free)
    9 free Free { sequence: u64 }
    /// [`BlockManager::begin_step`](crate::BlockManager::begin_step)
    10 begin_step BeginStep { token_budget: usize }
    /// [`BlockManager::decode`](crate::BlockManager::decode)
    11 decode Decode { plan: u64, sequences: Vec<u64>, lookahead: usize }
    /// [`BlockManager::speculate`](crate::BlockManager::speculate)
    12 speculate Speculate { plan: u64, sequence: u64, drafts: Vec<u32> }
    /// [`BlockManager::prefill`](crate::BlockManager::prefill)
    13 prefill Prefill { plan: u64, sequence: u64, max_tokens: usize, reserve: Option<usize> }
    /// [`BlockManager::cancel`](crate::BlockManager::cancel)
    14 cancel Cancel { plan: u64, sequence: u64 }
    /// [`BlockManager::commit_accepted`](crate::BlockManager::commit_accepted); no counts: one token each
    15 commit Commit { plan: u64, tokens: Vec<u32>, counts: Vec<usize> }
    /// [`BlockManager::rollback`](crate::BlockManager::rollback)
    16 rollback Rollback { plan: u64 }
    /// [`BlockManager::evict_idle`](crate::BlockManager::evict_idle)
    17 evict_idle EvictIdle {}
    /// The manager learnt that a [`SeqHandle`](crate::SeqHandle) is gone.
    18 drop_sequence DropSequence { sequence: u64 }
    /// The manager learnt that a [`Lease`](crate::Lease) is gone.
    19 drop_lease DropLease { lease: u64 }
    /// The manager learnt that the [`PlanHandle`](crate::PlanHandle) of an open plan is gone.
    20 drop_plan DropPlan { plan: u64 }
    /// The end of a recording, answered by the ledger.
    23 stop_recording Stop {}
}

/// What an operation answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing but that it was done.
    Done,
    /// An id, or how many blocks.
    Number(u64),
    /// Positions of those that did not fit, ids of those that went along.
    Numbers(Vec<u64>),
    /// Of `prefill` and `speculate`.
    Prefill(Prefill),
    /// Of `commit`.
    Redirects(Vec<Redirect>),
    /// Where every block is.
    Ledger(Ledger),
}

impl From<()> for Answer {
    fn from((): ()) -> Self {
        Self::Done
    }
}

impl From<u64> for Answer {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<usize> for Answer {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<&Vec<usize>> for Answer {
    fn from(numbers: &Vec<usize>) -> Self {
        Self::Numbers(numbers.iter().map(|&number| number as u64).collect())
    }
}

impl From<&Vec<u64>> for Answer {
    fn from(numbers: &Vec<u64>) -> Self {
        Self::Numbers(numbers.clone())
    }
}

impl From<Prefill> for Answer {
    fn from(answer: Prefill) -> Self {
        Self::Prefill(answer)
    }
}

impl From<&Vec<Redirect>> for Answer {
    fn from(redirects: &Vec<Redirect>) -> Self {
        Self::Redirects(redirects.clone())
    }
}

impl From<Ledger> for Answer {
    fn from(ledger: Ledger) -> Self {
        Self::Ledger(ledger)
    }
}

impl Answer {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Done => out.push(0),
            Self::Number(number) => {
                out.push(1);
                number.put(out);
            }
            Self::Numbers(numbers) => {
                out.push(2);
                numbers.put(out);
            }
            Self::Prefill(Prefill::Planned {
                cached_tokens,
                tokens,
                samples,
            }) => {
                out.push(3);
                cached_tokens.put(out);
                tokens.put(out);
                samples.put(out);
            }
            Self::Prefill(Prefill::NoRoom { needed, available }) => {
                out.push(4);
                needed.put(out);
                available.put(out);
            }
            Self::Prefill(Prefill::NoBudget) => out.push(5),
            Self::Redirects(redirects) => {
                out.push(6);
                redirects.put(out);
            }
            Self::Ledger(ledger) => {
                out.push(7);
                let Ledger {
                    free,
                    idle,
                    active,
                    leased,
                } = ledger;
                for blocks in [free, idle, active, leased] {
                    blocks.put(out);
                }
            }
        }
    }

    pub(super) fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        Ok(match from.byte()? {
            0 => Self::Done,
            1 => Self::Number(Field::take(from)?),
            2 => Self::Numbers(Field::take(from)?),
            3 => Self::Prefill(Prefill::Planned {
                cached_tokens: Field::take(from)?,
                tokens: Field::take(from)?,
                samples: Field::take(from)?,
            }),
            4 => Self::Prefill(Prefill::NoRoom {
                needed: Field::take(from)?,
                available: Field::take(from)?,
            }),
            5 => Self::Prefill(Prefill::NoBudget),
            6 => Self::Redirects(Field::take(from)?),
            7 => Self::Ledger(Ledger {
                free: Field::take(from)?,
                idle: Field::take(from)?,
                active: Field::take(from)?,
                leased: Field::take(from)?,
            }),
            tag => return Err(format!("no answer has the tag {tag}")),
        })
    }
}

impl Field for Redirect {
    fn put(&self, out: &mut Vec<u8>) {
        self.sequence.put(out);
        self.group.put(out);
        self.index.put(out);
        self.old_block.get().put(out);
        self.new_block.get().put(out);
    }

    fn take(from: &mut Bytes<'_>) -> Result<Self, String> {
        Ok(Self {
            sequence: Field::take(from)?,
            group: Field::take(from)?,
            index: Field::take(from)?,
            old_block: BlockId::from(u32::take(from)?),
            new_block: BlockId::from(u32::take(from)?),
        })
    }

    fn words(&self) -> String {
        let Self {
            sequence,
            group,
            index,
            ..
        } = self;
        let (old, new) = (self.old_block.get(), self.new_block.get());
        format!("sequence {sequence} group {group} entry {index} from block {old} to {new}")
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => write!(f, "done"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Numbers(numbers) => write!(f, "{}", numbers.words()),
            Self::Prefill(Prefill::Planned {
                cached_tokens,
                tokens,
                samples,
            }) => {
                let samples = if *samples {
                    "samples"
                } else {
                    "does not sample"
                };
                write!(
                    f,
                    "planned, {cached_tokens} tokens cached, {tokens} to compute, {samples}"
                )
            }
            Self::Prefill(Prefill::NoRoom { needed, available }) => {
                write!(f, "no room, {needed} blocks needed, {available} available")
            }
            Self::Prefill(Prefill::NoBudget) => write!(f, "no budget"),
            Self::Redirects(redirects) => write!(f, "redirects {}", redirects.words()),
            Self::Ledger(ledger) => {
                let Ledger {
                    free,
                    idle,
                    active,
                    leased,
                } = ledger;
                write!(
                    f,
                    "{free} blocks free, {idle} idle, {active} active, {leased} leased"
                )
            }
        }
    }
}
