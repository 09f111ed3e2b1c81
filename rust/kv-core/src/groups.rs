//! Layer groups: one sequence, several tables.
//!
//! Layers with full attention and layers with a sliding window keep different blocks of the same sequence. A block
//! belongs to one group at a time, and all groups allocate from one pool. All groups have the same number of
//! layers, so blocks have one size, as in vLLM's hybrid KV cache manager.
//!
//! A *logical block* is `block_size` positions of a sequence, and a block in each group. Lists of blocks are
//! by logical block, then by layer group, `index * groups + group`; with one group that is the plain block table.
//!
//! ```text
//!   tokens     0..16   16..32  32..48  48..64  64..80
//!   full         3       4       9      12      15
//!   window 32    -       -      10      13      16       `-`: released, no later token reads it
//! ```

use crate::error::{Error, within};

/// The block size, and divisions by it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSize {
    tokens: usize,
    /// log2 of a power of two: a shift is cheaper than a division.
    shift: Option<u32>,
    /// The bits that are zero in every multiple of it.
    low: usize,
}

impl BlockSize {
    fn new(tokens: usize) -> Self {
        let shift = tokens.is_power_of_two().then(|| tokens.trailing_zeros());
        let low = (1 << tokens.trailing_zeros()) - 1;
        Self { tokens, shift, low }
    }

    /// Whether a logical block begins at a position.
    pub(crate) fn begins_index(self, position: usize) -> bool {
        position & self.low == 0 && self.start_of(self.index_of(position)) == position
    }

    /// The logical block of a position: the full logical blocks before it.
    pub(crate) fn index_of(self, position: usize) -> usize {
        match self.shift {
            Some(shift) => position >> shift,
            None => position / self.tokens,
        }
    }

    /// The position at which a logical block begins.
    pub(crate) fn start_of(self, index: usize) -> usize {
        index * self.tokens
    }
}

/// The layer groups of a pool, and how many logical blocks before the end of a prefix each of them reads.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    windows: Box<[Option<usize>]>,
    size: BlockSize,
    has_windows: bool,
}

impl Groups {
    pub(crate) fn new(windows: &[Option<usize>], block_size: usize) -> Result<Self, Error> {
        within("the number of layer groups", 1..=64, windows.len())?;
        if windows.contains(&Some(0)) {
            let name = "a layer group's window";
            let (min, given) = (1, 0);
            return Err(Error::TooFew { name, min, given });
        }
        Ok(Self {
            windows: windows.into(),
            size: BlockSize::new(block_size),
            has_windows: windows.iter().any(Option::is_some),
        })
    }

    /// The number of groups: the width of a logical block.
    pub(crate) fn len(&self) -> usize {
        self.windows.len()
    }

    pub(crate) fn block_size(&self) -> usize {
        self.size.tokens
    }

    /// The block size with its divisions, for loops.
    pub(crate) fn size(&self) -> BlockSize {
        self.size
    }

    /// The logical block of a position: the full logical blocks before it.
    pub(crate) fn index_of(&self, position: usize) -> usize {
        self.size.index_of(position)
    }

    /// Logical blocks that `num_tokens` tokens need.
    pub(crate) fn end_of(&self, num_tokens: usize) -> usize {
        self.index_of(num_tokens.saturating_add(self.block_size() - 1))
    }

    pub(crate) fn have_windows(&self) -> bool {
        self.has_windows
    }

    /// Whether there is one group, without a window.
    pub(crate) fn is_one(&self) -> bool {
        self.len() == 1 && !self.has_windows
    }

    pub(crate) fn is_window(&self, group: usize) -> bool {
        self.windows[group].is_some()
    }

    /// The first logical block of a prefix of `indices` full logical blocks that a group needs for a query at its
    /// end or at its last position.
    pub(crate) fn first_index(&self, group: usize, indices: usize) -> usize {
        self.first_index_of(group, indices, 0)
    }

    /// The first logical block that the token at `position` reads.
    pub(crate) fn first_read(&self, group: usize, position: usize) -> usize {
        let first = |window| self.index_of((position + 1).saturating_sub(window));
        self.windows[group].map_or(0, first)
    }

    /// As `first_index`, also for queries at its last `replay` positions.
    pub(crate) fn first_index_of(&self, group: usize, indices: usize, replay: usize) -> usize {
        indices.saturating_sub(self.reach(group, replay))
    }

    /// Logical blocks in the windows of a query and of the `replay` - 1 positions before it.
    fn reach(&self, group: usize, replay: usize) -> usize {
        let before = replay.saturating_sub(1);
        let indices = |window: usize| self.end_of(window.saturating_add(before));
        self.windows[group].map_or(usize::MAX, indices)
    }

    /// The most logical blocks that a group holds at once until `num_tokens` tokens are computed, at most `max_tokens`
    /// in a step.
    pub(crate) fn peak(&self, group: usize, num_tokens: usize, max_tokens: usize) -> usize {
        let indices = num_tokens.div_ceil(self.block_size());
        // A step of n tokens touches at most this many logical blocks, wherever it begins.
        let step = max_tokens.saturating_add(2 * self.block_size() - 2) / self.block_size();
        indices.min(self.reach(group, 0).saturating_add(step))
    }

    /// The most blocks that one sequence holds at once until `num_tokens` tokens are computed, at most `max_tokens` in a
    /// step.
    pub(crate) fn blocks_for(&self, num_tokens: usize, max_tokens: usize) -> usize {
        let peaks = (0..self.len()).map(|group| self.peak(group, num_tokens, max_tokens));
        peaks.fold(0, usize::saturating_add)
    }

