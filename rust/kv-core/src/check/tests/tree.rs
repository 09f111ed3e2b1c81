//! What the validator says of a spoilt tree.

use std::collections::BTreeMap;

use super::super::ContentTree;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, ContentId, NodeIdx};

// The nodes of the scene by their slots.
const ROOT: usize = 0;
const TENANT: usize = 1;
/// Under `ROOT`, in both groups.
const FIRST: usize = 2;
/// Under `FIRST`, in the second group.
const SECOND: usize = 3;
/// These two are free.
const DEAD: usize = 4;
const DEAD_TOO: usize = 5;
/// Under `TENANT`, in the first group.
const LAST: usize = 6;

struct Scene {
    tree: ContentTree,
    sequences: BTreeMap<NodeIdx, u32>,
}

/// A way to spoil the scene, and what the validator must say of it.
type Case = (&'static str, fn(&mut Scene));

/// Two groups, two namespaces.
fn scene() -> Scene {
    let hasher = ContentHasher::new(1, 128);
    let mut tree = ContentTree::new(2, 2, 2, hasher).expect("little memory");
    let (root, tenant) = (tree.hold_root(b""), tree.hold_root(b"tenant"));
    let mut add = |parent: NodeIdx, token: u32, groups: &[usize]| {
        let tokens = [token, token];
        let hash = tree.hasher().child(tree.hash(parent), &tokens);
        let node = tree.insert(parent, &tokens, hash);
        for &group in groups {
            tree.set_block(node, group, BlockId::from(token));
        }
        node
    };
    let first = add(root, 10, &[0, 1]);
    add(first, 11, &[1]);
    let (dead, dead_too) = (add(first, 12, &[0]), add(root, 13, &[1]));
    add(tenant, 14, &[0]);
    tree.clear_block(dead, 0);
    tree.clear_block(dead_too, 1);
    let sequences = [(root, 1), (tenant, 1)].into();
    Scene { tree, sequences }
}

const SLOTS: &[Case] = &[
    ("7 slots with room for (15, 7) tokens and blocks", |s| {
        s.tree.tokens.push(0)
    }),
    ("7 slots with room for (14, 6) tokens and blocks", |s| {
        s.tree.more_blocks.pop();
    }),
    ("NodeIdx(2) is free, and lives or is free twice", |s| {
        s.tree.free_slots[1] = NodeIdx::new(FIRST);
    }),
    ("NodeIdx(4) is free, and lives or is free twice", |s| {
        s.tree.free_slots[1] = NodeIdx::new(DEAD);
    }),
    ("NodeIdx(4) is free and holds blocks", |s| {
        s.tree.nodes[DEAD].block = BlockId::from(1);
    }),
    ("NodeIdx(5) is free and holds blocks", |s| {
        s.tree.more_blocks[DEAD_TOO] = BlockId::from(1);
    }),
    ("2 dead nodes, 1 free", |s| {
        s.tree.free_slots.pop();
    }),
];

const HOLDS: &[Case] = &[
    ("NodeIdx(3) has a dead parent NodeIdx(4)", |s| {
        s.tree.nodes[SECOND].parent = NodeIdx::new(DEAD);
    }),
    ("2 sequences under NodeIdx(2), which is no root", |s| {
        s.sequences.insert(NodeIdx::new(FIRST), 2);
    }),
    ("2 sequences under NodeIdx(7), which is no root", |s| {
        s.sequences.insert(NodeIdx::new(7), 2);
    }),
    ("NodeIdx(0) has 2 holds, counted 3", |s| {
        s.sequences.insert(NodeIdx::new(ROOT), 2);
    }),
    ("NodeIdx(2) has 4 holds, counted 3", |s| {
        s.tree.nodes[FIRST].holds = 4
    }),
    ("NodeIdx(2) has 2 holds, counted 3", |s| {
        s.tree.nodes[FIRST].holds = 2
    }),
    ("NodeIdx(6) has 1 holds, counted 0", |s| {
        s.tree.nodes[LAST].block = BlockId::NONE;
    }),
];

const INDEX: &[Case] = &[
    ("3 contents, 2 in the index", |s| {
        let hash = s.tree.nodes[LAST].hash;
        s.tree.index.remove(hash, NodeIdx::new(LAST));
    }),
    ("3 contents, 4 in the index", |s| {
        let hash = s.tree.nodes[DEAD].hash;
        s.tree.index.insert(hash, NodeIdx::new(DEAD));
    }),
    ("NodeIdx(6) is not found by its hash", |s| {
        let hash = s.tree.nodes[LAST].hash;
        s.tree.index.remove(hash, NodeIdx::new(LAST));
        s.tree.index.insert(!hash, NodeIdx::new(LAST));
    }),
    ("NodeIdx(3) is not found by its hash", |s| {
        s.tree.nodes[SECOND].hash = s.tree.nodes[FIRST].hash;
    }),
];

const NAMES: &[Case] = &[
    ("its namespace Some(", |s| s.tree.nodes[ROOT].hash ^= 1),
    ("its namespace None", |s| {
        s.tree
            .roots
            .insert(b"tenant"[..].into(), NodeIdx::new(DEAD));
    }),
    ("2 roots, 1 names", |s| {
        s.tree.roots.remove(&b"tenant"[..]);
    }),
    ("2 roots, 3 names", |s| {
        s.tree.roots.insert([1].into(), NodeIdx::new(ROOT));
    }),
    ("NodeIdx(1) is a root and holds blocks", |s| {
        s.tree.nodes[TENANT].block = BlockId::from(1);
        s.tree.nodes[TENANT].holds += 1;
    }),
    ("NodeIdx(3) has no id of its own: ContentId(3)", |s| {
        s.tree.nodes[SECOND].id = s.tree.nodes[FIRST].id;
    }),
    ("NodeIdx(3) has no id of its own: ContentId(8)", |s| {
        s.tree.nodes[SECOND].id = ContentId(8);
    }),
    ("NodeIdx(3) has hash", |s| {
        s.tree.nodes[SECOND].hash ^= 1 << 64
    }),
    ("NodeIdx(3) has hash", |s| s.tree.tokens[2 * SECOND] += 1),
];

fn each_is_named(cases: &[Case]) {
    for (at, (expected, spoil)) in cases.iter().enumerate() {
        let mut scene = scene();
        assert_eq!(scene.tree.check(&scene.sequences), Ok(()));
        spoil(&mut scene);
        let found = scene.tree.check(&scene.sequences).expect_err(expected);
        assert!(
            found.contains(expected),
            "case {at}: {found:?} is not {expected:?}"
        );
    }
}

#[test]
fn slots() {
    each_is_named(SLOTS);
}

#[test]
fn holds() {
    each_is_named(HOLDS);
}

#[test]
fn index() {
    each_is_named(INDEX);
}

#[test]
fn names() {
    each_is_named(NAMES);
}
