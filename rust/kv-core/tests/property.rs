//! The manager and a naive model of it go through the same random operations and must agree after
//! every one: tables, counters, ledger, answers, redirects. A simulated KV cache sees to it that every
//! position a step reads holds exactly the tokens it should, also where the model has no say (hash
//! collisions). `KV_OPS` sets the number of operations (default 20,000).

mod model;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use kv_core::{
    BlockManager, BlockState, Config, Error, Event, IntArray, Lease, PlanHandle, PlanKey, Prefill,
    SeqHandle, StepArrays, TableRows,
};
use model::{Model, Seq};
use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestCaseError, TestRunner};

/// The call must be refused with this error.
macro_rules! refused {
    ($call:expr, $error:pat) => {{
        let answer = $call;
        prop_assert!(
            matches!(answer, $error),
            "{} was not refused",
            stringify!($call)
        );
    }};
}

const OPS_PER_CASE: usize = 200;

#[derive(Clone, Debug)]
enum Op {
    New {
        namespace: u8,
        pattern: u8,
        len: usize,
        read_cache: bool,
    },
    Drop(usize),
    Free(usize),
    Reset(usize),
    Match {
        namespace: u8,
        pattern: u8,
        len: usize,
    },
    Lease(usize),
    Attach(usize, usize),
    Fork(usize, usize),
    Append(usize, u8),
    DropLease(usize),
    Begin(usize),
    Prefill {
        seq: usize,
        max_tokens: usize,
        reserve: Option<usize>,
    },
    Decode(u8, usize),
    Speculate(usize, usize),
    Trim(usize, usize),
    Cancel(usize),
    Commit(u8),
    WrongCommit,
    Rollback,
    DropPlan(bool),
    Launch,
    EvictIdle,
}

fn op() -> impl Strategy<Value = Op> {
    let len = 1..14_usize;
    let reserve = prop_oneof![2 => Just(None), 1 => (0..4_usize).prop_map(Some)];
    prop_oneof![
        8 => (0..2_u8, 0..4_u8, len.clone(), prop::bool::weighted(0.9))
            .prop_map(|(namespace, pattern, len, read_cache)| Op::New { namespace, pattern, len, read_cache }),
        2 => any::<usize>().prop_map(Op::Drop),
        1 => any::<usize>().prop_map(Op::Free),
        2 => any::<usize>().prop_map(Op::Reset),
        2 => (0..2_u8, 0..4_u8, len).prop_map(|(namespace, pattern, len)| Op::Match { namespace, pattern, len }),
        1 => any::<usize>().prop_map(Op::Lease),
        2 => any::<(usize, usize)>().prop_map(|(seq, lease)| Op::Attach(seq, lease)),
        4 => any::<(usize, usize)>().prop_map(|(seq, len)| Op::Fork(seq, len)),
        3 => any::<(usize, u8)>().prop_map(|(seq, tokens)| Op::Append(seq, tokens)),
        3 => any::<usize>().prop_map(Op::DropLease),
        10 => prop_oneof![1 => 0..4_usize, 4 => Just(64_usize)].prop_map(Op::Begin),
        14 => (any::<usize>(), prop_oneof![1 => 0..6_usize, 2 => Just(64)], reserve)
            .prop_map(|(seq, max_tokens, reserve)| Op::Prefill { seq, max_tokens, reserve }),
        9 => (any::<u8>(), prop_oneof![3 => Just(0_usize), 1 => 1..6_usize])
            .prop_map(|(mask, lookahead)| Op::Decode(mask, lookahead)),
        5 => (any::<usize>(), 0..5_usize).prop_map(|(seq, drafts)| Op::Speculate(seq, drafts)),
        3 => (any::<usize>(), 0..6_usize).prop_map(|(seq, more)| Op::Trim(seq, more)),
        3 => any::<usize>().prop_map(Op::Cancel),
        9 => any::<u8>().prop_map(Op::Commit),
        1 => Just(Op::WrongCommit),
        1 => Just(Op::Rollback),
        1 => any::<bool>().prop_map(Op::DropPlan),
        3 => Just(Op::Launch),
        1 => Just(Op::EvictIdle),
    ]
}

