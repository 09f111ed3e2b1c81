//! Random operations and faults against a naive model: a set of keys, and the payload that belongs to each.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use common::{Fault, Faults, FaultyDisk, flush, get, prefix, put, small, tokens};
use kv_store::{Block, BlockKey, Config, Disk as _, Get, MemoryDisk, Prune, Put, Store};
use proptest::prelude::*;

const PROMPTS: u32 = 12;
const BLOCKS: usize = 6;
const MAX_LEN: usize = 3000;

#[derive(Clone, Debug)]
enum Op {
    Put(u32, usize),
    PutAll(u32),
    Get(u32, usize),
    Walk(u32, usize),
    Flush,
    Evict(u64),
    Prune(Prune),
    Verify,
    ReadFault(Fault),
    WriteFault(Fault),
    /// Flips a bit of a file on the disk.
    Flip(usize, usize),
    /// Exchanges the bytes of two files.
    Swap(usize, usize),
    /// Kills the process after so many more bytes, while it stores a prompt; then opens the store again.
    Kill(usize, u32),
    Reopen,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Device),
        Just(Fault::Error(io::ErrorKind::StorageFull)),
        Just(Fault::Error(io::ErrorKind::ReadOnlyFilesystem)),
        (0..4000usize).prop_map(Fault::Short),
        (0..100_000usize).prop_map(Fault::Flip),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let (prompt, block) = (0..PROMPTS, 0..BLOCKS);
    prop_oneof![
        8 => (prompt.clone(), block.clone()).prop_map(|(prompt, block)| Op::Put(prompt, block)),
        8 => prompt.clone().prop_map(Op::PutAll),
        12 => (prompt.clone(), block.clone()).prop_map(|(prompt, block)| Op::Get(prompt, block)),
        4 => (prompt.clone(), block).prop_map(|(prompt, block)| Op::Walk(prompt, block)),
        4 => Just(Op::Flush),
        1 => (0..64_000u64).prop_map(Op::Evict),
        1 => prop_oneof![
            Just(Prune::All),
            Just(Prune::Fingerprint(common::fingerprint("model"))),
            Just(Prune::Except(common::fingerprint("model"))),
            Just(Prune::OlderThan(Duration::from_secs(3600))),
        ].prop_map(Op::Prune),
        1 => Just(Op::Verify),
        2 => fault().prop_map(Op::ReadFault),
        2 => fault().prop_map(Op::WriteFault),
        1 => (any::<usize>(), any::<usize>()).prop_map(|(file, bit)| Op::Flip(file, bit)),
        1 => (any::<usize>(), any::<usize>()).prop_map(|(first, second)| Op::Swap(first, second)),
        2 => (0..20_000usize, prompt).prop_map(|(bytes, prompt)| Op::Kill(bytes, prompt)),
        2 => Just(Op::Reopen),
    ]
}

/// The model: the keys that were ever put. A hit outside of them is a failure, and so is a wrong byte.
struct World {
    store: Option<Store>,
    disk: MemoryDisk,
    faults: Faults,
    config: Config,
    ever_put: BTreeSet<BlockKey>,
    /// True after a flipped bit or exchanged files: entries may be missing then, but never wrong.
    is_tampered: bool,
}

