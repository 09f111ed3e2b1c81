//! Operations without a plan, for an engine that runs its own steps: each is over before the next call.

use std::collections::HashSet;

use kv_core::{Error, Extend, SeqKey};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::World;

/// Where its blocks are: by logical block and layer group.
type Table = Vec<Vec<Option<usize>>>;

impl World {
    pub(super) fn chosen(&self, i: usize) -> Option<(SeqKey, u64)> {
        let i = Self::pick(&self.handles, i)?;
        Some((self.handles[i].key(), self.handles[i].id()))
    }

    pub(super) fn reuse_cached(&mut self, i: usize) -> Result<(), TestCaseError> {
        let Some((key, id)) = self.chosen(i) else {
            return Ok(());
        };
        let answer = self.manager.reuse_cached(key);
        if self.busy(id) {
            prop_assert_eq!(answer, Err(Error::InPlan { sequence: id }));
            return Ok(());
        }
        let reused = answer.expect("at rest");
        *self.counts.entry("reused_tokens").or_default() += reused as u64;
        if self.exact {
            prop_assert_eq!(reused, self.model.reuse_cached(id));
        }
        if reused > 0 && self.model.state.is_some() {
            self.continue_snapshot(key, id, reused)?;
        }
        self.read_reused(key, id)
    }

    /// The caller copies the snapshot to the running state.
    fn continue_snapshot(&mut self, key: SeqKey, id: u64, at: usize) -> Result<(), TestCaseError> {
        let pin = self.manager.pin(key).expect("live");
        if self.exact {
            self.model.pin(self.next_pin, id);
        }
        let (position, blocks) = pin.snapshot();
        prop_assert_eq!(position, at);
        let seq = &self.model.seqs[&id];
        let state = self.model.kv_of(id, &seq.tokens[..at]);
        for (part, block) in blocks.iter().enumerate() {
            let read = self.states[block.get() as usize].as_ref();
            let expected = (state.clone(), part);
            prop_assert_eq!(read, Some(&expected), "sequence {}", id);
        }
        self.running.insert(id, state.1);
        drop(pin);
        self.model.drop_pin(self.next_pin);
        self.next_pin += 1;
        Ok(())
    }

    /// Keeps the running state, and copies it.
    pub(super) fn keep_snapshot(&mut self, i: usize) -> Result<(), TestCaseError> {
        let Some((key, id)) = self.chosen(i) else {
            return Ok(());
        };
        let computed = self.manager.view(key).expect("live").num_computed_tokens;
        let answer = self.manager.keep_snapshot(key);
        let (sequence, size) = (id, self.model.block_size);
        let refused = if self.busy(id) {
            Some(Error::InPlan { sequence })
        } else if computed == 0 || !computed.is_multiple_of(size) {
            Some(Error::SnapshotPosition { sequence, computed })
        } else {
            None
        };
        if let Some(error) = refused {
            prop_assert_eq!(answer, Err(error));
            return Ok(());
        }
        let answer = answer.expect("at rest");
        if self.exact {
            prop_assert_eq!(&answer, &self.model.keep_snapshot(id));
        }
        self.check_all_evicted()?;
        let Extend::Extended { blocks, .. } = answer else {
            return Ok(());
        };
        if !blocks.is_empty() {
            *self.counts.entry("kept_snapshots").or_default() += 1;
            let seq = &self.model.seqs[&id];
            let state = self.model.kv_of(id, &seq.tokens[..computed]).1;
            prop_assert_eq!(self.running.get(&id), Some(&state));
        }
        for (part, block) in blocks.iter().enumerate() {
            let state = (self.model.seqs[&id].namespace, self.running[&id].clone());
            let block = block.get() as usize;
            self.states[block] = Some((state, part));
            self.kv[block * size..][..size].fill(None);
        }
        Ok(())
    }

    /// The next token reads what a sequence has reused.
    pub(super) fn read_reused(&self, key: SeqKey, id: u64) -> Result<(), TestCaseError> {
        let view = self.manager.view(key).expect("live");
        let (computed, indices) = (view.num_computed_tokens, view.num_registered_blocks);
        // A full hit holds the block of the token that it computes again.
        let end = computed.max((indices * self.model.block_size).min(computed + 1));
        self.read_positions(key, id, end)
    }

    pub(super) fn extend(&mut self, i: usize, num_tokens: usize) -> Result<(), TestCaseError> {
        let Some((key, id)) = self.chosen(i) else {
            return Ok(());
        };
        let (before, held) = (self.table(key), self.held_by_plans());
        let answer = self.manager.extend(key, num_tokens);
        if self.busy(id) {
            prop_assert_eq!(answer, Err(Error::InPlan { sequence: id }));
            prop_assert_eq!(self.table(key), before);
            return Ok(());
        }
        let answer = answer.expect("at rest");
        if self.exact {
            prop_assert_eq!(&answer, &self.model.extend(id, num_tokens));
        }
        self.check_all_evicted()?;
        let Extend::Extended { blocks, copies } = answer else {
            prop_assert_eq!(self.table(key), before);
            return Ok(());
        };
        let size = self.model.block_size;
        for (from, to) in &copies {
            let (from, to) = (from.get() as usize, to.get() as usize);
            for offset in 0..size {
                self.kv[to * size + offset] = self.kv[from * size + offset].clone();
            }
        }
        let table = self.table(key);
        let new = table[before.len()..].iter().flatten().flatten();
        let given = blocks.iter().map(|block| block.get() as usize);
        prop_assert!(new.copied().eq(given), "the blocks that are new");
        let copies = copies.iter().map(|copy| copy.1);
        for block in blocks.iter().copied().chain(copies) {
            let block = block.get() as usize;
            prop_assert!(!held.contains(&block), "a step reads block {block}");
        }
        Ok(())
    }

