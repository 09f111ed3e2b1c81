//! The operations that change a manager, and their answers, as a [`Recorder`] receives them.

use std::any::Any;

use crate::handles::Pin;
use crate::ids::{PlanKey, SeqKey};
use crate::stats::PoolUsage;
use crate::step::{Extend, Prefill, Remapping};
use crate::transfers::Reserve;

/// Receives the operations of a manager (see [`BlockManager::set_recorder`](crate::BlockManager::set_recorder)).
pub trait Recorder: Any + Send {
    /// Whether it still receives operations.
    fn is_open(&self) -> bool;

    /// Receives an operation that succeeded, and its answer.
    fn record(&mut self, call: &Call, answer: &Answer);
}

macro_rules! calls {
    ($($(#[$doc:meta])* $word:ident $name:ident { $($(#[$how:meta])* $field:ident: $type:ty),* })*) => {
        /// An operation that changes a manager. It names sequences by their ids, plans and transfers by their serials,
        /// and pins by their numbers, from 1 in the order in which they were granted.
        ///
        /// Recordings contain the index of a variant: add new ones at the end.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
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
    decode Decode { plan: u64, #[cfg_attr(feature = "trace", serde(with = "distances"))] sequences: Vec<u64>, lookahead: usize }
    /// [`BlockManager::speculate`](crate::BlockManager::speculate)
    speculate Speculate { plan: u64, sequence: u64, drafts: Vec<u32> }
    /// [`BlockManager::prefill`](crate::BlockManager::prefill)
    prefill Prefill { plan: u64, sequence: u64, max_tokens: usize, spare_blocks: Option<usize>, replay: usize }
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
    draft Draft { plan: u64, #[cfg_attr(feature = "trace", serde(with = "distances"))] sequences: Vec<u64>, drafts: Vec<u32>, counts: Vec<usize> }
    /// [`BlockManager::reuse_cached`](crate::BlockManager::reuse_cached)
    reuse_cached ReuseCached { sequence: u64 }
    /// [`BlockManager::extend`](crate::BlockManager::extend)
    extend Extend { sequence: u64, num_tokens: usize }
    /// [`BlockManager::publish`](crate::BlockManager::publish)
    publish Publish { sequence: u64, num_tokens: usize, tokens: Vec<u32> }
    /// [`BlockManager::reserve`](crate::BlockManager::reserve)
    reserve Reserve { sequence: u64, num_tokens: usize }
    /// [`BlockManager::complete`](crate::BlockManager::complete); no block: it failed
    complete Complete { transfer: u64, num_blocks: usize }
    /// [`BlockManager::abandon`](crate::BlockManager::abandon)
    abandon Abandon { transfer: u64 }
    /// The [`Transfer`](crate::Transfer) of an open transfer was dropped.
    drop_transfer DropTransfer { transfer: u64 }
    /// [`BlockManager::evict`](crate::BlockManager::evict)
    evict Evict { num_blocks: usize }
    /// [`BlockManager::free_keeping`](crate::BlockManager::free_keeping)
    free_keeping FreeKeeping { sequence: u64, num_tokens: usize }
    /// [`BlockManager::want_snapshots`](crate::BlockManager::want_snapshots)
    want_snapshots WantSnapshots { sequence: u64, positions: Vec<usize> }
    /// [`BlockManager::keep_snapshot`](crate::BlockManager::keep_snapshot)
    keep_snapshot KeepSnapshot { sequence: u64 }
    /// [`BlockManager::advance_weights_version`](crate::BlockManager::advance_weights_version)
    advance_weights_version AdvanceWeightsVersion {}
    /// [`BlockManager::sequence`](crate::BlockManager::sequence), in a namespace that switches
    switching_sequence SwitchingSequence { tokens: Vec<u32>, namespace: Box<[u8]>, read_cache: bool, position: usize, other: Box<[u8]> }
    /// [`BlockManager::match_prefix`](crate::BlockManager::match_prefix), in a namespace that switches
    match_switching_prefix MatchSwitchingPrefix { tokens: Vec<u32>, namespace: Box<[u8]>, position: usize, other: Box<[u8]> }
}

/// The answer of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "trace", derive(serde::Serialize, serde::Deserialize))]
pub enum Answer {
    /// No value.
    Done,
    /// An id, or a number of blocks.
    Number(u64),
    /// Positions of rejected sequences, or ids of cancelled ones.
    Numbers(#[cfg_attr(feature = "trace", serde(with = "distances"))] Vec<u64>),
    /// Of `prefill` and `speculate`, and of `reserve` if another transfer is in the way.
    Prefill(Prefill),
    /// Of `commit`.
    Remappings(Vec<Remapping>),
    /// Blocks by state.
    PoolUsage(PoolUsage),
    /// Of `extend`, and of `reserve` with the reserved blocks.
    Extend(Extend),
}

macro_rules! answers {
    ($($type:ty: $value:pat => $answer:expr,)*) => {
        $(impl From<&$type> for Answer {
            fn from($value: &$type) -> Self {
                $answer
            }
        })*
    };
}

answers! {
    (): () => Self::Done,
    usize: &number => Self::Number(number as u64),
    u32: &number => Self::Number(number.into()),
    SeqKey: key => Self::Number(key.id),
    PlanKey: key => Self::Number(key.serial),
    Pin: pin => Self::Number(pin.num_blocks() as u64),
    Vec<usize>: numbers => Self::Numbers(numbers.iter().map(|&number| number as u64).collect()),
    Vec<u64>: numbers => Self::Numbers(numbers.clone()),
    Prefill: answer => Self::Prefill(*answer),
    Vec<Remapping>: remappings => Self::Remappings(remappings.clone()),
    PoolUsage: usage => Self::PoolUsage(*usage),
    Extend: answer => Self::Extend(answer.clone()),
    Reserve: answer => match answer {
        Reserve::Reserved(transfer) => Self::Extend(Extend::Extended {
            blocks: transfer.blocks().iter().map(|loading| loading.block).collect(),
            copies: Vec::new(),
        }),
        &Reserve::NoRoom { needed, available } => {
            Self::Extend(Extend::NoRoom { needed, available })
        }
        &Reserve::Loading { transfer } => Self::Prefill(Prefill::Loading { transfer }),
        Reserve::NotNeeded => Self::Done,
    },
}

/// Ids mostly ascend, so each is encoded as the difference from the one before.
#[cfg(feature = "trace")]
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
