//! A KV-cache block manager.
//!
//! It decides which physical block holds the KV cache of which tokens. It never sees the cache
//! itself: no tensors, no Python, no I/O.
//!
//! # The contract in short
//!
//! * **Two counters per block.** `refs` (atomic) counts every holder, `seq_refs` the live sequences.
//!   `free + evictable + active + pinned = num_blocks` after every call.
//! * **An exact index.** Contents form a tree; a match is a hit only if parent and tokens are equal.
//!   A hash collision costs a miss, never a wrong block.
//! * **Late merge.** When a step is committed, each block that became full is looked up once more; a
//!   content never has two registered blocks.
//! * **All or nothing.** A call that cannot do all of its work changes nothing and says so. Running
//!   out of blocks is an answer ([`Prefill::NoRoom`]), misuse is an [`Error`].
//! * **Forgetting never leaks.** Dropping a handle frees its sequence, a pin, a plan; a pin may be
//!   dropped by any thread, without the manager.
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
//! } // the sequence is dropped: its full blocks stay, evictable, for the next one
//! assert_eq!(manager.usage().evictable, 2);
//! # Ok::<(), kv_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod check;
mod config;
mod contents;
mod elements;
mod error;
mod event_log;
mod events;
mod eviction;
mod groups;
mod handle;
mod hash;
mod ids;
mod manager;
mod matching;
mod names;
mod pin;
mod pool;
mod queue;
mod sequence;
mod shared;
mod snapshot;
mod state;
mod stats;
mod step;
mod sync;
mod table;
mod trace;

pub use config::Config;
pub use elements::{SharedI32, SharedI64};
pub use error::Error;
pub use events::Event;
pub use eviction::Eviction;
pub use handle::{PlanHandle, SeqHandle};
pub use hash::ContentHasher;
pub use ids::{BlockId, PlanKey, SeqKey};
pub use manager::{BlockManager, SequenceView};
pub use pin::Pin;
pub use snapshot::{PoolSnapshot, SnapshotNode};
pub use stats::{BlockState, PoolUsage, Stats};
pub use step::{
    Extend, IntArray, PlanView, Prefill, PrefixArrays, Remapping, SharedPrefix, SharedPrefixes,
    StepArrays, TableRows,
};
pub use trace::{
    Answer, Call, Divergence, EndedRecording, Limits, Report, TraceError, replay, replay_within,
};
