//! Configuration of a store.

use std::time::Duration;

use crate::error::OpenError;

/// Limits and policies of a store. Start from [`Config::new`].
#[derive(Clone)]
pub struct Config {
    /// Bytes of all files together.
    pub max_bytes: u64,
    /// Entries in the index; each takes [`INDEX_BYTES_PER_ENTRY`](crate::INDEX_BYTES_PER_ENTRY) of memory.
    pub max_entries: u64,
    /// Queued payload bytes, in memory.
    pub queue_bytes: u64,
    /// Bytes of a segment, the unit of eviction; larger entries are not stored.
    pub segment_bytes: u64,
    /// Read or write.
    pub access: Access,
    /// A secret key: entries written without it are not read.
    pub auth_key: Option<[u8; 32]>,
    /// How long puts are dropped after a write failed. At most a second later, the store also checks for a replaced
    /// folder and for free space.
    pub retry_after: Duration,
    /// How long an operation may take until the store answers without the disk.
    pub stall_after: Duration,
}

/// How a folder is opened. One process writes at a time, any number read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and write; refused while another process writes.
    Write,
    /// Read what another process wrote.
    Read,
    /// Write, or read if another process writes.
    WriteOrRead,
}

const MIB: u64 = 1 << 20;

impl Config {
    /// A configuration for `max_bytes`: segments of a 64th of it, between 16 and 256 MiB, and 256 MiB of queue.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            max_entries: 1 << 20,
            queue_bytes: 256 * MIB,
            segment_bytes: (max_bytes / 64).clamp(16 * MIB, 256 * MIB),
            access: Access::Write,
            auth_key: None,
            retry_after: Duration::from_secs(2),
            stall_after: Duration::from_secs(10),
        }
    }

    pub(crate) fn check(&self) -> Result<(), OpenError> {
        let refuse = |text: String| Err(OpenError::Config(text));
        let (max, segment) = (self.max_bytes, self.segment_bytes);
        if segment < 4096 || segment > u64::from(u32::MAX) {
            return refuse(format!(
                "segment_bytes is {segment}; it must be between 4096 and {}",
                u32::MAX
            ));
        }
        if max < 4 * segment {
            return refuse(format!(
                "max_bytes is {max}; it must hold four segments of {segment} bytes, {}",
                segment.saturating_mul(4)
            ));
        }
        if self.max_entries == 0 || self.max_entries > u64::from(u32::MAX / 2) {
            return refuse(format!(
                "max_entries is {}; it must be between 1 and {}",
                self.max_entries,
                u32::MAX / 2
            ));
        }
        if self.queue_bytes == 0 {
            return refuse("queue_bytes is 0; it must hold an entry's payload".into());
        }
        Ok(())
    }
}
