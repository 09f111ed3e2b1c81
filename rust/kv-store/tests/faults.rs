//! One test per fault: answer, count and notice.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    Fault, Faults, FaultyDisk, MINUTE, SECOND, faulty, flush, get, prefix, put, small, tokens,
};
use kv_store::{BlockKey, Config, Disk as _, DropReason, Get, MemoryDisk, Notice, Put, Store};

const LEN: usize = 2000;

fn put_prompt(store: &Store, number: u32) -> Vec<Put> {
    let tokens = tokens(number, 4);
    (0..4)
        .map(|block| put(store, &prefix(&tokens).block(block), LEN))
        .collect()
}

fn hits(store: &Store, number: u32) -> usize {
    let tokens = tokens(number, 4);
    (0..4)
        .filter(|&block| get(store, &prefix(&tokens).block(block), LEN) == Get::Hit)
        .count()
}

#[test]
fn a_put_entry_is_read() {
    let (store, _, _) = faulty(small());
    assert_eq!(put_prompt(&store, 0), [Put::Queued; 4]);
    flush(&store);
    assert_eq!(hits(&store, 0), 4);
    assert_eq!(put_prompt(&store, 0), [Put::Known; 4]);
    let counters = store.stats().counters;
    assert_eq!(
        (
            counters.stored,
            counters.known,
            counters.hits,
            counters.misses
        ),
        (4, 4, 4, 0)
    );
    assert_eq!(hits(&store, 1), 2); // two shared blocks
    assert_eq!(store.stored_blocks(prefix(&tokens(1, 4)).keys()), 2);
    assert_eq!(store.stored_blocks(&prefix(&tokens(0, 4)).keys()[3..]), 1);
    assert!(store.take_notices().is_empty());
}

#[test]
fn a_touched_entry_is_evicted_later() {
    let (store, _, _) = faulty(small());
    let last = tokens(0, 2);
    let key = prefix(&last).keys()[1];
    assert!(!store.touch(&key));
    put(&store, &prefix(&last).block(1), LEN);
    assert!(store.touch(&key)); // also while it waits to be written
    flush(&store);
    for number in (3..120).step_by(3) {
        put_prompt(&store, number);
        flush(&store);
        assert!(store.touch(&key), "evicted after {number}");
    }
    let counters = store.stats().counters;
    assert!(counters.evicted > 0 && counters.relocated > 0);
    assert_eq!(counters.known, 40);
}

#[test]
fn namespaces_fingerprints_parents_and_tokens_are_compared() {
    let (store, _, _) = faulty(small());
    let tokens = tokens(0, 2);
    let block = prefix(&tokens).block(1);
    put(&store, &block, LEN);
    flush(&store);
    assert_eq!(get(&store, &block, LEN), Get::Hit);
    let other_root = BlockKey::root(block.fingerprint, b"tenant");
    let others = [
        kv_store::Block {
            fingerprint: common::fingerprint("other"),
            ..block
        },
        kv_store::Block {
            parent: other_root,
            ..block
        },
        kv_store::Block {
            tokens: &[4, 5, 6, 8],
            ..block
        },
    ];
    for other in others {
        assert_eq!(get(&store, &other, LEN), Get::Miss, "{other:?}");
    }
    // Same key, other namespace: found by hash, refused by comparison.
    assert_eq!(
        get(
            &store,
            &kv_store::Block {
                namespace: b"tenant",
                ..block
            },
            LEN
        ),
        Get::Miss
    );
    assert_eq!(store.stats().counters.collisions, 1);
    assert_eq!(get(&store, &block, LEN), Get::Hit);
}

#[test]
fn buffers_of_another_length_are_refused() {
    let (store, _, _) = faulty(small());
    let tokens = tokens(0, 1);
    let block = prefix(&tokens).block(0);
    store.put(&block, &[&[7; 100]]);
    flush(&store);
    let error = store.get(&block, &mut [&mut [0; 99]]).unwrap_err();
    assert_eq!((error.stored, error.given), (100, 99));
    assert!(error.to_string().contains("fingerprint"), "{error}");
    store.check().unwrap();
}

