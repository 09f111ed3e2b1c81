//! Every interleaving of a pin's drop with the manager's work, by loom.
//!
//! ```console
//! RUSTFLAGS="--cfg loom" cargo test -p kv-core --release --test loom
//! ```
//!
//! Exhaustive for two threads; with three, bounded by the number of preemptions.
#![cfg(loom)]

use kv_core::{BlockManager, Config, Error, Pin, Prefill, Reserve, SeqHandle, Transfer};
use kv_trace::Record;
use loom::sync::{Arc, Mutex};
use loom::thread;

/// Computes a prompt; its sequence.
fn run(manager: &mut BlockManager, prompt: &[u32]) -> Option<SeqHandle> {
    let seq = manager
        .sequence(prompt.to_vec(), b"", true)
        .expect("tokens");
    let plan = manager.begin_step(64).expect("none open");
    match manager
        .prefill(plan.key(), seq.key(), 64, None)
        .expect("planned once")
    {
        Prefill::Planned { .. } => {
            manager.commit(plan.key(), &[7]).expect("one sample");
            Some(seq)
        }
        _ => {
            manager.rollback(plan.key()).expect("open");
            None
        }
    }
}

fn matched(manager: &mut BlockManager) -> Pin {
    manager
        .match_prefix(&[1, 2], b"")
        .expect("a short namespace")
}

/// A pool of three blocks of one token each; a pin keeps the first two.
fn pinned() -> (BlockManager, Pin) {
    pinned_by(BlockManager::new(Config::new(3, 1)).expect("valid"))
}

fn pinned_by(mut manager: BlockManager) -> (BlockManager, Pin) {
    drop(run(&mut manager, &[1, 2]));
    let pin = matched(&mut manager);
    assert_eq!(pin.num_blocks(), 2);
    (manager, pin)
}

fn all_released(manager: &mut BlockManager, pinned: usize) {
    manager.check().expect("consistent");
    let usage = manager.usage();
    assert_eq!(usage.num_blocks(), 3);
    assert_eq!((usage.active, usage.pinned), (0, pinned));
}

/// The drop of a pin against one call of the manager.
fn drop_against(work: fn(&mut BlockManager)) {
    loom::model(move || {
        let (mut manager, pin) = pinned();
        let dropper = thread::spawn(move || drop(pin));
        work(&mut manager);
        manager.check().expect("consistent while the pin goes");
        dropper.join().expect("no panic");
        all_released(&mut manager, 0);
    });
}

/// While recording, the manager releases the blocks of a pin.
#[test]
fn drop_of_a_recorded_pin_against_allocate() {
    loom::model(|| {
        let mut manager = BlockManager::new(Config::new(3, 1)).expect("valid");
        manager.record(std::io::sink()).expect("new");
        let (mut manager, pin) = pinned_by(manager);
        let dropper = thread::spawn(move || drop(pin));
        drop(run(&mut manager, &[8, 9]));
        manager.check().expect("consistent while the pin goes");
        dropper.join().expect("no panic");
        all_released(&mut manager, 0);
    });
}

#[test]
fn drop_against_allocate() {
    drop_against(|manager| drop(run(manager, &[8, 9])));
}

#[test]
fn drop_against_match_and_release() {
    drop_against(|manager| drop(run(manager, &[1, 2, 3])));
}

#[test]
fn drop_against_a_full_hit() {
    drop_against(|manager| drop(run(manager, &[1, 2])));
}

#[test]
fn drop_against_another_pin() {
    drop_against(|manager| drop(matched(manager)));
}

#[test]
fn drop_against_evict_all() {
    drop_against(|manager| {
        manager.evict_all();
    });
}

#[test]
fn drop_against_usage_and_preview() {
    drop_against(|manager| {
        let usage = manager.usage();
        assert_eq!(usage.num_blocks(), 3);
    });
}

