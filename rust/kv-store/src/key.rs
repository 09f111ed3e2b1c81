//! Keys of stored blocks: BLAKE3 over the parent's key and the tokens, keyed by the model's fingerprint.

use std::fmt;

/// Identifies the model that computed the KV: weights, dtype, quantisation, layout, rotary settings, kernel version.
/// Entries of different fingerprints never match each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

/// Identifies a block by its whole prefix: namespace, tokens up to its last one, and fingerprint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a list of named properties. Order matters; every name and value is length-prefixed.
    pub fn of<'a>(properties: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("pyengine kv-store 1 fingerprint");
        for (name, value) in properties {
            for bytes in [name.as_bytes(), value] {
                hasher.update(&(bytes.len() as u64).to_le_bytes());
                hasher.update(bytes);
            }
        }
        Self(*hasher.finalize().as_bytes())
    }
}

impl BlockKey {
    /// The parent of a namespace's first blocks.
    pub fn root(fingerprint: Fingerprint, namespace: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&fingerprint.0);
        hasher.update(&[0]);
        hasher.update(namespace);
        Self(*hasher.finalize().as_bytes())
    }

    /// The key that takes the place of a parent's for a block in which the namespace switches: from its token at `offset`
    /// on, it belongs to `name`.
    pub fn switch(&self, fingerprint: Fingerprint, offset: u32, name: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&fingerprint.0);
        hasher.update(&[2]);
        hasher.update(&self.0);
        hasher.update(&offset.to_le_bytes());
        hasher.update(name);
        Self(*hasher.finalize().as_bytes())
    }

    /// The key of the block that holds `tokens` and follows the block with this key.
    pub fn child(&self, fingerprint: Fingerprint, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&fingerprint.0);
        let mut bytes = [0; 1024];
        bytes[0] = 1;
        bytes[1..33].copy_from_slice(&self.0);
        let mut len = 33;
        for token in tokens {
            if len + 4 > bytes.len() {
                hasher.update(&bytes[..len]);
                len = 0;
            }
            bytes[len..len + 4].copy_from_slice(&token.to_le_bytes());
            len += 4;
        }
        hasher.update(&bytes[..len]);
        Self(*hasher.finalize().as_bytes())
    }
}

macro_rules! bytes {
    ($($name:ident)*) => {$(
        impl $name {
            /// From the bytes that [`as_bytes`](Self::as_bytes) returned.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The 32 bytes.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        /// Hexadecimal, lower case.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    )*};
}
bytes!(Fingerprint BlockKey);

/// A block of a prefix. The key finds its entry; fingerprint, namespace, parent and tokens verify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block<'a> {
    /// The model that computed the KV.
    pub fingerprint: Fingerprint,
    /// Any bytes: an adapter, a tenant. Nothing matches across namespaces.
    pub namespace: &'a [u8],
    /// Key of the block before it, or [`BlockKey::root`].
    pub parent: BlockKey,
    /// The block's tokens.
    pub tokens: &'a [u32],
}

impl Block<'_> {
    /// The key that the block is stored under.
    pub fn key(&self) -> BlockKey {
        self.parent.child(self.fingerprint, self.tokens)
    }
}

/// The full blocks of a prompt, each hashed once.
#[derive(Clone, Debug)]
pub struct Prefix<'a> {
    fingerprint: Fingerprint,
    namespace: &'a [u8],
    tokens: &'a [u32],
    block_size: usize,
    keys: Vec<BlockKey>, // the root, then one per block
}

impl<'a> Prefix<'a> {
    /// Hashes all full blocks of `tokens`.
    ///
    /// # Panics
    /// If `block_size` is 0.
    pub fn new(
        fingerprint: Fingerprint,
        namespace: &'a [u8],
        tokens: &'a [u32],
        block_size: usize,
    ) -> Self {
        let mut keys = Vec::with_capacity(tokens.len() / block_size + 1);
        let mut last = BlockKey::root(fingerprint, namespace);
        keys.push(last);
        for block in tokens.chunks_exact(block_size) {
            last = last.child(fingerprint, block);
            keys.push(last);
        }
        Self {
            fingerprint,
            namespace,
            tokens,
            block_size,
            keys,
        }
    }

    /// Number of full blocks.
    pub fn len(&self) -> usize {
        self.keys.len() - 1
    }

    /// True if the prompt is shorter than a block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keys of the blocks, in order.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys[1..]
    }

    /// The block at `index`.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn block(&self, index: usize) -> Block<'a> {
        assert!(
            index < self.len(),
            "block {index} of a prefix of {} blocks",
            self.len()
        );
        Block {
            fingerprint: self.fingerprint,
            namespace: self.namespace,
            parent: self.keys[index],
            tokens: &self.tokens[index * self.block_size..][..self.block_size],
        }
    }
}
