//! `TracePlayer`: a recording, operation by operation.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use forks::Own;
use kv_core::BlockState;
use kv_trace::{Limits, Operation, Replay, TraceError as CoreError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::answers::{PoolUsage, Stats, state_name, values};
use crate::errors::{InvariantError, TraceError, forked};
use crate::numbers::number;
use crate::snapshot::PoolSnapshot;
use crate::trace::{Divergence, os_error, settings};

/// A replay and its file, which it reads again to go back.
struct Player {
    path: PathBuf,
    replay: Replay<File>,
    position: u64,
}

impl Player {
    fn open(path: PathBuf) -> PyResult<Self> {
        Ok(Self {
            replay: open(&path)?,
            path,
            position: 0,
        })
    }

    fn advance(&mut self) -> PyResult<Option<Operation>> {
        let next = self.replay.advance();
        let next = next.map_err(|error| raise(error, &self.path))?;
        self.position += u64::from(next.is_some());
        Ok(next)
    }

    fn seek(&mut self, position: u64) -> PyResult<u64> {
        if position < self.position {
            self.replay = open(&self.path)?;
            self.position = 0;
        }
        while self.position < position && self.advance()?.is_some() {}
        Ok(self.position)
    }

    /// State and references of a block.
    fn look(&mut self, block: u32) -> Result<(BlockState, u32, u32), kv_core::Error> {
        let manager = self.replay.manager();
        Ok((
            manager.state(block)?,
            manager.refs(block)?,
            manager.seq_refs(block)?,
        ))
    }

    /// The sequences whose tables contain a block, and whether it is among their registered blocks.
    fn sequences_with(&self, block: u32) -> (Vec<u64>, bool) {
        let (mut sequences, mut is_registered) = (Vec::new(), false);
        for view in self.replay.sequences() {
            for group in 0..self.replay.config().groups.len() {
                let held = |of: Option<kv_core::BlockId>| of.is_some_and(|of| of.get() == block);
                if let Some(row) = view.table(group).position(held) {
                    sequences.push(view.id);
                    is_registered |= row < view.num_registered_blocks;
                }
            }
        }
        (sequences, is_registered)
    }

    /// The operations from here on after which a block is in another state than before.
    fn follow(&mut self, block: u32) -> PyResult<Vec<BlockChange>> {
        let refused = |error: kv_core::Error| crate::errors::raise(error);
        let mut changes = Vec::new();
        let mut last = (self.look(block).map_err(refused)?, Vec::new(), false);
        while let Some(operation) = self.advance()? {
            let looked = self.look(block).map_err(refused)?;
            let (mut sequences, mut is_registered) =
                (Vec::new(), looked.0 == BlockState::Evictable);
            if looked.2 > 0 {
                (sequences, is_registered) = self.sequences_with(block);
            }
            let now = (looked, sequences, is_registered);
            if now == last {
                continue;
            }
            let ((state, refs, seq_refs), ref sequences, is_registered) = now;
            changes.push(BlockChange {
                operation: operation.number,
                call: operation.call_text(),
                state: state_name(state),
                refs,
                seq_refs,
                sequences: sequences.clone(),
                is_registered,
            });
            last = now;
        }
        Ok(changes)
    }
}

fn open(path: &Path) -> PyResult<Replay<File>> {
    let file = File::open(path).map_err(|error| os_error(&error, Some(path)))?;
    Replay::open(file, Limits::default()).map_err(|error| raise(error, path))
}

fn raise(error: CoreError, path: &Path) -> PyErr {
    match error {
        CoreError::Io(error) => os_error(&error, Some(path)),
        error => TraceError::new_err(error.to_string()),
    }
}

/// Replays a file that `BlockManager.record` wrote, operation by operation, forwards and back.
///
/// Going back replays the file from its beginning. Raises the errors of `replay`; an operation whose answer differs
/// ends the replay.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct TracePlayer(Own<Mutex<Player>>);

impl TracePlayer {
    /// Runs `work` without the GIL.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Player) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        self.0.origin.check("TracePlayer").map_err(forked)?;
        let broken = |_| InvariantError::new_err("an earlier call panicked; open the file again");
        py.detach(|| {
            let mut player: MutexGuard<'_, Player> = self.0.lock().map_err(broken)?;
            work(&mut player)
        })
    }
}

