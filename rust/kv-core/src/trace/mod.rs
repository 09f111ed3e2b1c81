//! Record and replay: every operation of a manager in a compact log.
//!
//! ```text
//! file    = magic ‖ format version ‖ frame(header) ‖ frame(operation) ...
//! frame   = length of the body ‖ check (2 bytes) ‖ body
//! header  = version of this crate ‖ settings
//! operation = call ‖ answer
//! ```
//!
//! Bodies are coded by `postcard`. `call.rs` says what an operation is, `frame.rs` how it is wrapped and
//! what the header holds; `record.rs` codes them, a thread of `writer.rs` writes, `replay.rs` reads, and `report.rs` is what came of it.
//!
//! Operations are written after they succeeded, with their answers: a replay gives them to a manager
//! of the same settings and seed and names the first one that is answered otherwise. What other threads
//! let go of is written where the manager takes note of it, so that a replay does the same at the
//! same place.
//!
//! ```
//! use kv_core::{BlockManager, Config, replay};
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

mod call;
mod error;
mod frame;
mod record;
mod replay;
mod report;
mod words;
mod writer;

pub use call::{Answer, Call};
pub use error::TraceError;
pub(crate) use record::{Recorder, accepted, ids};
pub use replay::{replay, replay_within};
pub use report::{Divergence, Limits, Report};
pub use writer::EndedRecording;
