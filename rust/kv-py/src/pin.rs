//! `Pin`: dropped by any thread, without the manager's lock and without the GIL.

use std::sync::Mutex;

use pyo3::prelude::*;

/// Keeps the blocks of a prefix cached without a sequence. Any thread may release it at any time, which takes
/// neither the manager's lock nor the GIL.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Pin(Mutex<Option<kv_core::Pin>>);

impl Pin {
    pub(crate) fn new(pin: kv_core::Pin) -> Self {
        Self(Mutex::new(Some(pin)))
    }

    /// The pin, unless it was released.
    pub(crate) fn with<R>(&self, look: impl FnOnce(Option<&kv_core::Pin>) -> R) -> R {
        // Held for a few instructions, and nothing is waited for under it: the GIL may be held.
        let pin = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        look(pin.as_ref())
    }
}

#[pymethods]
impl Pin {
    /// Number of tokens covered: blocks times block size; 0 after the release.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.with(|pin| pin.map_or(0, kv_core::Pin::num_tokens))
    }

    /// Ids of the pinned blocks in order; for each block of tokens, those of all layer groups. Empty after the
    /// release.
    #[getter]
    fn blocks(&self) -> Vec<u32> {
        self.with(|pin| {
            pin.map_or(Vec::new(), |pin| {
                pin.blocks().map(|block| block.get()).collect()
            })
        })
    }

    /// True after the release.
    #[getter]
    fn is_released(&self) -> bool {
        self.with(|pin| pin.is_none())
    }

    /// Releases the blocks; a second call does nothing.
    fn release(&self) {
        let pin = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        drop(pin);
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (exc_type, exc, traceback, /))]
    fn __exit__(
        &self,
        exc_type: &Bound<'_, PyAny>,
        exc: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) {
        let _ = (exc_type, exc, traceback);
        self.release();
    }

    fn __repr__(&self) -> String {
        match self.is_released() {
            true => "<Pin, released>".into(),
            false => format!("<Pin on {} tokens>", self.num_tokens()),
        }
    }
}