/// Few patterns with common prefixes, so that contents meet.
fn tokens(pattern: u8, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|at| {
            if at < 2 + u32::from(pattern) {
                at % 3
            } else {
                u32::from(pattern)
            }
        })
        .collect()
}

/// What one position's KV depends on: the namespace and every token up to it.
type Kv = (u8, Vec<u32>);

struct World {
    manager: BlockManager,
    model: Model,
    /// False where hashes collide on purpose: then the simulated KV cache is the judge, and the model
    /// only keeps the sequences' tokens.
    exact: bool,
    handles: Vec<SeqHandle>,
    leases: Vec<(usize, Lease)>,
    /// The open steps, oldest first.
    steps: VecDeque<Step>,
    next_lease: usize,
    /// What the last committed step sampled, by row.
    sampled: Vec<u32>,
    /// Tokens that were handed to the device before they were known.
    num_pending: u64,
    /// The set of contents as the events tell it.
    told: HashSet<u128>,
    kv: Vec<Option<Kv>>,
    arrays: Arrays,
    rows: TableRows,
}

/// An open step: whose rows are in it, and its inputs once they were handed to the device.
struct Step {
    handle: PlanHandle,
    rows: Vec<u64>,
    drafts: HashMap<u64, Vec<u32>>,
    launched: Option<Inputs>,
}

/// The inputs of a step as a device would have them.
struct Inputs {
    copies: Vec<(usize, usize)>,
    rows: Vec<Row>,
}

struct Row {
    first: usize,
    ids: Vec<i64>,
    slots: Vec<i64>,
    table: Vec<usize>,
    samples: usize,
}

struct Arrays {
    ids: Vec<Cell<i64>>,
    positions: Vec<Cell<i32>>,
    slots: Vec<Cell<i64>>,
    starts: Vec<Cell<i32>>,
    lens: Vec<Cell<i32>>,
    tables: Vec<Cell<i32>>,
    logits: Vec<Cell<i64>>,
}

const WIDTH: usize = 80;
const ROWS: usize = 64;

impl World {
    fn new(num_blocks: usize, block_size: usize, switches: (bool, bool), hash_bits: u32) -> Self {
        let (prefix_caching, in_flight_sharing) = switches;
        let config = Config {
            prefix_caching,
            in_flight_sharing,
            events: true,
            hash_bits,
            hash_seed: Some(1),
            ..Config::new(num_blocks, block_size)
        };
        Self {
            manager: BlockManager::new(config).expect("a valid config"),
            model: Model::new(num_blocks, block_size, prefix_caching, in_flight_sharing),
            exact: hash_bits == 128,
            handles: Vec::new(),
            leases: Vec::new(),
            steps: VecDeque::new(),
            next_lease: 0,
            sampled: Vec::new(),
            num_pending: 0,
            told: HashSet::new(),
            kv: vec![None; num_blocks * block_size],
            arrays: Arrays {
                ids: vec![Cell::new(0); 4096],
                positions: vec![Cell::new(0); 4096],
                slots: vec![Cell::new(0); 4096],
                starts: vec![Cell::new(0); ROWS + 1],
                lens: vec![Cell::new(0); ROWS],
                tables: vec![Cell::new(-7); ROWS * WIDTH],
                logits: vec![Cell::new(0); ROWS],
            },
            rows: TableRows::default(),
        }
    }

    fn pick<T>(list: &[T], index: usize) -> Option<usize> {
        (!list.is_empty()).then(|| index % list.len())
    }

