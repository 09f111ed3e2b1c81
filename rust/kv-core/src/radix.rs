//! The prefix index: a radix tree of cached blocks.
//!
//! A cached block is its parent (the cached block before it), `block_size` tokens, and the block ids that hold
//! it now, one per layer group. Consecutive cached blocks are one [`Node`]; a child may be attached after
//! any block of a node, so nodes are never split:
//!
//! ```text
//!   root  --[ block 1 | block 2 | block 3 ]        a node: tokens and block ids
//!                             \--[ block 3 | block 4 ]   a child, attached after block 2
//! ```
//!
//! The index finds a child by its parent position and first block. A hash proves nothing: a match compares the
//! tokens under the parent that the search has reached. A node ends with its last block that is held or
//! has a child, so a block in the middle may be evicted without orphaning its descendants.
//!
//! Block hashes are for other processes; each is computed when it is first needed.

mod check;
mod index;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{HashMap, TryReserveError};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::block_hashes::BlockHashSet;
use crate::events::{Event, Evicted};
use crate::groups::Groups;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, NodeId, NodePosition};
use crate::stats::SnapshotNode;
use crate::switch::{Label, Labelled, Switch, SwitchPoint};
use index::Index;

/// Hashes of removed blocks that may wait for their removal from the set, which bounds the work of a call.
const MAX_STALE_HASHES: usize = 1_024;

/// Children of a position that a search for a partial match compares: the newest ones. It bounds the cost of a
/// prefill that ends inside a block.
pub(crate) const MAX_COMPARED_CHILDREN: usize = 8;

/// Consecutive cached blocks. The root of a namespace has none. The default is a vacant node.
#[derive(Default)]
struct Node {
    /// Where it is attached; `NONE` for the root of a namespace.
    parent: NodePosition,
    /// The hash under which the index has it.
    hash: u32,
    /// Blocks in the node; 0 in roots and vacant nodes.
    len: u32,
    tokens: Vec<u32>,
    /// By block, then by layer group.
    blocks: Vec<BlockId>,
    /// Hashes of the first `num_hashed` blocks. They end early where another block has the same hash: that
    /// block and those after it have none.
    hashes: Vec<u128>,
    num_hashed: u32,
    /// By offset.
    children: Vec<ChildList>,
    /// The child that was attached or matched last, compared first. May be stale.
    latest_child: NodeId,
    /// Children of the same position, in the order in which they were attached.
    older_sibling: NodeId,
    newer_sibling: NodeId,
    /// Sequences under a root.
    sequences: u32,
    /// Of a root.
    namespace: Option<Arc<[u8]>>,
    /// Of its first block, if a namespace switches there. Such a block always begins a node.
    label: Option<Box<Label>>,
}

/// The children attached after `offset` blocks of a node.
struct ChildList {
    offset: u32,
    count: u32,
    newest: NodeId,
}

impl Node {
    fn is_live(&self) -> bool {
        self.len > 0 || self.namespace.is_some()
    }

    /// The offset of the last child.
    fn last_child(&self) -> u32 {
        self.children.last().map_or(0, |list| list.offset)
    }

    fn has_child(&self, offset: u32) -> bool {
        self.find_children(offset).is_ok()
    }

    /// Index of the child list of an offset, or where it would be inserted.
    fn find_children(&self, offset: u32) -> Result<usize, usize> {
        self.children
            .binary_search_by_key(&offset, |list| list.offset)
    }
}

/// Cached blocks by their prefixes.
pub(crate) struct RadixTree {
    block_size: usize,
    groups: usize,
    hasher: ContentHasher,
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    /// Nodes by parent position and first block.
    index: Index,
    namespaces: HashMap<Arc<[u8]>, NodeId>,
    /// Hashes of blocks, and those of forgotten blocks that are still to be removed.
    hashes: BlockHashSet,
    stale_hashes: Vec<u128>,
    num_blocks: usize,
    /// A position that is not truncated.
    protected: NodePosition,
    num_hashed: u64,
    num_collisions: u64,
}

