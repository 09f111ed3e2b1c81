//! The children of a content, and the nearest of them: what partial reuse copies from.
//!
//! The index finds a child by its whole row; to find one that agrees for a part of it, they have to be
//! looked at. A run links those that hang behind the same spot, the newest first: two numbers for each
//! run, written when it is made and when it ends.

use std::cmp::Reverse;

use super::{Contents, Run, Spot};
use crate::ids::RunId;

/// Runs behind one spot that are looked at: the newest ones. However many there are, a prefill that
/// ends inside a block costs no more than this.
pub(crate) const LOOKED_AT: usize = 8;

impl Contents {
    /// A run more hangs behind `spot`.
    pub(super) fn link(&mut self, spot: Spot, run: RunId) {
        let behind = self.hang_behind(spot);
        behind.count += 1;
        let older = std::mem::replace(&mut behind.newest, run);
        self.run_mut(run).older = older;
        if older != RunId::NONE {
            self.run_mut(older).newer = run;
        }
    }

    /// A run less is linked behind its parent.
    pub(super) fn unlink(&mut self, run: RunId) {
        let &Run {
            parent,
            older,
            newer,
            ..
        } = self.run(run);
        if older != RunId::NONE {
            self.run_mut(older).newer = newer;
        }
        if newer != RunId::NONE {
            self.run_mut(newer).older = older;
        } else {
            self.hang_behind(parent).newest = older;
        }
    }

    /// Of the `usable` contents that follow `spot` the one that agrees longest with `tokens`, at most a
    /// row of them, and for `least` at least; of several the one in the lowest block. How long that is.
    pub(crate) fn nearest(
        &self,
        spot: Spot,
        tokens: &[u32],
        least: usize,
        usable: impl Fn(Spot) -> bool,
    ) -> Option<(Spot, usize)> {
        let wanted = *tokens.first()?;
        let above = self.run(spot.run);
        let mut best = None;
        let mut look_at = |content: Spot, known: &[u32]| {
            let pairs = known.iter().zip(tokens);
            let agrees = pairs.take_while(|(known, token)| known == token).count();
            let value = (agrees, Reverse(self.block(content, 0)));
            let better = best.is_none_or(|(_, than)| value > than);
            if agrees >= least && better && usable(content) {
                best = Some((content, value));
            }
        };
        let row = spot.rows as usize * self.block_size;
        if let Some(row) = above.tokens.get(row..row + self.block_size) {
            let rows = spot.rows + 1;
            look_at(Spot { rows, ..spot }, row);
        }
        let newest = above.behind(spot.rows).map(|at| above.children[at].newest);
        let mut run = newest.unwrap_or(RunId::NONE);
        for _ in 0..LOOKED_AT {
            if run == RunId::NONE {
                break;
            }
            let Run { tokens, older, .. } = self.run(run);
            if tokens.first() == Some(&wanted) {
                look_at(Spot { run, rows: 1 }, tokens);
            }
            run = *older;
        }
        best.map(|(content, (agrees, _))| (content, agrees))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::ContentHasher;
    use crate::ids::BlockId;

    fn contents() -> (Contents, Spot) {
        let mut contents = Contents::new(64, 4, 1, ContentHasher::new(1, 128));
        let root = contents.hold_root(b"");
        (contents, root)
    }

    fn add(contents: &mut Contents, spot: Spot, tokens: &[u32], block: u32) -> Spot {
        contents.append(spot, tokens, &[BlockId::from(block)])
    }

    fn block(contents: &Contents, found: Option<(Spot, usize)>) -> Option<(u32, usize)> {
        found.map(|(spot, agrees)| (contents.block(spot, 0).expect("held").get(), agrees))
    }

    #[test]
    fn the_longest_of_all_that_follow_is_found() {
        let (mut contents, root) = contents();
        let one = add(&mut contents, root, &[1, 1, 1, 1], 9);
        add(&mut contents, one, &[2, 2, 2, 2], 8); // goes on in the same run
        for (tokens, block) in [([2, 2, 3, 3], 7), ([2, 4, 4, 4], 6), ([2, 2, 3, 4], 5)] {
            add(&mut contents, one, &tokens, block);
        }
        let ask = |contents: &Contents, tokens: &[u32], least| {
            block(contents, contents.nearest(one, tokens, least, |_| true))
        };
        assert_eq!(ask(&contents, &[2, 2, 2, 9], 1), Some((8, 3)));
        assert_eq!(ask(&contents, &[2, 4, 9], 1), Some((6, 2)));
        assert_eq!(ask(&contents, &[2, 2, 3, 9], 1), Some((5, 3))); // and block 7, as long
        assert_eq!(ask(&contents, &[2, 9], 1), Some((5, 1)));
        assert_eq!(ask(&contents, &[2, 9], 2), None);
        assert_eq!(ask(&contents, &[3], 1), None);
        let at_end = contents.nearest(one, &[], 0, |_| false);
        assert_eq!(at_end, None);
        let not_the_longest = |spot| contents.block(spot, 0) != Some(BlockId::from(8));
        let found = contents.nearest(one, &[2, 2, 2, 9], 1, not_the_longest);
        assert_eq!(block(&contents, found), Some((5, 2)));
    }

    #[test]
    fn the_newest_are_looked_at_and_those_that_end_are_not() {
        let (mut contents, root) = contents();
        let most = LOOKED_AT as u32;
        let all: Vec<Spot> = (0..most + 1)
            .map(|at| add(&mut contents, root, &[at, 0, 0, 0], at))
            .collect();
        let ask = |contents: &Contents, token| {
            block(contents, contents.nearest(root, &[token], 1, |_| true))
        };
        assert_eq!(ask(&contents, 0), None);
        assert_eq!(ask(&contents, 1), Some((1, 1)));
        // Out of the middle, the newest, and the oldest.
        for gone in [4, most, 1] {
            contents.clear_block(all[gone as usize], 0);
            assert_eq!(ask(&contents, gone), None);
            assert_eq!(contents.check(&[(root, 1)].into()), Ok(()));
        }
        assert_eq!(ask(&contents, 0), Some((0, 1)));
        add(&mut contents, root, &[99, 0, 0, 0], 99);
        assert_eq!(ask(&contents, 99), Some((99, 1)));
        assert_eq!(contents.check(&[(root, 1)].into()), Ok(()));
    }
}
