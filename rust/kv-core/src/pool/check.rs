//! Validation of the pool: cached blocks, the queue, references, usage.

use std::collections::{HashMap, HashSet};

use super::Pool;
use crate::check::ensure;
use crate::ids::{BlockId, NodePosition};
use crate::queue::{BlockMeta, Counts, List};

/// The least and the most block references that pins can hold.
pub(crate) type PinRefs = (usize, usize);

impl Pool {
    /// Every block id, its record, and the cached block that it holds.
    fn blocks(&self) -> impl Iterator<Item = (BlockId, &BlockMeta, Option<NodePosition>)> {
        let metas = self.queue.metas().iter().zip(&self.cached).enumerate();
        metas.map(|(index, (meta, held))| (BlockId::new(index), meta, held.some()))
    }

    /// Recounts everything. `held`: table entries per block; `plan_pins`: references of open plans and transfers;
    /// `before`: references of pins when `deferred`, the blocks of deferred releases, was read.
    pub(crate) fn check(
        &self,
        held: &[u32],
        plan_pins: &HashMap<BlockId, u32>,
        before: PinRefs,
        deferred: &HashSet<BlockId>,
    ) -> Result<(), String> {
        self.queue.check()?;
        self.check_snapshots()?;
        self.check_cached()?;
        self.check_queue()?;
        let (mut active, mut by_pins) = (0, 0);
        let mut lost = None;
        for (id, meta, cached) in self.blocks() {
            let pins = self.shared.pin_refs_of(id);
            let pinned = plan_pins.get(&id).copied().unwrap_or(0);
            let (recorded, seq_refs) = (meta.counts(), held[id.at()]);
            let counted = Counts {
                seq_refs,
                plan_pins: pinned,
            };
            ensure(recorded == counted, || {
                format!("{id:?} has {recorded:?}, counted {counted:?}")
            })?;
            let refs = seq_refs + pinned + pins;
            let queued = meta.is_queued();
            ensure(!queued || refs == 0, || {
                format!("{id:?} is in the queue with refs {refs}")
            })?;
            let is_computed = cached.is_none() || self.is_ready(id);
            ensure(refs > 0 || is_computed, || {
                format!("{id:?} is to be computed and has no reference")
            })?;
            if refs == 0 && !queued && !deferred.contains(&id) {
                lost = Some(id);
            }
            active += usize::from(held[id.at()] > 0);
            by_pins += pins as usize;
        }
        check_pins(by_pins, lost, before, self.shared.pin_refs())?;
        ensure(active == self.active, || {
            format!("usage: {} active, counted {active}", self.active)
        })
    }

    /// Cached blocks refer to their block ids, and block ids to their cached blocks.
    fn check_cached(&self) -> Result<(), String> {
        let groups = self.tree.groups();
        for position in self.tree.cached() {
            for group in 0..groups {
                let Some(id) = self.tree.block(position, group) else {
                    continue;
                };
                let held = self.cached.get(id.at());
                let names = held.map(|&held| (held, usize::from(self.queue.meta(id).group)));
                ensure(names == Some((position, group)), || {
                    format!("{position:?} is in {id:?} for group {group}, which holds {names:?}")
                })?;
            }
        }
        for (id, meta, cached) in self.blocks() {
            let group = usize::from(meta.group);
            let Some(cached) = cached else {
                ensure(group < groups, || format!("{id:?} is of group {group}"))?;
                continue;
            };
            let (own, weights) = (self.version_of(id), self.weights_version());
            ensure(own == weights, || {
                format!("{id:?} of version {own} is cached, the weights are at version {weights}")
            })?;
            if self.snapshot_at(cached).is_some_and(|of| of.contains(&id)) {
                continue;
            }
            ensure(group < groups, || format!("{id:?} is of group {group}"))?;
            let named = cached.offset > 0
                && self.tree.contains(cached)
                && self.tree.block(cached, group) == Some(id);
            ensure(named, || {
                format!("{id:?} holds {cached:?}, which is in another block")
            })?;
        }
        Ok(())
    }

