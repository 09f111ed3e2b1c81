//! The whole pool in one call: the same as block by block, and the tree.

use kv_core::{BlockManager, PoolSnapshot, SnapshotNode};

use super::tools::{PLENTY, begin, computed, manager, prompt, sequence, table};

#[test]
fn a_snapshot_shows_every_block_and_the_tree() {
    let mut m = manager(8);
    let root = prompt(8);
    let first = computed(&mut m, root.clone()); // step 1: blocks 0 and 1
    let pin = m.pin(first.key()).expect("live");
    drop(first);
    let beside = [&root[..], &[50; 4]].concat();
    let other = computed(&mut m, beside.clone()); // step 2: block 2 follows them
    let third = computed(&mut m, [&root[..4], &[60; 6]].concat()); // step 3: a fork in the tree
    drop(other);
    drop(pin);
    let snapshot = m.snapshot();

    let expected = PoolSnapshot {
        // 0: both stand on it; 1 and 2: the second one's; 3 and 4: the third one's, 4 is not full
        states: vec![2, 1, 1, 2, 2, 0, 0, 0],
        refs: vec![1, 0, 0, 1, 1, 0, 0, 0],
        seq_refs: vec![1, 0, 0, 1, 1, 0, 0, 0],
        ages: vec![2, 2, 1, 0, 0, 0, 0, 0],
        nodes: vec![2, 2, 2, 3, 0, 0, 0, 0],
        node_indices: vec![1, 2, 3, 1, 0, 0, 0, 0],
        tree: vec![
            SnapshotNode {
                parent: 0,
                parent_index: 0,
                len: 0,
                namespace: Some(b"".as_slice().into()),
            },
            SnapshotNode {
                parent: 1,
                parent_index: 0,
                len: 3,
                namespace: None,
            },
            SnapshotNode {
                parent: 2,
                parent_index: 1,
                len: 1,
                namespace: None,
            },
        ],
    };
    assert_eq!(snapshot, expected);
    drop(third);
}

#[test]
fn a_snapshot_says_whose_namespace_it_is_and_changes_nothing() {
    let mut m = manager(4);
    assert!(m.snapshot().tree.is_empty());
    let ours = sequence(&mut m, prompt(4));
    let theirs = m.sequence(prompt(4), b"tenant", true).expect("tokens");
    let snapshot = m.snapshot();
    let names = snapshot.tree.iter().map(|node| node.namespace.as_deref());
    let names: Vec<_> = names.collect();
    assert_eq!(names, [Some(b"".as_slice()), Some(b"tenant")]);
    assert_eq!(m.snapshot(), snapshot);
    assert_eq!(m.check(), Ok(()));
    drop((ours, theirs));
}

/// What is published is as old as what the last step has computed, beside an open step, too.
#[test]
fn published_blocks_have_an_age() {
    let mut m = manager(16);
    for name in 0..5 {
        drop(computed(&mut m, vec![100 + name; 4]));
    }
    let publish = |m: &mut BlockManager, token| {
        let seq = sequence(m, vec![token; 5]);
        m.extend(seq.key(), 4).expect("not in a plan");
        m.publish(seq.key(), 4, &[]).expect("extended");
        let block = table(m, &seq, 0)[0].expect("it has one");
        (seq, block as usize)
    };
    let (_first, block) = publish(&mut m, 200);
    assert_eq!(m.snapshot().ages[block], 0);
    drop(computed(&mut m, vec![300; 4]));
    assert_eq!(m.snapshot().ages[block], 1);
    let plan = begin(&mut m, PLENTY);
    let (_second, block) = publish(&mut m, 400);
    assert_eq!(m.snapshot().ages[block], 1);
    assert_eq!(
        m.match_prefix(&[400; 4], b"").map(|pin| pin.num_blocks()),
        Ok(1)
    );
    m.rollback(plan.key()).expect("the newest");
    m.check().expect("sound");
}
