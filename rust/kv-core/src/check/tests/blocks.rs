//! What the validator says of spoilt blocks: their contents, places and holders.

use super::*;
use crate::check::blocks::check_leases;
use crate::ids::NodeIdx;
use crate::queue::List;

const CONTENTS: &[Case] = &[
    ("NodeIdx(8) has 3 holds, counted 2", |s| {
        let node = s.block(12).node;
        s.manager.tree.hold(node);
    }),
    ("1 sequences under NodeIdx(8), which is no root", |s| {
        s.seq(FRESH).root = s.block(12).node;
    }),
    (
        "NodeIdx(14) is in BlockId(30) for group 0, which holds Some((NodeIdx(none), 0))",
        |s| {
            s.block(30).node = NodeIdx::NONE;
        },
    ),
    (
        "NodeIdx(14) is in BlockId(30) for group 0, which holds Some((NodeIdx(14), 1))",
        |s| {
            s.block(30).group = 1;
        },
    ),
    (
        "NodeIdx(14) is in BlockId(128) for group 0, which holds None",
        |s| {
            let node = s.block(30).node;
            s.manager.tree.set_block(node, 0, BlockId::from(128));
        },
    ),
    ("BlockId(70) is of group 2", |s| s.block(70).group = 2),
    (
        "BlockId(70) holds NodeIdx(14), which names another block",
        |s| {
            s.block(70).node = s.block(30).node;
        },
    ),
    (
        "BlockId(70) holds NodeIdx(1000), which names another block",
        |s| {
            s.block(70).node = NodeIdx::new(1000);
        },
    ),
];

const QUEUE: &[Case] = &[
    (
        "BlockId(30) waits in Probation, says Protected, should in Probation",
        |s| {
            s.block(30).list = List::Protected;
        },
    ),
    (
        "BlockId(30) waits in Probation, says Probation, should in Protected",
        |s| {
            s.block(30).used_again = true;
        },
    ),
    (
        "BlockId(26) waits in Probation, says Protected, should in Probation",
        |s| {
            s.block(26).list = List::Protected;
        },
    ),
    (
        "BlockId(70) waits in Free, says Probation, should in Free",
        |s| {
            s.block(70).list = List::Probation;
        },
    ),
    ("Free: 69 blocks linked, 70 counted", |s| {
        s.manager.queue.unlink(List::Probation, BlockId::from(70));
    }),
];

const HOLDERS: &[Case] = &[
    ("BlockId(10) has seq_refs 3, counted 2", |s| {
        s.block(10).seq_refs += 1
    }),
    ("BlockId(10) has 2 fences, counted 1", |s| {
        s.block(10).fences += 1;
    }),
    ("leases hold 8 blocks, counted 7 to 7", |s| {
        s.manager.shared.forget_lease_refs(1);
    }),
    ("leases hold 7 blocks, counted 8 to 8", |s| {
        s.manager.shared.let_go(BlockId::from(32));
    }),
    ("BlockId(70) is in the queue with refs 1", |s| {
        let table = [BlockId::from(70)].into();
        let lease = Lease::over(&s.manager.shared, None, table, NodeIdx::NONE, 3);
        s.leases.push(lease);
    }),
    ("BlockId(70) is in the queue with refs 1", |s| {
        s.manager.fence(BlockId::from(70));
    }),
    ("BlockId(30) is to be computed and nobody holds it", |s| {
        s.block(30).step = s.manager.open[NEWER].step();
    }),
    ("BlockId(70) is held by nobody and not queued", |s| {
        s.manager.queue.unlink(List::Free, BlockId::from(70));
    }),
    ("ledger: 49 active, counted 48", |s| s.manager.active = 49),
    ("a plan holds BlockId(128): there is none", |s| {
        s.manager.open[NEWER].fenced.push(BlockId::from(128));
    }),
];

#[test]
fn contents() {
    each_is_named(scene, CONTENTS);
}

#[test]
fn places_in_the_queue() {
    each_is_named(scene, QUEUE);
}

#[test]
fn holders() {
    each_is_named(scene, HOLDERS);
}

const REST_OF_ALL: &[Case] = &[
    ("events that nobody asked for", |s| {
        s.manager.config.events = false;
    }),
    ("1 entries are in no plan", |s| {
        s.manager.spare_entries.push(Entry {
            slot: REST,
            samples: false,
            start: 12,
            len: 1,
            write_from: 12,
            pending_row: None,
            before: s.manager.before(REST),
            more: None,
        });
    }),
];

#[test]
fn rest_of_all() {
    each_is_named(scene, REST_OF_ALL);
}

/// A lease that another thread drops meanwhile lowers the floor first, the ceiling last.
#[test]
fn leases_may_go_meanwhile() {
    let block = Some(BlockId::from(3));
    let lost = Err("BlockId(3) is held by nobody and not queued".into());
    assert_eq!(check_leases(8, None, (8, 8), (8, 8)), Ok(()));
    assert_eq!(check_leases(8, block, (8, 8), (8, 8)), lost);
    for counted in 6..=8 {
        // Dropped while the blocks were counted, and when that began.
        assert_eq!(check_leases(counted, block, (8, 8), (6, 6)), Ok(()));
        assert_eq!(check_leases(counted, block, (6, 8), (6, 8)), Ok(()));
    }
    for counted in [5, 9] {
        let range = Err(format!("leases hold {counted} blocks, counted 6 to 8"));
        assert_eq!(check_leases(counted, None, (8, 8), (6, 6)), range);
    }
}
