//! Validators recount their part of the state from scratch (see `BlockManager::check`).

#[cfg(test)]
pub(crate) mod scene;

/// An error with the difference, unless the condition holds.
pub(crate) fn ensure(holds: bool, difference: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(difference()) }
}