#[pymethods]
impl TracePlayer {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Player::open(path))
            .map(|player| Self(Own::new(Mutex::new(player))))
    }

    /// The version of kv-core that wrote the recording.
    #[getter]
    fn recorded_by(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |player| Ok(player.replay.recorded_by().to_owned()))
    }

    /// The manager's settings by name; `hash_seed` is the actual seed.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let config = self.with(py, |player| Ok(player.replay.config().clone()))?;
        settings(py, &config)
    }

    /// The number of operations so far.
    #[getter]
    fn position(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |player| Ok(player.position))
    }

    /// The operation whose answer differs, once the replay has come to it, or None.
    #[getter]
    fn divergence(&self, py: Python<'_>) -> PyResult<Option<Divergence>> {
        self.with(py, |player| {
            Ok(player.replay.divergence().map(Divergence::of))
        })
    }

    /// Replays the next operation. Returns it, or None at the end.
    fn advance(&self, py: Python<'_>) -> PyResult<Option<ReplayedOperation>> {
        self.with(py, |player| {
            Ok(player.advance()?.map(|operation| ReplayedOperation {
                number: operation.number,
                kind: operation.call.kind(),
                call: operation.call_text(),
                answer: operation.answer_text(),
            }))
        })
    }

    /// Goes to the state after `position` operations, or to the end. Returns the position.
    fn seek(&self, py: Python<'_>, position: &Bound<'_, PyAny>) -> PyResult<u64> {
        let position = number("position", position)?;
        self.with(py, |player| player.seek(position))
    }

    /// Replays all further operations, and returns those that changed a block's state, references or owners.
    fn follow(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<Vec<BlockChange>> {
        let block = number("block", block)?;
        self.with(py, |player| player.follow(block))
    }

    /// The whole pool, as `BlockManager.snapshot()` gives it.
    fn snapshot(&self, py: Python<'_>) -> PyResult<PoolSnapshot> {
        self.with(py, |player| {
            Ok(PoolSnapshot(player.replay.manager().snapshot()))
        })
    }

    /// The number of blocks in each state.
    fn usage(&self, py: Python<'_>) -> PyResult<PoolUsage> {
        self.with(py, |player| Ok(PoolUsage(player.replay.manager().usage())))
    }

    /// The counters.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.with(py, |player| Ok(Stats(player.replay.manager().stats())))
    }

    /// The live sequences, in the order of their creation.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<ReplayedSequence>> {
        self.with(py, |player| {
            let views = player.replay.sequences();
            let table = |view: &kv_core::SequenceView<'_>| -> Vec<i64> {
                let blocks = view.table(0);
                let number =
                    |block: Option<kv_core::BlockId>| block.map_or(-1, |of| of.get().into());
                blocks.map(number).collect()
            };
            let sequences = views.iter().map(|view| ReplayedSequence {
                id: view.id,
                num_tokens: view.tokens.len(),
                num_computed_tokens: view.num_computed_tokens,
                num_cached_tokens: view.num_cached_tokens,
                block_table: table(view),
            });
            Ok(sequences.collect())
        })
    }
}

values! {
    /// An operation of a recording.
    ReplayedOperation {
        /// Its number, from 1.
        number: u64,
        /// The name of the call.
        kind: &'static str,
        /// The operation, as text; long lists of tokens are cut.
        call: String,
        /// Its answer, as text.
        answer: String,
    }
    /// The state of a block after an operation that changed it.
    BlockChange {
        /// The number of the operation, from 1.
        operation: u64,
        /// The operation, as text.
        call: String,
        /// As `BlockManager.state`.
        state: &'static str,
        /// All references.
        refs: u32,
        /// Live sequences whose table contains it.
        seq_refs: u32,
        /// The ids of those that callers hold.
        sequences: Vec<u64>,
        /// True if it is cached, or an open step computes it for others to share.
        is_registered: bool,
    }
    /// A live sequence.
    ReplayedSequence {
        /// Its id.
        id: u64,
        /// Its known tokens.
        num_tokens: usize,
        /// Tokens whose KV is computed.
        num_computed_tokens: usize,
        /// Tokens that it reused.
        num_cached_tokens: usize,
        /// Its blocks in the first layer group; -1 for those that slid out of a window.
        block_table: Vec<i64>,
    }
}
