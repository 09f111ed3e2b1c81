//! The tree of contents, apart from the blocks that hold them.
//!
//! A node is one content: a parent, `block_size` tokens, a chained hash, and the blocks that hold it
//! now, one per layer group. Namespaces are the roots. A node lives as long as something holds it: a block, a child, or
//! (for a root) a sequence. So an ancestor's block may go first; whoever computes it again attaches
//! to the same node and its descendants match again.
//!
//! A step down the tree is a hit only if the candidate's parent *is* the node stood
//! on and its tokens *are equal*; a hash collision costs a miss, never a wrong block.

#[path = "ahead.rs"]
mod ahead;
#[path = "check/tree.rs"]
mod check;

use std::collections::HashMap;
use std::collections::TryReserveError;
use std::sync::Arc;

use crate::events::Event;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, ContentId, NodeIdx};
use crate::index::HashIndex;
use crate::usual;

#[derive(Clone)]
struct Node {
    hash: u128,
    id: ContentId,
    parent: NodeIdx,
    /// The child that was made or matched last: the first guess of a walk. May be stale.
    latest_child: NodeIdx,
    /// The block of the first layer group.
    block: BlockId,
    /// Reasons to live: each block, each child, each sequence under a root. 0: the slot is free.
    holds: u32,
}

const VACANT: Node = Node {
    hash: 0,
    id: ContentId(0),
    parent: NodeIdx::NONE,
    latest_child: NodeIdx::NONE,
    block: BlockId::NONE,
    holds: 0,
};

/// What a step down the tree found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The content is known. It may have lost its blocks.
    Found(NodeIdx),
    /// No such content; this is its hash.
    Missing(u128),
    /// Another content has this hash: the new one must stay private.
    Collision(u128),
}

/// What a walk wants to know of a content that it is at.
pub(crate) struct Passed {
    pub(crate) hash: u128,
    /// Where the first layer group has it.
    pub(crate) block: Option<BlockId>,
    /// See [`ContentTree::latest_child`].
    pub(crate) latest_child: Option<NodeIdx>,
}

impl Step {
    /// The hash of the content that was looked for.
    #[inline]
    pub(crate) fn hash(self, tree: &ContentTree) -> u128 {
        match self {
            Step::Found(node) => tree.hash(node),
            Step::Missing(hash) | Step::Collision(hash) => hash,
        }
    }
}

/// Contents, their links and their index.
pub(crate) struct ContentTree {
    block_size: usize,
    hasher: ContentHasher,
    nodes: Vec<Node>,
    /// `block_size` tokens per node slot.
    tokens: Vec<u32>,
    /// Layer groups.
    groups: usize,
    /// The blocks of the other groups, `groups - 1` per node slot: nothing where there is one group.
    more_blocks: Vec<BlockId>,
    free_slots: Vec<NodeIdx>,
    index: HashIndex,
    roots: HashMap<Arc<[u8]>, NodeIdx>,
    /// The namespace of each root.
    names: HashMap<NodeIdx, Arc<[u8]>>,
    next_id: u64,
    /// Blocks hashed so far.
    pub(crate) hashed: u64,
}

impl ContentTree {
    /// Bytes per block of the pool, the index included.
    pub(crate) fn bytes_per_block(block_size: usize) -> usize {
        size_of::<Node>() + block_size * size_of::<u32>() + HashIndex::BYTES_PER_BLOCK
    }

    pub(crate) fn new(
        num_blocks: usize,
        block_size: usize,
        groups: usize,
        hasher: ContentHasher,
    ) -> Result<Self, TryReserveError> {
        let (mut nodes, mut tokens) = (Vec::new(), Vec::new());
        nodes.try_reserve_exact(num_blocks)?;
        tokens.try_reserve_exact(num_blocks.saturating_mul(block_size))?;
        Ok(Self {
            block_size,
            hasher,
            nodes,
            tokens,
            groups,
            more_blocks: Vec::new(),
            free_slots: Vec::new(),
            index: HashIndex::new(num_blocks)?,
            roots: HashMap::new(),
            names: HashMap::new(),
            next_id: 0,
            hashed: 0,
        })
    }

    pub(crate) fn hasher(&self) -> &ContentHasher {
        &self.hasher
    }

    /// The root of `namespace`, if anything lives under it.
    pub(crate) fn root(&self, namespace: &[u8]) -> Option<NodeIdx> {
        self.roots.get(namespace).copied()
    }

    /// The root of `namespace`, made if need be, held once more.
    pub(crate) fn hold_root(&mut self, namespace: &[u8]) -> NodeIdx {
        let root = match self.roots.get(namespace) {
            Some(&root) => root,
            None => {
                let hash = self.hasher.root(namespace);
                let root = self.next_slot();
                self.take_slot(root, hash, NodeIdx::NONE);
                let name: Arc<[u8]> = namespace.into();
                self.names.insert(root, Arc::clone(&name));
                self.roots.insert(name, root);
                root
            }
        };
        self.hold(root);
        root
    }