    /// One operation on both; they must give the same answer.
    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::New {
                namespace,
                pattern,
                len,
                read_cache,
            } => {
                let tokens = tokens(pattern, len);
                let handle = self
                    .manager
                    .sequence(tokens.clone(), &[namespace], read_cache)
                    .expect("not empty");
                let seq = Seq {
                    namespace,
                    tokens,
                    read_cache,
                    ..Seq::default()
                };
                self.model.seqs.insert(handle.id(), seq);
                self.handles.push(handle);
            }
            Op::Drop(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    self.model.free(self.handles.swap_remove(i).id());
                }
            }
            Op::Free(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let handle = self.handles.swap_remove(i);
                    self.manager.free(handle.key()).expect("live");
                    prop_assert_eq!(self.manager.free(handle.key()), Err(Error::FreedSequence));
                    self.model.free(handle.id());
                }
            }
            Op::Reset(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let (key, id) = (self.handles[i].key(), self.handles[i].id());
                    let answer = self.manager.reset(key);
                    prop_assert_eq!(answer.is_ok(), !self.busy(id));
                    if answer.is_ok() {
                        self.model.reset(id);
                    }
                }
            }
            Op::Match {
                namespace,
                pattern,
                len,
            } => {
                let tokens = tokens(pattern, len);
                let lease = self.manager.match_prefix(&tokens, &[namespace]);
                self.model.match_prefix(self.next_lease, namespace, &tokens);
                self.keep(lease);
            }
            Op::Lease(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let lease = self.manager.lease(self.handles[i].key()).expect("live");
                    self.model.lease(self.next_lease, self.handles[i].id());
                    self.keep(lease);
                }
            }
            Op::Attach(i, j) => {
                if let (Some(i), Some(j)) =
                    (Self::pick(&self.handles, i), Self::pick(&self.leases, j))
                {
                    let answer = self
                        .manager
                        .attach(self.handles[i].key(), &self.leases[j].1);
                    let agreed = self.model.attach(self.handles[i].id(), self.leases[j].0);
                    prop_assert!(!self.exact || answer.is_ok() == agreed, "{answer:?}");
                }
            }
            Op::Fork(i, len) => self.fork(i, len)?,
            Op::Append(i, tokens) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let busy = self.busy(self.handles[i].id());
                    let seq = self
                        .model
                        .seqs
                        .get_mut(&self.handles[i].id())
                        .expect("live");
                    let tokens: Vec<u32> = (0..tokens % 3)
                        .map(|at| u32::from(tokens + at) % 3)
                        .collect();
                    let answer = self.manager.append(self.handles[i].key(), &tokens);
                    prop_assert_eq!(answer.is_ok(), !busy);
                    if answer.is_ok() {
                        seq.tokens.extend(tokens);
                    }
                }
            }
            Op::Trim(i, more) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let (key, id) = (self.handles[i].key(), self.handles[i].id());
                    let computed = self.manager.view(key).expect("live").num_computed_tokens;
                    let to = (computed + more).saturating_sub(2);
                    let answer = self.manager.trim(key, to).ok();
                    if self.exact {
                        prop_assert_eq!(answer, self.model.trim(id, to));
                    } else {
                        prop_assert_eq!(answer.is_some(), !self.busy(id) && to >= computed);
                    }
                }
            }
            Op::DropLease(i) => {
                if let Some(i) = Self::pick(&self.leases, i) {
                    self.model.drop_lease(self.leases.swap_remove(i).0);
                }
            }
            Op::EvictIdle => {
                let gone = self.manager.evict_idle();
                let expected = self.model.evict_idle();
                prop_assert!(!self.exact || gone == expected);
            }
            _ => self.apply_step(op)?,
        }
        Ok(())
    }

    fn fork(&mut self, i: usize, len: usize) -> Result<(), TestCaseError> {
        let Some(i) = Self::pick(&self.handles, i) else {
            return Ok(());
        };
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let known = self.model.seqs[&id].tokens.len();
        let len = match len % 4 {
            0 => len / 4 % (known + 2),
            1 => known,
            _ => known - 1,
        };
        let answer = self.manager.fork(key, len);
        let free = !self.busy(id);
        prop_assert_eq!(answer.is_ok(), free && (1..=known).contains(&len));
        let Ok(fork) = answer else { return Ok(()) };
        if self.exact {
            prop_assert!(self.model.fork(id, fork.id(), len));
        } else {
            let seq = self.model.seqs[&id].clone();
            let tokens = seq.tokens[..len].to_vec();
            self.model.seqs.insert(fork.id(), Seq { tokens, ..seq });
        }
        self.handles.push(fork);
        Ok(())
    }

    fn keep(&mut self, lease: Lease) {
        self.leases.push((self.next_lease, lease));
        self.next_lease += 1;
    }

    /// Whether an open step holds the sequence.
    fn busy(&self, id: u64) -> bool {
        self.steps.iter().any(|step| step.rows.contains(&id))
    }

    fn in_newest(&self, id: u64) -> bool {
        let newest = self.steps.back();
        newest.is_some_and(|step| step.rows.contains(&id))
    }

    fn speculates(&self, id: u64) -> bool {
        self.steps.iter().any(|step| step.drafts.contains_key(&id))
    }

    fn apply_step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let plan = match (op, self.steps.back()) {
            (Op::Begin(budget), _) => return self.begin(*budget),
            (_, None) => return Ok(()),
            (_, Some(step)) => step.handle.key(),
        };
        let planning = self
            .steps
            .back()
            .is_some_and(|step| step.launched.is_none());
        match *op {
            Op::Prefill {
                seq,
                max_tokens,
                reserve,
            } if planning => {
                if let Some(i) = Self::pick(&self.handles, seq) {
                    self.prefill(plan, i, max_tokens, reserve)?;
                }
            }
            Op::Decode(mask, lookahead) if planning => self.decode(plan, mask, lookahead)?,
            Op::Speculate(i, drafts) if planning => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    self.speculate(plan, i, drafts)?;
                }
            }
            Op::Cancel(i) if planning => self.cancel(plan, i)?,
            Op::Launch if planning => self.launch(self.steps.len() - 1)?,
            Op::Commit(seed) => self.commit(seed)?,
            Op::WrongCommit => self.wrong_commit()?,
            Op::Rollback => {
                if let (Some(oldest), 2) = (self.steps.front(), self.steps.len()) {
                    let oldest = oldest.handle.key();
                    refused!(self.manager.rollback(oldest), Err(Error::PlanOrder { .. }));
                    refused!(self.manager.commit(plan, &[]), Err(Error::PlanOrder { .. }));
                    refused!(
                        self.manager.decode(oldest, &[], 0),
                        Err(Error::PlanOrder { .. })
                    );
                }
                self.manager.rollback(plan).expect("the newest");
                refused!(self.manager.rollback(plan), Err(Error::PlanClosed { .. }));
                self.rolled_back();
            }
            Op::DropPlan(oldest) => {
                // The steps planned on top of a lost one go with it.
                let lost = if oldest { 0 } else { self.steps.len() - 1 };
                let kept: Vec<Step> = self.steps.drain(lost..).collect();
                for mut step in kept.into_iter().rev() {
                    step.rows.clear();
                    self.steps.push_back(step);
                    self.rolled_back();
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, budget: usize) -> Result<(), TestCaseError> {
        if self.steps.len() == 2 {
            refused!(self.manager.begin_step(1), Err(Error::PlanOpen { .. }));
            return Ok(());
        }
        if self
            .steps
            .back()
            .is_some_and(|step| step.launched.is_none())
        {
            self.launch(0)?;
        }
        let handle = self.manager.begin_step(budget).expect("less than two open");
        self.steps.push_back(Step {
            handle,
            rows: Vec::new(),
            drafts: HashMap::new(),
            launched: None,
        });
        self.model.begin(budget);
        Ok(())
    }

    fn prefill(
        &mut self,
        plan: PlanKey,
        i: usize,
        max_tokens: usize,
        reserve: Option<usize>,
    ) -> Result<(), TestCaseError> {
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let known = self.manager.view(key).expect("live");
        let pending = known.num_pending_tokens > 0 || self.speculates(id);
        let left = known.tokens.len().saturating_sub(known.num_planned_tokens);
        let answer = self.manager.prefill(plan, key, max_tokens, reserve);
        if self.in_newest(id) || pending {
            prop_assert_eq!(answer, Err(Error::InPlan { sequence: id }));
            return Ok(());
        }
        if left == 0 {
            prop_assert_eq!(answer, Err(Error::NothingToCompute { sequence: id }));
            return Ok(());
        }
        if self.exact {
            prop_assert_eq!(&answer, &Ok(self.model.prefill(id, max_tokens, reserve)));
        }
        if matches!(answer, Ok(Prefill::Planned { .. })) {
            self.steps.back_mut().expect("open").rows.push(id);
        }
        Ok(())
    }

    fn cancel(&mut self, plan: PlanKey, i: usize) -> Result<(), TestCaseError> {
        // Mostly one that is in the plan: the first ones have others that share with them.
        let rows = &self.steps.back().expect("open").rows;
        let planned = Self::pick(rows, i / 4).map(|at| rows[at]);
        let known = |id| self.handles.iter().position(|handle| handle.id() == id);
        let chosen = planned.filter(|_| i % 4 != 0).and_then(known);
        let Some(i) = chosen.or(Self::pick(&self.handles, i)) else {
            return Ok(());
        };
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let answer = self.manager.cancel(plan, key).ok();
        prop_assert_eq!(answer.is_some(), self.in_newest(id));
        if self.exact {
            prop_assert_eq!(&answer, &self.model.cancel(id));
        }
        let step = self.steps.back_mut().expect("open");
        for id in answer.iter().flat_map(|others| others.iter().chain([&id])) {
            step.rows.retain(|planned| planned != id);
            step.drafts.remove(id);
        }
        Ok(())
    }

    fn wrong_commit(&mut self) -> Result<(), TestCaseError> {
        let oldest = self.steps.front().expect("open").handle.key();
        let samples = self.manager.plan_view(oldest).expect("open").num_samples;
        let wrong = vec![0; samples + 1];
        refused!(
            self.manager.commit(oldest, &wrong),
            Err(Error::SampleCount { .. })
        );
        Ok(())
    }

    /// The newest step was rolled back, by a call or by losing its handle.
    fn rolled_back(&mut self) {
        drop(self.steps.pop_back());
        if self.exact {
            self.model.roll_back();
        }
    }

    /// Without the model's help: which sequences the open steps hold.
    fn count_plans(&mut self) {
        let steps = &self.steps;
        for (id, seq) in &mut self.model.seqs {
            let holding = steps.iter().filter(|step| step.rows.contains(id));
            seq.planned = holding.count() as u8;
        }
        self.model
            .seqs
            .retain(|_, seq| !seq.dropped || seq.planned > 0);
    }

    fn speculate(&mut self, plan: PlanKey, i: usize, drafts: usize) -> Result<(), TestCaseError> {
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let view = self.manager.view(key).expect("live");
        let ready = view.tokens.len() == view.num_planned_tokens + 1
            && view.num_pending_tokens == 0
            && !self.in_newest(id)
            && !self.speculates(id);
        let drafts: Vec<u32> = (0..drafts as u32).map(|at| (at + id as u32) % 3).collect();
        let answer = self.manager.speculate(plan, key, &drafts);
        prop_assert_eq!(answer.is_ok(), ready);
        let Ok(answer) = answer else { return Ok(()) };
        if self.exact {
            prop_assert_eq!(answer, self.model.speculate(id, drafts.clone()));
        }
        if matches!(answer, Prefill::Planned { .. }) {
            let step = self.steps.back_mut().expect("open");
            step.rows.push(id);
            if !drafts.is_empty() {
                step.drafts.insert(id, drafts);
            }
        }
        Ok(())
    }

    fn decode(&mut self, plan: PlanKey, mask: u8, lookahead: usize) -> Result<(), TestCaseError> {
        let ready = |handle: &&SeqHandle| {
            let view = self.manager.view(handle.key()).expect("live");
            let known = view.tokens.len() + view.num_pending_tokens;
            !self.in_newest(handle.id())
                && !self.speculates(handle.id())
                && known == view.num_planned_tokens + 1
        };
        // Some that cannot decode, to see that misuse changes nothing.
        let all = self.handles.iter().enumerate();
        let chosen: Vec<&SeqHandle> = match mask {
            0..8 => all
                .filter(|(i, _)| (mask >> (i % 3)) & 1 == 1)
                .map(|(_, handle)| handle)
                .collect(),
            _ => all
                .filter(|(i, _)| (mask >> (i % 8)) & 1 == 1)
                .map(|(_, handle)| handle)
                .filter(ready)
                .collect(),
        };
        let valid = chosen.iter().all(ready);
        let keys: Vec<_> = chosen.iter().map(|handle| handle.key()).collect();
        let ids: Vec<_> = chosen.iter().map(|handle| handle.id()).collect();
        let answer = self.manager.decode(plan, &keys, lookahead);
        prop_assert_eq!(answer.is_ok(), valid, "{:?}", answer);
        let Ok(misfits) = answer else { return Ok(()) };
        if self.exact {
            let fit: Vec<bool> = ids
                .iter()
                .map(|&id| self.model.decode(id, lookahead))
                .collect();
            let expected: Vec<usize> = (0..fit.len()).filter(|&i| !fit[i]).collect();
            prop_assert_eq!(&misfits, &expected);
        }
        let fits = (0..ids.len())
            .filter(|i| !misfits.contains(i))
            .map(|i| ids[i]);
        self.steps.back_mut().expect("open").rows.extend(fits);
        Ok(())
    }

    /// Hands a step's inputs to the device: from now on it is what it is.
    fn launch(&mut self, at: usize) -> Result<(), TestCaseError> {
        let a = &self.arrays;
        let arrays = StepArrays {
            input_ids: IntArray::I64(&a.ids),
            positions: IntArray::I32(&a.positions),
            slot_mapping: IntArray::I64(&a.slots),
            query_start_loc: IntArray::I32(&a.starts),
            seq_lens: IntArray::I32(&a.lens),
            block_tables: IntArray::I32(&a.tables),
            table_width: WIDTH,
            logits_indices: IntArray::I64(&a.logits),
        };
        let step = &self.steps[at];
        let plan = step.handle.key();
        self.manager
            .fill(plan, &arrays, &mut self.rows)
            .expect("the arrays are large enough");
        let size = self.model.block_size;
        let copies = self.manager.copies(plan).expect("open");
        if self.exact {
            let copies: Vec<_> = copies
                .iter()
                .map(|(from, to)| (from.get(), to.get()))
                .collect();
            prop_assert_eq!(&copies, &self.model.plans[at].copies);
        }
        let copies = copies.iter();
        let copies = copies
            .map(|(from, to)| (from.get() as usize, to.get() as usize))
            .collect();
        let view = self.manager.plan_view(plan).expect("open");
        let row = |row: usize| {
            let span = a.starts[row].get() as usize..a.starts[row + 1].get() as usize;
            let len = a.lens[row].get() as usize;
            let logits = a.logits[..view.num_samples].iter();
            let table = a.tables[row * WIDTH..][..len.div_ceil(size)].iter();
            Row {
                first: a.positions[span.start].get() as usize,
                ids: a.ids[span.clone()].iter().map(Cell::get).collect(),
                slots: a.slots[span.clone()].iter().map(Cell::get).collect(),
                table: table.map(|block| block.get() as usize).collect(),
                samples: logits
                    .filter(|at| span.contains(&(at.get() as usize)))
                    .count(),
            }
        };
        let rows = (0..view.num_sequences).map(row).collect();
        self.steps[at].launched = Some(Inputs { copies, rows });
        Ok(())
    }

    /// Runs the oldest step on the simulated KV cache, then commits it.
    fn commit(&mut self, seed: u8) -> Result<(), TestCaseError> {
        for at in 0..self.steps.len() {
            // The second step may be on its way already, with tokens that are still pending.
            if self.steps[at].launched.is_none() && (at == 0 || seed % 2 == 0) {
                self.launch(at)?;
            }
        }
        self.run_step()?;
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        let accept = |(row, id): (&Row, &u64)| {
            let drafts = step.drafts.get(id).cloned();
            let mut tokens = drafts.unwrap_or_default();
            let sum = usize::from(seed) + *id as usize;
            prop_assert_eq!(row.samples, tokens.len() + 1);
            tokens.truncate(sum % (tokens.len() + 1));
            tokens.push(sum as u32 % 3);
            Ok(tokens)
        };
        let sampling = inputs
            .rows
            .iter()
            .zip(&step.rows)
            .filter(|(row, _)| row.samples > 0);
        let samples: Vec<(u64, usize)> = sampling
            .clone()
            .map(|(row, id)| (*id, row.samples))
            .collect();
        let accepted: Vec<Vec<u32>> = sampling.map(accept).collect::<Result<_, _>>()?;
        let plan = step.handle.key();
        let tokens = accepted.concat();
        let counts: Vec<usize> = accepted.iter().map(Vec::len).collect();
        self.refuse_wrong_commits(plan, &tokens, &counts)?;
        let redirects = if counts.iter().all(|&count| count == 1) {
            self.manager.commit(plan, &tokens)
        } else {
            self.manager.commit_accepted(plan, &tokens, &counts)
        };
        let redirects = redirects.expect("the oldest");
        refused!(
            self.manager.commit(plan, &[]),
            Err(Error::PlanClosed { .. })
        );
        self.sampled.clear();
        for ((id, rows), tokens) in samples.iter().zip(&accepted) {
            self.sampled.resize(self.sampled.len() + rows, tokens[0]);
            if !self.exact {
                self.model
                    .seqs
                    .get_mut(id)
                    .expect("planned")
                    .tokens
                    .extend(tokens);
            }
        }
        drop(self.steps.pop_front());
        if self.exact {
            prop_assert_eq!(redirects, self.model.commit(&accepted));
        }
        Ok(())
    }

    fn refuse_wrong_commits(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), TestCaseError> {
        let more = [tokens, &[0; 9]].concat();
        for at in 0..counts.len() {
            let mut wrong = counts.to_vec();
            wrong[at] += 9; // more than any number of drafts
            let answer = self.manager.commit_accepted(plan, &more, &wrong);
            refused!(answer, Err(Error::Accepted { .. }));
        }
        let counts = [counts, &[1]].concat();
        let answer = self.manager.commit_accepted(plan, &more, &counts);
        refused!(answer, Err(Error::SampleCount { .. }));
        Ok(())
    }

    fn run_step(&mut self) -> Result<(), TestCaseError> {
        let size = self.model.block_size;
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        for &(from, to) in &inputs.copies {
            for offset in 0..size {
                self.kv[to * size + offset] = self.kv[from * size + offset].clone();
            }
        }
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            let (seq, all) = (&self.model.seqs[id], self.all_tokens(step, *id));
            for (at, position) in (row.first..row.first + row.ids.len()).enumerate() {
                let token = match row.ids[at] {
                    pending @ ..0 => {
                        self.num_pending += 1;
                        self.sampled[(-1 - pending) as usize]
                    }
                    token => token as u32,
                };
                prop_assert_eq!(
                    token,
                    all[position],
                    "sequence {} position {}",
                    id,
                    position
                );
                let slot = row.table[position / size] * size + position % size;
                match row.slots[at] {
                    -1 => prop_assert!(self.kv[slot].is_some(), "slot {} was never written", slot),
                    given => {
                        prop_assert_eq!(given as usize, slot);
                        self.kv[slot] = Some((seq.namespace, all[..=position].to_vec()));
                    }
                }
            }
        }
        // As on a GPU: everything is written before anything is read.
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            let (seq, all) = (&self.model.seqs[id], self.all_tokens(step, *id));
            for position in 0..row.first + row.ids.len() {
                let slot = row.table[position / size] * size + position % size;
                let expected = Some((seq.namespace, all[..=position].to_vec()));
                let read = &self.kv[slot];
                prop_assert_eq!(read, &expected, "sequence {} position {}", id, position);
            }
        }
        Ok(())
    }

    /// The tokens of a sequence, and its drafts in the step.
    fn all_tokens(&self, step: &Step, id: u64) -> Vec<u32> {
        let drafts = step.drafts.get(&id).map_or(&[][..], Vec::as_slice);
        [&self.model.seqs[&id].tokens, drafts].concat()
    }

    /// A replayed event log gives exactly the contents that the manager holds, each stored once and
    /// removed once, parents before children.
    fn replay_events(&mut self) -> Result<(), TestCaseError> {
        for event in self.manager.take_events() {
            match event {
                Event::Stored { hash, parent, .. } => {
                    prop_assert!(self.told.insert(hash), "{:x} was stored twice", hash);
                    let known = parent.is_none_or(|parent| self.told.contains(&parent));
                    prop_assert!(known, "{:x} was stored before its parent", hash);
                }
                Event::Removed { hash } => {
                    prop_assert!(self.told.remove(&hash), "{:x} was removed twice", hash);
                }
                Event::Cleared => self.told.clear(),
            }
        }
        let held: HashSet<u128> = self.manager.contents().into_iter().collect();
        prop_assert_eq!(&self.told, &held);
        Ok(())
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        if !self.exact {
            self.count_plans();
        }
        self.replay_events()?;
        self.manager.check().map_err(TestCaseError::fail)?;
        let ledger = self.manager.ledger();
        let num_blocks = self.manager.config().num_blocks;
        prop_assert_eq!(ledger.num_blocks(), num_blocks);
        if !self.exact {
            return Ok(());
        }
        prop_assert_eq!(ledger, self.model.ledger());
        for block in 0..num_blocks as u32 {
            let (refs, seq_refs) = (
                self.manager.refs(block).expect("known"),
                self.manager.seq_refs(block).expect("known"),
            );
            prop_assert_eq!(
                (refs, seq_refs),
                (self.model.refs(block), self.model.seq_refs(block))
            );
            let state = self.manager.state(block).expect("known");
            prop_assert_eq!(matches!(state, BlockState::Active), seq_refs > 0);
        }
        for handle in &self.handles {
            let view = self.manager.view(handle.key()).expect("live");
            let seq = &self.model.seqs[&handle.id()];
            let table: Vec<u32> = view.table.iter().map(|block| block.get()).collect();
            prop_assert_eq!(&table, &seq.table);
            prop_assert_eq!(view.tokens, &seq.tokens[..]);
            prop_assert_eq!(
                (view.num_computed_tokens, view.num_registered_blocks),
                (seq.computed, seq.registered)
            );
        }
        if let Some(step) = self.steps.back() {
            let view = self.manager.plan_view(step.handle.key()).expect("open");
            prop_assert_eq!(view.budget_left, self.model.budget());
        }
        for handle in &self.handles {
            let alone = self.model.seqs[&handle.id()]
                .table
                .iter()
                .filter(|&&block| self.model.refs(block) == 1)
                .count();
            prop_assert_eq!(self.manager.preview(handle.key()), Ok(alone));
        }
        Ok(())
    }

    /// Lets go of everything: the pool must be whole again and no content may have been lost track of.
    fn end(mut self) -> Result<Vec<(&'static str, u64)>, TestCaseError> {
        self.steps.clear();
        self.handles.clear();
        self.leases.clear();
        self.manager.check().map_err(TestCaseError::fail)?;
        let ledger = self.manager.ledger();
        prop_assert_eq!((ledger.active, ledger.leased), (0, 0));
        self.manager.evict_idle();
        prop_assert_eq!(self.manager.ledger().free, self.manager.config().num_blocks);
        prop_assert_eq!(
            self.manager.num_contents(),
            0,
            "contents outlive their blocks"
        );
        let pending = [("pending_tokens", self.num_pending)];
        Ok(self.manager.stats().each().chain(pending).collect())
    }
}

