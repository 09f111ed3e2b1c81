//! Blocks: their contents, their places in the queue, their holders, the ledger.

use std::collections::{HashMap, HashSet};

use super::ensure;
use crate::blocks::Block;
use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::queue::List;

/// What leases hold at least and at most.
type LeaseRefs = (usize, usize);

impl BlockManager {
    fn each_block(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.blocks.len()).map(BlockId::new)
    }

    /// A content names the block that holds it, and the block names the content.
    pub(super) fn check_contents(&self) -> Result<(), String> {
        for node in self.tree.held() {
            for group in 0..self.groups.len() {
                let Some(id) = self.tree.block(node, group) else {
                    continue;
                };
                let block = self.blocks.get(id.at());
                let names = block.map(|block| (block.node, usize::from(block.group)));
                ensure(names == Some((node, group)), || {
                    format!("{node:?} is in {id:?} for group {group}, which holds {names:?}")
                })?;
            }
        }
        for id in self.each_block() {
            let block = &self.blocks[id.at()];
            let (node, group) = (block.node, usize::from(block.group));
            ensure(group < self.groups.len(), || {
                format!("{id:?} is of group {group}")
            })?;
            if node == NodeIdx::NONE {
                continue;
            }
            let named = self.tree.lives(node) && self.tree.block(node, group) == Some(id);
            ensure(named, || {
                format!("{id:?} holds {node:?}, which names another block")
            })?;
        }
        Ok(())
    }

    /// Every block waits in the list that it says, and in the right one.
    pub(super) fn check_queue(&self) -> Result<(), String> {
        for list in [List::Free].into_iter().chain(List::IDLE) {
            for id in self.queue.iter(list) {
                let block = &self.blocks[id.at()];
                let right = match block.node.some() {
                    None => List::Free,
                    Some(_) => self.policy.list(block.used_again),
                };
                ensure(block.list == list && list == right, || {
                    let says = block.list;
                    format!("{id:?} waits in {list:?}, says {says:?}, should in {right:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Holders and ledger. `held`: table entries per block; `before`: what leases held when the mail
    /// was looked at; `posted`: the blocks that it names, which the manager is yet to take back.
    pub(super) fn check_blocks(
        &self,
        held: &[u32],
        before: LeaseRefs,
        posted: &HashSet<BlockId>,
    ) -> Result<(), String> {
        let fences = self.fences()?;
        let (mut active, mut by_leases) = (0, 0);
        let mut lost = None;
        for id in self.each_block() {
            let leases = self.shared.lease_refs_of(id);
            let held = (held[id.at()], fences.get(&id).copied().unwrap_or(0));
            let refs = held.0 + held.1 + leases;
            self.check_refs(id, held)?;
            let queued = self.queue.contains(id);
            let named = self.blocks[id.at()].node != NodeIdx::NONE;
            ensure(!queued || refs == 0, || {
                format!("{id:?} is in the queue with refs {refs}")
            })?;
            ensure(refs > 0 || !named || self.is_ready(id), || {
                format!("{id:?} is to be computed and nobody holds it")
            })?;
            if refs == 0 && !queued && !posted.contains(&id) {
                lost = Some(id);
            }
            active += usize::from(held.0 > 0);
            by_leases += leases as usize;
        }
        check_leases(by_leases, lost, before, self.shared.lease_refs())?;
        ensure(active == self.active, || {
            format!("ledger: {} active, counted {active}", self.active)
        })
    }

    /// How often open plans hold each block.
    fn fences(&self) -> Result<HashMap<BlockId, u32>, String> {
        let mut fences = HashMap::new();
        for block in self.open.iter().flat_map(|plan| &plan.fenced) {
            ensure(block.at() < self.blocks.len(), || {
                format!("a plan holds {block:?}: there is none")
            })?;
            *fences.entry(*block).or_default() += 1;
        }
        Ok(fences)
    }

    /// `held`: by sequences and by plans, counted.
    fn check_refs(&self, id: BlockId, held: (u32, u32)) -> Result<(), String> {
        let Block {
            seq_refs, fences, ..
        } = self.blocks[id.at()];
        ensure(seq_refs == held.0, || {
            format!("{id:?} has seq_refs {seq_refs}, counted {}", held.0)
        })?;
        ensure(fences == held.1, || {
            format!("{id:?} has {fences} fences, counted {}", held.1)
        })
    }
}

/// Leases hold `counted` references; a block is `lost` that nobody holds and that
/// is not in the queue. While a lease is being dropped its blocks may look so.
pub(super) fn check_leases(
    counted: usize,
    lost: Option<BlockId>,
    before: LeaseRefs,
    after: LeaseRefs,
) -> Result<(), String> {
    let (least, most) = (after.0, before.1);
    ensure(least <= counted && counted <= most, || {
        format!("leases hold {counted} blocks, counted {least} to {most}")
    })?;
    match lost {
        Some(block) if least == most => Err(format!("{block:?} is held by nobody and not queued")),
        _ => Ok(()),
    }
}
