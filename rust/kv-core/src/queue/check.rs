//! Validation of the free queue.

use super::{FreeQueue, LISTS, List};
use crate::check::ensure;

impl FreeQueue {
    /// Walks the rings both ways and counts.
    pub(crate) fn check(&self) -> Result<(), String> {
        LISTS.iter().try_for_each(|&list| self.check_ring(list))?;
        let waiting = self.metas().iter().filter(|meta| meta.queued).count();
        let len = self.len();
        ensure(waiting == len, || {
            format!("free queue: {waiting} blocks marked, {len} counted")
        })
    }

    fn check_ring(&self, list: List) -> Result<(), String> {
        let (sentinel, len) = (self.sentinel(list), self.len_of(list));
        let (mut at, mut seen) = (sentinel, 0);
        // Each link is checked in both directions, so the walk cannot enter a smaller ring.
        loop {
            let next = self.meta(at).link().next;
            let back = self.metas.get(next.at()).map(|meta| meta.link().prev);
            ensure(back == Some(at), || {
                format!("{list:?}: {at:?} and {next:?} disagree")
            })?;
            if next == sentinel {
                break;
            }
            seen += 1;
            at = next;
        }
        ensure(seen == len, || {
            format!("{list:?}: {seen} blocks linked, {len} counted")
        })
    }
}
