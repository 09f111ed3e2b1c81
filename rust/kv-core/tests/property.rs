//! The manager and a naive model of it go through the same random operations and must agree after
//! every one: tables, counters, usage, answers, remappings. A simulated KV cache sees to it that every
//! position a step reads holds exactly the tokens it should, also where the model has no say (hash
//! collisions). `KV_OPS` sets the number of operations (default 20,000).

mod model;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use kv_core::{Config, Eviction, StateConfig};
use kv_trace::replay;
use model::op::Op;
use model::recording::Recording;
use model::world::World;
use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestCaseError, TestError, TestRunner};

const OPS_PER_CASE: usize = 200;
const DEFAULT_OPS: usize = 20_000;
/// Runs until a rare counter is reached: one in thirty takes a second one, with the default number of operations.
const MAX_RUNS: usize = 20;

fn op() -> impl Strategy<Value = Op> {
    any::<[u16; 8]>().prop_map(|numbers| {
        let mut numbers = numbers.into_iter().map(usize::from);
        Op::choose(&mut |bound| numbers.next().expect("eight are enough") % bound)
    })
}

/// Blocks, tokens of a block, windows, switches and states of a pool.
type Pool = (
    usize,
    usize,
    Vec<Option<usize>>,
    (bool, bool, bool),
    Option<StateConfig>,
);

/// Runs `KV_OPS / share` operations; returns the sum of each counter.
fn run(share: usize, hash_bits: u32, eviction: Eviction) -> BTreeMap<&'static str, u64> {
    run_in(World::new, share, hash_bits, eviction)
}

fn num_ops() -> usize {
    std::env::var("KV_OPS").map_or(DEFAULT_OPS, |ops| ops.parse().expect("KV_OPS is a number"))
}

fn run_in(
    new_world: fn(Config) -> World,
    share: usize,
    hash_bits: u32,
    eviction: Eviction,
) -> BTreeMap<&'static str, u64> {
    let ops = num_ops() / share;
    let cases = ops.div_ceil(OPS_PER_CASE);
    let mut runner = TestRunner::new(Runs {
        cases: cases as u32,
        failure_persistence: None,
        ..Runs::default()
    });
    let window = prop_oneof![Just(None), (1..9_usize).prop_map(Some)];
    let groups = prop_oneof![
        1 => Just(vec![None]),
        1 => prop::collection::vec(window, 1..4),
    ];
    let switches = (
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.5),
        prop::bool::weighted(0.8),
    );
    let state = (1..4_usize, 0..12_usize, 0..9_usize).prop_map(|(blocks, cadence, min_tokens)| {
        StateConfig {
            blocks,
            cadence,
            min_tokens,
        }
    });
    let state = prop_oneof![1 => Just(None), 1 => state.prop_map(Some)];
    let num_blocks = prop_oneof![200 => 1..24_usize, 4 => 24..200_usize, 1 => 200..4_097_usize];
    let block_size = prop_oneof![8 => 1..5_usize, 1 => Just(16_usize)];
    let pool = (num_blocks, block_size, groups, switches, state);
    let strategy = (pool, prop::collection::vec(op(), OPS_PER_CASE));
    let applied = Cell::new(0_usize);
    let totals = RefCell::new(BTreeMap::new());
    let world = |(num_blocks, block_size, groups, switches, state): Pool| {
        let (prefix_caching, in_flight_sharing, partial_reuse) = switches;
        new_world(Config {
            groups,
            state: state.filter(|state| state.blocks <= num_blocks),
            prefix_caching,
            in_flight_sharing,
            partial_reuse,
            hash_bits,
            eviction,
            ..Config::new(num_blocks, block_size)
        })
    };
    let outcome = runner.run(&strategy, |(pool, ops)| {
        let mut world = world(pool.clone());
        let recording = Recording::default();
        world.record(recording.clone());
        play(&mut world, &ops)?;
        applied.set(applied.get() + ops.len());
        compare_with_replay(&mut world, &recording)?;
        for (name, count) in world.end()? {
            *totals.borrow_mut().entry(name).or_default() += count;
        }
        Ok(())
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(reason, (pool, ops))) => {
            let command = leave_recording(world(pool.clone()), &ops);
            panic!("{reason}\nwith {pool:?} and {ops:?}\nto see it again: {command}");
        }
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
    println!(
        "{} random operations at {hash_bits} hash bits, {eviction:?}, 0 differences",
        applied.get()
    );
    assert!(applied.get() >= ops);
    totals.into_inner()
}

