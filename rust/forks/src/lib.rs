//! Forks: a child has the memory of its parent, and none of the threads that use it.
//!
//! A lock that another thread held when the process was forked is never released in the child, and what it guards
//! may be half changed. So the child refuses the objects of its parent, and does not even drop them.

#![deny(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::Deref;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between the process that loaded this library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts forks from now on. The C library calls the counter in each child before anything else runs there.
///
/// # Errors
///
/// The system's, if it has no memory for the counter.
#[cfg(unix)]
#[allow(unsafe_code)]
pub fn count_forks() -> io::Result<()> {
    use std::sync::OnceLock;

    static STATUS: OnceLock<i32> = OnceLock::new();
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the function does nothing but add to an atomic, which is allowed after a fork, and the library is never
    // unloaded.
    match STATUS.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count)) }) {
        0 => Ok(()),
        &error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Without forks there is nothing to count.
///
/// # Errors
///
/// None.
#[cfg(not(unix))]
pub fn count_forks() -> io::Result<()> {
    Ok(())
}

/// The number of forks that led to this process.
#[inline]
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// The process that made an object.
pub struct Origin {
    forks: u32,
    process: u32,
}

impl Origin {
    /// This process.
    pub fn here() -> Self {
        Self {
            forks: forks(),
            process: process::id(),
        }
    }

    /// Whether this is that process.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.forks == forks()
    }

    /// Refuses an object of the kind `what` in a fork of that process.
    ///
    /// # Errors
    ///
    /// [`Forked`], whose text says what to do.
    #[inline]
    pub fn check(&self, what: &'static str) -> Result<(), Forked> {
        match self.is_here() {
            true => Ok(()),
            false => Err(Forked {
                what,
                process: self.process,
            }),
        }
    }
}

/// An object was used in a fork of the process that made it.
#[derive(Debug, Clone, Copy)]
pub struct Forked {
    what: &'static str,
    process: u32,
}

impl fmt::Display for Forked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, process, here) = (self.what, self.process, process::id());
        write!(
            f,
            "process {process} made this {what}, this is process {here}: make a new one after the fork"
        )
    }
}

impl std::error::Error for Forked {}

/// A value that a fork of the process that made it leaves alone: its memory is not freed there.
pub struct Own<T> {
    value: Option<T>,
    /// The process that made it.
    pub origin: Origin,
}

impl<T> Own<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self {
            value: Some(value),
            origin: Origin::here(),
        }
    }

    /// The value, to end it; `None` in a fork.
    pub fn get_mut(&mut self) -> Option<&mut T> {
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
