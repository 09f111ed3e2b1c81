#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod config;
mod disk;
mod error;
#[cfg_attr(not(unix), path = "folder_unsupported.rs")]
mod folder;
mod format;
mod index;
mod key;
mod load;
mod marker;
mod read;
mod state;
mod stats;
mod store;
mod usage;
mod writer;

pub use config::{Access, Config};
pub use disk::{Disk, DiskFile, MemoryDisk};
pub use error::{DropReason, Get, LengthMismatch, Notice, OpenError, Put};
pub use format::FORMAT_VERSION;
pub use index::INDEX_BYTES_PER_ENTRY;
pub use key::{Block, BlockKey, Fingerprint, Prefix};
pub use stats::{Counters, Stats};
pub use store::{Prune, Store, Verification};
pub use usage::{Amount, FingerprintUsage, Usage};
