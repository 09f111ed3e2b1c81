//! Threads that share the caller's arrays: every element is a value that one of them wrote.

use std::sync::Barrier;
use std::thread;

use kv_core::{BlockManager, Config, IntArray, StepArrays, TableRows};

use super::arrays::{Arrays, POSITIONS, Sizes, TABLES};

const TOKENS: usize = 64;
const BLOCK_SIZE: usize = 4;
const BLOCKS: usize = TOKENS / BLOCK_SIZE;
const THREADS: u32 = 4;
const ROUNDS: usize = if cfg!(miri) { 3 } else { 2_000 };

/// Fills a step of one prompt of equal tokens again and again, and reads between fills.
fn fill(token: u32, arrays: &Arrays, start: &Barrier) {
    let mut manager = BlockManager::new(Config::new(BLOCKS, BLOCK_SIZE)).expect("a manager");
    let prompt = vec![token; TOKENS];
    let sequence = manager.sequence(prompt, b"", true).expect("a sequence");
    let plan = manager.begin_step(TOKENS).expect("a plan");
    manager
        .prefill(plan.key(), sequence.key(), TOKENS, None)
        .expect("blocks suffice");
    start.wait();
    for _ in 0..ROUNDS {
        let mut rows = TableRows::default();
        let views = StepArrays {
            input_ids: IntArray::I32(&arrays.narrow),
            ..arrays.views()
        };
        manager
            .fill(plan.key(), &views, &mut rows)
            .expect("arrays that are large enough");
        let mut ids = arrays.narrow.iter();
        assert!(ids.all(|id| (1..=THREADS as i32).contains(&id.get())));
        let positions: Vec<i64> = (0..TOKENS as i64).collect();
        assert_eq!(arrays.values(POSITIONS), positions, "all write the same");
        let mut blocks = arrays.values(TABLES).into_iter();
        assert!(blocks.all(|block| (0..BLOCKS as i64).contains(&block)));
    }
}

#[test]
fn several_managers_fill_the_same_arrays() {
    let arrays = Arrays::new(Sizes::exactly(TOKENS, 1, BLOCKS, 1));
    let start = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        for token in 1..=THREADS {
            let (arrays, start) = (&arrays, &start);
            scope.spawn(move || fill(token, arrays, start));
        }
    });
    fill(2, &arrays, &Barrier::new(1));
    assert!(arrays.narrow.iter().all(|id| id.get() == 2));
}
