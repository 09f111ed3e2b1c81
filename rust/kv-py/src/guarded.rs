//! Locks that stay usable after a panic. Nothing here knows of Python, so `tests/guarded.rs` can run it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// State that one thread uses at a time; no thread waits for it. After a panic under its lock it is reset.
pub(crate) struct Guarded<T> {
    state: Mutex<T>,
    reset: fn(&mut T),
}

impl<T> Guarded<T> {
    /// `reset` makes any state, however broken, one to begin with.
    pub(crate) fn new(state: T, reset: fn(&mut T)) -> Self {
        let state = Mutex::new(state);
        Self { state, reset }
    }

    /// The state, for this thread alone; `None` while another one has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(state)) => {
                let mut state = state.into_inner();
                (self.reset)(&mut state);
                self.state.clear_poison();
                Some(state)
            }
        }
    }
}

/// Calls `work` with the state behind a lock. A panic is resumed once the lock is released: `work` only reads, so
/// the lock is not poisoned.
pub(crate) fn read<T, R>(state: MutexGuard<'_, T>, work: impl FnOnce(&T) -> R) -> R {
    let done = catch_unwind(AssertUnwindSafe(|| work(&state)));
    drop(state);
    done.unwrap_or_else(|panic| resume_unwind(panic))
}
