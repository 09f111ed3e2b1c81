//! Test vectors: docs/reference/kv-store-format.md gives the same.
#![allow(clippy::unwrap_used)]

mod common;

use common::{flush, small};
use kv_store::{Block, BlockKey, Disk as _, Fingerprint, MemoryDisk, Prefix, Store};

const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 128_000];

fn fingerprint() -> Fingerprint {
    Fingerprint::of([("model", &b"example"[..]), ("dtype", b"float32")])
}

fn document() -> String {
    std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/reference/kv-store-format.md"
    ))
    .unwrap()
}

/// The document has this value in the row of this name.
fn assert_vector(name: &str, value: &str) {
    let row = format!("| {name} | `{value}` |");
    assert!(
        document().contains(&row),
        "docs/reference/kv-store-format.md lacks: {row}"
    );
}

#[test]
fn keys_are_those_of_the_document() {
    let prefix = Prefix::new(fingerprint(), b"tenant", &TOKENS, 4);
    assert_eq!(prefix.len(), 2);
    assert_vector("fingerprint", &fingerprint().to_string());
    assert_vector(
        "root",
        &BlockKey::root(fingerprint(), b"tenant").to_string(),
    );
    assert_vector("block 0", &prefix.keys()[0].to_string());
    assert_vector("block 1", &prefix.keys()[1].to_string());
    assert_eq!(prefix.block(1).key(), prefix.keys()[1]);
}

#[test]
fn keys_are_blake3_of_what_the_document_says() {
    let root = blake3::keyed_hash(fingerprint().as_bytes(), b"\x00tenant");
    assert_eq!(
        root.as_bytes(),
        BlockKey::root(fingerprint(), b"tenant").as_bytes()
    );
    let mut bytes = [&b"\x02"[..], root.as_bytes(), &3_u32.to_le_bytes()].concat();
    bytes.extend_from_slice(b"adapter");
    let switched = BlockKey::root(fingerprint(), b"tenant").switch(fingerprint(), 3, b"adapter");
    let expected = blake3::keyed_hash(fingerprint().as_bytes(), &bytes);
    assert_eq!(switched.as_bytes(), expected.as_bytes());
    for len in [1, 4, 16, 247, 248, 249, 1000] {
        let tokens: Vec<u32> = (0..len).map(|token| token * 77_777).collect();
        let mut bytes = [&b"\x01"[..], root.as_bytes()].concat();
        tokens
            .iter()
            .for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        let key = BlockKey::from_bytes(*root.as_bytes()).child(fingerprint(), &tokens);
        assert_eq!(
            key.as_bytes(),
            blake3::keyed_hash(fingerprint().as_bytes(), &bytes).as_bytes(),
            "{len} tokens"
        );
    }
}

#[test]
fn whatever_differs_gives_another_key() {
    let one = Fingerprint::of([("a", &b"bc"[..])]);
    assert_ne!(one, Fingerprint::of([("ab", &b"c"[..])]));
    let root = BlockKey::root(one, b"");
    let keys = [
        root,
        BlockKey::root(one, b"\0"),
        BlockKey::root(Fingerprint::of([("a", &b"bd"[..])]), b""),
        root.child(one, &[1, 2]),
        root.child(one, &[1]).child(one, &[2]),
        root.child(one, &[2, 1]),
        root.child(one, &[0x0001_0002]),
    ];
    let distinct: std::collections::BTreeSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
}

/// The first data file with one entry: block 1 of the vectors, payload `00 01 .. 63`.
fn data_file(auth_key: Option<[u8; 32]>) -> Vec<u8> {
    let disk = MemoryDisk::new(1 << 20);
    let config = kv_store::Config {
        auth_key,
        ..small()
    };
    let store = Store::on_disk(Box::new(disk.clone()), config).unwrap();
    let prefix = Prefix::new(fingerprint(), b"tenant", &TOKENS, 4);
    let block: Block<'_> = prefix.block(1);
    let payload: Vec<u8> = (0..100).collect();
    store.put(&block, &[&payload]);
    flush(&store);
    drop(store);
    let file = disk.open("00000000.data").unwrap();
    let mut bytes = vec![0; file.size().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn entries_are_those_of_the_document() {
    let bytes = data_file(None);
    let header = (168 + 6 + 4 * 4_usize).next_multiple_of(8) + 32;
    assert_eq!(bytes.len(), 16 + header + 100);
    assert_eq!(&bytes[..16], b"KVSTDATA\x01\0\0\0\0\0\0\0");
    assert_vector("BLAKE3 of the data file", &blake3::hash(&bytes).to_string());
    assert_vector(
        "BLAKE3 of the data file, with key",
        &blake3::hash(&data_file(Some([7; 32]))).to_string(),
    );
    // Header and checksums, computed as the document says.
    let entry = &bytes[16..];
    let payload_key = blake3::derive_key("pyengine kv-store 1 payload", b"");
    assert_eq!(
        &entry[120..152],
        blake3::keyed_hash(&payload_key, &entry[header..]).as_bytes()
    );
    let header_key = blake3::derive_key("pyengine kv-store 1 header", b"");
    assert_eq!(
        &entry[header - 32..header],
        blake3::keyed_hash(&header_key, &entry[..header - 32]).as_bytes()
    );
}
