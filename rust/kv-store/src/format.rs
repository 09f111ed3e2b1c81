//! Bytes of files, entries and index records; docs/reference/kv-store-format.md is their specification.

use std::sync::LazyLock;

use blake3::hazmat::{ContextKey, HasherExt as _, hash_derive_key_context};

use crate::key::{Block, BlockKey, Fingerprint};

/// Version of the format: in the marker file, in every file and in every entry.
pub const FORMAT_VERSION: u32 = 1;

pub(crate) const FILE_HEADER: usize = 16;
pub(crate) const RECORD: usize = 128;
const FIXED: usize = 168; // of an entry's header, before namespace and tokens
const TAG: usize = 32;

const DATA_MAGIC: [u8; 8] = *b"KVSTDATA";
const INDEX_MAGIC: [u8; 8] = *b"KVSTINDX";
const ENTRY_MAGIC: [u8; 8] = *b"KVSTENTR";

/// A segment's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Data,
    Index,
}

impl FileKind {
    pub(crate) fn name(self, segment: u32) -> String {
        match self {
            Self::Data => format!("{segment:08x}.data"),
            Self::Index => format!("{segment:08x}.index"),
        }
    }

    /// The segment and kind of a file of the store.
    pub(crate) fn parse(name: &str) -> Option<(u32, Self)> {
        let (digits, kind) = name.split_once('.')?;
        let kind = match kind {
            "data" => Self::Data,
            "index" => Self::Index,
            _ => return None,
        };
        let segment = u32::from_str_radix(digits, 16).ok()?;
        (kind.name(segment) == name).then_some((segment, kind))
    }

    pub(crate) fn header(self, segment: u32) -> [u8; FILE_HEADER] {
        let magic = match self {
            Self::Data => DATA_MAGIC,
            Self::Index => INDEX_MAGIC,
        };
        let mut header = [0; FILE_HEADER];
        header[..8].copy_from_slice(&magic);
        header[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        header[12..].copy_from_slice(&segment.to_le_bytes());
        header
    }
}

/// Computes the checksums of entries. With a secret key they are authentication codes.
#[derive(Clone)]
pub(crate) struct Sealer {
    payload: [u8; 32],
    header: [u8; 32],
}

impl Sealer {
    pub(crate) fn new(auth_key: Option<&[u8; 32]>) -> Self {
        let material = auth_key.map_or(&[][..], |key| key);
        Self {
            payload: blake3::derive_key("pyengine kv-store 1 payload", material),
            header: blake3::derive_key("pyengine kv-store 1 header", material),
        }
    }

    /// A hasher for a payload; its result goes into the header.
    pub(crate) fn payload(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.payload)
    }

    fn tag(&self, header: &[u8]) -> [u8; TAG] {
        *blake3::keyed_hash(&self.header, header).as_bytes()
    }

    /// Names the authentication key in the marker file without revealing it.
    pub(crate) fn id(&self) -> String {
        blake3::keyed_hash(&self.header, b"id").to_hex()[..16].to_owned()
    }
}

/// An entry's header, borrowed from its bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) key: BlockKey,
    pub(crate) parent: BlockKey,
    pub(crate) payload_len: u64,
    pub(crate) checksum: [u8; 32],
    pub(crate) namespace: &'a [u8],
    tokens: &'a [u8],
}

/// Bytes of the header of a block's entry.
pub(crate) fn header_len(namespace: usize, tokens: usize) -> usize {
    (FIXED + namespace + 4 * tokens).next_multiple_of(8) + TAG
}

/// The header that identifies a block's entry.
pub(crate) fn encode_header(
    block: &Block<'_>,
    payload_len: u64,
    checksum: &[u8; 32],
    sealer: &Sealer,
) -> Vec<u8> {
    let len = header_len(block.namespace.len(), block.tokens.len());
    let mut header = Vec::with_capacity(len);
    header.extend_from_slice(&ENTRY_MAGIC);
    header.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    header.extend_from_slice(&(len as u32).to_le_bytes());
    header.extend_from_slice(block.fingerprint.as_bytes());
    header.extend_from_slice(block.key().as_bytes());
    header.extend_from_slice(block.parent.as_bytes());
    header.extend_from_slice(&payload_len.to_le_bytes());
    header.extend_from_slice(checksum);
    header.extend_from_slice(&(block.namespace.len() as u32).to_le_bytes());
    header.extend_from_slice(&(block.tokens.len() as u32).to_le_bytes());
    header.extend_from_slice(&[0; 8]); // reserved
    debug_assert_eq!(header.len(), FIXED);
    header.extend_from_slice(block.namespace);
    block
        .tokens
        .iter()
        .for_each(|token| header.extend_from_slice(&token.to_le_bytes()));
    header.resize(len - TAG, 0);
    let tag = sealer.tag(&header);
    header.extend_from_slice(&tag);
    header
}

