//! Limits and results of a replay.

use std::fmt;

use kv_core::{Answer, Call, Config, Error, PoolUsage, Stats};

use crate::text::Text;

/// Limits of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Token positions of the pool, and the sum of the tokens of sequences and the blocks of pins that exist at once.
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

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Report {
    /// The version of kv-core that recorded.
    pub recorded_by: String,
    /// The recorded settings, with the actual hash seed.
    pub config: Config,
    /// Replayed operations by kind, in the order of [`Call::KINDS`].
    pub operations: Vec<(&'static str, u64)>,
    /// Blocks by state at the end.
    pub usage: PoolUsage,
    /// The counters at the end.
    pub stats: Stats,
    /// The result of [`BlockManager::check`](kv_core::BlockManager::check) at the end.
    pub check: Result<(), String>,
    /// Whether [`Record::stop_recording`](crate::Record::stop_recording) ended the recording.
    pub complete: bool,
    /// The first operation with a different answer, where the replay ends.
    pub divergence: Option<Divergence>,
}

/// An operation that a replay answered differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Its number, from 1.
    pub operation: u64,
    /// The operation.
    pub call: Call,
    /// Its answer in the recording.
    pub recorded: Answer,
    /// Its answer in the replay.
    pub obtained: Result<Answer, Error>,
}

impl Divergence {
    /// The operation, as text.
    pub fn call_text(&self) -> String {
        self.call.text()
    }

    /// Its answer in the recording, as text.
    pub fn recorded_text(&self) -> String {
        self.recorded.text()
    }

    /// Its answer in the replay, as text.
    pub fn obtained_text(&self) -> String {
        match &self.obtained {
            Ok(answer) => answer.text(),
            Err(error) => format!("refused, {error}"),
        }
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operation, call) = (self.operation, self.call_text());
        let (recorded, obtained) = (self.recorded_text(), self.obtained_text());
        write!(
            f,
            "operation {operation}, {call}: recorded {recorded}; obtained {obtained}"
        )
    }
}
