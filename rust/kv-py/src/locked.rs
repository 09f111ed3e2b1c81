//! The core and its lock. Python objects are read before the lock is taken and made after it is released: no
//! Python code runs under it, not even a finalizer, and no thread waits for it while it holds the GIL.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forks::Own;
use kv_core::{BlockManager as Core, Error};
use kv_trace::{EndedRecording, Record};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::errors::{InvariantError, forked, raise};
use crate::guarded;

/// Contents that are named, and events that are taken, with the GIL.
const FEW_EVENTS: usize = 256;

/// Deferred releases, and blocks of them, that are applied with the GIL.
const FEW_RELEASES: usize = 256;

/// The core and its lock, shared by all handles.
pub(crate) struct Locked(Own<Mutex<Core>>);

impl Locked {
    pub(crate) fn new(core: Core) -> Self {
        Self(Own::new(Mutex::new(core)))
    }

    /// An error in a fork of the process that created the manager.
    #[inline]
    fn check_process(&self) -> PyResult<()> {
        self.0.origin.check("BlockManager").map_err(forked)
    }

    /// Runs `work` on the core. Tries the lock first; releases the GIL to wait.
    ///
    /// What `work` takes and answers could go to another thread (`Send`). So it has nothing of the
    /// interpreter at hand and makes no Python object, which could start the garbage collector and with
    /// it a finalizer that calls this very manager.
    #[inline]
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Core) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let answer = work(&mut *self.lock(py)?);
        answer.map_err(raise)
    }

    /// The same without the GIL, for what takes long.
    pub(crate) fn detached<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Core) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        self.check_process()?;
        py.detach(|| {
            let mut core = self.0.lock().map_err(|_| broken())?;
            work(&mut core)
        })
    }

    /// The same for what takes long only if much has become of the contents since events were taken: then
    /// without the GIL.
    pub(crate) fn with_events<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Core) -> R + Send,
    ) -> PyResult<R> {
        let mut core = self.lock(py)?;
        if core.num_pending_events() <= FEW_EVENTS {
            return Ok(work(&mut core));
        }
        drop(core);
        self.detached(py, |core| Ok(work(core)))
    }

    /// For `StepPlan.fill`, which changes nothing in the core: not even a panic in it does. Like `with`, `work`
    /// makes no Python object, but its arrays cannot go to another thread.
    #[inline]
    pub(crate) fn read<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Core) -> PyResult<R>,
    ) -> PyResult<R> {
        guarded::read(self.lock(py)?, work)
    }

    #[inline]
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Core>> {
        self.check_process()?;
        let mut core = self.0.lock_py_attached(py).map_err(|_| broken())?;
        if core.num_deferred() > FEW_RELEASES {
            drop(core);
            self.drain_many(py)?;
            core = self.0.lock_py_attached(py).map_err(|_| broken())?;
        }
        core.drain_deferred();
        Ok(core)
    }

    /// Applies many deferred releases without the GIL.
    #[cold]
    fn drain_many(&self, py: Python<'_>) -> PyResult<()> {
        self.detached(py, |core| {
            core.drain_deferred();
            Ok(())
        })
    }
}

impl Drop for Locked {
    /// The rest of a recording is written without the GIL, which its reader may need.
    fn drop(&mut self) {
        let Some(core) = self.0.get_mut() else {
            return;
        };
        let core = core.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut ended = core.abandon_recording();
        if ended.is_none() {
            return;
        }
        let mut finish = || ended.take().map(EndedRecording::finish);
        // No caller waits for its result.
        if Python::try_attach(|py| drop(py.detach(&mut finish))).is_none() {
            drop(finish());
        }
    }
}

fn broken() -> PyErr {
    InvariantError::new_err(
        "an earlier call panicked; this manager's state is unknown, make a new one",
    )
}
