//! The validator: recounts everything from scratch and reports the first difference.

use std::collections::{HashMap, HashSet};

use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::queue::List;
use crate::sequence::Sequence;

impl BlockManager {
    /// Recounts references, states, the queue, the tree and the plan. O(blocks + tokens).
    ///
    /// Leases may be dropped by other threads meanwhile; everything else must stand still.
    ///
    /// # Errors
    /// The first difference found, in words: a bug in this crate.
    pub fn check(&mut self) -> Result<(), String> {
        self.read_mail();
        self.queue.check()?;
        let held = self.check_sequences()?;
        self.check_blocks(&held)?;
        let mut roots: HashMap<NodeIdx, u32> = HashMap::new();
        for seq in self.sequences.iter() {
            *roots.entry(seq.root).or_default() += 1;
        }
        self.tree.check(&roots)?;
        self.check_plans()
    }

    /// Table entries per block.
    fn check_sequences(&self) -> Result<Vec<u32>, String> {
        let mut held = vec![0_u32; self.config.num_blocks];
        let (block_size, groups) = (self.config.block_size, self.groups.len());
        for seq in self.sequences.iter() {
            let id = seq.id;
            let blocks = seq.table.iter().copied().filter_map(BlockId::some);
            let distinct: HashSet<BlockId> = blocks.clone().collect();
            if distinct.len() != blocks.clone().count() {
                return Err(format!(
                    "sequence {id} holds a block twice: {:?}",
                    seq.table
                ));
            }
            for block in blocks {
                held[block.at()] += 1;
            }
            let rows = seq.table.len() / groups;
            if seq.computed > seq.tokens.len() || seq.computed > rows * block_size {
                return Err(format!(
                    "sequence {id}: {} computed of {} tokens in {rows} rows",
                    seq.computed,
                    seq.tokens.len(),
                ));
            }
            self.check_windows(seq)?;
            let mut node = seq.chain.tip;
            for row in (0..seq.chain.blocks).rev() {
                let tokens = seq.tokens.get(row * block_size..(row + 1) * block_size);
                let is_its = |group: usize| match seq.table.get(row * groups + group) {
                    Some(&block) if block != BlockId::NONE => {
                        self.tree.block(node, group) == Some(block)
                            && self.blocks[block.at()].node == node
                    }
                    gap => gap.is_some(),
                };
                if !(0..groups).all(is_its)
                    || Some(self.tree.tokens(node)) != tokens
                    || seq.hashes.get(row) != Some(&self.tree.hash(node))
                {
                    return Err(format!("sequence {id}: row {row} is not its content's"));
                }
                node = self
                    .tree
                    .parent(node)
                    .ok_or("a chain longer than its tree")?;
            }
            if node != seq.root {
                return Err(format!("sequence {id} does not hang from its namespace"));
            }
            if seq.dropped && seq.planned == 0 {
                return Err(format!("sequence {id} was dropped and lives on"));
            }
        }
        Ok(held)
    }

    /// Gaps only before windows, every row that a token to come sees.
    fn check_windows(&self, seq: &Sequence) -> Result<(), String> {
        let groups = self.groups.len();
        let rows = (seq.ahead / self.config.block_size).max(seq.chain.blocks);
        for (at, block) in seq.table.iter().enumerate() {
            let (row, group) = (at / groups, at % groups);
            if *block == BlockId::NONE && row >= self.groups.first_row(group, rows) {
                return Err(format!(
                    "sequence {} of {} computed tokens has no block in row {row} of group {group}",
                    seq.id, seq.computed
                ));
            }
        }
        Ok(())
    }