    /// The blocks of the sequences in open steps.
    fn held_by_plans(&self) -> HashSet<usize> {
        let planned = self.handles.iter().filter(|handle| self.busy(handle.id()));
        let tables = planned.map(|handle| self.table(handle.key()));
        tables.flatten().flatten().flatten().collect()
    }

    /// Computes what there are slots for, or less, or more than may be.
    pub(super) fn publish(&mut self, i: usize, how: u8) -> Result<(), TestCaseError> {
        let Some((key, id)) = self.chosen(i) else {
            return Ok(());
        };
        let size = self.model.block_size;
        let view = self.manager.view(key).expect("live");
        let (computed, known) = (view.num_computed_tokens, view.tokens.len());
        let written_from = (view.num_registered_blocks * size).max(computed);
        let table = self.table(key);
        let slots = table.len() * size;
        let tokens: Vec<u32> = (0..how % 3).map(|at| u32::from(how + at) % 3).collect();
        let known = known + tokens.len();
        let num_tokens = match how % 8 {
            few @ 0..2 => usize::from(few),
            2 => usize::from(how) % 7,
            _ => slots.min(known).saturating_sub(computed),
        };
        let end = computed + num_tokens;
        let answer = self.manager.publish(key, num_tokens, &tokens);
        let refused = if self.busy(id) {
            Some(Error::InPlan { sequence: id })
        } else if end > slots {
            let sequence = id;
            Some(Error::NotExtended {
                sequence,
                end,
                slots,
            })
        } else {
            let sequence = id;
            (end > known).then_some(Error::NotKnown {
                sequence,
                end,
                known,
            })
        };
        if let Some(error) = refused {
            prop_assert_eq!(answer, Err(error));
            prop_assert_eq!(self.table(key), table);
            return Ok(());
        }
        let shared = |error: &Error| matches!(error, Error::SharedBlock { .. });
        if num_tokens > 0 && self.exact {
            let block = self
                .model
                .held_by_others(id, computed)
                .first()
                .map(|copy| copy.2);
            let refused = block.map(|block| Error::SharedBlock {
                sequence: id,
                block,
            });
            prop_assert_eq!(answer.as_ref().err(), refused.as_ref());
        }
        if answer.as_ref().is_err_and(shared) {
            prop_assert_eq!(self.table(key), table);
            return Ok(());
        }
        *self.counts.entry("published_tokens").or_default() += num_tokens as u64;
        let remappings = answer.expect("slots and tokens are there");
        if self.exact {
            prop_assert_eq!(remappings, self.model.publish(id, num_tokens, &tokens));
        } else {
            let seq = self.model.seqs.get_mut(&id).expect("live");
            seq.extend(&tokens);
        }
        let seq = &self.model.seqs[&id];
        if self.model.state.is_some() && num_tokens > 0 {
            let before = self.running.get(&id).filter(|_| computed > 0);
            let before = before.map_or(&[][..], Vec::as_slice);
            let state = self.model.kv_of(id, &seq.tokens[..end]).1;
            prop_assert_eq!(before, &state[..computed], "the state of {}", id);
            self.running.insert(id, state);
        }
        for position in written_from..end {
            for block in table[position / size].iter().flatten() {
                self.states[*block] = None;
                let kv = self.model.kv_of(id, &seq.tokens[..=position]);
                self.kv[block * size + position % size] = Some(kv);
            }
        }
        self.read_positions(key, id, end)
    }

    fn table(&self, key: SeqKey) -> Table {
        let view = self.manager.view(key).expect("live");
        let groups: Vec<Vec<_>> = (0..self.model.groups.len())
            .map(|group| view.table(group).collect())
            .collect();
        let index = |index: usize| {
            let blocks = groups.iter().map(|blocks| blocks[index]);
            blocks
                .map(|block| block.map(|block| block.get() as usize))
                .collect()
        };
        (0..groups[0].len()).map(index).collect()
    }

    /// The KV of the first `end` positions that the next token reads.
    fn read_positions(&self, key: SeqKey, id: u64, end: usize) -> Result<(), TestCaseError> {
        let (size, seq, table) = (
            self.model.block_size,
            &self.model.seqs[&id],
            self.table(key),
        );
        for (group, window) in self.model.groups.iter().enumerate() {
            let first = window.map_or(0, |window| (end + 1).saturating_sub(window));
            for position in first..end {
                let block = table[position / size][group].expect("no window has slid past it");
                let read = self.kv[block * size + position % size].as_ref();
                let expected = self.model.kv_of(id, &seq.tokens[..=position]);
                prop_assert_eq!(
                    read,
                    Some(&expected),
                    "sequence {} position {}",
                    id,
                    position
                );
            }
        }
        Ok(())
    }
}
