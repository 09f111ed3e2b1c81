//! The validator's part that sees into the pool: contents and their blocks, the queue, holders, the
//! usage.

use std::collections::{HashMap, HashSet};

use super::Pool;
use crate::check::ensure;
use crate::contents::Spot;
use crate::ids::BlockId;
use crate::queue::{List, Place};

/// What pins hold at least and at most.
pub(crate) type PinRefs = (usize, usize);

impl Pool {
    /// Every block, its place and the content that it holds.
    fn each(&self) -> impl Iterator<Item = (BlockId, &Place, Option<Spot>)> {
        let places = self.queue.places().iter().zip(&self.held).enumerate();
        places.map(|(index, (place, held))| (BlockId::new(index), place, held.some()))
    }

    /// Recounts everything. `held`: table entries per block; `fences`: by open plans; `before`: what
    /// pins held when the mail was looked at; `posted`: the blocks that it names, which the manager
    /// is yet to take back.
    pub(crate) fn check(
        &self,
        held: &[u32],
        fences: &HashMap<BlockId, u32>,
        before: PinRefs,
        posted: &HashSet<BlockId>,
    ) -> Result<(), String> {
        self.queue.check()?;
        self.check_contents()?;
        self.check_queue()?;
        let (mut active, mut by_pins) = (0, 0);
        let mut lost = None;
        for (id, place, content) in self.each() {
            let pins = self.shared.pin_refs_of(id);
            let fenced = fences.get(&id).copied().unwrap_or(0);
            let (says, counted) = (place.counts(), [held[id.at()], fenced]);
            ensure(says == counted, || {
                format!("{id:?} has seq_refs and fences {says:?}, counted {counted:?}")
            })?;
            let refs = counted.iter().sum::<u32>() + pins;
            let queued = place.waits();
            ensure(!queued || refs == 0, || {
                format!("{id:?} is in the queue with refs {refs}")
            })?;
            let is_there = content.is_none() || self.is_ready(id);
            ensure(refs > 0 || is_there, || {
                format!("{id:?} is to be computed and nobody holds it")
            })?;
            if refs == 0 && !queued && !posted.contains(&id) {
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

    /// A content names the block that holds it, and the block names the content.
    fn check_contents(&self) -> Result<(), String> {
        let groups = self.contents.groups();
        for spot in self.contents.held() {
            for group in 0..groups {
                let Some(id) = self.contents.block(spot, group) else {
                    continue;
                };
                let held = self.held.get(id.at());
                let names = held.map(|&held| (held, usize::from(self.queue.place(id).group)));
                ensure(names == Some((spot, group)), || {
                    format!("{spot:?} is in {id:?} for group {group}, which holds {names:?}")
                })?;
            }
        }
        for (id, place, content) in self.each() {
            let group = usize::from(place.group);
            ensure(group < groups, || format!("{id:?} is of group {group}"))?;
            let Some(content) = content else {
                continue;
            };
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
        for (id, place, content) in self.each() {
            let lists = match content {
                None => [List::Free; 2],
                Some(_) => [List::Probation, self.policy.used_again()],
            };
            let says = place.list;
            ensure(lists.contains(&says), || {
                format!("{id:?} says {says:?}, should {lists:?}")
            })?;
        }
        for list in [List::Free].into_iter().chain(List::EVICTABLE) {
            for id in self.queue.iter(list) {
                let says = self.queue.place(id).list;
                ensure(says == list, || {
                    format!("{id:?} waits in {list:?}, says {says:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Contents that an open step computes: nobody else may.
    pub(crate) fn unready(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let unready = |id: BlockId, held: Option<Spot>| held.is_some() && !self.is_ready(id);
        self.each()
            .filter(move |&(id, _, held)| unready(id, held))
            .map(|(id, place, _)| (id, place.step))
    }

    /// The content of a block, its layer group, and the step that computed it.
    pub(crate) fn content_of(&self, block: BlockId) -> Option<(Spot, usize, u32)> {
        let place = self.queue.place(block);
        Some((self.content(block)?, usize::from(place.group), place.step))
    }
}

/// Pins hold `counted` references; a block is `lost` that nobody holds and that
/// is not in the queue. While a pin is being dropped its blocks may look so.
fn check_pins(
    counted: usize,
    lost: Option<BlockId>,
    before: PinRefs,
    after: PinRefs,
) -> Result<(), String> {
    let (least, most) = (after.0, before.1);
    ensure(least <= counted && counted <= most, || {
        format!("pins hold {counted} blocks, counted {least} to {most}")
    })?;
    match lost {
        Some(block) if least == most => Err(format!("{block:?} is held by nobody and not queued")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::OpenSteps;
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

    /// Eight blocks: 0 and 1 hold a prefix and are in a table, 2 is fenced, 3 is pinned, 4 is evictable, the
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
        shared.pin_refs_floor.fetch_add(1, Ordering::AcqRel);
        shared.pin_refs_ceiling.fetch_add(1, Ordering::AcqRel);
        pool.release_all(&taken[2..]);
        Scene {
            pool,
            held: vec![1, 1, 0, 0, 0, 0, 0, 0],
            fences: [(taken[2], 1)].into(),
            posted: HashSet::new(),
        }
    }

    fn check(scene: &Scene) -> Result<(), String> {
        let pins = scene.pool.shared.pin_refs();
        scene
            .pool
            .check(&scene.held, &scene.fences, pins, &scene.posted)
    }

    fn place(scene: &mut Scene, block: u32) -> &mut Place {
        scene.pool.queue.place_mut(BlockId::from(block))
    }

    type Case = (&'static str, fn(&mut Scene));

    const CASES: &[Case] = &[
        (
            "BlockId(0) has seq_refs and fences [2, 0], counted [1, 0]",
            |s| {
                place(s, 0).counts_mut()[0] = 2;
            },
        ),
        (
            "BlockId(2) has seq_refs and fences [0, 2], counted [0, 1]",
            |s| {
                place(s, 2).counts_mut()[1] = 2;
            },
        ),
        ("BlockId(4) is in the queue with refs 1", |s| {
            s.pool.shared.hold(BlockId::from(4));
        }),
        ("BlockId(4) is to be computed and nobody holds it", |s| {
            s.pool.set_open_steps(OpenSteps {
                oldest: 1,
                count: 1,
            });
        }),
        ("BlockId(5) is held by nobody and not queued", |s| {
            s.pool.queue.unlink(BlockId::from(5));
        }),
        ("pins hold 1 blocks, counted 0 to 0", |s| {
            s.pool.shared.forget_pin_refs(1)
        }),
        ("usage: 3 active, counted 2", |s| s.pool.active += 1),
        ("is in BlockId(7) for group 0, which holds", |s| {
            let content = s.pool.held[1];
            s.pool.contents.set_block(content, 0, BlockId::from(7));
        }),
        ("BlockId(5) is of group 3", |s| place(s, 5).group = 3),
        (
            "BlockId(5) holds Spot { run: RunId(1), rows: 2 }, which names another block",
            |s| {
                s.pool.held[5] = s.pool.held[1];
            },
        ),
        (
            "BlockId(5) holds Spot { run: RunId(1), rows: 9 }, which names another block",
            |s| {
                s.pool.held[5] = s.pool.held[1];
                s.pool.held[5].rows = 9;
            },
        ),
        ("BlockId(4) says Protected, should [Probation, Pro", |s| {
            place(s, 4).list = List::Protected;
        }),
        ("BlockId(4) waits in Probation, says Protected", |s| {
            s.pool.policy = Policy::new(Eviction::TwoQueue, 8);
            place(s, 4).list = List::Protected;
        }),
        ("Free: 2 blocks linked, 3 counted", |s| {
            place(s, 5).list = List::Probation;
            s.pool.queue.unlink(BlockId::from(5));
            place(s, 5).list = List::Free;
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
        scene.pool.queue.unlink(BlockId::from(5));
        scene.posted.insert(BlockId::from(5));
        assert_eq!(check(&scene), Ok(())); // the mail says so
    }
}
