//! The validator's part that sees into the tree: slots, holds, index, namespaces, contents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{ContentTree, Node};
use crate::check::ensure;
use crate::ids::NodeIdx;

impl Node {
    fn lives(&self) -> bool {
        self.holds > 0
    }

    fn is_root(&self) -> bool {
        self.parent == NodeIdx::NONE
    }
}

impl ContentTree {
    /// Recounts holds and re-finds every node. `root_holds` counts the sequences under each root.
    pub(crate) fn check(&self, root_holds: &BTreeMap<NodeIdx, u32>) -> Result<(), String> {
        self.check_slots()?;
        self.check_holds(root_holds)?;
        self.check_index()?;
        self.check_roots()?;
        self.check_contents()
    }

    /// Whether there is such a node.
    pub(crate) fn lives(&self, node: NodeIdx) -> bool {
        self.nodes.get(node.at()).is_some_and(Node::lives)
    }

    fn living(&self) -> impl Iterator<Item = (NodeIdx, &Node)> {
        let slots = self.nodes.iter().enumerate();
        let nodes = slots.map(|(slot, node)| (NodeIdx::new(slot), node));
        nodes.filter(|(_, node)| node.lives())
    }

    /// Every slot has a node that lives, or is free and empty.
    fn check_slots(&self) -> Result<(), String> {
        let (slots, free) = (self.nodes.len(), self.free_slots.len());
        let room = (self.tokens.len(), self.more_blocks.len());
        let needed = (slots * self.block_size, slots * (self.groups - 1));
        ensure(room == needed, || {
            format!("{slots} slots with room for {room:?} tokens and blocks")
        })?;
        let mut distinct = BTreeSet::new();
        for &slot in &self.free_slots {
            ensure(distinct.insert(slot) && !self.lives(slot), || {
                format!("{slot:?} is free, and lives or is free twice")
            })?;
            ensure(!self.has_block(slot), || {
                format!("{slot:?} is free and holds blocks")
            })?;
        }
        let dead = slots - self.living().count();
        ensure(dead == free, || format!("{dead} dead nodes, {free} free"))
    }

    /// Each node is held by its blocks, its children and, if it is a root, by sequences.
    fn check_holds(&self, root_holds: &BTreeMap<NodeIdx, u32>) -> Result<(), String> {
        let mut holds = vec![0_u32; self.nodes.len()];
        for (at, node) in self.living() {
            holds[at.at()] += self.blocks(at).count() as u32;
            if let Some(parent) = node.parent.some() {
                ensure(self.lives(parent), || {
                    format!("{at:?} has a dead parent {parent:?}")
                })?;
                holds[parent.at()] += 1;
            }
        }
        for (&root, count) in root_holds {
            let is_root = self.lives(root) && self.nodes[root.at()].is_root();
            ensure(is_root, || {
                format!("{count} sequences under {root:?}, which is no root")
            })?;
            holds[root.at()] += count;
        }
        for (at, node) in self.living() {
            let counted = holds[at.at()];
            ensure(counted == node.holds, || {
                format!("{at:?} has {} holds, counted {counted}", node.holds)
            })?;
        }
        Ok(())
    }

    /// The index has every content, and nothing else: no two have the same hash.
    fn check_index(&self) -> Result<(), String> {
        let linked = self.index.len();
        let contents: Vec<_> = self.living().filter(|(_, node)| !node.is_root()).collect();
        let counted = contents.len();
        ensure(linked == counted, || {
            format!("{counted} contents, {linked} in the index")
        })?;
        for (at, node) in contents {
            ensure(self.find(node.hash) == Some(at), || {
                format!("{at:?} is not found by its hash")
            })?;
        }
        Ok(())
    }

    /// Each root stands for one namespace and holds nothing.
    fn check_roots(&self) -> Result<(), String> {
        let roots: Vec<_> = self.living().filter(|(_, node)| node.is_root()).collect();
        let (counted, named) = (roots.len(), self.roots.len());
        ensure(counted == named, || {
            format!("{counted} roots, {named} names")
        })?;
        let known = self.names.len();
        ensure(known == named, || {
            format!("{named} names, {known} of roots")
        })?;
        let names = self.roots.iter().map(|(name, root)| (*root, name));
        let names: BTreeMap<NodeIdx, &Arc<[u8]>> = names.collect();
        for (at, node) in roots {
            let hash = names.get(&at).map(|name| self.hasher.root(name));
            ensure(hash == Some(node.hash), || {
                format!("{at:?} has hash {:x}, its namespace {hash:x?}", node.hash)
            })?;
            ensure(!self.has_block(at), || {
                format!("{at:?} is a root and holds blocks")
            })?;
        }
        Ok(())
    }

    /// Names: ids that are nobody else's, hashes that follow from what is hashed.
    fn check_contents(&self) -> Result<(), String> {
        let mut ids = BTreeSet::new();
        for (at, node) in self.living() {
            ensure(ids.insert(node.id) && node.id.0 <= self.next_id, || {
                format!("{at:?} has no id of its own: {:?}", node.id)
            })?;
            if let Some(parent) = node.parent.some() {
                let hash = self.hasher.child(self.hash(parent), self.tokens(at));
                ensure(hash == node.hash, || {
                    format!("{at:?} has hash {:x}, counted {hash:x}", node.hash)
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests/tree.rs"]
mod tests;
