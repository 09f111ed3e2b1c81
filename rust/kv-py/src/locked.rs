//! The core behind its lock. Python objects are read before the lock is taken and made after it is let
//! go: no Python code runs under it, and no thread waits for it while it holds the GIL.

use std::sync::{Mutex, MutexGuard};

use kv_core::BlockManager as Core;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::errors::InvariantError;

/// The core behind its lock, shared by all handles.
pub(crate) struct Locked(pub(crate) Mutex<Core>);

impl Locked {
    /// Tries first; lets go of the GIL to wait.
    #[inline]
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Core>> {
        let mut core = self.0.lock_py_attached(py).map_err(|_| broken())?;
        core.settle();
        Ok(core)
    }
}

pub(crate) fn broken() -> PyErr {
    InvariantError::new_err(
        "an earlier call panicked; this manager's state is unknown, make a new one",
    )
}
