//! Errors and answers of the store.

use std::io;
use std::path::PathBuf;

/// Reasons for which a folder cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// This system has no folders that owner and mode make private.
    #[error(
        "{path}: a KV store in a folder needs a Unix system, whose owners and modes keep the folder \
         private; on this one, keep the store in memory"
    )]
    Unsupported {
        /// The path.
        path: PathBuf,
    },
    /// The path is empty.
    #[error("cannot open a KV store: the name of its folder is empty")]
    NoName,
    /// The folder cannot be written.
    #[error(
        "{path} cannot be written ({source}); make it writable, or open it with access \"read\""
    )]
    ReadOnly {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The path is a symbolic link.
    #[error("{path} is a symbolic link; name the folder itself")]
    Symlink {
        /// The path.
        path: PathBuf,
    },
    /// The folder belongs to another user, who could forge entries.
    #[error(
        "{path} belongs to user {owner}, this process runs as user {user}; use a folder of this user"
    )]
    Owner {
        /// The path.
        path: PathBuf,
        /// User id of the folder's owner.
        owner: u32,
        /// User id of this process.
        user: u32,
    },
    /// The folder is a store, and other users can enter it.
    #[error("{path} is accessible to other users (mode {mode}); run: chmod 700 {path}")]
    Mode {
        /// The path.
        path: PathBuf,
        /// The permission bits, octal.
        mode: String,
    },
    /// The folder is empty, and other users can enter it.
    #[error(
        "{path} is accessible to other users (mode {mode}); name a folder in it that does not exist \
         yet, which is made private: {path}/kv-cache"
    )]
    OpenToOthers {
        /// The path.
        path: PathBuf,
        /// The permission bits, octal.
        mode: String,
    },
    /// The folder has files but no store's marker.
    #[error("{path} is not empty and not a KV store; name an empty or new folder")]
    NotAStore {
        /// The path.
        path: PathBuf,
    },
    /// The folder is a store of another format.
    #[error(
        "{path} is a KV store of format {found}, this program reads format 1; name another folder"
    )]
    Format {
        /// The path.
        path: PathBuf,
        /// Its format; the quoted text of a marker file that names none.
        found: String,
    },
    /// The folder was written with another authentication key, or without one.
    #[error(
        "{path} was written with another authentication key; give that key or name another folder"
    )]
    AuthKey {
        /// The path.
        path: PathBuf,
    },
    /// Another store writes to this folder.
    #[error("{path} is written by process {}; close it, or open the folder for reading",
        pid.map_or("(unknown)".into(), |pid| pid.to_string()))]
    Locked {
        /// The path.
        path: PathBuf,
        /// Process id of the writer.
        pid: Option<u32>,
    },
    /// An operation of the file system failed.
    #[error("cannot open the KV store {path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// Result of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The entry is copied and waits to be written.
    Queued,
    /// The entry is readable or waits to be written already.
    Known,
    /// The entry is not stored.
    Dropped(DropReason),
}

/// Reasons for which a put is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The queued bytes or entries have reached their limit.
    QueueFull,
    /// The entry is larger than a segment.
    TooLarge,
    /// The store was opened for reading.
    ReadOnly,
    /// The disk failed, is full or does not answer; puts are accepted again later.
    Suspended,
    /// The store is closed.
    Closed,
}

/// Result of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Get {
    /// The buffers hold the payload.
    Hit,
    /// The entry does not exist; the buffers are unchanged, or their bytes are invalid.
    Miss,
    /// The disk failed or stalls; ignore the buffers.
    Failed,
}

/// The caller's buffers do not have the length of the stored payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the entry holds {stored} bytes, the buffers {given}: part of the layout is missing in the fingerprint"
)]
pub struct LengthMismatch {
    /// Bytes of the stored payload.
    pub stored: u64,
    /// Bytes of the buffers.
    pub given: u64,
}

/// A message for the operator, once per fault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The disk holds less than the limit: the limit was lowered.
    LimitLowered {
        /// The configured limit.
        asked: u64,
        /// The limit now.
        limit: u64,
    },
    /// Writing failed; puts are dropped for a while.
    WriteFailed(String),
    /// Reading failed; the entries concerned are dropped.
    ReadFailed(String),
    /// An entry was damaged; it is dropped.
    Damaged(String),
    /// An operation takes longer than `stall_after`; the store answers misses until it ends.
    Stalled,
    /// Writing works again, or the stalled operation ended.
    Recovered,
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LimitLowered { asked, limit } => {
                write!(
                    f,
                    "KV store: the disk has space for {} MiB, not for {} MiB",
                    limit >> 20,
                    asked >> 20
                )
            }
            Self::WriteFailed(error) => write!(
                f,
                "KV store: a write failed ({error}); nothing is stored until the disk recovers"
            ),
            Self::ReadFailed(error) => write!(
                f,
                "KV store: a read failed ({error}); the KV is computed instead"
            ),
            Self::Damaged(error) => write!(
                f,
                "KV store: {error}; the entry is dropped, the KV is computed instead"
            ),
            Self::Stalled => f.write_str(
                "KV store: the disk does not answer; nothing is stored or loaded until it does",
            ),
            Self::Recovered => f.write_str("KV store: the disk has recovered"),
        }
    }
}