impl World {
    fn new(config: Config) -> Self {
        let (disk, faults) = (MemoryDisk::new(1 << 30), Faults::default());
        let mut world = Self {
            store: None,
            disk,
            faults,
            config,
            ever_put: BTreeSet::new(),
            is_tampered: false,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let disk = FaultyDisk(self.disk.clone(), self.faults.clone());
        self.store = Some(Store::on_disk(Box::new(disk), self.config.clone()).unwrap());
        flush(self.store());
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn put(&mut self, block: &Block<'_>) {
        match put(self.store(), block, MAX_LEN) {
            Put::Queued => drop(self.ever_put.insert(block.key())),
            Put::Known => assert!(self.ever_put.contains(&block.key())),
            Put::Dropped(_) => {}
        }
    }

    fn readable(&self) -> BTreeSet<BlockKey> {
        let all = (0..PROMPTS)
            .map(|prompt| tokens(prompt, BLOCKS))
            .collect::<Vec<_>>();
        let keys = all.iter().flat_map(|tokens| prefix(tokens).keys().to_vec());
        keys.filter(|key| self.store().contains(key)).collect()
    }

    /// Flips, cuts or exchanges bytes below the store.
    fn tamper(&mut self, change: impl FnOnce(&MemoryDisk, Vec<String>) -> io::Result<()>) {
        flush(self.store());
        let names = self.disk.names().unwrap();
        if !names.is_empty() {
            change(&self.disk, names).unwrap();
            self.is_tampered = true;
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Put(prompt, block) => self.put(&prefix(&tokens(prompt, BLOCKS)).block(block)),
            Op::PutAll(prompt) => {
                let tokens = tokens(prompt, BLOCKS);
                (0..BLOCKS).for_each(|block| self.put(&prefix(&tokens).block(block)));
            }
            Op::Get(prompt, block) => self.get(prompt, block),
            Op::Walk(prompt, first) => self.walk(prompt, first),
            Op::Flush => flush(self.store()),
            Op::Evict(bytes) => {
                flush(self.store());
                let before = self.store().stats().disk_bytes;
                let freed = self.store().evict(bytes);
                assert_eq!(before - self.store().stats().disk_bytes, freed);
            }
            Op::Prune(what) => {
                flush(self.store());
                self.store().prune(what);
                if matches!(what, Prune::All | Prune::Fingerprint(_)) {
                    assert!(self.readable().is_empty());
                }
            }
            Op::Verify => {
                flush(self.store());
                let before = self.readable().len();
                let verification = self.store().verify();
                assert_eq!(
                    verification.whole as usize + verification.damaged.len(),
                    before
                );
            }
            Op::ReadFault(fault) => self.faults.read(fault),
            Op::WriteFault(fault) => self.faults.write(fault),
            Op::Flip(file, bit) => self.tamper(|disk, names| {
                let file = disk.open_writable(&names[file % names.len()])?;
                let size = file.size()? as usize;
                if size > 0 {
                    let (mut byte, at) = ([0], (bit / 8 % size) as u64);
                    file.read_at(&mut byte, at)?;
                    byte[0] ^= 1 << (bit % 8);
                    file.write_at(&byte, at)?;
                }
                Ok(())
            }),
            Op::Swap(first, second) => self.tamper(|disk, names| {
                let files = [first, second]
                    .map(|file| disk.open_writable(&names[file % names.len()]).unwrap());
                let contents = files.each_ref().map(|file| {
                    let mut bytes = vec![0; file.size().unwrap() as usize];
                    file.read_at(&mut bytes, 0).unwrap();
                    bytes
                });
                for (file, bytes) in files.iter().zip(contents.iter().rev()) {
                    file.truncate(0)?;
                    file.write_at(bytes, 0)?;
                }
                Ok(())
            }),
            Op::Kill(bytes, prompt) => self.kill(bytes, prompt),
            Op::Reopen => {
                flush(self.store());
                let before = self.readable();
                self.faults.repair();
                assert!(self.store.take().unwrap().close(common::MINUTE));
                self.open();
                self.compare_after(&before, self.is_tampered);
            }
        }
        self.check();
    }

    fn get(&mut self, prompt: u32, block: usize) {
        flush(self.store()); // a queued write may evict between the two calls below
        let tokens = tokens(prompt, BLOCKS);
        let block = prefix(&tokens).block(block);
        let was_readable = self.store().contains(&block.key());
        match get(self.store(), &block, MAX_LEN) {
            Get::Hit => assert!(self.ever_put.contains(&block.key())),
            Get::Miss | Get::Failed => assert!(
                !was_readable || self.has_faults(),
                "{:?}",
                self.store().stats()
            ),
        }
    }

    fn has_faults(&self) -> bool {
        let counters = self.store().stats().counters;
        counters.damaged + counters.read_errors > 0
    }

    fn walk(&mut self, prompt: u32, first: usize) {
        flush(self.store());
        let tokens = tokens(prompt, BLOCKS);
        let prefix = prefix(&tokens);
        let count = self.store().stored_blocks(&prefix.keys()[first..]);
        for (index, key) in prefix.keys().iter().enumerate().skip(first).take(count + 1) {
            assert_eq!(self.store().contains(key), index < first + count);
        }
    }

    /// Everything that was complete is there afterwards.
    fn kill(&mut self, bytes: usize, prompt: u32) {
        flush(self.store());
        let before = self.readable();
        let (evicted, damaged) = (self.store().stats().counters.evicted, self.is_tampered);
        self.faults.repair();
        self.faults.kill_after(bytes);
        let tokens = tokens(prompt, BLOCKS);
        (0..BLOCKS).for_each(|block| self.put(&prefix(&tokens).block(block)));
        let store = self.store.take().unwrap();
        flush(&store);
        let has_evicted = store.stats().counters.evicted > evicted;
        drop(store);
        self.faults.repair();
        self.open();
        self.compare_after(&before, damaged || has_evicted);
    }

    /// Compares the readable keys before and after a reopening.
    fn compare_after(&self, before: &BTreeSet<BlockKey>, may_miss: bool) {
        let after = self.readable();
        assert!(
            may_miss || before.is_subset(&after),
            "lost {:?}",
            before.difference(&after)
        );
        assert!(after.is_subset(&self.ever_put));
    }

    fn check(&self) {
        self.store().check().unwrap();
        assert!(
            self.is_tampered || self.disk.used() <= self.config.max_bytes,
            "{} bytes on disk",
            self.disk.used()
        );
        let stats = self.store().stats();
        assert!(stats.disk_bytes <= self.config.max_bytes);
        let (usage, counters) = (stats.usage, stats.counters);
        if usage.writing.entries == 0 {
            let complete = usage.readable.entries + usage.reading.entries;
            let gone = counters.evicted + counters.lost + counters.pruned + counters.damaged;
            assert_eq!(
                counters.loaded + counters.stored,
                complete + gone,
                "{stats:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn every_hit_has_its_own_bytes_and_every_entry_is_accounted_for(ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new(small());
        ops.iter().for_each(|op| world.step(op));
    }

    #[test]
    fn the_index_is_bounded_too(ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new(Config { max_entries: 10, ..small() });
        for op in &ops {
            world.step(op);
            flush(world.store());
            let usage = world.store().stats().usage;
            assert!(usage.readable.entries <= 10, "{usage:?}");
        }
    }
}
