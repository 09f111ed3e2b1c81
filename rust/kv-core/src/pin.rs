//! Pins: prefixes that are kept alive without being sequences.

use crate::contents::Spot;
use crate::ids::BlockId;
use crate::shared::{Dropped, Shared};
use crate::sync::{Arc, Ordering};
use crate::table::BlockTable;

/// Keeps a prefix alive, from the root to its end, without being a sequence.
///
/// Dropping it takes neither the manager nor its lock and may happen on any thread.
#[derive(Debug)]
pub struct Pin {
    shared: Arc<Shared>,
    /// Granted while recording: its number there. Then the manager lets go of the blocks, at its next
    /// call, so that a replay can do it at the same place.
    serial: Option<u64>,
    /// What a token after the prefix sees.
    table: BlockTable,
    num_blocks: usize,
    end: Spot,
    num_tokens: usize,
}

impl Pin {
    /// Holds each block of `table` once more. Called by the manager, under its lock.
    pub(crate) fn over(
        shared: &Arc<Shared>,
        serial: Option<u64>,
        table: BlockTable,
        end: Spot,
        num_tokens: usize,
    ) -> Self {
        let num_blocks = table.len();
        shared
            .pin_refs_ceiling
            .fetch_add(num_blocks, Ordering::AcqRel);
        table.blocks().for_each(|block| shared.hold(block));
        shared
            .pin_refs_floor
            .fetch_add(num_blocks, Ordering::AcqRel);
        Self {
            shared: Arc::clone(shared),
            serial,
            table,
            num_blocks,
            end,
            num_tokens,
        }
    }

    /// The blocks kept, first to last; of each block of tokens, those of all layer groups.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        self.table.blocks()
    }

    /// How many these are.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub(crate) fn table(&self) -> &BlockTable {
        &self.table
    }

    /// Tokens covered: a multiple of the block size.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn manager(&self) -> u32 {
        self.shared.manager
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial.expect("a recorded pin")
    }

    pub(crate) fn end(&self) -> Option<Spot> {
        self.end.some()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let shared = &self.shared;
        if let Some(serial) = self.serial {
            if self.num_blocks > 0 {
                shared.post([Dropped::Pin(serial, self.blocks().collect())]);
            }
            return;
        }
        shared
            .pin_refs_floor
            .fetch_sub(self.num_blocks, Ordering::AcqRel);
        // Last block first, so that a prefix outlives its continuations in the queue.
        let released: Vec<_> = self
            .blocks()
            .rev()
            .filter(|&block| shared.let_go(block))
            .collect();
        if !released.is_empty() {
            shared.post([Dropped::Blocks(released)]);
        }
        shared
            .pin_refs_ceiling
            .fetch_sub(self.num_blocks, Ordering::AcqRel);
    }
}
