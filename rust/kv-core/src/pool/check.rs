//! The validator's part that sees into the pool: contents and their blocks, the queue, holders, the
//! ledger.

use std::collections::{HashMap, HashSet};

use super::{Block, Pool};
use crate::check::ensure;
use crate::contents::Spot;
use crate::ids::BlockId;
use crate::queue::List;

/// What leases hold at least and at most.
pub(crate) type LeaseRefs = (usize, usize);

impl Pool {
    fn each(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.map(|(index, block)| (BlockId::new(index), block))
    }

    /// Recounts everything. `held`: table entries per block; `fences`: by open plans; `before`: what
    /// leases held when the mail was looked at; `posted`: the blocks that it names, which the manager
    /// is yet to take back.
    pub(crate) fn check(
        &self,
        held: &[u32],
        fences: &HashMap<BlockId, u32>,
        before: LeaseRefs,
        posted: &HashSet<BlockId>,
    ) -> Result<(), String> {
        self.queue.check()?;
        self.check_contents()?;
        self.check_queue()?;
        let (mut active, mut by_leases) = (0, 0);
        let mut lost = None;
        for (id, block) in self.each() {
            let leases = self.shared.lease_refs_of(id);
            let fenced = fences.get(&id).copied().unwrap_or(0);
            let (says, counted) = ((block.seq_refs, block.fences), (held[id.at()], fenced));
            ensure(says == counted, || {
                format!("{id:?} has seq_refs and fences {says:?}, counted {counted:?}")
            })?;
            let refs = counted.0 + counted.1 + leases;
            let queued = self.queue.contains(id);
            ensure(!queued || refs == 0, || {
                format!("{id:?} is in the queue with refs {refs}")
            })?;
            let is_there = block.content == Spot::NONE || self.is_ready(id);
            ensure(refs > 0 || is_there, || {
                format!("{id:?} is to be computed and nobody holds it")
            })?;
            if refs == 0 && !queued && !posted.contains(&id) {
                lost = Some(id);
            }
            active += usize::from(held[id.at()] > 0);
            by_leases += leases as usize;
        }
        check_leases(by_leases, lost, before, self.shared.lease_refs())?;
        ensure(active == self.active, || {
            format!("ledger: {} active, counted {active}", self.active)
        })
    }

    /// A content names the block that holds it, and the block names the content.
    fn check_contents(&self) -> Result<(), String> {
        let groups = self.contents.groups();
        for spot in self.contents.held() {
            for group in 0..groups {
                let Some(id) = self.contents.block(spot, group) else {
                    continue;
                };
                let block = self.blocks.get(id.at());
                let names = block.map(|block| (block.content, usize::from(block.group)));
                ensure(names == Some((spot, group)), || {
                    format!("{spot:?} is in {id:?} for group {group}, which holds {names:?}")
                })?;
            }
        }
        for (id, block) in self.each() {
            let (content, group) = (block.content, usize::from(block.group));
            ensure(group < groups, || format!("{id:?} is of group {group}"))?;
            if content == Spot::NONE {
                continue;
            }
            let named = content.rows > 0
                && self.contents.lives(content)
                && self.contents.block(content, group) == Some(id);
            ensure(named, || {
                format!("{id:?} holds {content:?}, which names another block")
            })?;
        }
        Ok(())
    }

