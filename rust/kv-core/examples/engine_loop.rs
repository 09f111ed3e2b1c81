//! An engine in one file: three prompts, two of which begin alike, are prefilled in chunks and decoded
//! together. The model is a toy, but it reads the past from the paged cache and from nowhere else.
//!
//! `cargo run -p kv-core --example engine_loop`

use kv_core::{
    BlockManager, Config, Error, IntArray, PlanKey, Prefill, SeqHandle, SharedI64, StepArrays,
    TableRows,
};

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 12;
const BUDGET: usize = 12;
const MAX_SEQUENCES: usize = 4;
const TABLE_WIDTH: usize = 8;
const NEW_TOKENS: usize = 5;

/// The cache of a model with one layer and one number per position, and the arrays of a step.
struct Runner {
    kv: Vec<u64>,
    ids: Vec<SharedI64>,
    positions: Vec<SharedI64>,
    slots: Vec<SharedI64>,
    starts: Vec<SharedI64>,
    lengths: Vec<SharedI64>,
    tables: Vec<SharedI64>,
    rows: Vec<SharedI64>,
    written: TableRows,
}

impl Runner {
    fn new() -> Self {
        let array = |len| vec![SharedI64::new(0); len];
        Self {
            kv: vec![0; (NUM_BLOCKS + 1) * BLOCK_SIZE], // the last block is for padding
            ids: array(BUDGET),
            positions: array(BUDGET),
            slots: array(BUDGET),
            starts: array(MAX_SEQUENCES + 1),
            lengths: array(MAX_SEQUENCES),
            tables: array(MAX_SEQUENCES * TABLE_WIDTH),
            rows: array(MAX_SEQUENCES),
            written: TableRows::default(),
        }
    }

    /// Runs the planned step; returns a token for each row that samples.
    fn forward(&mut self, manager: &BlockManager, plan: PlanKey) -> Result<Vec<u32>, Error> {
        let view = manager.plan_view(plan)?;
        let arrays = StepArrays {
            input_ids: IntArray::I64(&self.ids),
            positions: IntArray::I64(&self.positions),
            slot_mapping: IntArray::I64(&self.slots),
            slots_width: self.slots.len(),
            query_start_loc: IntArray::I64(&self.starts),
            seq_lens: IntArray::I64(&self.lengths),
            block_tables: IntArray::I64(&self.tables),
            table_rows: self.tables.len() / TABLE_WIDTH,
            table_width: TABLE_WIDTH,
            logits_indices: IntArray::I64(&self.rows),
        };
        manager.fill(plan, &arrays, &mut self.written)?;
        // First the KV of the whole batch; -1: it is there already.
        for at in 0..view.num_tokens {
            if let Ok(slot) = usize::try_from(self.slots[at].get()) {
                self.kv[slot] = (self.ids[at].get() * (self.positions[at].get() + 1)) as u64;
            }
        }
        let sample = |row: &SharedI64| {
            let row = row.get();
            let inside = |start: &SharedI64| start.get() <= row;
            let sequence = self.starts[..=view.num_sequences].partition_point(inside) - 1;
            let table = &self.tables[sequence * TABLE_WIDTH..];
            let past = 0..=self.positions[row as usize].get() as usize;
            let sum: u64 = past
                .map(|at| {
                    let block = table[at / BLOCK_SIZE].get() as usize;
                    self.kv[block * BLOCK_SIZE + at % BLOCK_SIZE]
                })
                .sum();
            (sum % 97) as u32
        };
        Ok(self.rows[..view.num_samples].iter().map(sample).collect())
    }
}

fn main() -> Result<(), Error> {
    let mut manager = BlockManager::new(Config::new(NUM_BLOCKS, BLOCK_SIZE))?;
    let mut runner = Runner::new();
    let common: Vec<u32> = (1..=8).collect();
    let mut waiting = std::collections::VecDeque::new();
    for tail in [vec![20], vec![21, 22, 23], (40..55).collect()] {
        let prompt = [common.as_slice(), &tail].concat();
        let limit = prompt.len() + NEW_TOKENS;
        waiting.push_back((manager.sequence(prompt, b"", true)?, limit));
    }
    let mut running: Vec<(SeqHandle, usize)> = Vec::new();
    for step in 1.. {
        if waiting.is_empty() && running.is_empty() {
            break;
        }
        let plan = manager.begin_step(BUDGET)?;
        // Decodes first. A sequence without a block is preempted and starts over later.
        let keys: Vec<_> = running.iter().map(|(seq, _)| seq.key()).collect();
        for position in manager.decode(plan.key(), &keys, 0)?.into_iter().rev() {
            manager.reset(keys[position])?;
            waiting.push_back(running.remove(position));
        }
        // Then prompts, as far as blocks and budget reach; a chunk that is not the last stays in front.
        while let Some((seq, _)) = waiting.front()
            && manager.plan_view(plan.key())?.num_sequences < MAX_SEQUENCES
        {
            let answer = manager.prefill(plan.key(), seq.key(), BUDGET, Some(0))?;
            println!("step {step}: sequence {}: {answer:?}", seq.id());
            if !matches!(answer, Prefill::Planned { samples: true, .. }) {
                break;
            }
            running.extend(waiting.pop_front());
        }
        let sampled = runner.forward(&manager, plan.key())?;
        let merged = manager.commit(plan.key(), &sampled)?;
        println!(
            "step {step}: {} sampled, {} merged, {:?}",
            sampled.len(),
            merged.len(),
            manager.usage()
        );
        let mut still_running = Vec::new();
        for (seq, limit) in running {
            let tokens = manager.view(seq.key())?.tokens;
            if tokens.len() < limit {
                still_running.push((seq, limit));
            } else {
                println!("sequence {} ended: {tokens:?}", seq.id());
            } // dropped: freed
        }
        running = still_running;
    }
    println!("{:?}", manager.stats());
    manager.check().expect("the counts are right");
    Ok(())
}