impl RadixTree {
    /// An empty tree, sized for a pool of `num_blocks` blocks.
    pub(crate) fn new(
        num_blocks: usize,
        block_size: usize,
        groups: usize,
        hasher: ContentHasher,
    ) -> Self {
        Self {
            block_size,
            groups,
            hasher,
            nodes: Vec::new(),
            vacant: Vec::new(),
            index: Index::new(num_blocks),
            namespaces: HashMap::new(),
            hashes: BlockHashSet::new(num_blocks),
            stale_hashes: Vec::new(),
            num_blocks: 0,
            protected: NodePosition::NONE,
            num_hashed: 0,
            num_collisions: 0,
        }
    }

    /// Allocates the set of block hashes now instead of at the first hash.
    pub(crate) fn reserve_hashes(&mut self) -> Result<(), TryReserveError> {
        self.hashes.reserve()
    }

    /// Bytes per block of the pool.
    pub(crate) fn bytes_per_block(block_size: usize) -> usize {
        size_of::<BlockId>() + block_size * size_of::<u32>()
    }

    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    pub(crate) fn hasher(&self) -> &ContentHasher {
        &self.hasher
    }

    pub(crate) fn num_hashed(&self) -> u64 {
        self.num_hashed
    }

    /// Blocks whose hash another block had.
    pub(crate) fn num_collisions(&self) -> u64 {
        self.num_collisions
    }