    /// Every block waits in the list that it says, and that is one for it.
    fn check_queue(&self) -> Result<(), String> {
        for (id, block) in self.each() {
            let lists = match block.content.some() {
                None => [List::Free; 2],
                Some(_) => [List::Probation, self.policy.used_again()],
            };
            let says = block.list;
            ensure(lists.contains(&says), || {
                format!("{id:?} says {says:?}, should {lists:?}")
            })?;
        }
        for list in [List::Free].into_iter().chain(List::IDLE) {
            for id in self.queue.iter(list) {
                let says = self.blocks[id.at()].list;
                ensure(says == list, || {
                    format!("{id:?} waits in {list:?}, says {says:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Contents that an open step computes: nobody else may.
    pub(crate) fn unready(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let unready =
            |id: &BlockId, block: &Block| block.content != Spot::NONE && !self.is_ready(*id);
        self.each()
            .filter(move |(id, block)| unready(id, block))
            .map(|(id, block)| (id, block.step))
    }

    /// The content of a block, its layer group, and the step that computed it.
    pub(crate) fn content_of(&self, block: BlockId) -> Option<(Spot, usize, u32)> {
        let block = &self.blocks[block.at()];
        let content = block.content.some()?;
        Some((content, usize::from(block.group), block.step))
    }
}

/// Leases hold `counted` references; a block is `lost` that nobody holds and that
/// is not in the queue. While a lease is being dropped its blocks may look so.
fn check_leases(
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::contents::Spot;
    use crate::eviction::{Eviction, Policy};
    use crate::shared::Shared;
    use crate::sync::{Arc, Ordering};

    struct Scene {
        pool: Pool,
        held: Vec<u32>,
        fences: HashMap<BlockId, u32>,
        posted: HashSet<BlockId>,
    }

    /// Eight blocks: 0 and 1 hold a prefix and are in a table, 2 is fenced, 3 is leased, 4 is idle, the
    /// others are free.
    fn scene() -> Scene {
        let shared = Arc::new(Shared::new(0, 8).expect("little memory"));
        let mut pool = Pool::new(&Config::new(8, 2), Arc::clone(&shared)).expect("little memory");
        let root = pool.contents.hold_root(b"");
        let mut taken = Vec::new();
        pool.take(5, &mut taken);
        let end = pool.append(root, &[1, 1, 2, 2], &taken[..2], 1);
        let behind = Spot { rows: 1, ..end };
        pool.append(behind, &[3, 3], &taken[4..], 1);
        pool.fence(taken[2]);
        shared.hold(taken[3]);
        shared.lease_refs_floor.fetch_add(1, Ordering::AcqRel);
        shared.lease_refs_ceiling.fetch_add(1, Ordering::AcqRel);
        pool.release_all(&taken[2..]);
        Scene {
            pool,
            held: vec![1, 1, 0, 0, 0, 0, 0, 0],
            fences: [(taken[2], 1)].into(),
            posted: HashSet::new(),
        }
    }

    fn check(scene: &Scene) -> Result<(), String> {
        let leases = scene.pool.shared.lease_refs();
        scene
            .pool
            .check(&scene.held, &scene.fences, leases, &scene.posted)
    }

    type Case = (&'static str, fn(&mut Scene));

    const CASES: &[Case] = &[
        (
            "BlockId(0) has seq_refs and fences (2, 0), counted (1, 0)",
            |s| {
                s.pool.blocks[0].seq_refs = 2;
            },
        ),
        (
            "BlockId(2) has seq_refs and fences (0, 2), counted (0, 1)",
            |s| {
                s.pool.blocks[2].fences = 2;
            },
        ),
        ("BlockId(4) is in the queue with refs 1", |s| {
            (s.pool.blocks[4].seq_refs, s.held[4]) = (1, 1);
        }),
        ("BlockId(4) is to be computed and nobody holds it", |s| {
            s.pool.set_open_steps(Some([1, 1]));
        }),
        ("BlockId(5) is held by nobody and not queued", |s| {
            s.pool.queue.unlink(List::Free, BlockId::from(5));
        }),
        ("leases hold 1 blocks, counted 0 to 0", |s| {
            s.pool.shared.forget_lease_refs(1)
        }),
        ("ledger: 3 active, counted 2", |s| s.pool.active += 1),
        ("is in BlockId(7) for group 0, which holds", |s| {
            let content = s.pool.blocks[1].content;
            s.pool.contents.set_block(content, 0, BlockId::from(7));
        }),
        ("BlockId(5) is of group 3", |s| s.pool.blocks[5].group = 3),
        (
            "BlockId(5) holds Spot { run: RunId(1), rows: 2 }, which names another block",
            |s| {
                s.pool.blocks[5].content = s.pool.blocks[1].content;
            },
        ),
        (
            "BlockId(5) holds Spot { run: RunId(1), rows: 9 }, which names another block",
            |s| {
                s.pool.blocks[5].content = s.pool.blocks[1].content;
                s.pool.blocks[5].content.rows = 9;
            },
        ),
        ("BlockId(4) says Protected, should [Probation, Pro", |s| {
            s.pool.blocks[4].list = List::Protected;
        }),
        ("BlockId(4) waits in Probation, says Protected", |s| {
            s.pool.policy = Policy::new(Eviction::TwoQueue, 8);
            s.pool.blocks[4].list = List::Protected;
        }),
        ("Free: 2 blocks linked, 3 counted", |s| {
            s.pool.queue.unlink(List::Probation, BlockId::from(5));
        }),
    ];

    #[test]
    fn each_is_named() {
        for (at, (expected, spoil)) in CASES.iter().enumerate() {
            let mut scene = scene();
            assert_eq!(check(&scene), Ok(()));
            spoil(&mut scene);
            let found = check(&scene).expect_err(expected);
            assert!(
                found.contains(expected),
                "case {at}: {found:?} is not {expected:?}"
            );
        }
        let mut scene = scene();
        scene.pool.queue.unlink(List::Free, BlockId::from(5));
        scene.posted.insert(BlockId::from(5));
        assert_eq!(check(&scene), Ok(())); // the mail says so
    }
}
