//! Operations, as numbers that mean something in every state.

/// An operation on some sequence: numbers are taken modulo what there is, so that each list of operations is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Adds a sequence.
    Add {
        /// Its namespace.
        namespace: u8,
        /// The pattern of its tokens; patterns begin alike.
        pattern: u8,
        /// How many.
        len: usize,
    },
    /// Plans a prefill of up to `max_tokens` tokens.
    Prefill {
        /// Index of the sequence.
        sequence: usize,
        /// The chunk.
        max_tokens: usize,
    },
    /// Plans all sequences with one token left.
    Decode,
    /// Runs and commits the step; `token` varies the sampled tokens.
    Commit {
        /// The first of them.
        token: u8,
    },
    /// Appends tokens.
    Append {
        /// Index of the sequence.
        sequence: usize,
        /// How many.
        len: usize,
    },
    /// Forks a sequence.
    Fork(usize),
    /// Preempts a sequence.
    Preempt(usize),
    /// Ends a sequence.
    Free(usize),
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }

    pub(crate) fn operation(&mut self) -> Operation {
        let sequence = self.below(64) as usize;
        match self.below(32) {
            0..=5 => Operation::Add {
                namespace: self.below(2) as u8,
                pattern: self.below(4) as u8,
                len: 1 + self.below(14) as usize,
            },
            6..=14 => Operation::Prefill {
                sequence,
                max_tokens: [1 + self.below(6) as usize, 64][self.below(2) as usize],
            },
            15..=19 => Operation::Decode,
            20..=25 => Operation::Commit {
                token: self.below(3) as u8,
            },
            26 => Operation::Append {
                sequence,
                len: 1 + self.below(4) as usize,
            },
            27 => Operation::Fork(sequence),
            28 => Operation::Preempt(sequence),
            _ => Operation::Free(sequence),
        }
    }
}

/// Few patterns with common prefixes, so that sequences share blocks.
pub(crate) fn tokens(pattern: u8, len: usize) -> Vec<u32> {
    let token = |position| match position {
        position if position < 3 + 2 * u32::from(pattern) => position % 3,
        _ => u32::from(pattern),
    };
    (0..len as u32).map(token).collect()
}