    /// Cached blocks and their ancestors, and namespaces.
    pub(crate) fn len(&self) -> usize {
        self.num_blocks + self.namespaces.len()
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.at()]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node.at()]
    }

    /// The root of `namespace`, if it is in use.
    pub(crate) fn root(&self, namespace: &[u8]) -> Option<NodePosition> {
        let node = *self.namespaces.get(namespace)?;
        Some(NodePosition::new(node, 0))
    }

    /// The root of `namespace` for a new sequence; created if it is missing.
    pub(crate) fn acquire_root(&mut self, namespace: &[u8]) -> NodePosition {
        let node = match self.namespaces.get(namespace) {
            Some(&node) => node,
            None => {
                let name: Arc<[u8]> = namespace.into();
                let node = self.insert_node(Node {
                    namespace: Some(Arc::clone(&name)),
                    ..Node::default()
                });
                self.namespaces.insert(name, node);
                node
            }
        };
        let root = NodePosition::new(node, 0);
        self.share_root(root);
        root
    }

    pub(crate) fn share_root(&mut self, root: NodePosition) {
        self.node_mut(root.node).sequences += 1;
    }

    pub(crate) fn release_root(&mut self, root: NodePosition) {
        self.node_mut(root.node).sequences -= 1;
        self.truncate(root.node);
    }

    fn insert_node(&mut self, node: Node) -> NodeId {
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.at()] = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId::new(self.nodes.len() - 1)
            }
        }
    }

    /// The index hash of a child of `parent` with this first block.
    fn index_hash(&self, parent: NodePosition, tokens: &[u32], label: Option<&Label>) -> u32 {
        let position = u64::from(parent.node.get()) << 32 | u64::from(parent.offset);
        let seed = position ^ self.hasher.seed();
        let mut hash = xxh3_64_with_seed(bytemuck::cast_slice(tokens), seed);
        if let Some(Label { offset, name }) = label {
            hash = xxh3_64_with_seed(name, hash ^ u64::from(*offset));
        }
        self.hasher.index_bits(hash) as u32
    }

    /// The block that follows `position` with exactly these tokens and this label.
    pub(crate) fn next(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
    ) -> Option<NodePosition> {
        debug_assert_eq!(tokens.len(), self.block_size);
        let node = self.node(position.node);
        let at = position.offset as usize * self.block_size;
        if label.is_none() && node.tokens.get(at..at + self.block_size) == Some(tokens) {
            return Some(NodePosition::new(position.node, position.offset + 1));
        }
        Some(NodePosition::new(self.child(position, tokens, label)?, 1))
    }

    /// The child of `position` that begins with this block. The latest child is compared before anything is hashed.
    fn child(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
    ) -> Option<NodeId> {
        let node = self.node(position.node);
        if !node.has_child(position.offset) {
            return None;
        }
        let latest = node.latest_child;
        if latest != NodeId::NONE && self.begins_with(latest, position, tokens, label) {
            return Some(latest);
        }
        self.num_hashed += 1;
        let hash = self.index_hash(position, tokens, label);
        let matches = |node| self.begins_with(node, position, tokens, label);
        let child = self.index.find(hash, matches)?;
        self.node_mut(position.node).latest_child = child;
        Some(child)
    }

    /// Whether a node is a child of `parent` and begins with this block.
    fn begins_with(
        &self,
        node: NodeId,
        parent: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
    ) -> bool {
        let node = self.node(node);
        let begins = node.parent == parent && node.tokens.get(..self.block_size) == Some(tokens);
        begins && node.label.as_deref() == label
    }

    /// Follows `tokens` from `position` over blocks that are held and `usable`, and adds them to `blocks`. For
    /// pools of one layer group. Returns the last position.
    pub(crate) fn follow(
        &mut self,
        mut position: NodePosition,
        mut tokens: &[u32],
        blocks: &mut Vec<BlockId>,
        usable: impl Fn(BlockId) -> bool,
    ) -> NodePosition {
        let size = self.block_size;
        let usable = |block| block != BlockId::NONE && usable(block);
        while tokens.len() >= size {
            let node = self.node(position.node);
            let from = position.offset as usize;
            let rest = node.blocks.get(from..).unwrap_or_default();
            let num_compared = rest.len().min(tokens.len() / size);
            let known = &node.tokens[from * size..][..num_compared * size];
            let equal = equal_blocks(known, &tokens[..num_compared * size], size);
            let followed = leading(&rest[..equal], usable);
            blocks.extend_from_slice(&rest[..followed]);
            position.offset += followed as u32;
            tokens = &tokens[followed * size..];
            if followed < equal || tokens.len() < size {
                break;
            }
            let Some(node) = self.child(position, &tokens[..size], None) else {
                break;
            };
            if !usable(self.node(node).blocks[0]) {
                break;
            }
            position = NodePosition::new(node, 0);
        }
        position
    }

    /// As `follow`, where the namespace switches `indices` logical blocks after `position`.
    #[cold]
    fn follow_switch(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        (indices, label): (usize, &Label),
        blocks: &mut Vec<BlockId>,
        usable: impl Fn(BlockId) -> bool,
    ) -> NodePosition {
        let end = blocks.len() + indices;
        let (before, rest) = tokens.split_at((indices * self.block_size).min(tokens.len()));
        let position = self.follow(position, before, blocks, &usable);
        let Some(first) = rest.get(..self.block_size).filter(|_| blocks.len() == end) else {
            return position;
        };
        let child = self.child(position, first, Some(label));
        let usable = |block| block != BlockId::NONE && usable(block);
        match child.filter(|&child| usable(self.node(child).blocks[0])) {
            Some(child) => self.follow(NodePosition::new(child, 0), rest, blocks, usable),
            None => position,
        }
    }

    /// The `usable` block after `position` with the longest prefix in common with `tokens`, of at least `min_tokens`;
    /// and the length of that prefix. Of several, the one with the lowest block id. It compares the block that
    /// continues the node, and the newest `max_children` children. Blocks with different labels have the tokens before
    /// the first switch in common.
    pub(crate) fn longest_partial_match(
        &self,
        position: NodePosition,
        tokens: &[u32],
        label: Option<&Label>,
        min_tokens: usize,
        max_children: usize,
        usable: impl Fn(NodePosition) -> bool,
    ) -> Option<(NodePosition, usize)> {
        let first = *tokens.first()?;
        let node = self.node(position.node);
        let mut best = None;
        let mut compare = |candidate: NodePosition, known: &[u32], of: Option<&Label>| {
            let pairs = known.iter().zip(tokens).take(Label::common(label, of));
            let agrees = pairs.take_while(|(known, token)| known == token).count();
            let value = (agrees, Reverse(self.block(candidate, 0)));
            let better = best.is_none_or(|(_, than)| value > than);
            if agrees >= min_tokens && better && usable(candidate) {
                best = Some((candidate, value));
            }
        };
        let at = position.offset as usize * self.block_size;
        if let Some(known) = node.tokens.get(at..at + self.block_size) {
            let next = NodePosition::new(position.node, position.offset + 1);
            compare(next, known, None);
        }
        let newest = node.find_children(position.offset);
        let mut child = newest.map_or(NodeId::NONE, |at| node.children[at].newest);
        for _ in 0..max_children {
            if child == NodeId::NONE {
                break;
            }
            let node = self.node(child);
            if min_tokens == 0 || node.tokens.first() == Some(&first) {
                compare(
                    NodePosition::new(child, 1),
                    &node.tokens,
                    node.label.as_deref(),
                );
            }
            child = node.older_sibling;
        }
        best.map(|(candidate, (agrees, _))| (candidate, agrees))
    }

    /// Adds blocks after `position`, the first of which is not there yet, and has this label. `blocks`: by block, then by
    /// layer group. Returns the position of the last one.
    pub(crate) fn append(
        &mut self,
        position: NodePosition,
        tokens: &[u32],
        blocks: &[BlockId],
        label: Option<&Label>,
    ) -> NodePosition {
        // Pools of one group, which are most, need no division.
        let len = match self.groups {
            1 => blocks.len(),
            groups => blocks.len() / groups,
        } as u32;
        debug_assert_eq!(tokens.len(), len as usize * self.block_size);
        self.num_blocks += len as usize;
        let node = self.node_mut(position.node);
        if position.offset == node.len && node.namespace.is_none() && label.is_none() {
            node.tokens.extend_from_slice(tokens);
            node.blocks.extend_from_slice(blocks);
            node.len += len;
            return NodePosition::new(position.node, node.len);
        }
        let hash = self.index_hash(position, &tokens[..self.block_size], label);
        self.num_hashed += 1;
        let child = self.insert_node(Node {
            parent: position,
            hash,
            len,
            tokens: tokens.to_vec(),
            blocks: blocks.to_vec(),
            label: label.map(|label| Box::new(label.clone())),
            ..Node::default()
        });
        self.index.insert(hash, child);
        self.attach(child);
        self.node_mut(position.node).latest_child = child;
        NodePosition::new(child, len)
    }

    /// The child list of `position`, created if it is missing.
    fn child_list(&mut self, position: NodePosition) -> &mut ChildList {
        let node = self.node_mut(position.node);
        let at = node.find_children(position.offset).unwrap_or_else(|at| {
            let list = ChildList {
                offset: position.offset,
                count: 0,
                newest: NodeId::NONE,
            };
            node.children.insert(at, list);
            at
        });
        &mut node.children[at]
    }

    /// Adds a node to the children of its parent.
    fn attach(&mut self, child: NodeId) {
        let list = self.child_list(self.node(child).parent);
        list.count += 1;
        let older = std::mem::replace(&mut list.newest, child);
        self.node_mut(child).older_sibling = older;
        if older != NodeId::NONE {
            self.node_mut(older).newer_sibling = child;
        }
    }

    /// Removes a node from the children of its parent.
    fn detach(&mut self, child: NodeId) {
        let node = self.node(child);
        let (parent, older, newer) = (node.parent, node.older_sibling, node.newer_sibling);
        if older != NodeId::NONE {
            self.node_mut(older).newer_sibling = newer;
        }
        if newer != NodeId::NONE {
            self.node_mut(newer).older_sibling = older;
        }
        let list = self.child_list(parent);
        list.count -= 1;
        if newer == NodeId::NONE {
            list.newest = older;
        }
        if list.count == 0 {
            let node = self.node_mut(parent.node);
            node.children.retain(|list| list.offset != parent.offset);
        }
    }

    /// Keeps a block in the tree while an allocation may evict its block ids; `NONE` ends it.
    pub(crate) fn protect(&mut self, position: NodePosition) {
        self.protected = position;
    }

    /// Truncates a node after its last block that is held or has a child. A node that becomes empty is
    /// removed, and its parent truncated. The node may be gone already.
    pub(crate) fn truncate(&mut self, node: NodeId) {
        let mut at = node;
        loop {
            let (size, groups, protected) = (self.block_size, self.groups, self.protected);
            let node = &mut self.nodes[at.at()];
            if node.namespace.is_some() {
                if node.sequences == 0 && node.children.is_empty() {
                    self.remove_root(at);
                }
                return;
            }
            if node.len == 0 {
                return;
            }
            // Blocks before the last child stay, so only those after it are checked. Each is removed once, however
            // often a long node is truncated.
            let keep = match at == protected.node {
                true => node.last_child().max(protected.offset) as usize,
                false => node.last_child() as usize,
            };
            let rest = &node.blocks[keep * groups..];
            let held = rest.iter().rposition(|&block| block != BlockId::NONE);
            let keep = held.map_or(keep, |at| keep + at / groups + 1);
            self.num_blocks -= node.len as usize - keep;
            node.len = keep as u32;
            if keep > 0 {
                node.tokens.truncate(keep * size);
                node.blocks.truncate(keep * groups);
                shrink(&mut node.tokens);
                shrink(&mut node.blocks);
                self.forget_hashes(at, keep);
                return;
            }
            self.forget_hashes(at, 0);
            let Node { parent, hash, .. } = self.nodes[at.at()];
            self.index.remove(hash, at);
            self.detach(at);
            self.nodes[at.at()] = Node::default();
            self.vacant.push(at);
            at = parent.node;
        }
    }

    /// Shrinks the spare capacity of a node that is not about to grow to a quarter of its length.
    pub(crate) fn shrink_node(&mut self, node: NodeId) {
        let node = self.node_mut(node);
        if node.tokens.capacity() / 5 > node.tokens.len() / 4 {
            node.tokens.shrink_to(node.tokens.len() / 4 * 5);
            node.blocks.shrink_to(node.blocks.len() / 4 * 5);
        }
    }

    fn remove_root(&mut self, root: NodeId) {
        if let Some(name) = self.node_mut(root).namespace.take() {
            self.namespaces.remove(&name);
        }
        self.nodes[root.at()] = Node::default();
        self.vacant.push(root);
    }

    fn forget_hashes(&mut self, node: NodeId, keep: usize) {
        let node = &mut self.nodes[node.at()];
        node.num_hashed = node.num_hashed.min(keep as u32);
        let stale = node.hashes.drain(keep.min(node.hashes.len())..);
        self.stale_hashes.extend(stale);
        if self.stale_hashes.len() > MAX_STALE_HASHES {
            self.remove_stale_hashes();
        }
    }

    fn remove_stale_hashes(&mut self) {
        self.hashes.remove_all(&self.stale_hashes);
        self.stale_hashes.clear();
    }

    /// The block id that holds a cached block for a layer group.
    pub(crate) fn block(&self, position: NodePosition, group: usize) -> Option<BlockId> {
        self.node(position.node).blocks[position.index() * self.groups + group].some()
    }

    /// The block ids that hold a cached block, by layer group.
    pub(crate) fn blocks(&self, position: NodePosition) -> impl Iterator<Item = BlockId> + '_ {
        let at = position.index() * self.groups;
        let blocks = &self.node(position.node).blocks[at..at + self.groups];
        blocks.iter().filter_map(|block| block.some())
    }

    /// Whether any block id holds it.
    pub(crate) fn is_held(&self, position: NodePosition) -> bool {
        self.blocks(position).next().is_some()
    }

    /// Sets the block id that holds a cached block for a layer group.
    pub(crate) fn set_block(&mut self, position: NodePosition, group: usize, block: BlockId) {
        let at = position.index() * self.groups + group;
        self.node_mut(position.node).blocks[at] = block;
    }

    /// Clears the block id of a layer group. The block stays in the tree while others have one, or it has descendants.
    pub(crate) fn clear_block(&mut self, position: NodePosition, group: usize) {
        self.set_block(position, group, BlockId::NONE);
        if position.offset == self.node(position.node).len {
            self.truncate(position.node);
        }
    }

    /// Where a node is attached; `None` for the root of a namespace.
    pub(crate) fn parent_of(&self, node: NodeId) -> Option<NodePosition> {
        self.node(node).parent.some()
    }

    /// The block before this one; `None` at a root.
    pub(crate) fn parent(&self, position: NodePosition) -> Option<NodePosition> {
        match position.offset {
            0 => None,
            1 => Some(self.node(position.node).parent),
            offset => Some(NodePosition::new(position.node, offset - 1)),
        }
    }

    /// The position `count` blocks before this one.
    pub(crate) fn ancestor(&self, mut position: NodePosition, mut count: usize) -> NodePosition {
        while count >= position.offset as usize && count > 0 {
            count -= position.offset as usize;
            position = self.node(position.node).parent;
        }
        position.offset -= count as u32;
        position
    }

    /// Whether `tokens`, whole blocks of them, lead from `root` to `position`.
    pub(crate) fn leads_to(
        &self,
        root: NodePosition,
        prompt: Labelled<'_>,
        mut position: NodePosition,
    ) -> bool {
        let mut tokens = prompt.tokens;
        while position.offset > 0 {
            let node = self.node(position.node);
            let known = &node.tokens[..position.offset as usize * self.block_size];
            let Some(rest) = tokens.strip_suffix(known) else {
                return false;
            };
            let (first, end) = (rest.len() / self.block_size, tokens.len() / self.block_size);
            let switch = prompt.switch.filter(|of| (first..end).contains(&of.index));
            let is_here = switch.is_none_or(|switch| switch.index == first);
            if !is_here || node.label.as_deref() != switch.map(|switch| &switch.label) {
                return false;
            }
            tokens = rest;
            position = node.parent;
        }
        position == root && tokens.is_empty()
    }

    pub(crate) fn tokens(&self, position: NodePosition) -> &[u32] {
        &self.node(position.node).tokens[position.index() * self.block_size..][..self.block_size]
    }

    /// The hash of a block; `None` if another block has the same one.
    pub(crate) fn hash(&mut self, position: NodePosition) -> Option<u128> {
        let node = self.node(position.node);
        if (1..=node.num_hashed).contains(&position.offset) {
            return node.hashes.get(position.index()).copied();
        }
        // From the nearest hashed ancestor down.
        let mut path = vec![position];
        let mut at = position.node;
        while self.node(at).num_hashed == 0 && self.node(at).namespace.is_none() {
            let parent = self.node(at).parent;
            path.push(parent);
            at = parent.node;
        }
        let mut hash = None;
        while let Some(at) = path.pop() {
            hash = self.hash_node(at, hash);
        }
        hash
    }

    /// The hashes of the blocks `first` to `last` of a node, from 1; they are computed.
    pub(crate) fn hashes(&self, node: NodeId, first: u32, last: u32) -> &[u128] {
        let node = self.node(node);
        debug_assert!(last <= node.num_hashed);
        let end = node.hashes.len().min(last as usize);
        node.hashes.get(first as usize - 1..end).unwrap_or_default()
    }

    /// Hashes the blocks of a node up to `position`, given the hash of its parent.
    fn hash_node(&mut self, position: NodePosition, parent: Option<u128>) -> Option<u128> {
        self.remove_stale_hashes();
        let node = &mut self.nodes[position.node.at()];
        if let Some(namespace) = &node.namespace {
            return Some(self.hasher.root(namespace));
        }
        let known = node.num_hashed as usize;
        let before = match (known, &node.label) {
            (0, None) => parent,
            (0, Some(label)) => {
                parent.map(|parent| self.hasher.switch(parent, label.offset, &label.name))
            }
            _ => node.hashes.get(known - 1).copied(),
        };
        node.num_hashed = node.num_hashed.max(position.offset);
        let mut before = before?;
        let new = &node.tokens[known * self.block_size..node.num_hashed as usize * self.block_size];
        let hashes = new.chunks_exact(self.block_size).map(|tokens| {
            before = self.hasher.child(before, tokens);
            before
        });
        node.hashes.extend(hashes);
        let new = &node.hashes[known..];
        self.num_hashed += new.len() as u64;
        let distinct = self.hashes.add_leading(new);
        self.num_collisions += u64::from(distinct < new.len());
        node.hashes.truncate(known + distinct);
        node.hashes.get(position.index()).copied()
    }

    /// Appends `Stored` events for the `count` blocks up to `end`, as far as they have hashes.
    pub(crate) fn append_stored(
        &mut self,
        mut end: NodePosition,
        mut count: usize,
        events: &mut Vec<Event>,
    ) {
        let mut path = Vec::new();
        while count > 0 {
            let in_node = count.min(end.offset as usize);
            path.push((end, in_node));
            count -= in_node;
            end = self.node(end.node).parent;
        }
        for (end, count) in path.into_iter().rev() {
            events.extend(self.stored_event(end, count));
        }
    }

    /// The event of the `count` blocks up to `end`, all in one node.
    fn stored_event(&mut self, end: NodePosition, count: usize) -> Option<Event> {
        self.hash(end);
        let first = end.offset as usize - count;
        let parent = match (first, self.node(end.node).parent) {
            (0, NodePosition { offset: 0, .. }) => None,
            (0, parent) => self.hash(parent),
            _ => self.node(end.node).hashes.get(first - 1).copied(),
        };
        let node = self.node(end.node);
        let last = node.hashes.len().min(end.offset as usize);
        let hashes = node.hashes.get(first..last)?;
        if hashes.is_empty() {
            return None;
        }
        let (namespace, switch) = self.origin(end);
        Some(Event::Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: node.tokens[first * self.block_size..last * self.block_size].to_vec(),
            namespace,
            switch,
        })
    }

    /// The record of a block that is about to be evicted; `None` if it has no hash.
    pub(crate) fn evicted(
        &mut self,
        position: NodePosition,
        group: usize,
        block: BlockId,
    ) -> Option<Evicted> {
        let before = self.parent(position).filter(|before| before.offset > 0);
        let (namespace, switch) = self.origin(position);
        Some(Evicted {
            block,
            group,
            hash: self.hash(position)?,
            parent: before.and_then(|before| self.hash(before)),
            tokens: self.tokens(position).to_vec(),
            namespace,
            switch,
        })
    }

    pub(crate) fn namespace(&self, position: NodePosition) -> Arc<[u8]> {
        self.origin(position).0
    }

    /// The namespace of a block, and where it switches at or before the block.
    fn origin(&self, mut position: NodePosition) -> (Arc<[u8]>, Option<SwitchPoint>) {
        // Of the label: the blocks from its own one to the end.
        let (mut indices, mut label) = (0, None);
        loop {
            let node = self.node(position.node);
            indices += position.offset as usize;
            if let Some(of) = &node.label {
                label = Some((of, indices));
            }
            if let Some(namespace) = &node.namespace {
                let switch = label.map(|(of, to_end)| {
                    let start = (indices - to_end) * self.block_size;
                    (start + of.offset as usize, Arc::clone(&of.name))
                });
                return (Arc::clone(namespace), switch);
            }
            position = node.parent;
        }
    }

    pub(crate) fn cached(&self) -> impl Iterator<Item = NodePosition> + '_ {
        let nodes = self.nodes.iter().enumerate();
        nodes.flat_map(move |(id, node)| {
            let blocks = node.blocks.chunks_exact(self.groups).zip(1_u32..);
            blocks.filter_map(move |(ids, offset)| {
                let is_held = ids.iter().any(|&block| block != BlockId::NONE);
                is_held.then_some(NodePosition::new(NodeId::new(id), offset))
            })
        })
    }

    /// The live nodes, and the number of each by its id: 0 for vacant nodes.
    pub(crate) fn snapshot(&self) -> (Vec<SnapshotNode>, Vec<u32>) {
        let numbers = self.nodes.iter().scan(0, |count, node| {
            let live = u32::from(node.is_live());
            *count += live;
            Some(*count * live)
        });
        let numbers: Vec<u32> = numbers.collect();
        let live = self.nodes.iter().filter(|node| node.is_live());
        let node = |node: &Node| SnapshotNode {
            parent: node.parent.some().map_or(0, |at| numbers[at.node.at()]),
            parent_index: node.parent.offset,
            len: node.len,
            namespace: node.namespace.clone(),
        };
        (live.map(node).collect(), numbers)
    }
}