    fn check_blocks(&self, held: &[u32]) -> Result<(), String> {
        let mut fenced: HashMap<BlockId, u32> = HashMap::new();
        for block in self.open.iter().flat_map(|plan| &plan.fenced) {
            *fenced.entry(*block).or_default() += 1;
        }
        let (_, most) = self.shared.lease_refs();
        let (mut active, mut idle, mut by_leases) = (0, 0, 0);
        for (index, block) in self.blocks.iter().enumerate() {
            let id = BlockId::new(index);
            let (refs, queued) = (self.refs_of(id), self.queue.contains(id));
            if block.seq_refs != held[index] {
                return Err(format!(
                    "{id:?} has seq_refs {}, counted {}",
                    block.seq_refs, held[index]
                ));
            }
            let fences = fenced.get(&id).copied().unwrap_or(0);
            if block.fences != fences {
                return Err(format!(
                    "{id:?} has {} fences, counted {fences}",
                    block.fences
                ));
            }
            let Some(leases) = refs.checked_sub(held[index] + fences) else {
                let counted = held[index] + fences;
                return Err(format!(
                    "{id:?} has refs {refs}, counted {counted} without leases"
                ));
            };
            by_leases += leases as usize;
            if queued && refs > 0 {
                return Err(format!("{id:?} is in the queue with refs {refs}"));
            }
            if queued && (block.list == List::Free) != (block.node == NodeIdx::NONE) {
                return Err(format!(
                    "{id:?} with {:?} waits in {:?}",
                    block.node, block.list
                ));
            }
            active += usize::from(held[index] > 0);
            idle += usize::from(queued && block.node != NodeIdx::NONE);
            if let Some(node) = block.node.some() {
                if self.tree.block(node, usize::from(block.group)) != Some(id) {
                    return Err(format!("{id:?} holds {node:?}, which names another block"));
                }
                if self.tree.priority(node) != block.priority {
                    return Err(format!("{id:?} has {:?} priority", block.priority));
                }
                if refs == 0 && !self.is_ready(id) {
                    return Err(format!("{id:?} is to be computed and nobody holds it"));
                }
            }
        }
        let (least, _) = self.shared.lease_refs();
        if by_leases > most || by_leases < least {
            return Err(format!(
                "leases hold {by_leases} blocks, counted {least} to {most}"
            ));
        }
        let counted = (
            self.active,
            self.queue.len() - self.queue.len_of(List::Free),
        );
        if (active, idle) != counted {
            return Err(format!(
                "ledger: {counted:?} active and idle, counted {active} and {idle}"
            ));
        }
        Ok(())
    }

    fn check_plans(&self) -> Result<(), String> {
        let mut held: HashMap<u32, (u8, usize, u64)> = HashMap::new();
        for plan in &self.open {
            let slots: HashSet<u32> = plan.entries.iter().map(|entry| entry.slot).collect();
            if slots.len() != plan.entries.len() {
                return Err(format!("{:?} holds a sequence twice", plan.key));
            }
            let tokens: usize = plan.entries.iter().map(|entry| entry.len).sum();
            let samples: usize = plan.entries.iter().map(|entry| entry.rows()).sum();
            if (tokens, samples) != (plan.num_tokens, plan.num_samples) {
                return Err(format!(
                    "the plan has {} tokens and {} samples, counted {tokens} and {samples}",
                    plan.num_tokens, plan.num_samples
                ));
            }
            for entry in &plan.entries {
                let seq = self.sequences.at(entry.slot);
                let rows = seq.table.len() / self.groups.len();
                if rows * self.config.block_size < entry.start + entry.len {
                    return Err(format!("sequence {} is planned without blocks", seq.id));
                }
                let counts = held.entry(entry.slot).or_default();
                counts.0 += 1;
                counts.1 += usize::from(entry.samples);
                counts.2 = plan.key.serial;
            }
        }
        let none = (0, 0, 0);
        for (slot, seq) in self.sequences.iter_slots() {
            let counted = held.get(&slot).copied().unwrap_or(none);
            if counted != (seq.planned, seq.pending, seq.last_plan) {
                return Err(format!(
                    "sequence {} is in {} plans with {} pending tokens, counted {counted:?}",
                    seq.id, seq.planned, seq.pending
                ));
            }
            if seq.planned == 0 && seq.ahead != seq.computed {
                return Err(format!("sequence {} is ahead without a plan", seq.id));
            }
        }
        Ok(())
    }
}