/// Runs `KV_OPS / share` operations; returns the sum of each counter.
fn run(share: usize, hash_bits: u32) -> BTreeMap<&'static str, u64> {
    let ops: usize =
        std::env::var("KV_OPS").map_or(20_000, |ops| ops.parse().expect("KV_OPS is a number"));
    let cases = (ops / share).div_ceil(OPS_PER_CASE);
    let mut runner = TestRunner::new(Runs {
        cases: cases as u32,
        failure_persistence: None,
        ..Runs::default()
    });
    let switches = (prop::bool::weighted(0.9), prop::bool::weighted(0.7));
    let pool = (2..24_usize, 1..5_usize, switches);
    let strategy = (pool, prop::collection::vec(op(), OPS_PER_CASE));
    let applied = Cell::new(0_usize);
    let totals = RefCell::new(BTreeMap::new());
    let outcome = runner.run(&strategy, |((num_blocks, block_size, switches), ops)| {
        let mut world = World::new(num_blocks, block_size, switches, hash_bits);
        for op in &ops {
            world.apply(op)?;
            world.compare()?;
            applied.set(applied.get() + 1);
        }
        for (name, count) in world.end()? {
            *totals.borrow_mut().entry(name).or_default() += count;
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    println!(
        "{} random operations at {hash_bits} hash bits, 0 differences",
        applied.get()
    );
    assert!(applied.get() >= ops / share);
    totals.into_inner()
}

#[test]
fn agrees_with_the_model() {
    let totals = run(1, 128);
    for (name, total) in totals {
        // A test that never got there has shown nothing.
        assert_eq!(total > 0, name != "collisions", "{name}: {total}");
    }
}

#[test]
fn collisions_never_show_a_wrong_block() {
    for hash_bits in [0, 1, 3] {
        assert!(run(10, hash_bits)["collisions"] > 0);
    }
}
