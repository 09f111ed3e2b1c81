//! Matching: how much of a prompt is in the cache.
//!
//! The walk goes on from a content that is known. A prefix is a hit if every layer group finds
//! what a token after it will read: each row where the group sees everything, the rows of the window
//! where it does not. So a hit may lead over contents that have lost some of their blocks, or all.

use crate::contents::Spot;
use crate::groups::Groups;
use crate::ids::BlockId;
use crate::pool::Pool;

/// What a match is for.
#[derive(Clone, Copy)]
pub(crate) enum Wanted {
    /// A pin: contents that no open step is to compute.
    Ready,
    /// A prefill that computes so many of the tokens found again.
    Replay(usize),
}

/// The longest cached continuation of a prefix.
pub(crate) struct Match {
    /// Its last content; where the walk began if nothing was found.
    pub(crate) tip: Spot,
    /// Rows found.
    pub(crate) rows: usize,
    /// Their blocks, row-major; none where no later token reads one.
    pub(crate) blocks: Vec<BlockId>,
    /// How many of the last rows each group could use: the window's share.
    usable: Vec<usize>,
    /// So many of its last tokens are computed again: their windows are found too.
    pub(crate) replay: usize,
}

impl Match {
    pub(crate) const NOTHING: Self = Self {
        tip: Spot::NONE,
        rows: 0,
        blocks: Vec::new(),
        usable: Vec::new(),
        replay: 0,
    };

    /// Finds the longest continuation of the first `from` rows of `tokens`, which lead to `tip`.
    pub(crate) fn walk(
        &mut self,
        pool: &mut Pool,
        groups: &Groups,
        tokens: &[u32],
        (tip, from): (Spot, usize),
        wanted: Wanted,
    ) {
        self.clear(tip);
        let ready = matches!(wanted, Wanted::Ready);
        if let Wanted::Replay(tokens) = wanted {
            self.replay = tokens;
        }
        let rest = &tokens[(from * groups.block_size()).min(tokens.len())..];
        if groups.is_one() {
            self.tip = match ready {
                true => pool.follow_ready(tip, rest, &mut self.blocks),
                false => pool.contents.follow(tip, rest, &mut self.blocks, |_| true),
            };
            self.rows = self.blocks.len();
            return;
        }
        self.usable.resize(groups.len(), from);
        let mut spot = tip;
        for (row, tokens) in rest.chunks_exact(groups.block_size()).enumerate() {
            let Some(next) = pool.contents.next(spot, tokens) else {
                break;
            };
            match self.take(pool, groups, next, from + row + 1, ready) {
                Reach::Nothing => break,
                Reach::Through => {}
                Reach::Hit => (self.tip, self.rows) = (next, row + 1),
            }
            spot = next;
        }
        self.blocks.truncate(self.rows * groups.len());
    }

    pub(crate) fn clear(&mut self, tip: Spot) {
        (self.tip, self.rows, self.replay) = (tip, 0, 0);
        self.blocks.clear();
        self.usable.clear();
    }

    /// A content more, which makes `rows` rows: whether the prefix could end with it, or later.
    fn take(
        &mut self,
        pool: &Pool,
        groups: &Groups,
        content: Spot,
        rows: usize,
        ready: bool,
    ) -> Reach {
        let mut reach = Reach::Hit;
        for group in 0..groups.len() {
            let block = pool.contents.block(content, group);
            let block = block.filter(|&block| !ready || pool.is_ready(block));
            self.usable[group] = block.map_or(0, |_| self.usable[group] + 1);
            self.blocks.push(block.unwrap_or(BlockId::NONE));
            let first = groups.first_row_of(group, rows, self.replay);
            if self.usable[group] < rows - first {
                if !groups.is_window(group) {
                    return Reach::Nothing;
                }
                reach = Reach::Through;
            }
        }
        reach
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
