//! Threads that share the caller's arrays: every element is a value that one of them wrote.

use std::sync::Barrier;
use std::thread;

use kv_core::{BlockManager, Config, IntArray, SharedI32, SharedI64, StepArrays, TableRows};

const TOKENS: usize = 64;
const BLOCK_SIZE: usize = 4;
const BLOCKS: usize = TOKENS / BLOCK_SIZE;
const THREADS: u32 = 4;
const ROUNDS: usize = if cfg!(miri) { 3 } else { 2_000 };

struct Arrays {
    ids: Vec<SharedI32>,
    positions: Vec<SharedI64>,
    slots: Vec<SharedI64>,
    starts: Vec<SharedI32>,
    lens: Vec<SharedI32>,
    tables: Vec<SharedI32>,
    logits: Vec<SharedI64>,
}

impl Arrays {
    fn new() -> Self {
        Self {
            ids: vec![SharedI32::new(0); TOKENS],
            positions: vec![SharedI64::new(0); TOKENS],
            slots: vec![SharedI64::new(0); TOKENS],
            starts: vec![SharedI32::new(0); 2],
            lens: vec![SharedI32::new(0); 1],
            tables: vec![SharedI32::new(0); BLOCKS],
            logits: vec![SharedI64::new(0); 1],
        }
    }

    fn views(&self) -> StepArrays<'_> {
        StepArrays {
            input_ids: IntArray::I32(&self.ids),
            positions: IntArray::I64(&self.positions),
            slot_mapping: IntArray::I64(&self.slots),
            slots_width: TOKENS,
            query_start_loc: IntArray::I32(&self.starts),
            seq_lens: IntArray::I32(&self.lens),
            block_tables: IntArray::I32(&self.tables),
            table_rows: 1,
            table_width: BLOCKS,
            logits_indices: IntArray::I64(&self.logits),
        }
    }
}

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
        manager
            .fill(plan.key(), &arrays.views(), &mut rows)
            .expect("arrays that are large enough");
        for (at, (id, position)) in arrays.ids.iter().zip(&arrays.positions).enumerate() {
            assert!((1..=THREADS as i32).contains(&id.get()));
            assert_eq!(position.get(), at as i64, "all of them write the same");
        }
        assert!(
            arrays
                .tables
                .iter()
                .all(|block| (0..BLOCKS as i32).contains(&block.get()))
        );
    }
}

#[test]
fn several_managers_fill_the_same_arrays() {
    let (arrays, start) = (Arrays::new(), Barrier::new(THREADS as usize));
    thread::scope(|scope| {
        for token in 1..=THREADS {
            let (arrays, start) = (&arrays, &start);
            scope.spawn(move || fill(token, arrays, start));
        }
    });
    fill(2, &arrays, &Barrier::new(1));
    assert!(arrays.ids.iter().all(|id| id.get() == 2));
}
