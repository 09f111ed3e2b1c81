//! Operations and answers, as they are written down.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::words::Words;
use crate::stats::PoolUsage;
use crate::step::{Extend, Prefill, Remapping};

macro_rules! calls {
    ($($(#[$doc:meta])* $word:ident $name:ident { $($(#[$how:meta])* $field:ident: $type:ty),* })*) => {
        /// An operation that changes a manager, by the numbers of what it is about: the ids of sequences,
        /// the serials of plans, and pins counted from 1 in the order in which they were granted.
        ///
        /// A file names each by its place here: new ones go to the end.
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
                #[allow(clippy::self_named_constructors)]
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
    /// The manager learnt that a [`SeqHandle`](crate::SeqHandle) is gone.
    drop_sequence DropSequence { sequence: u64 }
    /// The manager learnt that a [`Pin`](crate::Pin) is gone.
    drop_pin DropPin { pin: u64 }
    /// The manager learnt that the [`PlanHandle`](crate::PlanHandle) of an open plan is gone.
    drop_plan DropPlan { plan: u64 }
    /// The end of a recording, answered by the usage.
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

/// What an operation answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Nothing but that it was done.
    Done,
    /// An id, or how many blocks.
    Number(u64),
    /// Positions of those that did not fit, ids of those that went along.
    Numbers(#[serde(with = "distances")] Vec<u64>),
    /// Of `prefill` and `speculate`.
    Prefill(Prefill),
    /// Of `commit`.
    Remappings(Vec<Remapping>),
    /// Where every block is.
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

/// Ids mostly ascend: each is written as its distance from the one before.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(call: Call) -> Vec<u8> {
        let bytes = postcard::to_stdvec(&call).expect("memory takes everything");
        assert_eq!(postcard::take_from_bytes(&bytes), Ok((call, &[][..])));
        for cut in 0..bytes.len() {
            assert!(postcard::from_bytes::<Call>(&bytes[..cut]).is_err());
        }
        bytes
    }

    /// What files hold. If one of these changes, so does the version of the format.
    #[test]
    fn calls_are_written_as_ever() {
        let ids = vec![300, 301, 7, u64::MAX, 0];
        let decode = there_and_back(Call::decode(2_u64, ids, 128_usize));
        let distances = [216, 4, 2, 203, 4, 15, 2];
        assert_eq!(decode, [&[10, 2, 5], &distances[..], &[128, 1]].concat());
        let tokens: Vec<u32> = vec![0, 127, 128, u32::MAX];
        let sequence = Call::sequence(tokens, *b"ns", true);
        let written = [0, 4, 0, 127, 128, 1, 255, 255, 255, 255, 15, 2, 110, 115, 1];
        assert_eq!(there_and_back(sequence), written);
        assert_eq!(there_and_back(Call::stop_recording()), [20]);
        let publish = Call::publish(1_u64, 2_usize, vec![3]);
        assert_eq!(there_and_back(publish), [24, 1, 2, 1, 3]);
    }
}