#[test]
fn opening_reads_the_index_and_no_payload() {
    let reads_to_open = |prompts: u32| {
        let config = Config::new(64 << 20);
        let (store, disk, faults) = faulty(config.clone());
        (0..prompts).for_each(|number| drop(put_prompt(&store, 3 * number)));
        assert!(store.close(MINUTE));
        let before = faults.operations().0;
        let disk = Box::new(FaultyDisk(disk, faults.clone()));
        let store = Store::on_disk(disk, config).unwrap();
        assert_eq!(store.stats().counters.loaded, u64::from(4 * prompts));
        faults.operations().0 - before
    };
    assert_eq!(reads_to_open(1), reads_to_open(100));
}

#[test]
fn a_full_disk_lowers_the_limit_and_the_store_goes_on() {
    let disk = MemoryDisk::new(60 << 10);
    let store = Store::on_disk(Box::new(disk.clone()), small()).unwrap();
    assert!(matches!(
        store.take_notices()[..],
        [Notice::LimitLowered { asked: 131_072, .. }]
    ));
    for number in 0..100 {
        put_prompt(&store, number);
        flush(&store);
        assert!(disk.used() <= 60 << 10);
    }
    let stats = store.stats();
    assert!(
        stats.counters.evicted > 0 && stats.counters.stored > 200,
        "{stats:?}"
    );
    assert!(hits(&store, 99) > 0);
}

#[test]
fn a_disk_that_others_fill_is_left_alone() {
    let (store, _, faults) = faulty(Config {
        retry_after: MINUTE,
        ..small()
    });
    put_prompt(&store, 0);
    flush(&store);
    store.take_notices();
    faults.write(Fault::Error(ErrorKind::StorageFull));
    put_prompt(&store, 10);
    flush(&store);
    assert!(matches!(
        store.take_notices()[..],
        [Notice::LimitLowered { .. }, ..]
    ));
    assert!(store.stats().limit_bytes < small().max_bytes);
}

#[test]
fn a_failed_write_is_counted_and_said_once() {
    for fault in [
        Fault::Device,
        Fault::Error(ErrorKind::ReadOnlyFilesystem),
        Fault::Short(100),
    ] {
        let (store, _, faults) = faulty(Config {
            retry_after: Duration::from_millis(50),
            ..small()
        });
        put_prompt(&store, 0);
        flush(&store);
        faults.write(fault);
        put(&store, &prefix(&tokens(9, 3)).block(2), LEN);
        flush(&store);
        assert_eq!(
            put_prompt(&store, 12),
            [Put::Dropped(DropReason::Suspended); 4]
        );
        assert!(matches!(store.take_notices()[..], [Notice::WriteFailed(_)]));
        assert!(store.stats().is_suspended);
        assert_eq!(hits(&store, 0), 4, "complete entries stay readable");
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(put_prompt(&store, 12), [Put::Queued; 4]);
        flush(&store);
        assert_eq!(hits(&store, 12), 4);
        assert_eq!(store.take_notices(), [Notice::Recovered]);
        let counters = store.stats().counters;
        assert_eq!(
            (counters.write_errors, counters.dropped_failed),
            (1, 5),
            "{fault:?}"
        );
    }
}

#[test]
fn damage_is_a_miss_and_stays_one() {
    for at in [0, 20, 60, 100, 140, 170, 200, 300, 1000] {
        let (store, disk, faults) = faulty(small());
        let tokens = tokens(0, 1);
        let block = prefix(&tokens).block(0);
        store.put(&block, &[&[7; 1000]]);
        flush(&store);
        let file = disk.open_writable("00000000.data").unwrap();
        let mut byte = [0];
        file.read_at(&mut byte, 16 + at).unwrap();
        file.write_at(&[byte[0] ^ 4], 16 + at).unwrap();
        let read = |store: &Store| store.get(&block, &mut [&mut [0; 1000]]).unwrap();
        assert_eq!(read(&store), Get::Miss, "byte {at}");
        assert!(!store.contains(&block.key()));
        assert!(matches!(store.take_notices()[..], [Notice::Damaged(_)]));
        flush(&store);
        drop(store);
        let store = Store::on_disk(Box::new(FaultyDisk(disk, faults)), small()).unwrap();
        assert!(!store.contains(&block.key()), "dropped for good");
        assert_eq!(store.put(&block, &[&[7; 1000]]), Put::Queued);
        flush(&store);
        assert_eq!(read(&store), Get::Hit);
    }
}