    /// Holds a node once more.
    pub(crate) fn hold(&mut self, node: NodeIdx) {
        self.nodes[node.at()].holds += 1;
    }

    /// Gives one hold back; nodes that nothing holds any more die, up to the root.
    #[inline(always)] // every content that goes comes here
    pub(crate) fn unhold(&mut self, node: NodeIdx) {
        let mut node = node;
        loop {
            let slot = &mut self.nodes[node.at()];
            slot.holds -= 1;
            if slot.holds > 0 {
                return;
            }
            let (parent, hash) = (slot.parent, slot.hash);
            self.free_slots.push(node);
            if parent == NodeIdx::NONE {
                return self.forget_root(node);
            }
            self.index.remove(hash, node);
            node = parent;
        }
    }

    fn forget_root(&mut self, root: NodeIdx) {
        if let Some(name) = self.names.remove(&root) {
            self.roots.remove(&name);
        }
    }

    /// The child of `parent` with exactly these tokens.
    ///
    /// The latest child is compared before anything is hashed; `known` is the hash of these tokens
    /// under this parent where an earlier step has computed it already.
    #[inline]
    pub(crate) fn step(&mut self, parent: NodeIdx, tokens: &[u32], known: Option<u128>) -> Step {
        let guess = self.latest_child(parent);
        if let Some(child) = guess.filter(|&child| self.is_child(child, parent, tokens)) {
            return Step::Found(child);
        }
        let hash = known.unwrap_or_else(|| {
            self.hashed += 1;
            self.hasher.child(self.nodes[parent.at()].hash, tokens)
        });
        match self.find(hash) {
            None => Step::Missing(hash),
            Some(node) if self.is_child(node, parent, tokens) => {
                self.nodes[parent.at()].latest_child = node;
                Step::Found(node)
            }
            Some(_) => Step::Collision(hash),
        }
    }

    /// The child that was made or matched last, perhaps in another life of its slot; none if no content
    /// has ever followed this one.
    #[inline]
    pub(crate) fn latest_child(&self, node: NodeIdx) -> Option<NodeIdx> {
        self.nodes[node.at()].latest_child.some()
    }

    /// A new content under a `parent` that has no children, in one block for each group; none if another
    /// content has its hash.
    #[inline(always)] // every new content comes here
    pub(crate) fn append(
        &mut self,
        parent: NodeIdx,
        tokens: &[u32],
        hash: u128,
        blocks: &[BlockId],
    ) -> Option<NodeIdx> {
        let node = self.next_content();
        let nodes = &self.nodes;
        let has_it = |node: NodeIdx| nodes[node.at()].hash == hash;
        if !self.index.insert_new(hash, node, has_it) {
            return None;
        }
        self.begin_content(node, parent, tokens, hash);
        let slot = &mut self.nodes[node.at()];
        (slot.block, slot.holds) = (blocks[0], self.groups as u32);
        if self.groups > 1 {
            let at = self.more_at(node);
            self.more_blocks[at..at + self.groups - 1].copy_from_slice(&blocks[1..]);
        }
        Some(node)
    }

    /// A new content under `parent`. It must be given a block at once.
    #[inline(always)] // every new content comes here
    pub(crate) fn insert(&mut self, parent: NodeIdx, tokens: &[u32], hash: u128) -> NodeIdx {
        let node = self.next_content();
        self.index.insert(hash, node);
        self.begin_content(node, parent, tokens, hash);
        node
    }

    /// The slot of the content that is made next, for which the index has room.
    #[inline(always)] // as `insert`
    fn next_content(&mut self) -> NodeIdx {
        let nodes = &self.nodes;
        self.index.make_room(|node| nodes[node.at()].hash);
        self.next_slot()
    }

    /// The next slot, which is in the index, becomes a content under `parent`.
    #[inline(always)] // as `insert`
    fn begin_content(&mut self, node: NodeIdx, parent: NodeIdx, tokens: &[u32], hash: u128) {
        self.take_slot(node, hash, parent);
        let start = node.at() * self.block_size;
        usual::copy(tokens, &mut self.tokens[start..start + self.block_size]);
        let parent = &mut self.nodes[parent.at()];
        parent.holds += 1;
        parent.latest_child = node;
    }

    /// The block that holds the content for a layer group.
    #[inline]
    pub(crate) fn block(&self, node: NodeIdx, group: usize) -> Option<BlockId> {
        match group {
            0 => self.nodes[node.at()].block.some(),
            _ => self.more_blocks[self.more_at(node) + group - 1].some(),
        }
    }

