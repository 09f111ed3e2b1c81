//! Systems without Unix owners and modes keep a store in memory only.
#![cfg(not(unix))]
#![allow(clippy::unwrap_used)]

mod common;

use common::{MINUTE, flush, get, prefix, put, small, tokens};
use kv_store::{Get, MemoryDisk, OpenError, Store};

#[test]
fn a_folder_is_refused_and_not_made() {
    let path = std::env::temp_dir().join(format!("kv-store-refused-{}", std::process::id()));
    let error = Store::open(&path, small()).err().unwrap();
    assert!(matches!(error, OpenError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("in memory"), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_store_in_memory_works() {
    let store = Store::on_disk(Box::new(MemoryDisk::new(u64::MAX)), small()).unwrap();
    let tokens = tokens(1, 3);
    let prefix = prefix(&tokens);
    for index in 0..prefix.len() {
        put(&store, &prefix.block(index), 100);
    }
    flush(&store);
    for index in 0..prefix.len() {
        assert_eq!(get(&store, &prefix.block(index), 100), Get::Hit);
    }
    assert!(store.close(MINUTE));
}