#[test]
fn a_read_that_fails_is_no_hit() {
    for (fault, counted) in [
        (Fault::Device, 1),
        (Fault::Error(ErrorKind::PermissionDenied), 0),
        (Fault::Flip(0), 1),
    ] {
        let (store, _, faults) = faulty(small());
        put_prompt(&store, 0);
        flush(&store);
        faults.read(fault);
        assert_eq!(hits(&store, 0), 3, "{fault:?}");
        let counters = store.stats().counters;
        assert_eq!(counters.lost + counters.damaged, counted);
        assert_eq!(hits(&store, 0), 4 - counted as usize);
        assert_eq!(store.take_notices().len(), 1);
        store.check().unwrap();
    }
}

#[test]
fn a_folder_that_is_gone_costs_hits_and_no_more() {
    let (store, _, faults) = faulty(small());
    put_prompt(&store, 0);
    flush(&store);
    faults.remove_folder();
    assert_eq!(hits(&store, 0), 0);
    for number in 3..60 {
        put_prompt(&store, number);
        flush(&store);
    }
    assert_eq!(store.stats().counters.lost, 4);
    let notices = store.take_notices();
    assert!(notices.len() < 5, "{notices:?}");
    assert!(store.close(MINUTE));
}

#[test]
fn a_hanging_disk_blocks_no_other_call() {
    let (store, _, faults) = faulty(Config {
        stall_after: Duration::from_millis(50),
        ..small()
    });
    put_prompt(&store, 0);
    flush(&store);
    faults.hang();
    let tokens = tokens(0, 4);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let answer = get(&store, &prefix(&tokens).block(0), LEN);
            is_done.store(true, Ordering::SeqCst);
            answer
        });
        std::thread::sleep(Duration::from_millis(80));
        let start = Instant::now();
        assert_eq!(get(&store, &prefix(&tokens).block(1), LEN), Get::Failed);
        assert_eq!(store.stored_blocks(prefix(&tokens).keys()), 0);
        assert_eq!(
            put_prompt(&store, 9)[0],
            Put::Dropped(DropReason::Suspended)
        );
        assert!(store.stats().is_stalled && !is_done.load(Ordering::SeqCst));
        assert!(start.elapsed() < SECOND);
        assert_eq!(store.take_notices(), [Notice::Stalled]);
        store.check().unwrap();
        faults.repair();
        assert_eq!(reader.join().unwrap(), Get::Hit);
    });
    assert_eq!(store.take_notices(), [Notice::Recovered]);
    assert_eq!(hits(&store, 0), 4);
}

#[test]
fn a_hanging_writer_fills_the_queue_and_blocks_no_caller() {
    let (store, _, faults) = faulty(Config {
        stall_after: Duration::from_millis(200),
        ..small()
    });
    faults.hang();
    let puts: Vec<Put> = (0..100)
        .flat_map(|number| put_prompt(&store, number))
        .collect();
    assert!(puts.contains(&Put::Dropped(DropReason::QueueFull)));
    assert!(store.stats().queued_bytes <= small().queue_bytes);
    assert!(!store.flush(Duration::from_millis(20)));
    let start = Instant::now();
    assert!(!store.close(Duration::from_millis(20)));
    assert!(start.elapsed() < SECOND);
    faults.repair();
}

#[test]
fn entries_of_another_authentication_key_are_not_read() {
    let disk = MemoryDisk::new(1 << 30);
    let open = |auth_key| {
        Store::on_disk(
            Box::new(disk.clone()),
            Config {
                auth_key,
                ..small()
            },
        )
        .unwrap()
    };
    let store = open(Some([1; 32]));
    put_prompt(&store, 0);
    flush(&store);
    assert_eq!(hits(&store, 0), 4);
    drop(store);
    assert_eq!(hits(&open(Some([1; 32])), 0), 4);
    let forger = open(None);
    assert_eq!(hits(&forger, 0), 0);
    put_prompt(&forger, 0); // a forgery without the key
    flush(&forger);
    assert_eq!(hits(&forger, 0), 4);
    drop(forger);
    let store = open(Some([1; 32]));
    assert!(store.contains(&prefix(&tokens(0, 4)).keys()[0]));
    assert_eq!(hits(&store, 0), 0);
    assert_eq!(store.stats().counters.damaged, 4);
}

