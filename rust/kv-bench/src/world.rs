//! A manager in steady state, and what the operations need beside it.

use kv_core::{
    BlockManager, Config, Error, IntArray, Pin, PlanHandle, SeqHandle, SeqKey, SharedI64,
    StepArrays, TableRows,
};

const NUM_BLOCKS: usize = 65_536;
const BLOCK_SIZE: usize = 16;
/// Sequences that a step may have, and the widest block table.
const ROWS: usize = 256;
const WIDTH: usize = 128;
const SEED: u64 = 1;
/// Spare capacity of a prompt, in tokens.
const ROOM: usize = 64;
/// The token that the model always samples.
const SAMPLED: [u32; ROWS] = [1; ROWS];

/// The calls of an operation are allowed.
pub type Outcome = Result<(), Error>;

/// A manager, and sequences, plans and prompts in the state that an operation wants.
pub struct World {
    manager: BlockManager,
    tokens_made: u32,
    /// A prompt that is cached.
    known: Vec<u32>,
    /// Prompts to serve next.
    received: Vec<Vec<u32>>,
    running: Vec<SeqHandle>,
    keys: Vec<SeqKey>,
    plan: Option<PlanHandle>,
    pin: Option<Pin>,
    arrays: [Vec<SharedI64>; 7],
    written: TableRows,
}

impl World {
    /// A pool without a free block. `known` tokens are cached and nothing holds them.
    pub(crate) fn full(known: usize) -> Result<Self, Error> {
        let mut config = Config::new(NUM_BLOCKS, BLOCK_SIZE);
        config.hash_seed = Some(SEED);
        Self::full_of(known, config)
    }

    /// The same, of a manager that keeps events.
    fn keep_events(&mut self) -> Outcome {
        self.switch_on(|config| &mut config.events)
    }

    /// The same, of a manager that explains misses.
    pub(crate) fn explain(&mut self) -> Outcome {
        self.switch_on(|config| &mut config.explain)
    }

    fn switch_on(&mut self, switch: fn(&mut Config) -> &mut bool) -> Outcome {
        let mut config = self.manager.config().clone();
        if !std::mem::replace(switch(&mut config), true) {
            *self = Self::full_of(self.known.len(), config)?;
        }
        Ok(())
    }

    fn full_of(known: usize, config: Config) -> Result<Self, Error> {
        let widths = [ROWS, ROWS, ROWS, ROWS + 1, ROWS, ROWS * WIDTH, ROWS];
        let mut world = Self {
            manager: BlockManager::new(config)?,
            tokens_made: 0,
            known: Vec::new(),
            received: Vec::new(),
            running: Vec::new(),
            keys: Vec::new(),
            plan: None,
            pin: None,
            arrays: widths.map(|width| vec![SharedI64::new(0); width]),
            written: TableRows::default(),
        };
        while world.manager.usage().free > 0 {
            world.received = vec![world.new_tokens(known)];
            world.known.clone_from(&world.received[0]);
            world.serve()?;
        }
        Ok(world)
    }

    /// Tokens that no other prompt has.
    fn new_tokens(&mut self, count: usize) -> Vec<u32> {
        let start = self.tokens_made;
        self.tokens_made += count as u32;
        // An odd factor: different numbers stay different.
        let token = |at: u32| at.wrapping_mul(2_654_435_761);
        (start..self.tokens_made).map(token).collect()
    }

    /// `count` requests with the same prompt, which is new.
    pub(crate) fn receive_new(&mut self, len: usize, count: usize) -> Outcome {
        let tokens = self.new_tokens(len);
        self.received = (0..count).map(|_| with_room(&tokens)).collect();
        Ok(())
    }

    /// A request with a new prompt, of a manager that keeps events and has none.
    pub(crate) fn receive_with_events(&mut self, len: usize) -> Outcome {
        self.keep_events()?;
        self.take_events()?;
        self.receive_new(len, 1)
    }

    /// A request whose prompt is cached.
    pub(crate) fn receive_known(&mut self, len: usize) -> Outcome {
        self.received = vec![with_room(&self.known[..len])];
        Ok(())
    }

    /// Computes a prompt in one step.
    pub(crate) fn serve(&mut self) -> Outcome {
        self.prefill()?;
        self.stop_all()
    }

    /// The events since the last call.
    pub(crate) fn take_events(&mut self) -> Outcome {
        drop(self.manager.take_events());
        Ok(())
    }

