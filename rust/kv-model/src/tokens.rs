//! Token sequences so short that they are copied.

use std::fmt;

/// Up to 16 tokens, each 0 or 1.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokens {
    len: u8,
    bits: u16,
}

impl Tokens {
    /// No token.
    pub const EMPTY: Self = Self { len: 0, bits: 0 };

    /// All sequences of `len` tokens.
    pub fn all(len: usize) -> impl Iterator<Item = Self> {
        (0..1_u16 << len).map(move |bits| Self {
            len: len as u8,
            bits,
        })
    }

    /// How many.
    pub fn len(self) -> usize {
        usize::from(self.len)
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The first `len` tokens.
    ///
    /// # Panics
    ///
    /// There are fewer.
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len());
        Self {
            len: len as u8,
            bits: self.bits & ((1 << len) - 1),
        }
    }

    /// The tokens from `start` on.
    ///
    /// # Panics
    ///
    /// `start` is behind the last one.
    pub fn from(self, start: usize) -> Self {
        assert!(start <= self.len());
        Self {
            len: (self.len() - start) as u8,
            bits: self.bits >> start,
        }
    }

    /// Appends a token.
    ///
    /// # Panics
    ///
    /// The token is neither 0 nor 1, or there are 16 already.
    pub fn push(&mut self, token: u32) {
        assert!(token < 2 && self.len < 16);
        self.bits |= (token as u16) << self.len;
        self.len += 1;
    }

    /// Whether it begins with `prefix`.
    pub fn starts_with(self, prefix: Self) -> bool {
        prefix.len <= self.len && self.first(prefix.len()) == prefix
    }

    /// The tokens, one by one.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..self.len).map(move |at| u32::from(self.bits >> at & 1))
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|token| write!(f, "{token}"))
    }
}
