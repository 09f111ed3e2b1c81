//! Matching: how much of a prompt is in the cache.
//!
//! The walk goes down the tree from a row that is known. A prefix is a hit if every layer group finds
//! what a token after it will read: each row where the group sees everything, the rows of the window
//! where it does not. So a hit may lead over contents that have lost some of their blocks, or all.

use crate::groups::Groups;
use crate::ids::{BlockId, NodeIdx};
use crate::tree::{ContentTree, Step};

/// The longest cached continuation of a prefix.
pub(crate) struct Match {
    /// Its last content; none if nothing was found.
    pub(crate) tip: NodeIdx,
    /// Rows found.
    pub(crate) rows: usize,
    /// Their blocks, row-major; none where no later token reads one.
    pub(crate) blocks: Vec<BlockId>,
    /// Rows behind each row, itself included, that each group could use: the window's share.
    runs: Vec<usize>,
}

/// What a walk goes over.
pub(crate) struct Prompt<'a> {
    /// All tokens, from the root on.
    pub(crate) tokens: &'a [u32],
    /// The last content known, and how many rows lead to it.
    pub(crate) tip: NodeIdx,
    pub(crate) rows: usize,
    /// The hashes of the leading blocks as far as they are known; the walk adds what it learns.
    pub(crate) hashes: Option<&'a mut Vec<u128>>,
}

impl Match {
    pub(crate) const NOTHING: Self = Self {
        tip: NodeIdx::NONE,
        rows: 0,
        blocks: Vec::new(),
        runs: Vec::new(),
    };

    /// Finds the longest continuation of `prompt` all of whose blocks are `usable`.
    pub(crate) fn walk(
        &mut self,
        tree: &mut ContentTree,
        groups: &Groups,
        prompt: Prompt<'_>,
        usable: impl Fn(BlockId) -> bool,
    ) {
        let Prompt {
            tokens,
            mut tip,
            rows,
            mut hashes,
        } = prompt;
        self.clear();
        let blocks = tokens.chunks_exact(groups.block_size()).enumerate();
        if groups.is_one() {
            let blocks = blocks.clone().skip(rows);
            self.follow(tree, tip, blocks, hashes.as_deref_mut(), &usable);
            tip = self.tip.some().unwrap_or(tip);
        }
        let followed = rows + self.rows;
        self.runs.resize(groups.len(), followed);
        for (row, tokens) in blocks.skip(followed) {
            let known = hashes.as_ref().and_then(|hashes| hashes.get(row).copied());
            let step = tree.step(tip, tokens, known);
            if let (Some(hashes), None) = (&mut hashes, known) {
                hashes.push(step.hash(tree));
            }
            let Step::Found(node) = step else { break };
            match self.take(tree, groups, node, row, &usable) {
                Reach::Nothing => break,
                Reach::Through => {}
                Reach::Hit => (self.tip, self.rows) = (node, row + 1 - rows),
            }
            tip = node;
        }
        self.cut(groups, rows);
    }

    /// Where one group sees everything: goes the way of the latest reader, as far as it is this prompt's.
    fn follow<'a>(
        &mut self,
        tree: &ContentTree,
        tip: NodeIdx,
        blocks: impl ExactSizeIterator<Item = (usize, &'a [u32])>,
        mut hashes: Option<&mut Vec<u128>>,
        usable: impl Fn(BlockId) -> bool,
    ) {
        self.blocks.reserve(blocks.len());
        if let Some(hashes) = &mut hashes {
            hashes.reserve(blocks.len());
        }
        let (mut at, mut latest) = (tip, tree.latest_child(tip));
        for (row, tokens) in blocks {
            let Some(child) = latest else { break };
            let Some(content) = tree.child(child, at, tokens) else {
                break;
            };
            let Some(block) = content.block.filter(|&block| usable(block)) else {
                break;
            };
            if let Some(hashes) = hashes.as_mut().filter(|hashes| hashes.len() == row) {
                hashes.push(content.hash);
            }
            self.blocks.push(block);
            (at, latest) = (child, content.latest_child);
        }
        self.rows = self.blocks.len();
        if self.rows > 0 {
            self.tip = at;
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.tip, self.rows) = (NodeIdx::NONE, 0);
        self.blocks.clear();
        self.runs.clear();
    }

    /// A row more: whether the prefix could end with it, or with a later one.
    #[inline]
    fn take(
        &mut self,
        tree: &ContentTree,
        groups: &Groups,
        node: NodeIdx,
        row: usize,
        usable: impl Fn(BlockId) -> bool,
    ) -> Reach {
        let mut reach = Reach::Hit;
        for group in 0..groups.len() {
            let block = tree.block(node, group).filter(|&block| usable(block));
            self.runs[group] = if block.is_some() {
                self.runs[group] + 1
            } else {
                0
            };
            self.blocks.push(block.unwrap_or(BlockId::NONE));
            if self.runs[group] < groups.rows_needed(group, row + 1) {
                if !groups.is_window(group) {
                    return Reach::Nothing;
                }
                reach = Reach::Through;
            }
        }
        reach
    }

    /// Of the blocks of the rows found, which follow `rows` others, keeps those that a token after them
    /// reads.
    fn cut(&mut self, groups: &Groups, rows: usize) {
        let found = self.rows;
        self.blocks.truncate(found * groups.len());
        if groups.have_windows() {
            for group in 0..groups.len() {
                let unseen = groups.first_row(group, rows + found).saturating_sub(rows);
                for row in 0..unseen.min(found) {
                    self.blocks[row * groups.len() + group] = BlockId::NONE;
                }
            }
        }
    }
}

/// How far a prefix reaches with a row more.
enum Reach {
    /// No further: a group that sees everything lacks a block.
    Nothing,
    /// Not to here: a window is not complete.
    Through,
    /// To here.
    Hit,
}
