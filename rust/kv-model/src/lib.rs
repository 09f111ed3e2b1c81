#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod invariants;
mod life;
mod pool;
mod state;
mod step;
mod tokens;

pub use life::{Action, Answer, BlockLife, Bounds, Event, Flaw, Remapping};
pub use pool::{Block, BlockId, Pool};
pub use state::{Entry, NUM_SEQUENCES, Pin, Sequence, State, Step, Transfer};
pub use tokens::Tokens;
