//! What the validator says of spoilt plans.

use super::*;
use crate::plan::Plan;

const KEYS: &[Case] = &[
    ("is another manager's", |s| {
        s.manager.open[OLDER].key.manager += 1
    }),
    ("plan 0 follows plan 0 of 12", |s| {
        s.manager.open[OLDER].key.serial = 0
    }),
    ("plan 12 follows plan 12 of 12", |s| {
        s.manager.open[OLDER].key.serial = 12
    }),
    ("plan 12 follows plan 11 of 11", |s| s.manager.plans = 11),
    ("3 plans are open", |s| {
        let mut key = s.manager.open[NEWER].key;
        key.serial = 13;
        s.manager.plans = 13;
        s.manager.open.push(Plan {
            key,
            entries: Vec::new(),
            budget_left: 0,
            num_tokens: 0,
            num_samples: 0,
            copies: Vec::new(),
            fenced: Vec::new(),
        });
    }),
    ("plan 11 holds a sequence that is gone", |s| {
        s.entry(OLDER, LEFT).slot = 99
    }),
];

const TOTALS: &[Case] = &[
    (
        "plan 11 has 17 tokens and 3 samples, counted 16 and 3",
        |s| {
            s.manager.open[OLDER].num_tokens = 17;
        },
    ),
    (
        "plan 11 has 16 tokens and 4 samples, counted 16 and 3",
        |s| {
            s.manager.open[OLDER].num_samples = 4;
        },
    ),
    ("sequence 4 copies entry 2 to write in row 2", |s| {
        s.more(NEWER, CHILD).copied[0].0 = 2;
    }),
    (
        "sequence 4: plan 12 does not copy (BlockId(10), BlockId(46))",
        |s| {
            s.manager.open[NEWER].copies[0].1 = BlockId::from(0);
        },
    ),
    ("plan 12 copies BlockId(10) and does not hold it", |s| {
        let other = BlockId::from(8);
        s.manager.open[NEWER].fenced[0] = other;
        s.block(8).fences += 1;
        s.block(10).fences -= 1;
    }),
    ("plan 12 copies 3 blocks, counted 2", |s| {
        s.manager.open[NEWER]
            .copies
            .push((BlockId::from(10), BlockId::from(8)));
    }),
];

const EXTENTS: &[Case] = &[
    ("sequence 9 is planned without blocks", |s| {
        s.entry(NEWER, LONG).len = 7
    }),
    ("sequence 9 is planned without blocks", |s| {
        s.entry(NEWER, LONG).before.table_len = 11
    }),
    ("sequence 9 was at 6 with 3 table entries", |s| {
        s.entry(NEWER, LONG).before.table_len = 3;
    }),
    ("sequence 9 was at 6 with 5 table entries", |s| {
        s.entry(NEWER, LONG).before.table_len = 5;
    }),
    ("sequence 9 was at 6 with 2 table entries", |s| {
        s.entry(NEWER, LONG).before.table_len = 2;
    }),
    ("sequence 9 writes from 8, has blocks of 3 rows", |s| {
        s.entry(NEWER, LONG).write_from = 8;
    }),
    ("sequence 9 writes from 9, has blocks of 4 rows", |s| {
        s.entry(NEWER, LONG).before.chain.blocks = 3;
    }),
    ("sequence 9 announces from row 2, not 3", |s| {
        s.more(NEWER, LONG).announce_from = 2;
    }),
    ("sequence 13 announces from row 1, not 0", |s| {
        s.more(NEWER, DRAFTY).announce_from = 1;
    }),
    ("sequence 9 was led to row 6, stands on 5", |s| {
        s.more(NEWER, LONG).announced = 3
    }),
    ("sequence 16 was led to row 2, stands on 1", |s| {
        s.more(OLDER, LEFT).announced = 2
    }),
    (
        "sequence 9 stood on NodeIdx(16), its path leads through Some(NodeIdx(17))",
        |s| {
            let tip = s.block(34).node;
            s.entry(NEWER, LONG).before.chain.tip = tip;
        },
    ),
    ("sequence 9 has [5] present of 6..10", |s| {
        s.more(NEWER, LONG).present = vec![5]
    }),
    ("sequence 15 has [0, 2, 4, 6] present of 0..6", |s| {
        s.more(NEWER, AGAIN).present[3] = 6;
    }),
    ("sequence 15 has [2, 0, 4, 5] present of 0..6", |s| {
        s.more(NEWER, AGAIN).present.swap(0, 1);
    }),
    ("sequence 15 has [0, 2, 4, 5] present of 0..6", |s| {
        s.entry(NEWER, AGAIN).before.table_len = 2;
    }),
];

