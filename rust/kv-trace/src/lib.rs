//! Record and replay: every operation of a block manager in a compact log.
//!
//! ```text
//! file    = magic ‖ format version ‖ frame(header) ‖ frame(operation) ...
//! frame   = length of the body ‖ check (2 bytes) ‖ body
//! header  = version of the crate ‖ settings
//! operation = call ‖ answer
//! ```
//!
//! `postcard` encodes the bodies. `frame.rs` has the format, `record.rs` encodes operations, a thread of
//! `writer.rs` writes them, `replay.rs` replays them, `report.rs` has the results, `text.rs` shows
//! operations and answers in them.
//!
//! Operations are written after they succeeded, with their answers. A replay gives them to a manager of the
//! same settings and seed, and reports the first one that is answered differently. Handles dropped by other
//! threads are written where the manager drains them, so a replay drops them between the same operations.
//!
//! ```
//! use kv_core::{BlockManager, Config};
//! use kv_trace::{Record, replay};
//! # use std::io::Write;
//! # use std::sync::{Arc, Mutex};
//! # #[derive(Clone, Default)]
//! # struct File(Arc<Mutex<Vec<u8>>>);
//! # impl Write for File {
//! #     fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> { self.0.lock().expect("sound").write(bytes) }
//! #     fn flush(&mut self) -> std::io::Result<()> { Ok(()) }
//! # }
//! # let file = File::default();
//!
//! let mut manager = BlockManager::new(Config::new(8, 4))?;
//! manager.record(file.clone())?;
//! let seq = manager.sequence((0..10).collect(), b"", true)?;
//! let plan = manager.begin_step(512)?;
//! manager.prefill(plan.key(), seq.key(), 512, None)?;
//! manager.commit(plan.key(), &[42])?;
//! manager.stop_recording()?;
//!
//! let report = replay(&file.0.lock().expect("sound")[..])?;
//! assert!(report.divergence.is_none() && report.complete);
//! assert_eq!((report.usage, report.stats), (manager.usage(), manager.stats()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod frame;
mod record;
mod replay;
mod report;
mod text;
mod writer;

pub use error::TraceError;
pub use record::Record;
pub use replay::{Operation, Replay, replay, replay_within};
pub use report::{Divergence, Limits, Report};
pub use writer::EndedRecording;
