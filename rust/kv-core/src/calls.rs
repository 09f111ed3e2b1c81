//! Every operation that changes a manager, and its answer: what a [`Recorder`] receives.

use std::any::Any;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::BlockId;
use crate::stats::PoolUsage;
use crate::step::{Extend, Prefill, Remapping};

/// Receives the operations of a manager (see [`BlockManager::set_recorder`](crate::BlockManager::set_recorder)).
pub trait Recorder: Any + Send {
    /// Whether it still receives operations.
    fn is_open(&self) -> bool;

    /// Receives an operation that succeeded, and its answer.
    fn record(&mut self, call: &Call, answer: &Answer);
}

macro_rules! calls {
    ($($(#[$doc:meta])* $word:ident $name:ident { $($(#[$how:meta])* $field:ident: $type:ty),* })*) => {
        /// An operation that changes a manager. It names sequences by their ids, plans by their serials, and pins
        /// by their numbers, from 1 in the order in which they were granted.
        ///
        /// Recordings contain the index of a variant: add new ones at the end.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[allow(missing_docs)] // fields are the arguments of the call of that name
        pub enum Call {
            $($(#[$doc])* $name { $($(#[$how])* $field: $type),* },)*
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
                #[allow(clippy::self_named_constructors, dead_code)] // one per call
                pub(crate) fn $word($($field: impl Into<$type>),*) -> Self {
                    Self::$name { $($field: $field.into()),* }
                }
            )*
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
    sequence Sequence { tokens: Vec<u32>, namespace: Box<[u8]>, read_cache: bool }
    /// [`BlockManager::match_prefix`](crate::BlockManager::match_prefix)
    match_prefix MatchPrefix { tokens: Vec<u32>, namespace: Box<[u8]> }
    /// [`BlockManager::pin`](crate::BlockManager::pin)
    pin Pin { sequence: u64 }
    /// [`BlockManager::attach`](crate::BlockManager::attach)
    attach Attach { sequence: u64, pin: u64 }
    /// [`BlockManager::fork`](crate::BlockManager::fork)
    fork Fork { sequence: u64, num_tokens: usize }
    /// [`BlockManager::append`](crate::BlockManager::append)
    append Append { sequence: u64, tokens: Vec<u32> }
    /// [`BlockManager::trim`](crate::BlockManager::trim)
    trim Trim { sequence: u64, num_tokens: usize }
    /// [`BlockManager::reset`](crate::BlockManager::reset)
    reset Reset { sequence: u64 }
    /// [`BlockManager::free`](crate::BlockManager::free)
    free Free { sequence: u64 }
    /// [`BlockManager::begin_step`](crate::BlockManager::begin_step)
    begin_step BeginStep { token_budget: usize }
    /// [`BlockManager::decode`](crate::BlockManager::decode)
    decode Decode { plan: u64, #[serde(with = "distances")] sequences: Vec<u64>, lookahead: usize }
    /// [`BlockManager::speculate`](crate::BlockManager::speculate)
    speculate Speculate { plan: u64, sequence: u64, drafts: Vec<u32> }
    /// [`BlockManager::prefill`](crate::BlockManager::prefill)
    prefill Prefill { plan: u64, sequence: u64, max_tokens: usize, reserve: Option<usize>, replay: usize }
    /// [`BlockManager::cancel`](crate::BlockManager::cancel)
    cancel Cancel { plan: u64, sequence: u64 }
    /// [`BlockManager::commit_accepted`](crate::BlockManager::commit_accepted); no counts: one token each
    commit Commit { plan: u64, tokens: Vec<u32>, counts: Vec<usize> }
    /// [`BlockManager::rollback`](crate::BlockManager::rollback)
    rollback Rollback { plan: u64 }
    /// [`BlockManager::evict_all`](crate::BlockManager::evict_all)
    evict_all EvictAll {}
    /// A [`SeqHandle`](crate::SeqHandle) was dropped.
    drop_sequence DropSequence { sequence: u64 }
    /// A [`Pin`](crate::Pin) was dropped.
    drop_pin DropPin { pin: u64 }
    /// The [`PlanHandle`](crate::PlanHandle) of an open plan was dropped.
    drop_plan DropPlan { plan: u64 }
    /// The end of a recording, answered by the pool's usage.
    stop_recording Stop {}
    /// [`BlockManager::draft`](crate::BlockManager::draft)
    draft Draft { plan: u64, #[serde(with = "distances")] sequences: Vec<u64>, drafts: Vec<u32>, counts: Vec<usize> }
    /// [`BlockManager::reuse_cached`](crate::BlockManager::reuse_cached)
    reuse_cached ReuseCached { sequence: u64 }
    /// [`BlockManager::extend`](crate::BlockManager::extend)
    extend Extend { sequence: u64, num_tokens: usize }
    /// [`BlockManager::publish`](crate::BlockManager::publish)
    publish Publish { sequence: u64, num_tokens: usize, tokens: Vec<u32> }
}

/// The answer of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// No value.
    Done,
    /// An id, or a number of blocks.
    Number(u64),
    /// Positions of rejected sequences, or ids of cancelled ones.
    Numbers(#[serde(with = "distances")] Vec<u64>),
    /// Of `prefill` and `speculate`.
    Prefill(Prefill),
    /// Of `commit`.
    Remappings(Vec<Remapping>),
    /// Blocks by state.
    PoolUsage(PoolUsage),
    /// Of `extend`.
    Extend(Extend),
}

macro_rules! answers {
    ($($type:ty: $value:pat => $answer:expr,)*) => {
        $(impl From<$type> for Answer {
            fn from($value: $type) -> Self {
                $answer
            }
        })*
    };
}

answers! {
    (): () => Self::Done,
    u64: number => Self::Number(number),
    usize: number => Self::Number(number as u64),
    &Vec<usize>: numbers => Self::Numbers(numbers.iter().map(|&number| number as u64).collect()),
    &Vec<u64>: numbers => Self::Numbers(numbers.clone()),
    Prefill: answer => Self::Prefill(answer),
    &Vec<Remapping>: remappings => Self::Remappings(remappings.clone()),
    PoolUsage: usage => Self::PoolUsage(usage),
    &Extend: answer => Self::Extend(answer.clone()),
}

/// Ids mostly ascend, so each is encoded as the difference from the one before.
mod distances {
    use std::iter::once;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(ids: &[u64], to: S) -> Result<S::Ok, S::Error> {
        let before = once(&0).chain(ids);
        let distance = |(id, before): (&u64, &u64)| id.wrapping_sub(*before).cast_signed();
        to.collect_seq(ids.iter().zip(before).map(distance))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
        let distances = Vec::<i64>::deserialize(from)?;
        let next = |id: &mut u64, distance| {
            *id = id.wrapping_add_signed(distance);
            Some(*id)
        };
        Ok(distances.into_iter().scan(0, next).collect())
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
            Self::Extend(Extend::Extended { blocks, copies }) => {
                let copies = copies
                    .iter()
                    .map(|(from, to)| vec![*from, *to])
                    .collect::<Vec<_>>();
                write!(f, "blocks {}, copies {}", blocks.words(), copies.words())
            }
            Self::Prefill(Prefill::NoRoom { needed, available })
            | Self::Extend(Extend::NoRoom { needed, available }) => {
                write!(f, "no room, {needed} blocks needed, {available} available")
            }
            Self::Prefill(Prefill::NoBudget) => write!(f, "no budget"),
            Self::Remappings(remappings) => write!(f, "remappings {}", remappings.words()),
            Self::PoolUsage(usage) => {
                let PoolUsage {
                    free,
                    evictable,
                    active,
                    pinned,
                } = usage;
                write!(
                    f,
                    "{free} blocks free, {evictable} evictable, {active} active, {pinned} pinned"
                )
            }
        }
    }
}

/// Elements of a list that are displayed.
const SHOWN: usize = 8;

/// How a value is displayed.
trait Words {
    fn words(&self) -> String;
}

macro_rules! as_displayed {
    ($($type:ty),*) => {
        $(impl Words for $type {
            fn words(&self) -> String {
                self.to_string()
            }
        })*
    };
}
as_displayed!(u32, u64, usize, bool);

impl Words for BlockId {
    fn words(&self) -> String {
        self.get().to_string()
    }
}

impl Words for Box<[u8]> {
    fn words(&self) -> String {
        format!("{:?}", self.escape_ascii().to_string())
    }
}

impl Words for Remapping {
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

impl<T: Words> Words for Option<T> {
    fn words(&self) -> String {
        self.as_ref().map_or("none".into(), Words::words)
    }
}

impl<T: Words> Words for Vec<T> {
    fn words(&self) -> String {
        let mut shown: Vec<String> = self.iter().take(SHOWN).map(Words::words).collect();
        if self.len() > SHOWN {
            shown.push(format!("... {} in all", self.len()));
        }
        format!("[{}]", shown.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_short_in_words() {
        let eight = "[0, 1, 2, 3, 4, 5, 6, 7]";
        assert_eq!((0..8).collect::<Vec<u64>>().words(), eight);
        assert_eq!(vec![1_u32, 2].words(), "[1, 2]");
        assert_eq!(
            (0..20).collect::<Vec<u64>>().words(),
            "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"
        );
        assert_eq!(
            (None::<u64>.words(), Some(7_u64).words()),
            ("none".into(), "7".into())
        );
    }
}
