//! Record and replay: files for the core, its report for Python.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use kv_trace::TraceError as CoreError;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::answers::{PoolUsage, Stats, values};
use crate::errors::TraceError;

/// An error of the system, with its number and the file, as Python would raise it itself.
pub(crate) fn os_error(error: &io::Error, path: Option<&Path>) -> PyErr {
    let text = error.to_string();
    let Some(code) = error.raw_os_error() else {
        return PyOSError::new_err(text);
    };
    let text = text.replace(&format!(" (os error {code})"), "");
    match path {
        None => PyOSError::new_err((code, text)),
        Some(path) => PyOSError::new_err((code, text, path.display().to_string())),
    }
}

/// The settings of a recorded manager by name.
pub(crate) fn settings<'py>(
    py: Python<'py>,
    config: &kv_core::Config,
) -> PyResult<Bound<'py, PyDict>> {
    let kv_core::Config {
        num_blocks,
        block_size,
        ref groups,
        state,
        prefix_caching,
        in_flight_sharing,
        partial_reuse,
        events,
        keep_evicted: _, // neither is recorded
        explain: _,
        eviction,
        hash_seed,
        hash_bits,
    } = *config;
    let dict = PyDict::new(py);
    dict.set_item("num_blocks", num_blocks)?;
    dict.set_item("block_size", block_size)?;
    dict.set_item("groups", PyTuple::new(py, groups)?)?;
    if let Some(state) = state {
        dict.set_item("state_blocks", state.blocks)?;
        dict.set_item("snapshot_cadence", state.cadence)?;
        dict.set_item("snapshot_min_tokens", state.min_tokens)?;
    }
    dict.set_item("prefix_caching", prefix_caching)?;
    dict.set_item("in_flight_sharing", in_flight_sharing)?;
    dict.set_item("partial_reuse", partial_reuse)?;
    dict.set_item("events", events)?;
    dict.set_item("eviction", eviction.name())?;
    dict.set_item("hash_seed", hash_seed)?;
    dict.set_item("hash_bits", hash_bits)?;
    Ok(dict)
}

/// The result of a replay.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct ReplayReport(kv_trace::Report);

#[pymethods]
impl ReplayReport {
    /// The version of kv-core that wrote the recording.
    #[getter]
    fn recorded_by(&self) -> &str {
        &self.0.recorded_by
    }

    /// The manager's settings by name; `hash_seed` is the actual seed.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        settings(py, &self.0.config)
    }

    /// Number of replayed operations of each kind.
    #[getter]
    fn operations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (kind, count) in &self.0.operations {
            dict.set_item(kind, count)?;
        }
        Ok(dict)
    }

    /// The number of blocks in each state at the end.
    #[getter]
    fn usage(&self) -> PoolUsage {
        PoolUsage(self.0.usage)
    }

    /// The counters at the end.
    #[getter]
    fn stats(&self) -> Stats {
        Stats(self.0.stats)
    }

    /// The first difference that `check()` found at the end, or None.
    #[getter]
    fn failed_check(&self) -> Option<&str> {
        self.0.check.as_ref().err().map(String::as_str)
    }

    /// True if `stop_recording()` ended the recording.
    #[getter]
    fn is_complete(&self) -> bool {
        self.0.complete
    }

    /// The first operation whose answer differs from the recording, or None.
    #[getter]
    fn divergence(&self) -> Option<Divergence> {
        self.0.divergence.as_ref().map(Divergence::of)
    }

    fn __repr__(&self) -> String {
        let operations: u64 = self.0.operations.iter().map(|(_, count)| count).sum();
        match &self.0.divergence {
            None => format!("<ReplayReport, {operations} operations, no divergence>"),
            Some(divergence) => format!("<ReplayReport, {divergence}>"),
        }
    }
}

values! {
    /// An operation whose answer differs from the recording; the replay ended there.
    Divergence {
        /// The number of the operation, from 1.
        operation: u64,
        /// The operation, as text.
        call: String,
        /// Its answer in the recording, as text.
        recorded: String,
        /// Its answer in the replay, as text.
        obtained: String,
    }
}

impl Divergence {
    pub(crate) fn of(divergence: &kv_trace::Divergence) -> Self {
        Self {
            operation: divergence.operation,
            call: divergence.call_text(),
            recorded: divergence.recorded_text(),
            obtained: divergence.obtained_text(),
        }
    }
}

/// Replays a file that `BlockManager.record` wrote, up to the first operation whose answer differs. Runs without
/// the GIL.
///
/// Raises `TraceError` for a file that is not a recording, has another version, or is truncated or damaged, and
/// `OSError` for a file that cannot be read.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub(crate) fn replay(py: Python<'_>, path: PathBuf) -> PyResult<ReplayReport> {
    py.detach(|| {
        let file = File::open(&path).map_err(|error| os_error(&error, Some(&path)))?;
        match kv_trace::replay(file) {
            Ok(report) => Ok(ReplayReport(report)),
            Err(CoreError::Io(error)) => Err(os_error(&error, Some(&path))),
            Err(error) => Err(TraceError::new_err(error.to_string())),
        }
    })
}
