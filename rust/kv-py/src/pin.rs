//! `Pin`: dropped by any thread, without the manager's lock and without the GIL.

use std::sync::{Mutex, PoisonError};

use forks::Own;
use pyo3::prelude::*;

use crate::errors::forked;

/// Blocks of a pin that are released with the GIL.
const FEW: usize = 4_096;

/// Keeps the blocks of a prefix cached without a sequence. Any thread may release it at any time, which takes
/// neither the manager's lock nor the GIL.
///
/// In a fork of the process that made it, a release does nothing, and all else raises `HandleError`.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Pin(Own<Mutex<Option<kv_core::Pin>>>);

impl Pin {
    pub(crate) fn new(pin: kv_core::Pin) -> Self {
        Self(Own::new(Mutex::new(Some(pin))))
    }

    /// An error in a fork of the process that created the pin.
    pub(crate) fn check_process(&self) -> PyResult<()> {
        self.0.origin.check("Pin").map_err(forked)
    }

    /// The pin, unless it was released. Not for a fork.
    pub(crate) fn with<R>(&self, look: impl FnOnce(Option<&kv_core::Pin>) -> R) -> R {
        // Held for a few instructions, never while waiting: the caller may hold the GIL.
        let pin = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        look(pin.as_ref())
    }
}

#[pymethods]
impl Pin {
    /// Number of tokens covered: blocks times block size; 0 after the release.
    #[getter]
    fn num_tokens(&self) -> PyResult<usize> {
        self.check_process()?;
        Ok(self.with(|pin| pin.map_or(0, kv_core::Pin::num_tokens)))
    }

    /// Number of tokens for which the pinned snapshot of a state stands; 0 without one.
    #[getter]
    fn num_state_tokens(&self) -> PyResult<usize> {
        self.check_process()?;
        Ok(self.with(|pin| pin.map_or(0, |pin| pin.snapshot().0)))
    }

    /// Ids of the blocks of this snapshot, in the order of its bytes; they are the last ones of `blocks`.
    #[getter]
    fn state_blocks(&self) -> PyResult<Vec<u32>> {
        self.check_process()?;
        Ok(self.with(|pin| {
            let blocks = pin.map_or(&[][..], |pin| pin.snapshot().1);
            blocks.iter().map(|block| block.get()).collect()
        }))
    }

    /// The pinned blocks as (index in the prefix, layer group, block id), in the order of `blocks`. Those of the snapshot
    /// have the index of the last block of its prefix, and the layer group after the others.
    #[getter]
    fn indexed_blocks(&self) -> PyResult<Vec<(usize, usize, u32)>> {
        self.check_process()?;
        Ok(self.with(|pin| {
            let blocks = pin.map_or(Vec::new(), kv_core::Pin::indexed_blocks);
            let blocks = blocks.into_iter();
            blocks
                .map(|(index, group, block)| (index, group, block.get()))
                .collect()
        }))
    }

    /// Ids of the pinned blocks in order; for each block of tokens, those of all layer groups, and last those of the
    /// snapshot. Empty after the release.
    #[getter]
    fn blocks(&self) -> PyResult<Vec<u32>> {
        self.check_process()?;
        Ok(self.with(|pin| {
            pin.map_or(Vec::new(), |pin| {
                pin.blocks().map(|block| block.get()).collect()
            })
        }))
    }

    /// True after the release.
    #[getter]
    fn is_released(&self) -> PyResult<bool> {
        self.check_process()?;
        Ok(self.with(|pin| pin.is_none()))
    }

    /// Releases the blocks; a second call does nothing.
    fn release(&self, py: Python<'_>) {
        if !self.0.origin.is_here() {
            return; // a `with` block may end in a fork
        }
        let pin = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match pin {
            Some(pin) if pin.num_blocks() > FEW => py.detach(|| drop(pin)),
            pin => drop(pin),
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (exc_type, exc, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) {
        let _ = (exc_type, exc, traceback);
        self.release(py);
    }

    fn __repr__(&self) -> String {
        if !self.0.origin.is_here() {
            return "<Pin of another process>".into();
        }
        self.with(|pin| match pin {
            None => "<Pin, released>".into(),
            Some(pin) => format!("<Pin on {} tokens>", pin.num_tokens()),
        })
    }
}