/// A pool of three blocks of one token each; a transfer is to fill the first two.
fn loading() -> (BlockManager, Transfer) {
    let mut manager = BlockManager::new(Config::new(3, 1)).expect("valid");
    let seq = manager.sequence(vec![1, 2, 3], b"", true).expect("tokens");
    match manager.reserve(seq.key(), 2).expect("at rest") {
        Reserve::Reserved(transfer) => (manager, transfer),
        answer => panic!("{answer:?}"),
    }
}

/// The drop of a transfer against calls of the manager.
fn drop_transfer_against(work: fn(&mut BlockManager)) {
    loom::model(move || {
        let (mut manager, transfer) = loading();
        let dropper = thread::spawn(move || drop(transfer));
        work(&mut manager);
        manager.check().expect("consistent while the transfer goes");
        dropper.join().expect("no panic");
        all_released(&mut manager, 0);
    });
}

#[test]
fn drop_of_a_transfer_against_allocate() {
    drop_transfer_against(|manager| drop(run(manager, &[8, 9])));
}

#[test]
fn drop_of_a_transfer_against_a_prefill_that_waits() {
    drop_transfer_against(|manager| drop(run(manager, &[1, 2, 3])));
}

#[test]
fn drop_of_a_transfer_against_evict() {
    drop_transfer_against(|manager| {
        let (_, pin) = manager.evict(3);
        assert_eq!(pin.num_blocks(), 0);
        manager.evict_all();
    });
}

/// One thread completes a transfer, another drops its handle: one of them ends it.
#[test]
fn drop_of_a_transfer_against_complete() {
    loom::model(|| {
        let (mut manager, transfer) = loading();
        let key = transfer.key();
        let dropper = thread::spawn(move || drop(transfer));
        let restored = match manager.complete(key, 2) {
            Ok(_) => 2,
            Err(error) => {
                assert_eq!(error, Error::TransferEnded { transfer: 1 });
                0
            }
        };
        drop(run(&mut manager, &[8]));
        manager.check().expect("consistent");
        dropper.join().expect("no panic");
        all_released(&mut manager, 0);
        assert!(matched(&mut manager).num_blocks() <= restored);
    });
}

/// The bytes of a transfer are written before its blocks are anybody else's.
#[test]
fn what_was_written_in_a_transfer_happens_before_reuse() {
    loom::model(|| {
        let (mut manager, transfer) = loading();
        let cell = std::sync::Arc::new(loom::cell::UnsafeCell::new(0));
        let block = transfer.blocks()[0].block.get();
        let writer = {
            let cell = std::sync::Arc::clone(&cell);
            thread::spawn(move || {
                cell.with_mut(|value| assert!(!value.is_null()));
                drop(transfer);
            })
        };
        if manager.refs(block).expect("known") == 0 {
            cell.with_mut(|value| assert!(!value.is_null())); // loom reports a race if unordered
        }
        writer.join().expect("no panic");
    });
}

/// Accesses to a block through a pin happen before the block's next use.
#[test]
fn what_was_read_under_a_pin_happens_before_reuse() {
    loom::model(|| {
        let (mut manager, pin) = pinned();
        let cell = std::sync::Arc::new(loom::cell::UnsafeCell::new(0));
        let block = pin.blocks().next().expect("two");
        let reader = {
            let cell = std::sync::Arc::clone(&cell);
            thread::spawn(move || {
                cell.with(|value| assert!(!value.is_null()));
                drop(pin);
            })
        };
        let refs = manager.refs(block.get()).expect("known");
        if refs == 0 {
            cell.with_mut(|value| assert!(!value.is_null())); // loom reports a race if unordered
        }
        reader.join().expect("no panic");
    });
}

/// Two pins on the same blocks, dropped by two threads, while the manager works.
#[test]
fn two_droppers_and_the_manager() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let (mut manager, first) = pinned();
        let second = matched(&mut manager);
        let manager = Arc::new(Mutex::new(manager));
        let droppers = [first, second].map(|pin| thread::spawn(move || drop(pin)));
        drop(run(&mut manager.lock().expect("sound"), &[1, 5]));
        for dropper in droppers {
            dropper.join().expect("no panic");
        }
        all_released(&mut manager.lock().expect("sound"), 0);
    });
}
