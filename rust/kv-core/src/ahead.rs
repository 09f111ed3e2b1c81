//! The tree's part that runs ahead: what is soon needed is computed, or read so that it is in the
//! processor's cache, for many contents in a loop of its own. So these wait for memory together; lookups
//! one after the other would wait one by one.

use std::hint::black_box;

use super::ContentTree;
use crate::ids::NodeIdx;

impl ContentTree {
    /// The hashes of the blocks that follow the content hashed `parent`, added to `hashes`.
    #[inline(never)] // the loop wants all registers
    pub(crate) fn hash_ahead<'a>(
        &mut self,
        mut parent: u128,
        blocks: impl Iterator<Item = &'a [u32]>,
        hashes: &mut Vec<u128>,
    ) {
        let known = hashes.len();
        for tokens in blocks {
            parent = self.hasher.child(parent, tokens);
            hashes.push(parent);
        }
        self.hashed += (hashes.len() - known) as u64;
    }

    /// Contents with these hashes are about to be looked for.
    pub(crate) fn expect(&self, hashes: &[u128]) {
        let touch = |all, &hash| all ^ self.index.touch(hash);
        black_box(hashes.iter().fold(0, touch));
    }

    /// These contents are about to be given up, and their slots to be used again.
    pub(crate) fn expect_end(&self, nodes: impl Iterator<Item = NodeIdx>) {
        let touch = |node: NodeIdx| {
            let token = self.tokens[node.at() * self.block_size];
            self.index.touch(self.hash(node)) ^ u64::from(token)
        };
        black_box(nodes.map(touch).fold(0, |all, one| all ^ one));
    }
}
