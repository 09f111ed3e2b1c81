//! Memory that one object alone may write to, in the whole process.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The claims that are in force.
static CLAIMED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// Ranges of addresses that no other claim overlaps; released when dropped.
pub(crate) struct Claim(Vec<Range<usize>>);

impl Claim {
    /// All of these ranges, or the position of the first that another claim overlaps.
    pub(crate) fn on(ranges: Vec<Range<usize>>) -> Result<Self, usize> {
        let mut claimed = claimed();
        let is_claimed = |range: &Range<usize>| claimed.iter().any(|other| overlap(range, other));
        match ranges.iter().position(is_claimed) {
            Some(at) => Err(at),
            None => {
                claimed.extend(ranges.iter().cloned());
                Ok(Self(ranges))
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = claimed();
        for range in &self.0 {
            if let Some(at) = claimed.iter().position(|other| other == range) {
                claimed.swap_remove(at);
            }
        }
    }
}

/// Whether two ranges have an address in common.
pub(crate) fn overlap(left: &Range<usize>, right: &Range<usize>) -> bool {
    left.start.max(right.start) < left.end.min(right.end)
}

/// Nothing that can panic leaves the list in disorder.
fn claimed() -> MutexGuard<'static, Vec<Range<usize>>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}
