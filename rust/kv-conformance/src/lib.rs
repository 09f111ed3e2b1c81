#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod manager;
mod operation;
mod remote;
mod runs;
mod world;

pub use manager::{BlockManager, Prefilled, Promises, StateCopy};
pub use operation::Operation;
pub use remote::{Remote, RemoteManager};
pub use runs::{Failure, Runs, check};
pub use world::Report;
