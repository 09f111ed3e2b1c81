//! A new version of the weights: what earlier ones computed serves no sequence that begins later.

use super::State;
use crate::error::Error;
use crate::ids::BlockId;

impl State {
    /// Ends the cache of the current weights. Sequences with computed tokens go on over their blocks, and register none
    /// from now on. Returns the next version.
    pub(crate) fn advance_weights_version(&mut self) -> Result<u32, Error> {
        let (plans, transfers) = (self.steps.num_open(), self.transfers.open.len());
        if plans + transfers > 0 {
            return Err(Error::WeightsInUse { plans, transfers });
        }
        let mut live: Vec<(u64, u32)> = { self.seqs.enumerate() }
            .map(|(seq_idx, seq)| (seq.id, seq_idx))
            .collect();
        live.sort_unstable();
        for &(_, seq_idx) in &live {
            self.unregister(seq_idx);
        }
        let version = self.pool.advance_weights_version();
        for &(_, seq_idx) in &live {
            let seq = self.seqs.at_mut(seq_idx);
            if seq.computed == 0 {
                seq.begin_with(version);
                let slots: Vec<BlockId> = seq.table.blocks().collect();
                self.pool.stamp(&slots);
            }
        }
        Ok(version)
    }

    /// Unregisters the blocks of a sequence. Those of tokens that are yet to be computed are released.
    fn unregister(&mut self, seq_idx: u32) {
        let seq = self.seqs.at(seq_idx);
        let (end, registered) = (self.groups.end_of(seq.computed), seq.registered.end());
        let full = self.groups.index_of(seq.computed);
        let (seq, pool) = (self.seqs.at_mut(seq_idx), &mut self.pool);
        if end < registered {
            seq.change_table(|table| {
                table.take_indices(end..registered, |block| pool.release(block));
            });
        }
        seq.unregister(full, end);
        self.slide(seq_idx);
    }
}
