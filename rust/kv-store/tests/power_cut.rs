//! The power goes at each point of a log of writes, names and syncs: what was not synced is lost, torn or reordered.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use common::{MINUTE, flush, get, prefix, put, small, tokens};
use kv_store::{Config, Disk, DiskFile, Get, MemoryDisk, Store};

const LEN: usize = 2000;
const BLOCKS: usize = 4;

/// A change of the disk. Files have numbers: a name may be given to several, one after the other.
enum Change {
    Write(usize, u64, Vec<u8>),
    Truncate(usize, u64),
    SyncFile(usize),
    Create(usize, String),
    Rename(usize, String, String),
    Remove(String),
    SyncNames,
    /// `sync` has returned. These prompts are stored, and were already at the last of these, unless they are new.
    Synced(BTreeSet<u32>),
}

#[derive(Default)]
struct Log {
    changes: Vec<Change>,
    files: BTreeMap<String, usize>,
    made: usize,
}

/// A disk in memory that writes down each change.
#[derive(Clone)]
struct LoggedDisk(MemoryDisk, Arc<Mutex<Log>>);

struct LoggedFile(Box<dyn DiskFile>, usize, Arc<Mutex<Log>>);

impl LoggedDisk {
    fn new() -> Self {
        Self(MemoryDisk::new(1 << 30), Arc::default())
    }

    fn log(&self, change: Change) {
        self.1.lock().unwrap().changes.push(change);
    }

    fn file(&self, name: &str, file: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        let number = self.1.lock().unwrap().files[name];
        Box::new(LoggedFile(file, number, Arc::clone(&self.1)))
    }
}

impl Disk for LoggedDisk {
    fn names(&self) -> io::Result<Vec<String>> {
        self.0.names()
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let file = self.0.create(name)?;
        {
            let mut log = self.1.lock().unwrap();
            log.made += 1;
            let number = log.made;
            log.files.insert(name.into(), number);
            log.changes.push(Change::Create(number, name.into()));
        }
        Ok(self.file(name, file))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        self.0.open(name)
    }

    fn open_writable(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        Ok(self.file(name, self.0.open_writable(name)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)?;
        self.log(Change::Remove(name.into()));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)?;
        let mut log = self.1.lock().unwrap();
        let number = log.files.remove(from).unwrap();
        log.files.insert(to.into(), number);
        let change = Change::Rename(number, from.into(), to.into());
        log.changes.push(change);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.log(Change::SyncNames);
        Ok(())
    }

    fn available(&self) -> io::Result<u64> {
        self.0.available()
    }
}

impl DiskFile for LoggedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        let written = self.0.write_at(buffer, offset)?;
        let change = Change::Write(self.1, offset, buffer[..written].to_vec());
        self.2.lock().unwrap().changes.push(change);
        Ok(written)
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn truncate(&self, size: u64) -> io::Result<()> {
        self.0.truncate(size)?;
        let change = Change::Truncate(self.1, size);
        self.2.lock().unwrap().changes.push(change);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.2
            .lock()
            .unwrap()
            .changes
            .push(Change::SyncFile(self.1));
        Ok(())
    }
}

/// The fate of changes that were not synced.
#[derive(Clone, Copy, Debug)]
enum Unsynced {
    Kept,
    Lost,
    /// Each by itself is kept, lost or, if it is a write, torn.
    Mixed(u64),
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most
    }
}

/// The disk after the power went behind the first `cut` changes.
fn disk_after(changes: &[Change], cut: usize, unsynced: Unsynced) -> MemoryDisk {
    let changes = &changes[..cut];
    let mut chance = Chance(
        cut as u64
            ^ if let Unsynced::Mixed(seed) = unsynced {
                seed << 40
            } else {
                0
            },
    );
    let mut is_kept = |is_synced: bool| match unsynced {
        _ if is_synced => true,
        Unsynced::Kept => true,
        Unsynced::Lost => false,
        Unsynced::Mixed(_) => chance.below(2) == 0,
    };
    let last = |is_sync: &dyn Fn(&Change) -> bool| changes.iter().rposition(is_sync).unwrap_or(0);
    let names_end = last(&|change| matches!(change, Change::SyncNames));
    let mut ends: BTreeMap<usize, usize> = BTreeMap::new();
    for (at, change) in changes.iter().enumerate() {
        if let Change::SyncFile(file) = change {
            ends.insert(*file, at);
        }
    }
    let mut files: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for (at, change) in changes.iter().enumerate() {
        let is_before = |file: &usize| ends.get(file).is_some_and(|&end| at < end);
        match change {
            Change::Write(file, offset, bytes) if is_kept(is_before(file)) => {
                let is_torn =
                    !is_before(file) && matches!(unsynced, Unsynced::Mixed(_)) && !is_kept(false);
                let bytes = if is_torn {
                    &bytes[..bytes.len() / 2]
                } else {
                    bytes
                };
                let content = files.entry(*file).or_default();
                let end = *offset as usize + bytes.len();
                content.resize(content.len().max(end), 0);
                content[*offset as usize..end].copy_from_slice(bytes);
            }
            Change::Truncate(file, size) if is_kept(is_before(file)) => {
                files.entry(*file).or_default().truncate(*size as usize);
            }
            Change::Create(file, name) if is_kept(at < names_end) => {
                names.insert(name.clone(), *file);
            }
            Change::Rename(file, from, to) if is_kept(at < names_end) => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
            Change::Remove(name) if is_kept(at < names_end) => {
                names.remove(name);
            }
            _ => {}
        }
    }
    let disk = MemoryDisk::new(1 << 30);
    for (name, file) in names {
        let content = files.remove(&file).unwrap_or_default();
        let file = disk.create(&name).unwrap();
        assert_eq!(file.write_at(&content, 0).unwrap(), content.len());
    }
    disk
}

