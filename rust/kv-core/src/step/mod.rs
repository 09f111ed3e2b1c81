//! Steps: planned, computed, then committed or rolled back.
//!
//! ```text
//!   begin_step -> decode, draft, prefill -> fill -> run -> commit
//!                 (cancel)                            \-> rollback
//! ```
//!
//! `admit` checks blocks and budget, `enter` changes tables and pool and journals that, `undo` reverts the journal,
//! `commit` caches what was computed (with the late merge), `inputs` writes the runner's arrays, `sharing` and
//! `cascade` find rows that share leading blocks. `snapshots` plans the snapshots of states that steps load and write.
//! `direct` is the allocator's interface, without plans.

mod admit;
mod answers;
mod cascade;
mod check;
mod commit;
mod direct;
mod draft;
mod enter;
mod inputs;
mod journal;
mod plan;
mod sharing;
mod snapshots;
pub(crate) mod state_work;
pub(crate) mod steps;
mod undo;

pub use admit::PrefillRequest;
pub use answers::{Extend, PlanView, Prefill, Remapping};
pub use cascade::SharedPrefix;
pub use inputs::{IntArray, StepArrays, TableRows};
pub use sharing::{PrefixArrays, SharedPrefixes};
pub use snapshots::StateCopy;
