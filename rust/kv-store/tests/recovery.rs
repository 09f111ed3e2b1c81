//! Faults that last and end: capacity and entries come back within seconds, without a restart.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{MINUTE, SECOND, faulty, flush, get, prefix, put, small, tokens};
use kv_store::{Config, Get, Store};

const LEN: usize = 2000;
const SOON: Duration = Duration::from_secs(3);
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;
const EIO: i32 = 5;
const EROFS: i32 = 30;

fn config() -> Config {
    Config {
        max_bytes: 1 << 20,
        segment_bytes: 32 << 10,
        retry_after: Duration::from_millis(100),
        stall_after: Duration::from_millis(100),
        ..small()
    }
}

fn put_prompts(store: &Store, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let tokens = tokens(3 * number, 4);
        (0..4).for_each(|block| _ = put(store, &prefix(&tokens).block(block), LEN));
        assert!(store.flush(MINUTE));
    }
    store.check().unwrap();
}

fn hits(store: &Store, numbers: std::ops::Range<u32>) -> usize {
    let hits = |number| {
        let tokens = tokens(3 * number, 4);
        let is_hit = |&block: &usize| get(store, &prefix(&tokens).block(block), LEN) == Get::Hit;
        (0..4).filter(is_hit).count()
    };
    numbers.map(hits).sum()
}

/// After the fault, the store takes as much as before.
fn assert_recovers(store: &Store, what: &str) {
    let end = Instant::now() + SOON;
    for first in (1000..).step_by(50) {
        put_prompts(store, first..first + 50);
        let found = hits(store, first..first + 50);
        let stats = store.stats();
        if found == 200 && stats.limit_bytes == config().max_bytes {
            assert!(!stats.is_suspended && !stats.is_stalled);
            return;
        }
        assert!(Instant::now() < end, "{what}: {found} of 200, {stats:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_store_whose_writes_failed_takes_as_much_as_before() {
    for (name, code) in [
        ("ENOSPC", ENOSPC),
        ("EDQUOT", EDQUOT),
        ("EIO", EIO),
        ("EROFS", EROFS),
    ] {
        for (first, second) in [(true, true), (false, true), (true, false)] {
            let (store, _, faults) = faulty(config());
            put_prompts(&store, 0..20);
            for is_used in [first, second] {
                faults.break_writes(code);
                if is_used {
                    put_prompts(&store, 100..120);
                }
                assert!(hits(&store, 0..20) <= 80);
                faults.repair();
                if is_used {
                    assert_recovers(&store, name);
                }
            }
            assert!(store.stats().counters.write_errors > 0);
        }
    }
}

#[test]
fn one_failed_write_does_not_shrink_the_store() {
    let (store, _, faults) = faulty(config());
    put_prompts(&store, 0..1);
    faults.write(common::Fault::Error(std::io::ErrorKind::StorageFull));
    put_prompts(&store, 1..2);
    assert_recovers(&store, "one ENOSPC");
}

#[test]
fn a_store_that_stalled_takes_as_much_as_before() {
    let (store, _, faults) = faulty(config());
    put_prompts(&store, 0..20);
    faults.hang();
    let tokens = tokens(300, 1);
    put(&store, &prefix(&tokens).block(0), LEN);
    assert!(!store.flush(SECOND / 2));
    let start = Instant::now();
    assert_eq!(
        store.sync().unwrap_err().kind(),
        std::io::ErrorKind::TimedOut
    );
    assert!(start.elapsed() < SECOND && store.stats().is_stalled);
    faults.repair();
    assert!(store.flush(SOON));
    assert_recovers(&store, "stalled");
    assert!(store.sync().is_ok());
}

/// A folder that is removed with its value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-store-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn make_private(path: &Path) {
    std::fs::DirBuilder::new().mode(0o700).create(path).unwrap();
}

#[test]
fn a_folder_that_was_removed_and_is_made_again_is_used() {
    let scratch = Scratch::new("removed");
    let folder = scratch.at("store");
    let store = Store::open(&folder, config()).unwrap();
    put_prompts(&store, 0..20);
    std::fs::remove_dir_all(&folder).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    put_prompts(&store, 20..40);
    assert_eq!(hits(&store, 0..40), 0);
    assert!(
        !folder.exists(),
        "a folder that was removed, perhaps with its disk, is not made again"
    );
    make_private(&folder);
    assert_recovers(&store, "removed and made again");
    assert!(
        Store::open(&folder, config()).is_err(),
        "the new folder is locked"
    );
    let expected = hits(&store, 1000..1050);
    assert!(store.close(MINUTE));
    drop(store);
    let store = Store::open(&folder, config()).unwrap();
    assert_eq!(hits(&store, 1000..1050), expected);
}

#[test]
fn another_store_in_place_of_the_folder_is_read_and_written() {
    let scratch = Scratch::new("replaced");
    let (folder, other) = (scratch.at("store"), scratch.at("other"));
    let store = Store::open(&other, config()).unwrap();
    put_prompts(&store, 500..510);
    assert!(store.close(MINUTE));
    drop(store);
    let store = Store::open(&folder, config()).unwrap();
    put_prompts(&store, 0..20);
    std::fs::rename(&folder, scratch.at("away")).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    put_prompts(&store, 20..21);
    assert_eq!(
        hits(&store, 0..21),
        84,
        "a folder that was moved is still there"
    );
    std::fs::rename(&other, &folder).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    put_prompts(&store, 30..31);
    assert_eq!(
        (
            hits(&store, 500..510),
            hits(&store, 30..31),
            hits(&store, 0..20)
        ),
        (40, 4, 0)
    );
    flush(&store);
}

#[test]
fn a_reader_follows_its_folder() {
    let scratch = Scratch::new("read");
    let folder = scratch.at("store");
    let writer = Store::open(&folder, config()).unwrap();
    put_prompts(&writer, 0..5);
    let reader = Config {
        access: kv_store::Access::Read,
        ..config()
    };
    let reader = Store::open(&folder, reader).unwrap();
    assert_eq!(hits(&reader, 0..5), 20);
    drop(writer);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(reader.refresh().is_err());
    let writer = Store::open(&folder, config()).unwrap();
    put_prompts(&writer, 5..10);
    assert_eq!(reader.refresh().unwrap(), 20);
    assert_eq!((hits(&reader, 5..10), hits(&reader, 0..5)), (20, 0));
}
