//! Partial matches.

use super::*;

fn tree() -> (RadixTree, NodePosition) {
    let mut tree = RadixTree::new(64, 4, 1, ContentHasher::new(1, 128));
    let root = tree.acquire_root(b"");
    (tree, root)
}

fn add(tree: &mut RadixTree, position: NodePosition, tokens: &[u32], block: u32) -> NodePosition {
    tree.append(position, tokens, &[BlockId::from(block)], None)
}

fn block(tree: &RadixTree, matched: Option<(NodePosition, usize)>) -> Option<(u32, usize)> {
    matched.map(|(position, agrees)| (tree.block(position, 0).expect("held").get(), agrees))
}

#[test]
fn the_longest_partial_match_is_found() {
    let (mut tree, root) = tree();
    let parent = add(&mut tree, root, &[1, 1, 1, 1], 9);
    add(&mut tree, parent, &[2, 2, 2, 2], 8); // continues the node
    for (tokens, block) in [([2, 2, 3, 3], 7), ([2, 4, 4, 4], 6), ([2, 2, 3, 4], 5)] {
        add(&mut tree, parent, &tokens, block);
    }
    let ask = |tree: &RadixTree, tokens: &[u32], least| {
        block(
            tree,
            tree.longest_partial_match(parent, tokens, None, least, MAX_COMPARED_CHILDREN, |_| {
                true
            }),
        )
    };
    assert_eq!(ask(&tree, &[2, 2, 2, 9], 1), Some((8, 3)));
    assert_eq!(ask(&tree, &[2, 4, 9], 1), Some((6, 2)));
    assert_eq!(ask(&tree, &[2, 2, 3, 9], 1), Some((5, 3))); // and block 7, as long
    assert_eq!(ask(&tree, &[2, 9], 1), Some((5, 1)));
    assert_eq!(ask(&tree, &[2, 9], 2), None);
    assert_eq!(ask(&tree, &[3], 1), None);
    let at_end = tree.longest_partial_match(parent, &[], None, 0, 8, |_| false);
    assert_eq!(at_end, None);
    let not_the_longest = |position| tree.block(position, 0) != Some(BlockId::from(8));
    let matched = tree.longest_partial_match(
        parent,
        &[2, 2, 2, 9],
        None,
        1,
        MAX_COMPARED_CHILDREN,
        not_the_longest,
    );
    assert_eq!(block(&tree, matched), Some((5, 2)));
}

#[test]
fn only_the_newest_live_children_are_compared() {
    let (mut tree, root) = tree();
    let max_children = MAX_COMPARED_CHILDREN as u32;
    let all: Vec<NodePosition> = (0..max_children + 1)
        .map(|at| add(&mut tree, root, &[at, 0, 0, 0], at))
        .collect();
    let ask = |tree: &RadixTree, token| {
        block(
            tree,
            tree.longest_partial_match(root, &[token], None, 1, MAX_COMPARED_CHILDREN, |_| true),
        )
    };
    assert_eq!(ask(&tree, 0), None);
    assert_eq!(ask(&tree, 1), Some((1, 1)));
    // Out of the middle, the newest, and the oldest.
    for gone in [4, max_children, 1] {
        tree.clear_block(all[gone as usize], 0);
        assert_eq!(ask(&tree, gone), None);
        assert_eq!(tree.check(&[(root, 1)].into()), Ok(()));
    }
    assert_eq!(ask(&tree, 0), Some((0, 1)));
    add(&mut tree, root, &[99, 0, 0, 0], 99);
    assert_eq!(ask(&tree, 99), Some((99, 1)));
    assert_eq!(tree.check(&[(root, 1)].into()), Ok(()));
}