    /// Prefills the received prompts in one step; their sequences keep running.
    fn prefill(&mut self) -> Outcome {
        let tokens = self.received.iter().map(Vec::len).sum();
        let plan = self.manager.begin_step(tokens)?;
        let first = self.running.len();
        for prompt in self.received.drain(..) {
            let seq = self.manager.sequence(prompt, b"", true)?;
            self.manager
                .prefill(plan.key(), seq.key(), tokens, Some(0))?;
            self.running.push(seq);
        }
        let sampled = &SAMPLED[..self.running.len() - first];
        self.manager.commit(plan.key(), sampled)?;
        Ok(())
    }

    /// Drops every running sequence; the manager learns of it at its next call.
    pub(crate) fn stop_all(&mut self) -> Outcome {
        self.running.clear();
        self.keys.clear();
        self.manager.usage();
        Ok(())
    }

    /// `count` sequences of at least `len` tokens, alone and computed, instead of those before. Their
    /// lengths are spread over a block.
    pub(crate) fn start(&mut self, len: usize, count: usize) -> Outcome {
        self.stop_all()?;
        for index in 0..count {
            self.receive_new(len + index % BLOCK_SIZE, 1)?;
            self.prefill()?;
        }
        self.keys = self.running.iter().map(SeqHandle::key).collect();
        Ok(())
    }

    /// The same, but earlier sequences run until they are twice as long. Commits the open plan.
    pub(crate) fn keep_running(&mut self, len: usize, count: usize) -> Outcome {
        self.commit()?;
        match self.keys.first() {
            Some(&key) if self.manager.view(key)?.tokens.len() < 2 * len => Ok(()),
            _ => self.start(len, count),
        }
    }

    pub(crate) fn plan_decodes(&mut self) -> Outcome {
        let plan = self.manager.begin_step(self.keys.len())?;
        let rejected = self.manager.decode(plan.key(), &self.keys, 0)?;
        assert!(rejected.is_empty(), "the pool has blocks for all");
        self.plan = Some(plan);
        Ok(())
    }

    pub(crate) fn commit(&mut self) -> Outcome {
        if let Some(plan) = self.plan.take() {
            let sampled = &SAMPLED[..self.keys.len()];
            self.manager.commit(plan.key(), sampled)?;
        }
        Ok(())
    }

    /// Writes the inputs of the open plan, into the same arrays as the last time.
    pub(crate) fn fill(&mut self) -> Outcome {
        let [ids, positions, slots, starts, lengths, tables, rows] = &self.arrays;
        let arrays = StepArrays {
            input_ids: IntArray::I64(ids),
            positions: IntArray::I64(positions),
            slot_mapping: IntArray::I64(slots),
            slots_width: slots.len(),
            query_start_loc: IntArray::I64(starts),
            seq_lens: IntArray::I64(lengths),
            block_tables: IntArray::I64(tables),
            table_rows: ROWS,
            table_width: WIDTH,
            logits_indices: IntArray::I64(rows),
        };
        let plan = self.plan.as_ref().expect("planned before");
        self.manager.fill(plan.key(), &arrays, &mut self.written)
    }

    /// Samples of the one sequence that runs.
    pub(crate) fn fork(&mut self, count: usize) -> Outcome {
        let origin = self.keys[0];
        let len = self.manager.view(origin)?.tokens.len();
        for _ in 0..count {
            let fork = self.manager.fork(origin, len)?;
            self.running.push(fork);
        }
        Ok(())
    }

    /// On a prompt that is cached.
    pub(crate) fn take_pin(&mut self, len: usize) -> Outcome {
        let pin = self.manager.match_prefix(&self.known[..len], b"")?;
        assert_eq!(pin.num_tokens(), len, "all of it is cached");
        self.pin = Some(pin);
        Ok(())
    }

    /// With the manager's next call, which takes the blocks back.
    pub(crate) fn drop_pin(&mut self) -> Outcome {
        self.pin = None;
        self.manager.usage();
        Ok(())
    }

    pub(crate) fn empty_steps(&mut self, count: usize) -> Outcome {
        for _ in 0..count {
            let plan = self.manager.begin_step(1)?;
            self.manager.commit(plan.key(), &[])?;
        }
        Ok(())
    }
}

/// A prompt as the Python binding brings it: the first tokens sampled do not move it in memory.
fn with_room(tokens: &[u32]) -> Vec<u32> {
    let mut prompt = Vec::with_capacity(tokens.len() + ROOM);
    prompt.extend_from_slice(tokens);
    prompt
}
