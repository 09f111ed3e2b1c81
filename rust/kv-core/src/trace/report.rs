//! What a replay may take, and what it comes to.

use std::fmt;

use super::call::{Answer, Call};
use crate::config::Config;
use crate::error::Error;
use crate::stats::{PoolUsage, Stats};

/// What a replay may take, whatever the file says.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Token positions of the pool; tokens and blocks that sequences and pins are made on at once.
    pub tokens: usize,
    /// Bytes of one operation.
    pub operation: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            num_blocks: 1 << 24,
            tokens: 1 << 28,
            operation: 1 << 26,
        }
    }
}

/// What a replay came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// The version of kv-core that recorded.
    pub recorded_by: String,
    /// The recorded settings; the hash seed is the one that was in force.
    pub config: Config,
    /// How many operations of each kind were replayed, in the order of [`Call::KINDS`].
    pub operations: Vec<(&'static str, u64)>,
    /// Where every block is at the end.
    pub usage: PoolUsage,
    /// The counters at the end.
    pub stats: Stats,
    /// What [`BlockManager::check`] says at the end.
    pub check: Result<(), String>,
    /// The recording was ended by [`BlockManager::stop_recording`].
    pub complete: bool,
    /// The first operation that was answered otherwise; nothing was replayed after it.
    pub divergence: Option<Divergence>,
}

/// An operation that a replay answered otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Which one, counted from 1.
    pub operation: u64,
    /// The operation.
    pub call: Call,
    /// Its answer in the recording.
    pub recorded: Answer,
    /// Its answer now.
    pub obtained: Result<Answer, Error>,
}

impl Divergence {
    /// The answer now, in words.
    pub fn obtained_in_words(&self) -> String {
        match &self.obtained {
            Ok(answer) => answer.to_string(),
            Err(error) => format!("refused, {error}"),
        }
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "operation {}, {}: recorded {}; obtained {}",
            self.operation,
            self.call,
            self.recorded,
            self.obtained_in_words()
        )
    }
}
