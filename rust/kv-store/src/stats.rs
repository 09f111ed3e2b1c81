//! Counters since the store was opened.

use crate::error::{DropReason, Get};
use crate::usage::Usage;

/// Usage and limits now, and counters since the store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Entries and bytes by state.
    pub usage: Usage,
    /// Bytes of all files.
    pub disk_bytes: u64,
    /// The limit of `disk_bytes` now: `max_bytes`, or less if the disk holds less.
    pub limit_bytes: u64,
    /// Queued payload bytes.
    pub queued_bytes: u64,
    /// True if this store writes.
    pub is_writer: bool,
    /// True if puts are dropped because writing failed.
    pub is_suspended: bool,
    /// True if an operation of the disk takes longer than `stall_after`.
    pub is_stalled: bool,
    /// The counters.
    pub counters: Counters,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident)*) => {
        /// Counters since the store was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values, in the order of the fields.
            pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Entries read at opening.
    loaded
    /// Entries written.
    stored
    /// Payload bytes written.
    stored_bytes
    /// Puts and touches of entries that exist already.
    known
    /// Puts dropped because the queue was full.
    dropped_queue_full
    /// Puts dropped because the entry is larger than a segment.
    dropped_too_large
    /// Puts dropped because the disk failed or did not answer, before or after they were queued.
    dropped_failed
    /// Puts dropped because the store only reads.
    dropped_read_only
    /// Puts dropped because the store was closing.
    dropped_closed
    /// Gets that returned a payload.
    hits
    /// Payload bytes of hits.
    hit_bytes
    /// Gets of entries that do not exist.
    misses
    /// Gets that failed because of the disk.
    failed
    /// Entries dropped because their bytes had changed.
    damaged
    /// Gets whose key has an entry of another prefix.
    collisions
    /// Entries evicted because the store was full.
    evicted
    /// Segments removed.
    evicted_segments
    /// Entries copied to a later segment because they are in use.
    relocated
    /// Entries dropped by `prune`.
    pruned
    /// Entries dropped because their files are gone or cannot be read.
    lost
    /// Write operations that failed.
    write_errors
    /// Read operations that failed.
    read_errors
    /// Number of stalls of the disk.
    stalls
}

impl Counters {
    pub(crate) fn count_drop(&mut self, reason: DropReason) {
        *match reason {
            DropReason::QueueFull => &mut self.dropped_queue_full,
            DropReason::TooLarge => &mut self.dropped_too_large,
            DropReason::ReadOnly => &mut self.dropped_read_only,
            DropReason::Suspended => &mut self.dropped_failed,
            DropReason::Closed => &mut self.dropped_closed,
        } += 1;
    }

    pub(crate) fn count_get(&mut self, answer: Get, bytes: u64) {
        match answer {
            Get::Hit => {
                self.hits += 1;
                self.hit_bytes += bytes;
            }
            Get::Miss => self.misses += 1,
            Get::Failed => self.failed += 1,
        }
    }
}