impl<'a> Header<'a> {
    /// Parses a header with a valid tag.
    pub(crate) fn decode(bytes: &'a [u8], sealer: &Sealer) -> Option<Self> {
        let (signed, tag) = bytes.split_at_checked(bytes.len().checked_sub(TAG)?)?;
        let array = |at: usize| -> Option<[u8; 32]> { signed.get(at..at + 32)?.try_into().ok() };
        let number = |at: usize| -> Option<u32> {
            Some(u32::from_le_bytes(signed.get(at..at + 4)?.try_into().ok()?))
        };
        if !signed.starts_with(&ENTRY_MAGIC)
            || number(8)? != FORMAT_VERSION
            || number(12)? as usize != bytes.len()
        {
            return None;
        }
        if blake3::Hash::from(sealer.tag(signed)) != <[u8; TAG]>::try_from(tag).ok()? {
            return None; // compared in constant time
        }
        let (namespace, tokens) = (number(152)? as usize, number(156)? as usize);
        let end = FIXED.checked_add(namespace)?;
        if header_len(namespace, tokens) != bytes.len() {
            return None;
        }
        Some(Self {
            fingerprint: Fingerprint::from_bytes(array(16)?),
            key: BlockKey::from_bytes(array(48)?),
            parent: BlockKey::from_bytes(array(80)?),
            payload_len: u64::from_le_bytes(signed.get(112..120)?.try_into().ok()?),
            checksum: array(120)?,
            namespace: signed.get(FIXED..end)?,
            tokens: signed.get(end..end + 4 * tokens)?,
        })
    }

    /// The tokens, in order.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u32> {
        self.tokens
            .chunks_exact(4)
            .map(|token| u32::from_le_bytes([token[0], token[1], token[2], token[3]]))
    }

    /// True if the entry holds exactly this block.
    pub(crate) fn proves(&self, block: &Block<'_>) -> bool {
        self.fingerprint == block.fingerprint
            && self.parent == block.parent
            && self.namespace == block.namespace
            && self.tokens.len() == 4 * block.tokens.len()
            && self.tokens().eq(block.tokens.iter().copied())
    }

    /// True if the entry's key is that of its parent and tokens.
    pub(crate) fn is_consistent(&self) -> bool {
        let tokens: Vec<u32> = self.tokens().collect();
        self.key == self.parent.child(self.fingerprint, &tokens)
    }
}

/// Kinds of index records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// The entry at `offset` is complete.
    Stored,
    /// The entry of this key was removed from the segment.
    Dropped,
}

/// A record of a segment's index: the position of an entry, whose header verifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: RecordKind,
    pub(crate) key: BlockKey,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) offset: u64,
    pub(crate) header_len: u32,
    pub(crate) payload_len: u64,
    /// Seconds since 1970.
    pub(crate) written: u64,
}

impl Record {
    pub(crate) fn encode(&self, segment: u32) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[..32].copy_from_slice(self.key.as_bytes());
        record[32..64].copy_from_slice(self.fingerprint.as_bytes());
        record[64..72].copy_from_slice(&self.offset.to_le_bytes());
        record[72..80].copy_from_slice(&self.payload_len.to_le_bytes());
        record[80..88].copy_from_slice(&self.written.to_le_bytes());
        record[88..92].copy_from_slice(&self.header_len.to_le_bytes());
        let kind: u32 = match self.kind {
            RecordKind::Stored => 1,
            RecordKind::Dropped => 2,
        };
        record[92..96].copy_from_slice(&kind.to_le_bytes());
        let checksum = record_checksum(segment, &record[..96]);
        record[96..].copy_from_slice(&checksum);
        record
    }

    pub(crate) fn decode(segment: u32, bytes: &[u8; RECORD]) -> Option<Self> {
        if record_checksum(segment, &bytes[..96])[..] != bytes[96..] {
            return None;
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let array = |at: usize| <[u8; 32]>::try_from(&bytes[at..at + 32]).expect("32 bytes");
        let kind = match number(88) >> 32 {
            1 => RecordKind::Stored,
            2 => RecordKind::Dropped,
            _ => return None,
        };
        Some(Self {
            kind,
            key: BlockKey::from_bytes(array(0)),
            fingerprint: Fingerprint::from_bytes(array(32)),
            offset: number(64),
            payload_len: number(72),
            written: number(80),
            header_len: number(88) as u32,
        })
    }
}

fn record_checksum(segment: u32, record: &[u8]) -> [u8; 32] {
    static CONTEXT: LazyLock<ContextKey> =
        LazyLock::new(|| hash_derive_key_context("pyengine kv-store 1 record"));
    let mut hasher = blake3::Hasher::new_from_context_key(&CONTEXT);
    hasher.update(&segment.to_le_bytes());
    hasher.update(record);
    *hasher.finalize().as_bytes()
}
