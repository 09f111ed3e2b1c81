//! Forks: a child has the memory of its parent, and none of the threads that use it.
//!
//! A lock that another thread held when the process was forked is never released in the child, and what it guards
//! may be half changed. So the child refuses the objects of its parent, and does not even drop them.

use std::ops::Deref;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;

use crate::errors::HandleError;

/// Forks between the process that loaded the module and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts forks from now on. The C library calls the counter in each child before anything else runs there.
#[cfg(unix)]
#[allow(unsafe_code)]
pub(crate) fn count_forks() -> PyResult<()> {
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the function does nothing but add to an atomic, which is allowed after a fork, and the module is never
    // unloaded.
    match unsafe { libc::pthread_atfork(None, None, Some(count)) } {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(error).into()),
    }
}

/// Without forks there is nothing to count.
#[cfg(not(unix))]
pub(crate) fn count_forks() -> PyResult<()> {
    Ok(())
}

/// The number of forks that led to this process.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// The process that made an object.
pub(crate) struct Origin {
    forks: u32,
    process: u32,
}

impl Origin {
    /// This process.
    pub(crate) fn here() -> Self {
        Self {
            forks: forks(),
            process: process::id(),
        }
    }

    /// Whether this is that process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.forks == forks()
    }

    /// An error in a fork of that process, for an object of the kind `what`.
    #[inline]
    pub(crate) fn check(&self, what: &str) -> PyResult<()> {
        match self.is_here() {
            true => Ok(()),
            false => Err(self.refuse(what)),
        }
    }

    #[cold]
    fn refuse(&self, what: &str) -> PyErr {
        let (process, here) = (self.process, process::id());
        HandleError::new_err(format!(
            "process {process} made this {what}, this is process {here}: make a new one after the fork"
        ))
    }
}

/// A value that a fork of the process that made it leaves alone: its memory is not freed there.
pub(crate) struct Own<T> {
    value: Option<T>,
    pub(crate) origin: Origin,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Some(value),
            origin: Origin::here(),
        }
    }

    /// The value, to end it; `None` in a fork.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.value.as_mut().filter(|_| self.origin.is_here())
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value.as_ref().expect("there until it is dropped")
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
