//! Why a file cannot be replayed.

use std::io;

use kv_core::Error;

/// Why a file cannot be replayed. A different answer is a [`Report::divergence`](crate::Report::divergence) instead.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message explains the fields
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the recording: {0}")]
    Io(#[from] io::Error),
    /// The file is not a recording.
    #[error("this is not a recording of a BlockManager; give a file that record() has written")]
    NotATrace,
    /// A recording in another version of the format.
    #[error(
        "the recording has format {found}, this version reads format {supported}; {}",
        way_out(recorded_by.as_deref())
    )]
    Version {
        found: u64,
        supported: u64,
        recorded_by: Option<String>,
    },
    /// Exceeds the limits of a replay.
    #[error(
        "{what} is {found}, a replay takes {limit} at most; record less, or give replay_within() larger limits"
    )]
    Limit {
        what: String,
        found: u64,
        limit: u64,
    },
    /// The recorded settings are refused.
    #[error("the recorded settings are refused: {0}")]
    Config(#[source] Error),
    /// The file ends within an operation (0: the header).
    #[error(
        "the recording is cut at byte {byte}, in {}; end one with stop_recording(), and copy it whole",
        operation_name(*operation)
    )]
    Cut { byte: u64, operation: u64 },
    /// An operation (0: the header) is damaged.
    #[error(
        "the recording is damaged at byte {byte}, in {}: {what}; copy it again or record it again",
        operation_name(*operation)
    )]
    Corrupt {
        byte: u64,
        operation: u64,
        what: String,
    },
}

fn way_out(recorded_by: Option<&str>) -> String {
    match recorded_by {
        Some(version) => {
            format!("version {version} wrote it: replay it with that one, or record again")
        }
        None => "replay it with the version that wrote it, or record again".into(),
    }
}

pub(crate) fn operation_name(operation: u64) -> String {
    match operation {
        0 => "its header".into(),
        operation => format!("operation {operation}"),
    }
}
