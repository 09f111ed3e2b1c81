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
    /// Payload bytes that wait to be written.
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

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Entries found at opening.
    pub loaded: u64,
    /// Entries written.
    pub stored: u64,
    /// Payload bytes written.
    pub stored_bytes: u64,
    /// Puts of entries that were there already.
    pub known: u64,
    /// Puts dropped because the queue was full.
    pub dropped_queue_full: u64,
    /// Puts dropped because the entry is larger than a segment.
    pub dropped_too_large: u64,
    /// Puts dropped because the disk failed or did not answer, before or after they were queued.
    pub dropped_failed: u64,
    /// Puts dropped because the store only reads.
    pub dropped_read_only: u64,
    /// Puts dropped because the store was closing.
    pub dropped_closed: u64,
    /// Gets that returned a payload.
    pub hits: u64,
    /// Payload bytes of hits.
    pub hit_bytes: u64,
    /// Gets of entries that were not there.
    pub misses: u64,
    /// Gets that failed because the disk did.
    pub failed: u64,
    /// Entries dropped because their bytes were not what had been written.
    pub damaged: u64,
    /// Gets that found an entry of the same key and another prefix.
    pub collisions: u64,
    /// Entries evicted because the store was full.
    pub evicted: u64,
    /// Segments removed.
    pub evicted_segments: u64,
    /// Entries copied to a later segment because they are in use.
    pub relocated: u64,
    /// Entries dropped by `prune`.
    pub pruned: u64,
    /// Entries dropped because their files are gone or cannot be read.
    pub lost: u64,
    /// Write operations that failed.
    pub write_errors: u64,
    /// Read operations that failed.
    pub read_errors: u64,
    /// Times that the disk did not answer.
    pub stalls: u64,
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