    /// Every snapshot is at a block that is cached in all layer groups, and its blocks refer to that.
    fn check_snapshots(&self) -> Result<(), String> {
        for (position, blocks) in self.cached_snapshots() {
            let is_cached = self.tree.contains(position)
                && self.tree.blocks(position).count() == self.tree.groups();
            ensure(is_cached, || {
                format!("the snapshot at {position:?} outlives a block of its prefix")
            })?;
            let mut blocks = blocks.iter();
            let lost = blocks.find(|block| {
                let meta = self.queue.metas().get(block.at());
                let group = meta.map(|meta| usize::from(meta.group));
                group != Some(self.tree.groups()) || self.cached[block.at()] != position
            });
            ensure(lost.is_none(), || {
                format!("the snapshot at {position:?} is not in {lost:?}")
            })?;
        }
        Ok(())
    }

    /// Every queued block is in the list of its record.
    fn check_queue(&self) -> Result<(), String> {
        for (id, meta, cached) in self.blocks() {
            let lists = match cached {
                None => [List::Free; 3],
                Some(_) if self.is_snapshot(id) => {
                    [List::Probation, self.policy.list_of_reused(), List::Spare]
                }
                Some(_) => {
                    let reused = self.policy.list_of_reused();
                    [List::Probation, reused, reused]
                }
            };
            let list = meta.list;
            ensure(lists.contains(&list), || {
                format!("{id:?} is for {list:?}, not one of {lists:?}")
            })?;
        }
        for list in [List::Free].into_iter().chain(List::ALL_EVICTABLE) {
            for id in self.queue.iter(list) {
                let own = self.queue.meta(id).list;
                ensure(own == list, || {
                    format!("{id:?} is in {list:?}, its record has {own:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Blocks that transfers are to fill, by their records.
    pub(crate) fn marked_loading(&self) -> usize {
        self.queue
            .metas()
            .iter()
            .filter(|meta| meta.loading)
            .count()
    }

    /// Blocks that an open step is to compute, and the step.
    pub(crate) fn unready(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let unready = |id: BlockId| !self.is_ready(id) && !self.is_loading(id);
        self.blocks()
            .filter(move |&(id, _, held)| held.is_some() && unready(id))
            .map(|(id, meta, _)| (id, meta.step))
    }

    /// The cached block of a block id, its layer group, and the step that computed it.
    pub(crate) fn cached_info(&self, block: BlockId) -> Option<(NodePosition, usize, u32)> {
        let meta = self.queue.meta(block);
        Some((self.cached_at(block)?, usize::from(meta.group), meta.step))
    }
}

/// Pins hold `counted` references; `lost` is a block without references that is not queued. Blocks of a pin that is
/// being dropped may look lost.
fn check_pins(
    counted: usize,
    lost: Option<BlockId>,
    before: PinRefs,
    after: PinRefs,
) -> Result<(), String> {
    let (min, max) = (after.0, before.1);
    ensure(min <= counted && counted <= max, || {
        format!("pins hold {counted} blocks, counted {min} to {max}")
    })?;
    match lost {
        Some(block) if min == max => Err(format!("{block:?} has no reference and is not queued")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::OpenSteps;
    use super::*;
    use crate::config::Config;
    use crate::eviction::{Eviction, Policy};
    use crate::handles::Shared;
    use crate::ids::NodePosition;
    use crate::sync::{Arc, Ordering};

    struct Scene {
        pool: Pool,
        held: Vec<u32>,
        plan_pins: HashMap<BlockId, u32>,
        deferred: HashSet<BlockId>,
    }

    /// Eight blocks: 0 and 1 hold a prefix and are in a table, 2 is pinned, 3 is pinned, 4 is evictable, the
    /// others are free.
    fn scene() -> Scene {
        let shared = Arc::new(Shared::new(0, 8).expect("little memory"));
        let mut pool = Pool::new(&Config::new(8, 2), Arc::clone(&shared)).expect("little memory");
        let root = pool.tree.acquire_root(b"");
        let mut taken = Vec::new();
        pool.take(5, &mut taken);
        let end = pool.append(root, &[1, 1, 2, 2], &taken[..2], 1, None);
        let first = NodePosition { offset: 1, ..end };
        pool.append(first, &[3, 3], &taken[4..], 1, None);
        pool.pin(taken[2]);
        shared.hold(taken[3]);
        shared.pin_refs_floor.fetch_add(1, Ordering::AcqRel);
        shared.pin_refs_ceiling.fetch_add(1, Ordering::AcqRel);
        pool.release_all(&taken[2..]);
        Scene {
            pool,
            held: vec![1, 1, 0, 0, 0, 0, 0, 0],
            plan_pins: [(taken[2], 1)].into(),
            deferred: HashSet::new(),
        }
    }

    fn check(scene: &Scene) -> Result<(), String> {
        let pins = scene.pool.shared.pin_refs();
        scene
            .pool
            .check(&scene.held, &scene.plan_pins, pins, &scene.deferred)
    }

    fn meta(scene: &mut Scene, block: u32) -> &mut BlockMeta {
        scene.pool.queue.meta_mut(BlockId::from(block))
    }

    type Case = (&'static str, fn(&mut Scene));

    const CASES: &[Case] = &[
        (
            "BlockId(0) has Counts { seq_refs: 2, plan_pins: 0 }, counted Counts { seq_refs: 1, plan_pins: 0 }",
            |s| {
                *meta(s, 0).seq_refs_mut() = 2;
            },
        ),
        (
            "BlockId(2) has Counts { seq_refs: 0, plan_pins: 2 }, counted Counts { seq_refs: 0, plan_pins: 1 }",
            |s| {
                *meta(s, 2).plan_pins_mut() = 2;
            },
        ),
        ("BlockId(4) is in the queue with refs 1", |s| {
            s.pool.shared.hold(BlockId::from(4));
        }),
        ("BlockId(4) is to be computed and has no reference", |s| {
            s.pool.set_open_steps(OpenSteps {
                oldest: 1,
                count: 1,
            });
        }),
        ("BlockId(5) has no reference and is not queued", |s| {
            s.pool.queue.unlink(BlockId::from(5));
        }),
        ("pins hold 1 blocks, counted 0 to 0", |s| {
            s.pool.shared.forget_pin_refs(1)
        }),
        ("usage: 3 active, counted 2", |s| s.pool.active += 1),
        ("is in BlockId(7) for group 0, which holds", |s| {
            let cached = s.pool.cached[1];
            s.pool.tree.set_block(cached, 0, BlockId::from(7));
        }),
        ("BlockId(5) is of group 3", |s| meta(s, 5).group = 3),
        (
            "BlockId(5) holds NodePosition { node: NodeId(1), offset: 2 }, which is in another block",
            |s| {
                s.pool.cached[5] = s.pool.cached[1];
            },
        ),
        (
            "BlockId(5) holds NodePosition { node: NodeId(1), offset: 9 }, which is in another block",
            |s| {
                s.pool.cached[5] = s.pool.cached[1];
                s.pool.cached[5].offset = 9;
            },
        ),
        ("BlockId(4) is for Protected, not one of [Prob", |s| {
            meta(s, 4).list = List::Protected;
        }),
        ("BlockId(4) is in Probation, its record has", |s| {
            s.pool.policy = Policy::new(Eviction::TwoQueue, 8);
            meta(s, 4).list = List::Protected;
        }),
        (
            "BlockId(4) of version 2 is cached, the weights are at version 0",
            |s| s.pool.stamp_as(BlockId::from(4), 2),
        ),
        ("Free: 2 blocks linked, 3 counted", |s| {
            meta(s, 5).list = List::Probation;
            s.pool.queue.unlink(BlockId::from(5));
            meta(s, 5).list = List::Free;
        }),
    ];

    #[test]
    fn each_is_named() {
        for (at, (expected, spoil)) in CASES.iter().enumerate() {
            let mut scene = scene();
            assert_eq!(check(&scene), Ok(()));
            spoil(&mut scene);
            let difference = check(&scene).expect_err(expected);
            assert!(
                difference.contains(expected),
                "case {at}: {difference:?} is not {expected:?}"
            );
        }
        let mut scene = scene();
        scene.pool.queue.unlink(BlockId::from(5));
        scene.deferred.insert(BlockId::from(5));
        assert_eq!(check(&scene), Ok(())); // its release is deferred
    }
}