fn play(world: &mut World, ops: &[Op]) -> Result<(), TestCaseError> {
    for op in ops {
        world.apply(op)?;
        world.compare()?;
    }
    Ok(())
}

/// A replay has the same result.
fn compare_with_replay(world: &mut World, recording: &Recording) -> Result<(), TestCaseError> {
    let (usage, mut stats) = world.stop_recording();
    let report =
        replay(&recording.bytes()[..]).map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(&report.divergence, &None);
    prop_assert_eq!(&report.check, &Ok(()));
    stats.hashed_blocks = report.stats.hashed_blocks; // explanations hash blocks, too, and are not recorded
    prop_assert_eq!((report.usage, report.stats), (usage, stats));
    Ok(())
}

/// Plays a failing case once more, recorded into a file; the command that replays it.
fn leave_recording(mut world: World, ops: &[Op]) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("replays");
    let test = std::thread::current().name().unwrap_or("case").to_owned();
    let path = folder.join(test).with_extension("kvtrace");
    fs::create_dir_all(&folder).expect("a folder below target");
    world.record(File::create(&path).expect("a file below target"));
    // It fails again; what came before is written when the world goes.
    let _ = catch_unwind(AssertUnwindSafe(|| play(&mut world, ops)));
    drop(world);
    format!("pyengine trace replay {}", path.display())
}

#[test]
fn a_case_that_fails_leaves_its_recording() {
    let failed = catch_unwind(|| run_in(World::with_a_difference, 1, 128, Eviction::Lru));
    let failed = failed.expect_err("the model shares nothing");
    let message = failed.downcast_ref::<String>().expect("a message");
    let (_, path) = message
        .split_once("pyengine trace replay ")
        .expect("the command");
    let report = replay(File::open(path).expect("the recording")).expect("whole");
    // The manager was right, so it is again.
    assert_eq!((report.divergence, report.check), (None, Ok(())));
    assert!(!report.operations.is_empty());
}

/// Runs operations until all of these counters are above 0: a test that never got there has shown nothing.
fn run_until(
    wanted: impl Fn(&str) -> bool,
    share: usize,
    hash_bits: u32,
    eviction: Eviction,
) -> BTreeMap<&'static str, u64> {
    let mut totals = BTreeMap::new();
    for _ in 0..MAX_RUNS {
        for (name, count) in run(share, hash_bits, eviction) {
            *totals.entry(name).or_insert(0) += count;
        }
        if totals
            .iter()
            .all(|(name, &total)| total > 0 || !wanted(name))
        {
            return totals;
        }
    }
    panic!("a counter was not reached: {totals:?}");
}

#[test]
fn agrees_with_the_model() {
    let totals = run_until(|name| name != "collisions", 1, 128, Eviction::Lru);
    assert_eq!(totals["collisions"], 0);
}

#[test]
fn collisions_never_show_a_wrong_block() {
    for hash_bits in [0, 1, 3] {
        run_until(|name| name == "collisions", 10, hash_bits, Eviction::Lru);
    }
}

#[test]
fn two_queues_never_show_a_wrong_block() {
    let wanted = ["evicted_blocks", "hit_blocks"];
    run_until(|name| wanted.contains(&name), 10, 128, Eviction::TwoQueue);
}