const SHARING: &[Case] = &[
    (
        "sequence 16 starts at 1 with 1 tokens of 0 rows adopted",
        |s| {
            s.starts(OLDER, LEFT, 1, 3);
        },
    ),
    (
        "sequence 14 starts at 10 with 10 tokens of 4 rows adopted",
        |s| {
            s.starts(NEWER, FULL, 10, 2);
        },
    ),
    (
        "sequence 10 starts at 5 with 5 tokens of 2 rows adopted",
        |s| {
            s.starts(OLDER, TWIN, 5, 4);
        },
    ),
    ("sequence 9 adopted 3 blocks of 2, 2 in flight", |s| {
        s.more(NEWER, LONG).matched_blocks = 3;
    }),
    ("sequence 10 adopted 4 blocks of 4, 5 in flight", |s| {
        s.more(OLDER, TWIN).in_flight = 5;
    }),
    ("sequence 15 adopted 0 blocks of 0, 5 in flight", |s| {
        s.more(NEWER, AGAIN).in_flight = 5;
    }),
    ("sequence 9 announces what it must not", |s| {
        s.manager.config.in_flight_sharing = false;
    }),
    ("sequence 16 announces what it must not", |s| {
        s.more(OLDER, LEFT).prefill = false
    }),
    ("sequence 14 adopts what it must not", |s| {
        let more = s.more(NEWER, FULL);
        (more.prefill, more.announce_from) = (false, 0);
    }),
    ("sequence 14 adopts what it must not", |s| {
        s.seq(FULL).read_cache = false
    }),
    ("sequence 13 drafts in its prompt", |s| {
        let more = s.more(NEWER, DRAFTY);
        (more.prefill, more.announce_from) = (true, 1);
    }),
    (
        "sequence 10 shares BlockId(34), which no entry before it computes",
        |s| {
            s.manager.open[OLDER].entries.swap(0, 1);
        },
    ),
    ("sequence 10 shares 3 blocks in flight, counted 4", |s| {
        s.more(OLDER, TWIN).in_flight = 3;
    }),
    ("sequence 9 announces entry 1 without content", |s| {
        s.more(NEWER, LONG).unseen.clear(); // the newer plan has it
    }),
    (
        "sequence 9 announces BlockId(34) of step 3 in step 11",
        |s| s.block(34).step = 3,
    ),
    ("BlockId(36) is announced twice", |s| {
        s.starts(OLDER, TWIN, 3, 6);
        s.entry(OLDER, TWIN).write_from = 3;
        let more = s.more(OLDER, TWIN);
        (more.matched, more.matched_blocks, more.in_flight) = (1, 2, 2);
        (more.announce_from, more.announced) = (1, 2);
    }),
    ("BlockId(12) is to be computed in step 12 by nobody", |s| {
        s.block(12).step = 12
    }),
];

const ORDER: &[Case] = &[
    ("sequence 9 is twice in plan 11", |s| {
        s.entry(OLDER, TWIN).slot = LONG
    }),
    (
        "sequence 11 is twice in plan 12, or after its drafts",
        |s| {
            s.entry(OLDER, TALK).len = 2;
            s.more(OLDER, TALK).drafts = vec![1];
            s.manager.open[OLDER].num_tokens += 1;
            s.manager.open[OLDER].num_samples += 1;
        },
    ),
    (
        "sequence 11 is planned from 4, begins at 5, stands at 5",
        |s| {
            s.entry(NEWER, TALK).before.ahead = 4;
            s.more(NEWER, TALK).adopted = 1;
        },
    ),
    (
        "sequence 11 is planned from 5, begins at 6, stands at 5",
        |s| {
            s.entry(NEWER, TALK).start = 6;
        },
    ),
    (
        "sequence 9 is planned from 6, begins at 9, stands at 6",
        |s| {
            s.entry(NEWER, LONG).len = 0;
        },
    ),
    ("sequence 9 ends at 6 of 20 tokens and samples", |s| {
        s.entry(OLDER, LONG).samples = true;
    }),
    (
        "sequence 11 ends at 5 of 5 tokens and does not sample",
        |s| {
            s.entry(OLDER, TALK).samples = false;
        },
    ),
    (
        "sequence 11 ends at 7 of 6 tokens and does not sample",
        |s| {
            let entry = s.entry(NEWER, TALK);
            (entry.len, entry.samples) = (2, false);
        },
    ),
    (
        "sequence 11 computes row Some(2), row Some(0) samples it",
        |s| {
            s.entry(NEWER, TALK).pending_row = Some(2);
        },
    ),
    (
        "sequence 11 computes row None, row Some(0) samples it",
        |s| {
            s.entry(NEWER, TALK).pending_row = None;
        },
    ),
    (
        "sequence 4 computes row Some(0), row None samples it",
        |s| {
            s.entry(NEWER, CHILD).pending_row = Some(0);
        },
    ),
];

const ENDS: &[Case] = &[
    ("sequence 1: (1, 0, 0) plans", |s| s.seq(REST).planned = 1),
    ("sequence 1: (0, 1, 0) plans", |s| s.seq(REST).pending = 1),
    ("sequence 1: (0, 0, 12) plans", |s| {
        s.seq(REST).last_plan = 12
    }),
    ("sequence 11: (2, 1, 12) plans", |s| s.seq(TALK).pending = 1),
    ("sequence 1 is at 13, its plans lead to 12", |s| {
        s.seq(REST).ahead = 13
    }),
    ("sequence 11 is at 7, its plans lead to 6", |s| {
        s.seq(TALK).ahead = 7
    }),
    ("sequence 1 speculates: true", |s| {
        s.seq(REST).speculating = true
    }),
    ("sequence 13 speculates: false", |s| {
        s.seq(DRAFTY).speculating = false
    }),
    ("sequence 11 has sample row 2, counted Some(1)", |s| {
        s.seq(TALK).sample_row = 2
    }),
];

#[test]
fn keys() {
    each_is_named(scene, KEYS);
}

#[test]
fn totals_and_copies() {
    each_is_named(scene, TOTALS);
}

#[test]
fn extents() {
    each_is_named(scene, EXTENTS);
}

#[test]
fn sharing() {
    each_is_named(scene, SHARING);
}

#[test]
fn order() {
    each_is_named(scene, ORDER);
}

#[test]
fn ends() {
    each_is_named(scene, ENDS);
}