#[test]
fn used_entries_outlive_unused_ones() {
    let (store, disk, _) = faulty(small());
    put_prompt(&store, 0);
    for number in 3..200 {
        put_prompt(&store, number);
        flush(&store);
        assert_eq!(hits(&store, 0), 4, "after prompt {number}");
        assert!(disk.used() <= small().max_bytes);
    }
    let counters = store.stats().counters;
    assert!(
        counters.relocated > 0 && counters.evicted > 100,
        "{counters:?}"
    );
    assert_eq!(hits(&store, 30), 0);
}

/// The order in which prompts are evicted by later ones, if `look` looks at the store meanwhile.
fn evicted_in_order(look: impl Fn(&Store)) -> Vec<u32> {
    let (store, _, _) = faulty(small());
    let prompts = (0..30).step_by(3);
    prompts.clone().for_each(|number| {
        put_prompt(&store, number);
        flush(&store);
    });
    let is_there = |number: u32| store.contains(&prefix(&tokens(number, 4)).keys()[3]);
    assert!(prompts.clone().all(is_there));
    assert_eq!(hits(&store, 0), 4);
    let (mut order, mut next) = (Vec::new(), 30);
    while order.len() < 10 {
        look(&store);
        put_prompt(&store, next);
        flush(&store);
        next += 3;
        let gone = prompts.clone().filter(|&number| !is_there(number));
        let new: Vec<u32> = gone.filter(|number| !order.contains(number)).collect();
        order.extend(new);
        assert!(next < 1000);
    }
    order
}

/// Checks are no uses: neither of all entries, nor of the keys of a prompt, nor of what is listed.
#[test]
fn looking_changes_no_order_of_eviction() {
    let alone = evicted_in_order(|_| ());
    let looked = evicted_in_order(|store| {
        assert!(store.verify().damaged.is_empty());
        for number in (0..30).step_by(3).rev() {
            let tokens = tokens(number, 4);
            let found = prefix(&tokens);
            store.stored_blocks(found.keys());
            found.keys().iter().for_each(|key| {
                store.contains(key);
            });
        }
        store.by_fingerprint();
        store.stats();
        store.take_notices();
        store.refresh().unwrap();
        store.check().unwrap();
    });
    assert_eq!(alone, looked);
    let verified = evicted_in_order(|store| drop(store.verify()));
    assert_eq!(alone, verified);
}

#[test]
fn an_entry_that_is_read_while_it_is_evicted_stays_whole() {
    let (store, _, _) = faulty(small());
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (store, is_done) = (&store, &is_done);
            scope.spawn(move || {
                let mut number = reader;
                while !is_done.load(Ordering::SeqCst) {
                    hits(store, number % 40);
                    number += 1;
                }
            });
        }
        for number in 0..400 {
            put_prompt(&store, number % 40);
            assert!(store.flush(MINUTE));
            store.check().unwrap();
        }
        is_done.store(true, Ordering::SeqCst);
    });
    flush(&store);
    let stats = store.stats();
    assert_eq!(
        (
            stats.usage.reading.entries,
            stats.counters.damaged,
            stats.counters.failed
        ),
        (0, 0, 0),
        "{stats:?}"
    );
    assert!(
        stats.counters.hits > 100 && stats.counters.evicted > 100,
        "{stats:?}"
    );
}

#[test]
fn entries_that_are_too_large_and_stores_that_only_read_say_so() {
    let (store, disk, _) = faulty(small());
    let tokens = tokens(0, 4);
    let block = prefix(&tokens).block(0);
    assert_eq!(
        store.put(&block, &[&vec![0; 17 << 10]]),
        Put::Dropped(DropReason::TooLarge)
    );
    put_prompt(&store, 0);
    flush(&store);
    let reader = Config {
        access: kv_store::Access::Read,
        ..small()
    };
    let reader = Store::on_disk(Box::new(FaultyDisk(disk, Faults::default())), reader).unwrap();
    assert!(!reader.is_writer());
    assert_eq!(hits(&reader, 0), 4);
    assert_eq!(
        put_prompt(&reader, 9)[0],
        Put::Dropped(DropReason::ReadOnly)
    );
    put_prompt(&store, 12);
    flush(&store);
    assert_eq!(hits(&reader, 12), 0);
    assert_eq!(reader.refresh().unwrap(), 8);
    assert_eq!(hits(&reader, 12), 4);
    for number in 15..300 {
        put_prompt(&store, number);
        flush(&store);
    }
    reader.refresh().unwrap();
    reader.check().unwrap();
    assert_eq!(hits(&reader, 0), 0);
    assert_eq!(hits(&reader, 299), 4);
}
