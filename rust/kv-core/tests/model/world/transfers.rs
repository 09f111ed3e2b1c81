//! KV from outside the pool, and KV that leaves it: transfers that end late, in any order, wholly, partly or not at
//! all; blocks that are evicted and copied meanwhile.

use kv_core::{Error, Evicted, Reserve, Transfer};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::super::{Answer, op, stamped};
use super::World;

/// A transfer, its sequence, and the tokens whose KV it brings.
pub(super) struct Load {
    pub(super) transfer: Transfer,
    sequence: u64,
    namespace: u8,
    tokens: Vec<u32>,
}

const MAX_LOADS: usize = 3;
const MAX_VICTIMS: usize = 2;

impl World {
    pub(super) fn reserve(&mut self, i: usize, len: usize) -> Result<(), TestCaseError> {
        let Some((key, id)) = self.chosen(i) else {
            return Ok(());
        };
        if self.loads.len() == MAX_LOADS {
            self.drop_transfer(0)?;
        }
        let (seq, busy) = (&self.model.seqs[&id], self.busy(id));
        let num_tokens = match len % 4 {
            0 => len / 4 % (seq.tokens.len() + 2),
            _ => seq.tokens.len(),
        };
        let (namespace, tokens) = (seq.namespace, seq.tokens.clone());
        let answer = self.manager.reserve(key, num_tokens);
        if busy {
            let refused = matches!(answer, Err(Error::InPlan { sequence }) if sequence == id);
            prop_assert!(refused, "{:?}", answer);
            return Ok(());
        }
        let answer = answer.expect("at rest");
        if self.exact {
            let said = match &answer {
                Reserve::Reserved(transfer) => {
                    let blocks = transfer.blocks().iter();
                    let blocks = blocks.map(|at| (at.index, at.group, at.block.get()));
                    Answer::Reserved(blocks.collect())
                }
                &Reserve::NoRoom { needed, available } => Answer::NoRoom(needed, available),
                &Reserve::Loading { transfer } => Answer::Loading(transfer),
                Reserve::NotNeeded => Answer::NotNeeded,
            };
            prop_assert_eq!(said, self.model.reserve(id, num_tokens));
        }
        if let Reserve::Reserved(transfer) = answer {
            *self.counts.entry("transfers").or_default() += 1;
            if self.exact {
                let indices = self.model.rows_of(transfer.key().serial());
                prop_assert_eq!(transfer.indices(), indices);
            }
            self.loads.push(Load {
                transfer,
                sequence: id,
                namespace,
                tokens,
            });
        } else {
            *self.counts.entry("awaited_transfers").or_default() +=
                u64::from(matches!(answer, Reserve::Loading { .. }));
        }
        Ok(())
    }

    /// The bytes of the first `num_blocks` indices arrive; in the other blocks there is anything.
    fn write(&mut self, load: &Load, num_blocks: usize) {
        let size = self.model.block_size;
        let end = load.transfer.indices().start + num_blocks;
        let of_state = self.model.groups.len();
        let version = self.model.weights_version;
        let tokens = load.tokens.iter();
        let tokens: Vec<u32> = tokens.map(|&token| stamped(token, version)).collect();
        let mut parts = 0..;
        for loading in load.transfer.blocks() {
            self.states[loading.block.get() as usize] = None;
            if loading.group == of_state {
                let state = (load.namespace, tokens[..end * size].to_vec());
                let part = parts.next().expect("few blocks");
                let is_filled = num_blocks == load.transfer.indices().len();
                self.states[loading.block.get() as usize] = is_filled.then_some((state, part));
                self.kv[loading.block.get() as usize * size..][..size].fill(None);
                continue;
            }
            for offset in 0..size {
                let position = loading.index * size + offset;
                let kv = match loading.index < end {
                    true => (load.namespace, tokens[..=position].to_vec()),
                    false => (u8::MAX, Vec::new()),
                };
                self.kv[loading.block.get() as usize * size + offset] = Some(kv);
            }
        }
    }

    pub(super) fn complete(&mut self, i: usize, how: u8) -> Result<(), TestCaseError> {
        let Some(i) = Self::pick(&self.loads, i) else {
            return Ok(());
        };
        let load = self.loads.swap_remove(i);
        let (key, reserved) = (load.transfer.key(), load.transfer.indices().len());
        let num_blocks = match how % 4 {
            0 => usize::from(how / 4) % (reserved + 1),
            1 if how > 200 => 0,
            _ => reserved,
        };
        self.write(&load, num_blocks);
        let (transfer, wrong) = (key.serial(), reserved + 1);
        let refused = Err(Error::TransferBlocks {
            transfer,
            reserved,
            num_blocks: wrong,
        });
        prop_assert_eq!(self.manager.complete(key, wrong), refused);
        let reused = match num_blocks {
            0 => self.manager.fail(key).map(|()| 0),
            _ => self.manager.complete(key, num_blocks),
        };
        let reused = reused.expect("open");
        if self.exact {
            prop_assert_eq!(reused, self.model.end_load(transfer, num_blocks));
        }
        let ended = Err(Error::TransferEnded { transfer });
        prop_assert_eq!(self.manager.complete(key, 0), ended.clone());
        prop_assert_eq!(self.manager.abandon(key).map(|()| 0), ended);
        let mut handles = self.handles.iter();
        let sequence = handles.find(|handle| handle.id() == load.sequence);
        match sequence.map(|handle| handle.key()) {
            Some(key) if !self.busy(load.sequence) => self.read_reused(key, load.sequence),
            _ => Ok(()),
        }
    }

