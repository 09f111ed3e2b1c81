//! Validation of open transfers: their blocks are theirs alone, and in the index as loading or not at all.

use std::collections::{HashMap, HashSet};

use crate::check::ensure;
use crate::ids::{BlockId, NodePosition};
use crate::state::State;

impl State {
    /// Recounts the open transfers. Adds the blocks that they hold to `counts`.
    pub(crate) fn check_transfers(&self, counts: &mut HashMap<BlockId, u32>) -> Result<(), String> {
        let (mut last, mut loading) = (0, HashSet::new());
        for (&serial, open) in &self.transfers.open {
            let num_begun = self.transfers.num_begun;
            ensure(last < serial && serial <= num_begun, || {
                format!("transfer {serial} follows transfer {last} of {num_begun}")
            })?;
            ensure(open.key.serial == serial, || {
                format!(
                    "transfer {} is in the place of transfer {serial}",
                    open.key.serial
                )
            })?;
            last = serial;
            for to_fill in &open.loading {
                let block = to_fill.block;
                let is_its = self.pool.is_loading(block) && loading.insert(block);
                ensure(is_its && self.pool.seq_refs(block) == 0, || {
                    format!("transfer {serial} fills {block:?}, which is not its own")
                })?;
                let cached = self.pool.cached_info(block);
                let is_known = cached.is_none_or(|(_, group, number)| {
                    group == to_fill.group && number == serial as u32
                });
                ensure(is_known && open.indices.contains(&to_fill.index), || {
                    format!("transfer {serial} fills {to_fill:?}, cached as {cached:?}")
                })?;
            }
            if let Some(snapshot) = &open.snapshot {
                for &block in &snapshot.blocks {
                    let is_its = self.pool.is_loading(block) && loading.insert(block);
                    let is_cached = self.pool.cached_info(block).is_some();
                    ensure(is_its && !is_cached, || {
                        format!(
                            "transfer {serial} fills {block:?} of a snapshot, which is not its own"
                        )
                    })?;
                }
                let tree = self.pool.tree();
                let is_held = snapshot.position == NodePosition::NONE
                    || (tree.contains(snapshot.position)
                        && tree.blocks(snapshot.position).count() == tree.groups());
                ensure(is_held, || {
                    format!("transfer {serial} fills a snapshot after a block that is not cached")
                })?;
            }
            for block in open.blocks().chain(open.held.iter().copied()) {
                *counts.entry(block).or_default() += 1;
            }
        }
        let (recorded, marked, counted) = (
            self.pool.usage().loading,
            self.pool.marked_loading(),
            loading.len(),
        );
        ensure((recorded, marked) == (counted, counted), || {
            format!("usage: {recorded} loading, {marked} marked, counted {counted}")
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::check::scene::*;
    use crate::ids::BlockId;
    use crate::open_transfers::OpenTransfer;

    fn first(scene: &mut Scene) -> &mut OpenTransfer {
        let mut open = scene.manager.state.transfers.open.values_mut();
        open.next().expect("an open transfer")
    }

    const CASES: &[Case] = &[
        ("transfer 1 follows transfer 0 of 0", |s| {
            s.manager.state.transfers.num_begun = 0;
        }),
        ("transfer 9 is in the place of transfer 1", |s| {
            first(s).key.serial = 9;
        }),
        ("transfer 1 fills BlockId(0), which is not its own", |s| {
            first(s).loading[0].block = BlockId::from(0);
        }),
        ("transfer 1 fills BlockId(", |s| {
            let loading = &mut first(s).loading;
            loading[1].block = loading[0].block;
        }),
        ("transfer 1 fills LoadingBlock { index: 9, group: 0", |s| {
            first(s).loading[0].index = 9;
        }),
        ("transfer 1 fills LoadingBlock { index: 4, group: 0", |s| {
            first(s).loading[1].group = 0;
        }),
        ("usage: 4 loading, 4 marked, counted 3", |s| {
            first(s).loading.pop();
        }),
        ("plan_pins: 1 }, counted Counts", |s| {
            first(s).held.clear();
        }),
    ];

    #[test]
    fn each_of_them_is_named() {
        each_is_named(scene, CASES);
    }
}
