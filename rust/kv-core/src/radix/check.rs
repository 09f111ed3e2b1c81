//! Validation of the tree: nodes, children, index, hashes.

use std::collections::{BTreeMap, HashSet};

use super::{ChildList, Node, NodePosition, RadixTree};
use crate::check::ensure;
use crate::ids::{BlockId, NodeId};

impl RadixTree {
    /// Recounts children and finds every node again. `sequences`: those under each root.
    pub(crate) fn check(&self, sequences: &BTreeMap<NodePosition, u32>) -> Result<(), String> {
        self.check_vacancies()?;
        let mut children: BTreeMap<NodePosition, u32> = BTreeMap::new();
        for (id, node) in self.live_nodes() {
            self.check_run(id, node)?;
            if node.namespace.is_none() {
                *children.entry(node.parent).or_default() += 1;
            }
        }
        self.check_children(&children)?;
        self.check_index()?;
        self.check_roots(sequences)?;
        self.check_hashes()
    }

    /// Whether a position exists.
    pub(crate) fn contains(&self, position: NodePosition) -> bool {
        let node = self
            .nodes
            .get(position.node.at())
            .filter(|node| node.is_live());
        node.is_some_and(|node| position.offset as usize * self.groups <= node.blocks.len())
    }

    fn live_nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let all = self.nodes.iter().enumerate();
        let nodes = all.map(|(id, node)| (NodeId::new(id), node));
        nodes.filter(|(_, node)| node.is_live())
    }

    /// Every node is live or vacant.
    fn check_vacancies(&self) -> Result<(), String> {
        let mut distinct = HashSet::new();
        for &id in &self.vacant {
            let is_vacant = self.nodes.get(id.at()).is_some_and(|node| !node.is_live());
            ensure(distinct.insert(id) && is_vacant, || {
                format!("{id:?} is vacant, and lives or is vacant twice")
            })?;
        }
        let (dead, vacant) = (
            self.nodes.len() - self.live_nodes().count(),
            self.vacant.len(),
        );
        ensure(dead == vacant, || {
            format!("{dead} dead nodes, {vacant} vacant")
        })?;
        let len: usize = self
            .live_nodes()
            .map(|(_, node)| node.blocks.len() / self.groups)
            .sum();
        let counted = self.num_blocks;
        ensure(len == counted, || {
            format!("{len} blocks in all, {counted} counted")
        })
    }

    /// A node has as many tokens as blocks, and its last block is held or has a child.
    fn check_run(&self, id: NodeId, node: &Node) -> Result<(), String> {
        let len = node.blocks.len() / self.groups;
        let tokens = node.tokens.len();
        let fits = node.blocks.len().is_multiple_of(self.groups) && tokens == len * self.block_size;
        ensure(fits, || {
            let blocks = node.blocks.len();
            format!("{id:?} has {tokens} tokens in {blocks} blocks")
        })?;
        if node.namespace.is_some() {
            return ensure(len == 0, || format!("{id:?} is a root of {len} blocks"));
        }
        let parent = node.parent;
        ensure(self.contains(parent), || {
            format!("{id:?} is attached to {parent:?}, which is gone")
        })?;
        let is_root = self.node(parent.node).namespace.is_some();
        ensure(is_root == (parent.offset == 0), || {
            format!("{id:?} is attached to {parent:?}, no block and no root")
        })?;
        let last = node.blocks[node.blocks.len().saturating_sub(self.groups)..].iter();
        let needed = last.clone().any(|&block| block != BlockId::NONE);
        ensure(len > 0 && (needed || node.has_child(len as u32)), || {
            format!("{id:?} has {len} blocks, and nothing needs the last one")
        })
    }

    fn check_children(&self, counted: &BTreeMap<NodePosition, u32>) -> Result<(), String> {
        let recorded = self.live_nodes().flat_map(|(node, of)| {
            of.children.iter().map(
                move |&ChildList {
                          offset: len, count, ..
                      }| { (NodePosition { node, offset: len }, count) },
            )
        });
        let recorded: BTreeMap<NodePosition, u32> = recorded.collect();
        for (position, count) in counted {
            let linked = recorded.get(position).copied().unwrap_or(0);
            ensure(linked == *count, || {
                format!("{linked} nodes are attached to {position:?}, counted {count}")
            })?;
        }
        ensure(recorded.len() == counted.len(), || {
            format!(
                "children at {} positions, counted {}",
                recorded.len(),
                counted.len()
            )
        })?;
        let sorted = |node: &Node| node.children.is_sorted_by(|a, b| a.offset < b.offset);
        ensure(self.live_nodes().all(|(_, node)| sorted(node)), || {
            "children out of order".into()
        })?;
        let list = self.live_nodes().flat_map(|(node, of)| {
            let position = move |list: &ChildList| {
                (
                    NodePosition {
                        node,
                        offset: list.offset,
                    },
                    list.newest,
                )
            };
            of.children.iter().map(position)
        });
        let mut linked = 0;
        for (position, newest) in list {
            linked += self.check_links(position, newest)?;
        }
        let attached: u32 = counted.values().sum();
        ensure(linked == attached, || {
            format!("{linked} nodes linked, counted {attached}")
        })
    }

    /// The children of a position are linked both ways, from the newest one on. Returns how many they are.
    fn check_links(&self, position: NodePosition, newest: NodeId) -> Result<u32, String> {
        let (mut at, mut newer, mut linked) = (newest, NodeId::NONE, 0);
        while at != NodeId::NONE {
            let node = self.nodes.get(at.at()).filter(|node| node.is_live());
            let fits = node.filter(|node| node.parent == position && node.newer_sibling == newer);
            let Some(node) = fits else {
                return Err(format!("{at:?} is linked after {newer:?} at {position:?}"));
            };
            (at, newer) = (node.older_sibling, at);
            linked += 1;
        }
        Ok(linked)
    }

    /// The index has every node and nothing else, and no two begin with the same block.
    fn check_index(&self) -> Result<(), String> {
        let nodes = self
            .live_nodes()
            .filter(|(_, node)| node.namespace.is_none());
        let nodes: Vec<_> = nodes.collect();
        let (indexed, counted) = (self.index.len(), nodes.len());
        ensure(indexed == counted, || {
            format!("{counted} nodes, {indexed} in the index")
        })?;
        for (id, node) in nodes {
            let tokens = &node.tokens[..self.block_size];
            let label = node.label.as_deref();
            let hash = self.index_hash(node.parent, tokens, label);
            let indexed = self.index.find(hash, |other| {
                self.begins_with(other, node.parent, tokens, label)
            });
            ensure(indexed == Some(id), || {
                format!("{id:?} is indexed as {indexed:?}")
            })?;
            // The next block of the parent is not a child of it.
            let above = self.node(node.parent.node);
            let at = node.parent.offset as usize * self.block_size;
            ensure(
                label.is_some() || above.tokens.get(at..at + self.block_size) != Some(tokens),
                || format!("{id:?} begins as its parent goes on"),
            )?;
        }
        Ok(())
    }

    /// Each root is of one namespace, and has sequences or children.
    fn check_roots(&self, sequences: &BTreeMap<NodePosition, u32>) -> Result<(), String> {
        let roots = self
            .live_nodes()
            .filter(|(_, node)| node.namespace.is_some());
        let roots: Vec<_> = roots.collect();
        for &(node, root) in &roots {
            let name = root
                .namespace
                .as_ref()
                .and_then(|name| self.namespaces.get(name));
            ensure(name == Some(&node), || {
                format!("{node:?} is the root of {name:?}")
            })?;
            let counted = sequences
                .get(&NodePosition { node, offset: 0 })
                .copied()
                .unwrap_or(0);
            let recorded = root.sequences;
            ensure(recorded == counted, || {
                format!("{node:?} has {recorded} sequences, counted {counted}")
            })?;
            ensure(counted > 0 || !root.children.is_empty(), || {
                format!("{node:?} is the root of nothing")
            })?;
        }
        let (counted, named) = (roots.len(), self.namespaces.len());
        ensure(counted == named, || {
            format!("{counted} roots, {named} namespaces")
        })?;
        for (root, count) in sequences {
            let is_root = self.contains(*root) && self.node(root.node).namespace.is_some();
            ensure(is_root, || {
                format!("{count} sequences under {root:?}, which is no root")
            })?;
        }
        Ok(())
    }

    /// Hashes follow from tokens and parents, and no two blocks have the same one.
    fn check_hashes(&self) -> Result<(), String> {
        let mut all = HashSet::new();
        for (id, node) in self.live_nodes() {
            let len = node.tokens.len() / self.block_size;
            let (hashes, num_hashed) = (node.hashes.len(), node.num_hashed as usize);
            ensure(hashes <= num_hashed && num_hashed <= len, || {
                format!("{id:?} has {hashes} hashes of {num_hashed} in {len} blocks")
            })?;
            let mut parent = node
                .parent
                .some()
                .and_then(|position| self.known_hash(position));
            if let Some(label) = &node.label {
                parent = parent.map(|of| self.hasher.switch(of, label.offset, &label.name));
            }
            for (index, &hash) in node.hashes.iter().enumerate() {
                let tokens = &node.tokens[index * self.block_size..][..self.block_size];
                let counted = parent.map(|parent| self.hasher.child(parent, tokens));
                parent = Some(hash);
                ensure(counted == Some(hash), || {
                    format!("{id:?} has the hash {hash:x} at {index}, counted {counted:x?}")
                })?;
                ensure(all.insert(hash), || {
                    format!("two blocks have the hash {hash:x}")
                })?;
            }
        }
        all.extend(&self.stale_hashes);
        let are_known = all.iter().all(|&hash| self.hashes.contains(hash));
        ensure(are_known && all.len() == self.hashes.len(), || {
            format!("{} hashes, {} in the set", all.len(), self.hashes.len())
        })
    }

    /// A hash that was computed already.
    fn known_hash(&self, position: NodePosition) -> Option<u128> {
        let node = self.node(position.node);
        match &node.namespace {
            Some(name) => Some(self.hasher.root(name)),
            None => node.hashes.get(position.index()).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shrink;
    use super::*;
    use crate::hash::ContentHasher;

    // The nodes of the scene by their ids; node 4 is vacant.
    const ROOT: usize = 0;
    /// Under `ROOT`: three blocks; the middle one has lost its block id in the second group.
    const LONG: usize = 1;
    /// After two blocks of `LONG`: one block.
    const CHILD: usize = 2;
    /// The root of another namespace, with a sequence.
    const TENANT: usize = 3;

    struct Scene {
        tree: RadixTree,
        sequences: BTreeMap<NodePosition, u32>,
    }

    fn scene() -> Scene {
        let mut tree = RadixTree::new(64, 2, 2, ContentHasher::new(1, 128));
        let root = tree.acquire_root(b"");
        let blocks = |ids: [u32; 2]| ids.map(BlockId::from);
        let long = [blocks([0, 1]), blocks([2, 3]), blocks([4, 5])].concat();
        let end = tree.append(root, &[1, 1, 2, 2, 3, 3], &long, None);
        let list = NodePosition { offset: 2, ..end };
        let child = tree.append(list, &[4, 4], &blocks([6, 7]), None);
        let tenant = tree.acquire_root(b"tenant");
        let gone = tree.append(list, &[5, 5], &blocks([8, 9]), None);
        tree.clear_block(gone, 0);
        tree.clear_block(gone, 1);
        tree.clear_block(list, 1);
        tree.hash(end);
        tree.hash(child);
        Scene {
            tree,
            sequences: [(root, 1), (tenant, 1)].into(),
        }
    }

    type Case = (&'static str, fn(&mut Scene));

    const CASES: &[Case] = &[
        ("NodeId(4) is vacant, and lives or is vacant twice", |s| {
            s.tree.vacant.push(NodeId::new(4));
        }),
        ("NodeId(1) is vacant, and lives or is vacant twice", |s| {
            s.tree.vacant[0] = NodeId::new(LONG)
        }),
        ("1 dead nodes, 0 vacant", |s| s.tree.vacant.clear()),
        ("4 blocks in all, 5 counted", |s| s.tree.num_blocks += 1),
        ("NodeId(1) has 5 tokens in 6 blocks", |s| {
            s.tree.nodes[LONG].tokens.pop();
        }),
        ("NodeId(3) is a root of 1 blocks", |s| {
            s.tree.nodes[TENANT].tokens = vec![1, 1];
            s.tree.nodes[TENANT].blocks = vec![BlockId::from(8); 2];
            s.tree.num_blocks += 1;
        }),
        (
            "is attached to NodePosition { node: NodeId(4), offset: 1 }, which is gone",
            |s| {
                s.tree.nodes[CHILD].parent = NodePosition {
                    node: NodeId::new(4),
                    offset: 1,
                };
            },
        ),
        ("no block and no root", |s| {
            s.tree.nodes[CHILD].parent.offset = 0
        }),
        (
            "NodeId(2) has 1 blocks, and nothing needs the last one",
            |s| {
                s.tree.nodes[CHILD].blocks = vec![BlockId::NONE; 2];
            },
        ),
        (
            "2 nodes are attached to NodePosition { node: NodeId(1), offset: 2 }, counted 1",
            |s| {
                s.tree.nodes[LONG].children[0].count = 2;
            },
        ),
        (
            "0 nodes are attached to NodePosition { node: NodeId(1), offset: 2 }, counted 1",
            |s| {
                s.tree.nodes[LONG].children.clear();
            },
        ),
        ("children at 3 positions, counted 2", |s| {
            let position = NodePosition {
                node: NodeId::new(LONG),
                offset: 3,
            };
            s.tree.child_list(position).count += 1;
        }),
        ("NodeId(1) is linked after NodeId(none) at", |s| {
            s.tree.nodes[LONG].newer_sibling = NodeId::new(CHILD);
        }),
        ("NodeId(1) is linked after NodeId(2) at", |s| {
            s.tree.nodes[CHILD].older_sibling = NodeId::new(LONG);
        }),
        ("1 nodes linked, counted 2", |s| {
            s.tree.nodes[LONG].children[0].newest = NodeId::NONE;
        }),
        ("2 nodes, 1 in the index", |s| {
            let (parent, tokens) = (s.tree.nodes[CHILD].parent, [4, 4]);
            let hash = s.tree.index_hash(parent, &tokens, None);
            s.tree.index.remove(hash, NodeId::new(CHILD));
        }),
        ("NodeId(2) is indexed as None", |s| {
            s.tree.nodes[CHILD].tokens[0] = 9
        }),
        ("NodeId(2) begins as its parent goes on", |s| {
            s.tree.nodes[LONG].tokens[4..].copy_from_slice(&[4, 4]);
        }),
        ("NodeId(3) is the root of None", |s| {
            s.tree.namespaces.remove(&b"tenant"[..]);
        }),
        ("NodeId(3) has 1 sequences, counted 2", |s| {
            s.sequences.insert(
                NodePosition {
                    node: NodeId::new(TENANT),
                    offset: 0,
                },
                2,
            );
        }),
        ("NodeId(3) is the root of nothing", |s| {
            s.sequences.remove(&NodePosition {
                node: NodeId::new(TENANT),
                offset: 0,
            });
            s.tree.nodes[TENANT].sequences = 0;
        }),
        ("2 roots, 3 namespaces", |s| {
            s.tree.namespaces.insert([1][..].into(), NodeId::new(ROOT));
        }),
        (
            "2 sequences under NodePosition { node: NodeId(1), offset: 1 }, which is no root",
            |s| {
                s.sequences.insert(
                    NodePosition {
                        node: NodeId::new(LONG),
                        offset: 1,
                    },
                    2,
                );
            },
        ),
        ("NodeId(1) has 4 hashes of 3 in 3 blocks", |s| {
            s.tree.nodes[LONG].hashes.push(9)
        }),
        ("NodeId(1) has 3 hashes of 4 in 3 blocks", |s| {
            s.tree.nodes[LONG].num_hashed = 4
        }),
        ("NodeId(1) has the hash", |s| {
            s.tree.nodes[LONG].hashes[1] = 7;
        }),
        ("4 hashes, 5 in the set", |s| {
            s.tree.hashes.add_leading(&[7]);
        }),
    ];

    #[test]
    fn each_is_named() {
        for (at, (expected, spoil)) in CASES.iter().enumerate() {
            let mut scene = scene();
            assert_eq!(scene.tree.check(&scene.sequences), Ok(()));
            spoil(&mut scene);
            let difference = scene.tree.check(&scene.sequences).expect_err(expected);
            assert!(
                difference.contains(expected),
                "case {at}: {difference:?} is not {expected:?}"
            );
        }
    }

    #[test]
    fn nodes_release_unused_capacity_or_do_not_need() {
        let mut items = vec![9; 97];
        items.truncate(10);
        shrink(&mut items);
        assert_eq!(items.capacity(), 97); // 26 are not small enough for 97
        items.truncate(7);
        shrink(&mut items);
        assert!(items.capacity() < 97 && items == [9; 7]);
        let mut s = scene();
        for (capacity, kept) in [(10, 10), (1_000, 1_000), (1_300, 1_250)] {
            let node = &mut s.tree.nodes[LONG];
            node.tokens = Vec::with_capacity(capacity);
            node.tokens.resize(1_000.min(capacity), 7);
            s.tree.shrink_node(NodeId::new(LONG));
            assert_eq!(s.tree.nodes[LONG].tokens.capacity(), kept);
        }
    }
}