fn hits(store: &Store, number: u32) -> usize {
    let tokens = tokens(number, BLOCKS);
    let is_hit = |&block: &usize| get(store, &prefix(&tokens).block(block), LEN) == Get::Hit;
    (0..BLOCKS).filter(is_hit).count()
}

/// Every cut of the log: the store opens, has right bytes only, and all that was synced and not evicted since.
fn check_cuts(disk: &LoggedDisk, prompts: &[u32]) -> usize {
    let config = Config {
        max_bytes: 8 << 20, // what comes back because its removal was lost is not evicted at once
        ..small()
    };
    let log = disk.1.lock().unwrap();
    let changes = &log.changes;
    let mut kept = 0;
    for cut in 0..=changes.len() {
        let synced = |change: &Change| match change {
            Change::Synced(prompts) => Some(prompts.clone()),
            _ => None,
        };
        let before = changes[..cut]
            .iter()
            .rev()
            .find_map(synced)
            .unwrap_or_default();
        let after = changes[cut..].iter().find_map(synced).unwrap_or_default();
        for unsynced in [
            Unsynced::Kept,
            Unsynced::Lost,
            Unsynced::Mixed(1),
            Unsynced::Mixed(2),
        ] {
            let after_cut = disk_after(changes, cut, unsynced);
            let store = Store::open_disk(Box::new(after_cut), config.clone())
                .unwrap_or_else(|error| panic!("cut {cut}, {unsynced:?}: {error}"));
            store.check().unwrap();
            for &number in prompts {
                let found = hits(&store, number); // compares every byte
                let must_be = before.contains(&number) && after.contains(&number);
                assert!(
                    !must_be || found == BLOCKS,
                    "cut {cut}, {unsynced:?}: prompt {number} was synced, and has {found} blocks"
                );
                kept += usize::from(must_be);
            }
            put(&store, &prefix(&tokens(999, 1)).block(0), LEN);
            flush(&store);
            assert!(store.close(MINUTE));
        }
    }
    kept
}

fn store_prompts(store: &Store, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let tokens = tokens(number, BLOCKS);
        (0..BLOCKS).for_each(|block| _ = put(store, &prefix(&tokens).block(block), LEN));
        flush(store);
    }
}

fn sync(store: &Store, disk: &LoggedDisk, prompts: u32) {
    store.sync().unwrap();
    let is_stored = |&number: &u32| {
        let tokens = tokens(number, BLOCKS);
        prefix(&tokens).keys().iter().all(|key| store.contains(key)) // which is no use
    };
    let stored = (0..prompts).filter(is_stored);
    disk.log(Change::Synced(stored.collect()));
}

/// Killed processes leave segments that they did not sync; the next one syncs them too.
#[test]
fn what_was_synced_is_there_also_if_an_earlier_process_wrote_it() {
    let disk = LoggedDisk::new();
    let config = Config {
        max_bytes: 8 << 20,
        ..small()
    };
    for round in 0..4 {
        let store = Store::open_disk(Box::new(disk.clone()), config.clone()).unwrap();
        if round > 0 {
            sync(&store, &disk, 3 * round);
        }
        store_prompts(&store, 3 * round..3 * round + 3);
        std::mem::forget(store); // killed: nothing is synced
    }
    let store = Store::open_disk(Box::new(disk.clone()), config.clone()).unwrap();
    sync(&store, &disk, 12);
    store_prompts(&store, 12..13);
    sync(&store, &disk, 13);
    std::mem::forget(store);
    assert!(check_cuts(&disk, &(0..13).collect::<Vec<_>>()) > 1000);
}

/// Segments are evicted, and entries in use are copied to others before.
#[test]
fn copies_of_an_eviction_are_on_the_device_before_their_originals_go() {
    let disk = LoggedDisk::new();
    let config = Config {
        max_bytes: 64 << 10,
        ..small()
    };
    let store = Store::open_disk(Box::new(disk.clone()), config.clone()).unwrap();
    let used = prefix(&tokens(0, BLOCKS)).keys().to_vec();
    for round in 0..10 {
        for number in 0..3 {
            let number = 3 * (3 * round + number);
            store_prompts(&store, [number]);
            used.iter().for_each(|key| _ = store.touch(key));
        }
        sync(&store, &disk, 90);
    }
    assert!(store.stats().counters.relocated > 0, "{:?}", store.stats());
    assert!(store.close(MINUTE));
    assert!(check_cuts(&disk, &(0..90).step_by(3).collect::<Vec<_>>()) > 1000);
}