    pub(super) fn drop_transfer(&mut self, i: usize) -> Result<(), TestCaseError> {
        if let Some(i) = Self::pick(&self.loads, i) {
            let load = self.loads.swap_remove(i);
            self.write(&load, 0);
            if self.exact {
                self.model.end_load(load.transfer.key().serial(), 0);
            }
        }
        Ok(())
    }

    pub(super) fn abandon(&mut self, i: usize) -> Result<(), TestCaseError> {
        if let Some(i) = Self::pick(&self.loads, i) {
            let key = self.loads[i].transfer.key();
            prop_assert_eq!(self.manager.abandon(key), Ok(()));
            if self.exact {
                self.model.abandon(key.serial());
                prop_assert!(!self.model.is_awaited(key.serial()));
            }
        }
        Ok(())
    }

    /// Evicts some blocks ahead of need; or stops copying the oldest ones.
    pub(super) fn evict(&mut self, count: usize) -> Result<(), TestCaseError> {
        if count == 0 || self.victims.len() == MAX_VICTIMS {
            if !self.victims.is_empty() {
                let (number, evicted, pin) = self.victims.remove(0);
                self.check_evicted(&evicted)?;
                self.model.drop_pin(number);
                drop(pin);
            }
            return Ok(());
        }
        let (evicted, pin) = self.manager.evict(count);
        let blocks: Vec<u32> = pin.blocks().map(|block| block.get()).collect();
        prop_assert!(evicted.len() <= blocks.len() && blocks.len() <= count);
        if self.exact {
            let all = evicted.len() == blocks.len();
            prop_assert!(all || self.manager.stats().collisions > 0);
            prop_assert_eq!(&blocks, &self.model.evict(self.next_pin, count));
        }
        self.check_evicted(&evicted)?;
        self.victims.push((self.next_pin, evicted, pin));
        self.next_pin += 1;
        Ok(())
    }

    /// Evicted blocks are intact until they are overwritten.
    pub(super) fn check_all_evicted(&mut self) -> Result<(), TestCaseError> {
        let evicted = self.manager.take_evicted();
        *self.counts.entry("kept_blocks").or_default() += evicted.len() as u64;
        for Evicted { block, .. } in &evicted {
            let kv = self.kv[block.get() as usize * self.model.block_size].as_ref();
            let version = kv.map(|(_, tokens)| tokens[0] >> 16);
            prop_assert_eq!(version, Some(self.model.weights_version));
        }
        self.check_evicted(&evicted)
    }

    fn check_evicted(&mut self, evicted: &[Evicted]) -> Result<(), TestCaseError> {
        let (size, collisions) = (self.model.block_size, self.manager.stats().collisions);
        for Evicted {
            block,
            group,
            hash,
            parent,
            tokens,
            namespace,
            switch,
        } in evicted
        {
            prop_assert!(*group < self.model.groups.len());
            let kv = &self.kv[block.get() as usize * size..][..size];
            let last = kv[size - 1].as_ref();
            let (of, prefix) = last.expect("it was computed");
            let version = prefix[0] >> 16;
            let prefix: Vec<u32> = prefix.iter().map(|&token| token & 0xffff).collect();
            prop_assert_eq!(
                (&namespace[..], &op::raw(&prefix[prefix.len() - size..])),
                (&[*of][..], tokens)
            );
            for (offset, kv) in kv.iter().enumerate() {
                let kv = kv.as_ref().expect("it was computed");
                let tokens = &prefix[..prefix.len() - size + offset + 1];
                let stamped = tokens.iter().map(|&token| stamped(token, version));
                prop_assert_eq!(&kv.1, &stamped.collect::<Vec<u32>>());
            }
            let hasher = self.manager.hasher();
            let mut hashes = vec![hasher.root(namespace)];
            let expected = op::switch_in(&prefix).map(|(at, to)| (at, vec![to]));
            let given = switch.as_ref().map(|(at, to)| (*at, to.to_vec()));
            prop_assert_eq!(given, expected);
            for (index, tokens) in op::raw(&prefix).chunks(size).enumerate() {
                let mut parent = hashes[hashes.len() - 1];
                if let Some((at, to)) = switch
                    && at / size == index
                {
                    parent = hasher.switch(parent, (at % size) as u32, to);
                }
                hashes.push(hasher.child(parent, tokens));
            }
            let before = hashes[hashes.len() - 2];
            prop_assert_eq!(Some(hash), hashes.last());
            let expected = (hashes.len() > 2).then_some(before);
            prop_assert!(*parent == expected || collisions > 0 && parent.is_none());
        }
        Ok(())
    }
}