    /// The blocks that hold the content, in the order of their groups.
    pub(crate) fn blocks(&self, node: NodeIdx) -> impl Iterator<Item = BlockId> + '_ {
        (0..self.groups).filter_map(move |group| self.block(node, group))
    }

    /// Whether any block holds the content.
    #[inline]
    pub(crate) fn has_block(&self, node: NodeIdx) -> bool {
        self.blocks(node).next().is_some()
    }

    /// Moves the content of a group to another block, or gives it one again.
    #[inline]
    pub(crate) fn set_block(&mut self, node: NodeIdx, group: usize, block: BlockId) {
        let before = std::mem::replace(self.place(node, group), block);
        self.nodes[node.at()].holds += u32::from(before == BlockId::NONE);
    }

    /// The content loses a group's block. It lives on if it has others, or descendants.
    #[inline]
    pub(crate) fn clear_block(&mut self, node: NodeIdx, group: usize) {
        *self.place(node, group) = BlockId::NONE;
        self.unhold(node);
    }

    #[inline]
    fn place(&mut self, node: NodeIdx, group: usize) -> &mut BlockId {
        match group {
            0 => &mut self.nodes[node.at()].block,
            _ => {
                let at = self.more_at(node) + group - 1;
                &mut self.more_blocks[at]
            }
        }
    }

    #[inline]
    fn more_at(&self, node: NodeIdx) -> usize {
        node.at() * (self.groups - 1)
    }

    pub(crate) fn parent(&self, node: NodeIdx) -> Option<NodeIdx> {
        self.nodes[node.at()].parent.some()
    }

    #[inline]
    pub(crate) fn tokens(&self, node: NodeIdx) -> &[u32] {
        &self.tokens[node.at() * self.block_size..][..self.block_size]
    }

    #[inline]
    pub(crate) fn hash(&self, node: NodeIdx) -> u128 {
        self.nodes[node.at()].hash
    }

    /// A content as events tell of it, given the root it hangs from.
    pub(crate) fn stored(&self, node: NodeIdx, root: NodeIdx) -> Event {
        let parent = self.nodes[node.at()].parent;
        Event::Stored {
            hash: self.hash(node),
            parent: (parent != root).then(|| self.hash(parent)),
            tokens: self.tokens(node).into(),
            namespace: Arc::clone(&self.names[&root]),
        }
    }

    /// Every content that a block holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = NodeIdx> + '_ {
        let live = self.nodes.iter().enumerate();
        let live = live.filter(|(_, node)| node.holds > 0);
        live.map(|(slot, _)| NodeIdx::new(slot))
            .filter(|&node| self.has_block(node))
    }

    /// Nodes that live, roots included.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free_slots.len()
    }

    /// The content of a node, if it follows `parent` with exactly these tokens.
    #[inline(always)] // every row of a prompt that is cached comes here
    pub(crate) fn child(&self, node: NodeIdx, parent: NodeIdx, tokens: &[u32]) -> Option<Passed> {
        let slot = &self.nodes[node.at()];
        if slot.holds == 0 || slot.parent != parent || !usual::are_equal(self.tokens(node), tokens)
        {
            return None;
        }
        Some(Passed {
            hash: slot.hash,
            block: slot.block.some(),
            latest_child: slot.latest_child.some(),
        })
    }

    #[inline]
    fn is_child(&self, node: NodeIdx, parent: NodeIdx, tokens: &[u32]) -> bool {
        self.child(node, parent, tokens).is_some()
    }

    #[inline]
    fn find(&self, hash: u128) -> Option<NodeIdx> {
        self.index
            .find(hash, |node| self.nodes[node.at()].hash == hash)
    }

    /// The slot of the node that is made next.
    #[inline(always)] // as `insert`
    fn next_slot(&mut self) -> NodeIdx {
        if let Some(&slot) = self.free_slots.last() {
            return slot;
        }
        let slot = self.one_more_slot();
        self.free_slots.push(slot);
        slot
    }

    /// A node in the next slot.
    #[inline(always)] // as `insert`
    fn take_slot(&mut self, slot: NodeIdx, hash: u128, parent: NodeIdx) {
        self.free_slots.pop();
        self.next_id += 1;
        self.nodes[slot.at()] = Node {
            hash,
            id: ContentId(self.next_id),
            parent,
            ..VACANT
        };
    }

    fn one_more_slot(&mut self) -> NodeIdx {
        self.nodes.push(VACANT);
        self.tokens.resize(self.nodes.len() * self.block_size, 0);
        let more = self.nodes.len() * (self.groups - 1);
        self.more_blocks.resize(more, BlockId::NONE);
        NodeIdx::new(self.nodes.len() - 1)
    }
}
