//! What the validator says of spoilt sequences.

use super::*;
use crate::ids::NodeIdx;

const TABLES: &[Case] = &[
    ("two sequences are number 1", |s| s.seq(COPY).id = 1),
    ("sequence 1 has 7 table entries in 2 groups", |s| {
        s.seq(REST).table.pop();
    }),
    ("sequence 1 holds BlockId(128): there is none", |s| {
        s.seq(REST).table[7] = BlockId::from(128);
    }),
    (
        "sequence 1 holds BlockId(6) as entry 7, it is entry 6",
        |s| {
            s.seq(REST).table[7] = BlockId::from(6);
        },
    ),
    (
        "sequence 2 holds BlockId(6) as entry 4, it is entry 6",
        |s| {
            s.seq(COPY).table.swap(4, 6);
        },
    ),
    ("sequence 1 holds BlockId(5) of group 0 in column 1", |s| {
        s.block(5).group = 0;
    }),
    (
        "sequence 1 of 12 computed tokens has no block in row 2 of group 1",
        |s| {
            s.seq(REST).table[5] = BlockId::NONE;
        },
    ),
    (
        "sequence 1 of 12 computed tokens has no block in row 0 of group 0",
        |s| {
            s.seq(REST).table[0] = BlockId::NONE;
        },
    ),
];

const PROGRESS: &[Case] = &[
    ("sequence 5: 8 computed of 7 tokens in 3 rows", |s| {
        s.seq(TAIL).computed = 8;
    }),
    ("sequence 1: 13 computed of 13 tokens in 4 rows", |s| {
        s.seq(REST).computed = 13;
    }),
    ("sequence 1 is at 11, behind its 12 computed tokens", |s| {
        s.seq(REST).ahead = 11;
    }),
    ("sequence 6: 12 cached of 11 computed tokens", |s| {
        s.seq(ATTACHED).cached = 12;
    }),
    ("sequence 6 is at 10 with 12 registered tokens", |s| {
        s.seq(ATTACHED).stand(10);
        s.seq(ATTACHED).cached = 0;
    }),
    ("sequence 1 has named blocks, and caching is off", |s| {
        s.manager.config.prefix_caching = false;
    }),
    ("sequence 1 was dropped and lives on", |s| {
        s.seq(REST).dropped = true;
    }),
];

const CHAINS: &[Case] = &[
    ("sequence 1 knows 3 hashes, 4 of 4 blocks registered", |s| {
        s.seq(REST).hashes.pop();
    }),
    ("sequence 2 knows 5 hashes, 4 of 4 blocks registered", |s| {
        s.seq(COPY).hashes.push(0);
    }),
    ("for row 1, counted", |s| s.seq(REST).hashes[1] ^= 1),
    ("sequence 1: the content of row 3 is gone", |s| {
        s.seq(REST).chain.tip = NodeIdx::NONE;
    }),
    ("sequence 1: row 3 is not its content's", |s| {
        s.seq(REST).chain.tip = s.seq(PARENT).chain.tip;
    }),
    ("sequence 1: row 3 is not its content's", |s| {
        s.seq(REST).table[7] = BlockId::from(25);
    }),
    ("sequence 14: row 3 is not its content's", |s| {
        s.seq(FULL).table.truncate(6);
    }),
    ("sequence 7 does not hang from its namespace", |s| {
        s.seq(FRESH).chain.tip = s.seq(TENANT).root;
    }),
];

const UNSHARED: &[Case] = &[
    (
        "sequence 3 would write on entry 4, BlockId(10) of 2 tables",
        |s| {
            s.seq(PARENT).shared_rows = 2;
        },
    ),
    (
        "sequence 8 would write on entry 2, BlockId(14) of 1 tables",
        |s| {
            s.block(14).node = s.block(12).node;
        },
    ),
];

const COLLISIONS: &[Case] = &[
    (
        "sequence 1 of 9 computed tokens has no block in row 1 of group 0",
        |s| {
            s.seq(0).table[1] = BlockId::NONE;
        },
    ),
    (
        "sequence 1 would write on entry 3, BlockId(3) of 1 tables",
        |s| {
            s.block(3).node = s.block(1).node;
        },
    ),
    ("sequence 2: row 0 is not its content's", |s| {
        s.seq(1).tokens[0] = 50; // the same hash
    }),
];

const NAMELESS: &[Case] = &[
    ("sequence 1 has named blocks, and caching is off", |s| {
        s.seq(0).chain.private = true;
    }),
    ("sequence 1 has named blocks, and caching is off", |s| {
        s.seq(0).chain.blocks = 1;
    }),
];

#[test]
fn tables() {
    each_is_named(scene, TABLES);
}

#[test]
fn progress() {
    each_is_named(scene, PROGRESS);
}

#[test]
fn unshared_rows() {
    each_is_named(scene, UNSHARED);
}

#[test]
fn chains() {
    each_is_named(scene, CHAINS);
    each_is_named(collisions, COLLISIONS);
    each_is_named(nameless, NAMELESS);
}
