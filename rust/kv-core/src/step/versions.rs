//! Versions of the block tables in a set of arrays.

use std::sync::atomic::{AtomicU64, Ordering};

/// A version of the block tables in a set of arrays. It changes whenever rows may share other blocks than before. A row
/// that grows by unshared blocks does not change it.
#[derive(Debug)]
pub(super) struct TableVersion {
    /// Of the arrays.
    id: u64,
    version: u64,
}

static NUM_ARRAYS: AtomicU64 = AtomicU64::new(0);

impl TableVersion {
    pub(super) fn new() -> Self {
        Self {
            id: NUM_ARRAYS.fetch_add(1, Ordering::Relaxed),
            version: 0,
        }
    }

    pub(super) fn change(&mut self) {
        self.version += 1;
    }

    /// A value that no other version of any arrays has.
    pub(super) fn key(&self) -> (u64, u64) {
        (self.id, self.version)
    }
}