/// The longest cached continuation of a prefix.
///
/// It is a hit if every layer group has the blocks that a token after it reads: all of them where the group sees
/// everything, those of the window where it does not. So it may pass blocks that some groups have lost.
#[derive(Default)]
pub(crate) struct Match {
    /// The last matched position; where the search began if nothing matched.
    pub(crate) last: NodePosition,
    /// Logical blocks matched.
    pub(crate) num_indices: usize,
    /// Their blocks, by logical block, then by layer group; `NONE` where no later token reads one.
    pub(crate) blocks: Vec<BlockId>,
    /// By layer group, how many of the last logical blocks are usable.
    usable: Vec<usize>,
    /// Matched tokens that are computed again: their windows must be cached, too.
    pub(crate) replay: usize,
    /// Of a model with state layers: the snapshot that the tokens after the match continue, `NONE` if they continue the
    /// sequence's own state; and the position of that state.
    pub(crate) snapshot: NodePosition,
    pub(crate) start: usize,
}

/// How far a match reaches with one more logical block.
pub(crate) enum Reach {
    /// No further: a group that sees everything lacks a block.
    Ends,
    /// Not to this logical block, but perhaps to a later one: a window is not complete.
    Passes,
    /// To this logical block.
    Hits,
}

impl Match {
    /// Begins a search at `last`, for a prefix of which `replay` tokens are computed again.
    pub(crate) fn begin(&mut self, last: NodePosition, replay: usize) {
        (self.last, self.num_indices, self.replay) = (last, 0, replay);
        self.blocks.clear();
        self.usable.clear();
    }

