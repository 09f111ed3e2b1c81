//! Entries and bytes by state, and by fingerprint.

use crate::key::Fingerprint;

/// Entries and their bytes on disk, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Number of entries.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The readable entries of a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FingerprintUsage {
    /// The fingerprint.
    pub fingerprint: Fingerprint,
    /// Entries and their bytes.
    pub amount: Amount,
    /// When the newest was written, in seconds since 1970.
    pub last_written: u64,
}

/// Entries by state. An entry is in exactly one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Complete, and not being read.
    pub readable: Amount,
    /// Queued or being written: not readable yet.
    pub writing: Amount,
    /// Complete, and being read.
    pub reading: Amount,
    /// Dropped; its bytes are on disk until its segment is removed.
    pub condemned: Amount,
}

impl Usage {
    /// The sum of all states.
    pub fn total(&self) -> Amount {
        let all = [self.readable, self.writing, self.reading, self.condemned];
        Amount {
            entries: all.iter().map(|a| a.entries).sum(),
            bytes: all.iter().map(|a| a.bytes).sum(),
        }
    }
}
