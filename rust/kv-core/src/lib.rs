//! A KV-cache block manager.
//!
//! It decides which physical block holds the KV cache of which tokens. It has no tensors, no Python and no I/O.
//!
//! # The contract in short
//!
//! * **Two counters per block.** `refs` counts all references, `seq_refs` the live sequences among them.
//!   `free + evictable + active + pinned + loading == num_blocks` after every call.
//! * **An exact index.** Cached blocks form a radix tree; a block matches only if its parent and its tokens are equal.
//!   A hash collision costs a miss, never a wrong block.
//! * **Late merge.** A commit looks each block that became full up once more, so no prefix has two cached blocks.
//! * **All or nothing.** A call that cannot do all of its work changes nothing. Running out of blocks is an answer
//!   ([`Prefill::NoRoom`]), misuse is an [`Error`].
//! * **No leaks.** Dropping a handle frees its sequence, plan, transfer or pin. Any thread may drop one, without the manager.
//!
//! ```
//! use kv_core::{BlockManager, Config, Prefill};
//!
//! let mut manager = BlockManager::new(Config::new(8, 4))?;
//! let prompt: Vec<u32> = (0..10).collect();
//! for cached in [0, 8] {
//!     let seq = manager.sequence(prompt.clone(), b"", true)?;
//!     let plan = manager.begin_step(512)?;
//!     let answer = manager.prefill(plan.key(), seq.key(), 512, Some(0))?;
//!     let planned = Prefill::Planned { cached_tokens: cached, tokens: 10 - cached, samples: true };
//!     assert_eq!(answer, planned);
//!     manager.commit(plan.key(), &[42])?; // the token that the model gave
//! } // the sequence is dropped: its full blocks stay cached for the next one
//! assert_eq!(manager.usage().evictable, 2);
//! # Ok::<(), kv_core::Error>(())
//! ```
//!
//! # A step
//!
//! | call | what for |
//! |---|---|
//! | [`BlockManager::sequence`] | a request's tokens; it holds no block yet |
//! | [`BlockManager::begin_step`] | a plan with a budget of tokens; two may be open |
//! | [`BlockManager::prefill`], [`decode`](BlockManager::decode), [`speculate`](BlockManager::speculate) | match what is cached, allocate blocks for the rest |
//! | [`BlockManager::fill`] | the model's inputs: token ids, positions, slots, block tables, in arrays of yours |
//! | [`BlockManager::copies`] | blocks to copy before the model runs |
//! | [`BlockManager::commit`], [`commit_accepted`](BlockManager::commit_accepted) | the sampled tokens; full blocks are cached and merged |
//!
//! [`fork`](BlockManager::fork), [`pin`](BlockManager::pin), [`append`](BlockManager::append),
//! [`trim`](BlockManager::trim) and [`reset`](BlockManager::reset) work between steps; [`reserve`](BlockManager::reserve)
//! begins a transfer of KV that comes from elsewhere.
//!
//! # Threads
//!
//! One thread calls the manager. Handles are `Send` and may be dropped anywhere, at any time: the release is deferred to the
//! manager's next call.
//!
//! # Panics
//!
//! No call of [`BlockManager`] panics for its arguments: misuse is an [`Error`]. [`SequenceView::table`] panics for a layer
//! group that does not exist. Running out of memory for the manager's own tables is an [`Error`] in
//! [`BlockManager::new`]; later it panics or aborts.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod block_hashes;
mod calls;
mod check;
mod config;
mod elements;
mod error;
mod events;
mod eviction;
mod explain;
mod groups;
mod handles;
mod hash;
mod ids;
mod manager;
mod open_transfers;
mod pool;
mod queue;
mod radix;
mod sequence;
mod snapshots;
mod state;
mod stats;
mod step;
mod switch;
mod sync;
mod table;
mod transfers;

pub use calls::{Answer, Call, Recorder};
pub use config::{Config, StateConfig};
pub use elements::{SharedI32, SharedI64};
pub use error::Error;
pub use events::{Event, Evicted};
pub use eviction::Eviction;
pub use explain::{EvictedBy, Explanation, Miss, MissReason, PastEviction};
pub use handles::{LoadingBlock, Pin, PlanHandle, SeqHandle, Transfer};
pub use hash::ContentHasher;
pub use ids::{BlockId, PlanKey, SeqKey, TransferKey};
pub use manager::{BlockManager, SequenceView};
pub use stats::{BlockState, PoolSnapshot, PoolUsage, SnapshotNode, StateUsage, Stats};
pub use step::{
    Extend, IntArray, PlanView, Prefill, PrefillRequest, PrefixArrays, Remapping, SharedPrefix,
    SharedPrefixes, StateCopy, StepArrays, TableRows,
};
pub use switch::{Namespace, SwitchPoint};
pub use transfers::Reserve;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