    /// Lets every group use the first `from` logical blocks.
    pub(crate) fn begin_groups(&mut self, groups: &Groups, from: usize) {
        self.usable.resize(groups.len(), from);
    }

    /// Adds a logical block with these blocks, number `indices` of the prefix, from 1.
    pub(crate) fn push(
        &mut self,
        groups: &Groups,
        indices: usize,
        blocks: impl Iterator<Item = Option<BlockId>>,
    ) -> Reach {
        let mut reach = Reach::Hits;
        for (group, block) in blocks.enumerate() {
            self.usable[group] = block.map_or(0, |_| self.usable[group] + 1);
            self.blocks.push(block.unwrap_or(BlockId::NONE));
            let first = groups.first_index_of(group, indices, self.replay);
            if self.usable[group] < indices - first {
                if !groups.is_window(group) {
                    return Reach::Ends;
                }
                reach = Reach::Passes;
            }
        }
        reach
    }
}

impl RadixTree {
    /// Finds the longest continuation of the first `from` blocks of a prompt over `usable` blocks, from `matched.last`.
    pub(crate) fn find_match(
        &mut self,
        matched: &mut Match,
        groups: &Groups,
        prompt: Labelled<'_>,
        from: usize,
        usable: impl Fn(BlockId) -> bool,
    ) {
        let Labelled { tokens, switch } = prompt;
        let rest = &tokens[(from * self.block_size).min(tokens.len())..];
        if groups.is_one() {
            let blocks = &mut matched.blocks;
            matched.last = match switch {
                Some(Switch { index, label }) if *index >= from => {
                    self.follow_switch(matched.last, rest, (index - from, label), blocks, usable)
                }
                _ => self.follow(matched.last, rest, blocks, usable),
            };
            matched.num_indices = matched.blocks.len();
            return;
        }
        matched.usable.resize(self.groups, from);
        let mut position = matched.last;
        for (index, tokens) in rest.chunks_exact(self.block_size).enumerate() {
            let label = prompt.label(from + index);
            let Some(next) = self.next(position, tokens, label) else {
                break;
            };
            let block = |group| self.block(next, group).filter(|&block| usable(block));
            match matched.push(groups, from + index + 1, (0..self.groups).map(block)) {
                Reach::Ends => break,
                Reach::Passes => {}
                Reach::Hits => (matched.last, matched.num_indices) = (next, index + 1),
            }
            position = next;
        }
        matched.blocks.truncate(matched.num_indices * self.groups);
    }
}

/// How many leading blocks are equal. Both have the same length.
fn equal_blocks(known: &[u32], tokens: &[u32], block_size: usize) -> usize {
    if known == tokens {
        return known.len() / block_size;
    }
    let [known, tokens] = [known, tokens].map(|tokens| tokens.chunks_exact(block_size));
    let pairs = known.zip(tokens);
    pairs.take_while(|(known, tokens)| known == tokens).count()
}

/// How many leading blocks are usable. Usually all of them are: a loop without branches.
fn leading(blocks: &[BlockId], usable: impl Fn(BlockId) -> bool) -> usize {
    match blocks.iter().fold(true, |all, &block| all & usable(block)) {
        true => blocks.len(),
        false => blocks.iter().take_while(|&&block| usable(block)).count(),
    }
}

/// Shrinks the capacity once most of it is unused.
fn shrink<T>(vec: &mut Vec<T>) {
    if vec.capacity() / 4 > vec.len() + 16 {
        vec.shrink_to(2 * vec.len());
    }
}
