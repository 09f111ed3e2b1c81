//! Memory that one object alone may write to, in the whole process.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forks::{Origin, forks};

/// The claims that are in force. A fork has its own: it begins without claims, and with a lock that no thread of its
/// parent holds.
static CLAIMED: [Mutex<Claims>; 16] = [const {
    Mutex::new(Claims {
        forks: 0,
        ranges: Vec::new(),
    })
}; 16];

struct Claims {
    /// The process, by the forks that led to it.
    forks: u32,
    ranges: Vec<Range<usize>>,
}

/// Ranges of addresses that no other claim overlaps; released when dropped.
pub(crate) struct Claim {
    ranges: Vec<Range<usize>>,
    origin: Origin,
}

impl Claim {
    /// All of these ranges, or the position of the first that another claim overlaps.
    pub(crate) fn on(ranges: Vec<Range<usize>>) -> Result<Self, usize> {
        let claimed = &mut claimed().ranges;
        let is_claimed = |range: &Range<usize>| claimed.iter().any(|other| overlap(range, other));
        match ranges.iter().position(is_claimed) {
            Some(at) => Err(at),
            None => {
                claimed.extend(ranges.iter().cloned());
                let origin = Origin::here();
                Ok(Self { ranges, origin })
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let claimed = &mut claimed().ranges;
        for range in &self.ranges {
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
fn claimed() -> MutexGuard<'static, Claims> {
    let forks = forks();
    let claimed = &CLAIMED[forks as usize % CLAIMED.len()];
    let mut claimed = claimed.lock().unwrap_or_else(PoisonError::into_inner);
    if claimed.forks != forks {
        *claimed = Claims {
            forks,
            ranges: Vec::new(),
        };
    }
    claimed
}
