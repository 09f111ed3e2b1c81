//! What validators are made of. Each part recounts its own from scratch; see `BlockManager::check`.

#[cfg(test)]
pub(crate) mod scene;

/// The difference, in words, unless there is none.
pub(crate) fn ensure(holds: bool, difference: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(difference()) }
}
