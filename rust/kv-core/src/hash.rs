//! Block hashes: they identify cached blocks for the outside world, and prove nothing.
//!
//! ```text
//! root(namespace)        = XXH3_128(namespace bytes, seed)
//! child(parent, tokens)  = XXH3_128(parent as 16 bytes, little endian ‖ tokens as u32, little endian)
//! ```
//!
//! The parent of a block in which a namespace switches is
//! `XXH3_128(parent as 16 bytes, little endian ‖ offset as u32, little endian ‖ name)`.
//!
//! XXH3 is Yann Collet's (xxHash 0.8). The seed enters once, at the root, and reaches every
//! descendant through the chain. Given a seed, hashes are equal in every process on every machine.

use std::hash::{BuildHasher, Hasher, RandomState};

use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

/// The largest block whose bytes are hashed from the stack.
const STACK_TOKENS: usize = 64;

/// Chained 128-bit block hashes under one seed.
#[derive(Clone, Debug)]
pub struct ContentHasher {
    seed: u64,
    mask: u128,
}

impl ContentHasher {
    /// A hasher of `bits` bits (128 outside tests: fewer make collisions on purpose).
    pub fn new(seed: u64, bits: u32) -> Self {
        let mask = match bits {
            0 => 0,
            bits => u128::MAX >> (128 - bits.min(128)),
        };
        Self { seed, mask }
    }

    /// A seed that differs in every process.
    pub fn random_seed() -> u64 {
        RandomState::new().build_hasher().finish()
    }

    /// The seed in force.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Masks a hash of the index to as many bits as block hashes have.
    pub(crate) fn index_bits(&self, hash: u64) -> u64 {
        hash & self.mask as u64
    }

    /// The hash of a namespace.
    pub fn root(&self, namespace: &[u8]) -> u128 {
        xxh3_128_with_seed(namespace, self.seed) & self.mask
    }

    /// The hash that takes the place of `parent` for a block in which a namespace switches: from its token at `offset`
    /// on, it belongs to `name`.
    pub fn switch(&self, parent: u128, offset: u32, name: &[u8]) -> u128 {
        let bytes = [&parent.to_le_bytes()[..], &offset.to_le_bytes(), name].concat();
        xxh3_128(&bytes) & self.mask
    }

    /// The hash of a block of `tokens` after the block hashed `parent`.
    pub fn child(&self, parent: u128, tokens: &[u32]) -> u128 {
        let hash = match tokens.len() {
            // The usual block size, so that the length is a constant.
            16 => Self::of_stack::<{ 16 + 4 * 16 }>(parent, tokens),
            ..=STACK_TOKENS => Self::of_stack::<{ 16 + 4 * STACK_TOKENS }>(parent, tokens),
            len => {
                let mut bytes = vec![0; 16 + 4 * len];
                Self::lay_out(parent, tokens, &mut bytes);
                xxh3_128(&bytes)
            }
        };
        hash & self.mask
    }

    #[inline(always)]
    fn of_stack<const BYTES: usize>(parent: u128, tokens: &[u32]) -> u128 {
        let mut stack = [0; BYTES];
        let bytes = &mut stack[..16 + 4 * tokens.len()];
        Self::lay_out(parent, tokens, bytes);
        xxh3_128(bytes)
    }

    fn lay_out(parent: u128, tokens: &[u32], bytes: &mut [u8]) {
        bytes[..16].copy_from_slice(&parent.to_le_bytes());
        if cfg!(target_endian = "little") {
            bytes[16..].copy_from_slice(bytemuck::cast_slice(tokens));
        } else {
            for (four, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
                four.copy_from_slice(&token.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_documented_bytes() {
        let hasher = ContentHasher::new(7, 128);
        let root = hasher.root(b"tenant");
        assert_eq!(root, xxh3_128_with_seed(b"tenant", 7));
        for len in [1_u32, 16, 64, 65, 300] {
            let tokens: Vec<u32> = (0..len).map(|t| t * 70_001).collect();
            let mut bytes = root.to_le_bytes().to_vec();
            bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
            assert_eq!(
                hasher.child(root, &tokens),
                xxh3_128(&bytes),
                "{len} tokens"
            );
        }
    }

    #[test]
    fn test_vectors_do_not_move() {
        let hasher = ContentHasher::new(0, 128);
        let root = hasher.root(b"");
        let first = hasher.child(root, &[1, 2, 3, 4]);
        assert_eq!(root, 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        // The vectors of the docs, there in little endian.
        let bytes = |hash: u128| {
            hash.to_le_bytes()
                .map(|byte| format!("{byte:02x}"))
                .concat()
        };
        assert_eq!(bytes(first), "b669d390b17abeed76dc029be89b9feb");
        let second = hasher.child(first, &[5, 6, 7, 8]);
        assert_eq!(bytes(second), "d658bebed64ccffe2596165ebc529903");
        let tenant = hasher.child(hasher.root(b"tenant"), &[1, 2, 3, 4]);
        assert_eq!(bytes(tenant), "a346afbacff39c989c9ceda808a756b2");
        assert_ne!(first, hasher.child(root, &[1, 2, 3, 5]));
    }

    #[test]
    fn fewer_bits_collide() {
        assert_eq!(ContentHasher::new(1, 0).root(b"x"), 0);
        assert!(ContentHasher::new(1, 3).child(9, &[1, 2]) < 8);
    }
}
