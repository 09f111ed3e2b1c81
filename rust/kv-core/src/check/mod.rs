//! The validator: recounts everything from scratch and reports the first difference.
//!
//! It looks from the bottom up, so that each part may lean on those before it: the queue's rings, the
//! tree of contents, the sequences, the blocks that both name, the plans on top.

mod blocks;
mod plans;
mod sequences;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::ids::NodeIdx;
use crate::manager::BlockManager;

/// The difference, in words, unless there is none.
pub(crate) fn ensure(holds: bool, difference: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(difference()) }
}

impl BlockManager {
    /// Recounts references, states, the queue, the tree and the plans. O(blocks + tokens).
    ///
    /// It changes nothing: what dropped handles left to do is still to be done after it. Leases may be
    /// dropped by other threads meanwhile; everything else must stand still.
    ///
    /// # Errors
    /// The first difference found, in words: a bug in this crate.
    pub fn check(&self) -> Result<(), String> {
        let leases = self.shared.lease_refs();
        let posted = self.shared.posted_blocks();
        self.queue.check()?;
        let mut roots: BTreeMap<NodeIdx, u32> = BTreeMap::new();
        for seq in self.sequences.iter() {
            *roots.entry(seq.root).or_default() += 1;
        }
        self.tree.check(&roots)?;
        let held = self.check_sequences()?;
        self.check_contents()?;
        self.check_queue()?;
        self.check_blocks(&held, leases, &posted)?;
        self.check_plans()?;
        ensure(self.spare_entries.is_empty(), || {
            format!("{} entries are in no plan", self.spare_entries.len())
        })?;
        ensure(self.config.events || self.events.is_empty(), || {
            format!("{} events that nobody asked for", self.events.len())
        })
    }
}
