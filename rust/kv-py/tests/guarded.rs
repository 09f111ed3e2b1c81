//! A panic in one call leaves locks that later calls can use.

#[path = "../src/guarded.rs"]
mod guarded;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, Mutex};
use std::thread;

use guarded::{Guarded, read};
use kv_core::{BlockManager, Config, IntArray, SharedI64, SharedPrefixes, StepArrays, TableRows};

fn panics<R>(work: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}

#[test]
fn a_panic_resets_the_state_and_the_next_caller_gets_it() {
    let state = Guarded::new(vec![1, 2, 3], Vec::clear);
    assert!(panics(|| {
        let mut state = state.try_lock().expect("free");
        state.push(4);
        panic!("half way");
    }));
    for expected in [vec![], vec![5]] {
        let mut state = state.try_lock().expect("usable");
        assert_eq!(*state, expected);
        state.push(5);
    }
}

#[test]
fn another_thread_is_refused_and_not_kept_waiting() {
    let (state, barrier) = (Guarded::new(0, |state| *state = 0), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _state = state.try_lock().expect("free");
            barrier.wait();
            barrier.wait();
        });
        barrier.wait();
        assert!(state.try_lock().is_none());
        barrier.wait();
    });
    assert!(state.try_lock().is_some());
}

#[test]
fn a_panic_of_a_reader_does_not_poison_the_lock() {
    let state = Mutex::new(7);
    assert!(panics(|| read(state.lock().expect("free"), |_| panic!(
        "on purpose"
    ))));
    assert_eq!(state.lock().map(|state| *state).ok(), Some(7));
    assert_eq!(read(state.lock().expect("free"), |state| *state + 1), 8);
}

/// As in `StepPlan.fill`: the manager has a lock, and so has the state of the arrays.
#[test]
fn a_fill_that_panics_is_followed_by_one_that_writes_everything() {
    let mut manager = BlockManager::new(Config::new(8, 4)).expect("a manager");
    let sequence = manager
        .sequence(vec![3; 10], b"", true)
        .expect("a sequence");
    let plan = manager.begin_step(64).expect("a plan");
    manager
        .prefill(plan.key(), sequence.key(), 64, None)
        .expect("blocks");
    let manager = Mutex::new(manager);
    let rows = Guarded::new(TableRows::default(), |rows| *rows = TableRows::default());
    let shared = SharedPrefixes::new(0, 1, 2).expect("limits");
    let shared = Guarded::new(shared, SharedPrefixes::reset);

    let columns = [10, 10, 10, 2, 1, 3, 1].map(|len| vec![SharedI64::new(-7); len]);
    let [ids, positions, slots, starts, lens, tables, logits] =
        columns.each_ref().map(|column| IntArray::I64(column));
    let arrays = StepArrays {
        input_ids: ids,
        positions,
        slot_mapping: slots,
        slots_width: 10,
        query_start_loc: starts,
        seq_lens: lens,
        block_tables: tables,
        table_rows: 1,
        table_width: 3,
        logits_indices: logits,
    };
    let fill = |panic: bool| {
        let manager = manager.lock().expect("not poisoned");
        read(manager, |manager| {
            let mut shared = shared.try_lock().expect("free");
            let mut rows = rows.try_lock().expect("free");
            let filled = manager.fill_shared(plan.key(), &arrays, &mut rows, &mut shared);
            assert!(!panic, "half way");
            filled
        })
    };
    let values = || {
        columns
            .each_ref()
            .map(|column| column.iter().map(SharedI64::get).collect())
    };
    assert_eq!(fill(false), Ok(()));
    let before: [Vec<i64>; 7] = values();
    let version = shared.try_lock().expect("free").version();
    assert!(panics(|| fill(true)));

    columns.iter().flatten().for_each(|element| element.set(-7));
    assert_eq!(fill(false), Ok(()));
    assert_eq!(values(), before, "all rows are written again");
    let shared = shared.try_lock().expect("free");
    assert!(shared.version() > version, "the prefixes are written again");
}