    /// The most blocks that a sequence takes until `num_tokens` tokens are computed, beyond those that it holds after
    /// the first `computed` ones.
    pub(crate) fn blocks_to_come(
        &self,
        num_tokens: usize,
        max_tokens: usize,
        computed: usize,
    ) -> usize {
        let size = self.block_size();
        let indices = computed.div_ceil(size);
        let passed = |&window: &usize| (computed + 1).saturating_sub(window) / size;
        let passed: usize = self.windows.iter().flatten().map(passed).sum();
        let held = indices * self.len() - passed;
        let new = num_tokens.div_ceil(size).saturating_sub(indices);
        let peak = self.blocks_for(num_tokens, max_tokens);
        let new = new.saturating_mul(self.len());
        peak.saturating_sub(held).min(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_needs_the_blocks_that_its_next_token_sees() {
        for (window, block_size) in [(1, 1), (4, 4), (5, 4), (6, 4), (7, 3), (16, 16)] {
            let groups = Groups::new(&[Some(window)], block_size).expect("valid");
            for indices in 0..10 {
                let tokens = indices * block_size;
                // A full hit computes its last token again; everything else begins at the end.
                for position in tokens.saturating_sub(1)..=tokens {
                    let seen = (position + 1).saturating_sub(window) / block_size;
                    assert!(groups.first_index(0, indices) <= seen);
                    assert!(groups.first_index(0, indices) + 1 >= seen);
                }
                for replay in 0..12 {
                    let first = groups.first_index_of(0, indices, replay);
                    let query = tokens.saturating_sub(replay.max(1));
                    let seen = (query + 1).saturating_sub(window) / block_size;
                    assert_eq!(first, seen.min(indices), "{replay} tokens before {tokens}");
                    assert!(replay > 1 || first == groups.first_index(0, indices));
                }
            }
        }
        let full = Groups::new(&[None], 4).expect("valid");
        assert_eq!(full.first_index(0, 1_000_000), 0);
    }

    #[test]
    fn blocks_for_is_never_less_than_a_prefill_holds() {
        for (window, size, max_tokens) in [(4, 4, 1), (5, 4, 3), (8, 2, 7), (3, 1, 2), (16, 4, 64)]
        {
            let groups = Groups::new(&[None, Some(window)], size).expect("valid");
            for num_tokens in 1..60_usize {
                let (mut computed, mut peak) = (0, 0);
                while computed < num_tokens {
                    let end = (computed + max_tokens).min(num_tokens);
                    let (indices, from) =
                        (end.div_ceil(size), groups.first_index(1, computed / size));
                    peak = peak.max(indices + indices - from);
                    computed = end;
                }
                assert!(peak <= groups.blocks_for(num_tokens, max_tokens));
            }
            assert_eq!(groups.blocks_for(1, usize::MAX), 2);
            assert!(groups.blocks_for(usize::MAX, 1) > usize::MAX / 5);
        }
    }

    /// A window of 8 reaches into two logical blocks of 4; a step of n tokens touches some more.
    #[test]
    fn peaks() {
        let groups = Groups::new(&[Some(8), None], 4).expect("valid");
        for (max_tokens, indices) in [(1, 1), (2, 2), (5, 2), (6, 3), (9, 3), (10, 4)] {
            assert_eq!(
                groups.peak(0, 100, max_tokens),
                2 + indices,
                "{max_tokens} tokens"
            );
            assert_eq!(groups.peak(1, 100, max_tokens), 25);
            assert_eq!(groups.blocks_for(100, max_tokens), 25 + 2 + indices);
        }
        for (num_tokens, indices) in [(0, 0), (4, 1), (5, 2), (9, 3), (17, 4)] {
            assert_eq!(
                groups.peak(0, num_tokens, 2),
                indices,
                "{num_tokens} tokens"
            );
        }
        assert_eq!(groups.peak(0, 100, usize::MAX), 25);
    }

    #[test]
    fn indices_of_positions() {
        for block_size in [1, 3, 4, 6, 16] {
            let groups = Groups::new(&[None], block_size).expect("valid");
            for position in 0..40 {
                assert_eq!(groups.index_of(position), position / block_size);
                assert_eq!(groups.end_of(position), position.div_ceil(block_size));
            }
            assert_eq!((groups.len(), groups.block_size()), (1, block_size));
            assert!(!groups.have_windows() && !groups.is_window(0));
        }
        let groups = Groups::new(&[None, Some(5)], 4).expect("valid");
        assert!(groups.have_windows() && groups.is_window(1) && !groups.is_window(0));
        assert_eq!(groups.len(), 2);
        for (windows, is_one) in [
            (&[None][..], true),
            (&[Some(5)], false),
            (&[None; 2], false),
        ] {
            let groups = Groups::new(windows, 4).expect("valid");
            assert_eq!(groups.is_one(), is_one);
        }
        assert_eq!(
            [1, 2, 3, 4].map(|indices| groups.first_index(1, indices)),
            [0, 0, 1, 2]
        );
    }

    #[test]
    fn bad_groups_are_refused() {
        let out_of_range = |given| Error::OutOfRange {
            name: "the number of layer groups",
            min: 1,
            max: 64,
            given,
        };
        assert_eq!(Groups::new(&[], 4).err(), Some(out_of_range(0)));
        assert_eq!(Groups::new(&[None; 65], 4).err(), Some(out_of_range(65)));
        assert_eq!(
            Groups::new(&[Some(0)], 4).err(),
            Some(Error::TooFew {
                name: "a layer group's window",
                min: 1,
                given: 0
            })
        );
    }
}
