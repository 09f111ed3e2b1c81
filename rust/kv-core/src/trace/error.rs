//! Why a file cannot be replayed.

use std::{fmt, io};

use crate::error::Error;

/// Why a file cannot be replayed. An operation that is answered otherwise is none of these reasons
/// (see [`Report::divergence`](crate::Report::divergence)).
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be read.
    Io(io::Error),
    /// The file does not begin as a recording does.
    NotATrace,
    /// A recording in another version of the format.
    Version {
        /// The file's version.
        found: u64,
        /// The version that is read here.
        supported: u64,
    },
    /// A setting that this version does not have.
    UnknownSetting {
        /// Its number in the header.
        setting: u64,
        /// The version of kv-core that recorded it.
        recorded_by: String,
    },
    /// A pool of more blocks than a replay may make.
    TooManyBlocks {
        /// Blocks of the recorded pool.
        num_blocks: usize,
        /// [`Limits::num_blocks`](crate::Limits::num_blocks)
        limit: usize,
    },
    /// A manager of the recorded settings cannot be made.
    Config(Error),
    /// The file ends inside an operation (0: the header).
    Cut {
        /// The length of the file.
        byte: u64,
        /// The operation that is not whole, counted from 1.
        operation: u64,
    },
    /// An operation (0: the header) is not what was written.
    Corrupt {
        /// Where its frame begins.
        byte: u64,
        /// The operation, counted from 1.
        operation: u64,
        /// What is wrong with it.
        what: String,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot read the recording: {error}"),
            Self::NotATrace => write!(
                f,
                "this is no recording of a BlockManager; give a file that record() has written"
            ),
            Self::Version { found, supported } => write!(
                f,
                "the recording has format version {found}, this version reads {supported}; replay it with the version that wrote it"
            ),
            Self::UnknownSetting {
                setting,
                recorded_by,
            } => write!(
                f,
                "the recording has setting number {setting}, which this version does not know; replay it with version {recorded_by}, which wrote it"
            ),
            Self::TooManyBlocks { num_blocks, limit } => write!(
                f,
                "the recorded pool has {num_blocks} blocks, a replay makes {limit} at most; record a smaller pool or give replay_within() a larger limit"
            ),
            Self::Config(error) => {
                write!(f, "the recorded settings are refused: {error}")
            }
            Self::Cut { byte, operation } => write!(
                f,
                "the recording is cut at byte {byte}, in {}; end one with stop_recording(), and copy it whole",
                place(*operation)
            ),
            Self::Corrupt {
                byte,
                operation,
                what,
            } => write!(
                f,
                "the recording is damaged at byte {byte}, in {}: {what}; copy it again or record it again",
                place(*operation)
            ),
        }
    }
}

fn place(operation: u64) -> String {
    match operation {
        0 => "its header".into(),
        operation => format!("operation {operation}"),
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Config(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for TraceError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
