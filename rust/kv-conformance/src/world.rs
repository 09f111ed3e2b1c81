//! The manager beside a simulated KV cache.

use std::collections::{BTreeMap, BTreeSet};

use crate::manager::{BlockManager, Prefilled, Promises, StateCopy};
use crate::operation::{Operation, tokens};

/// Counts of the run: a test can check that they are not 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Steps committed.
    pub steps: u64,
    /// Tokens reused.
    pub cached_tokens: u64,
    /// Requests for blocks that were refused.
    pub refusals: u64,
    /// Blocks copied.
    pub copies: u64,
    /// States loaded from blocks.
    pub states: u64,
}

const MAX_SEQUENCES: usize = 6;
const MAX_TOKENS: usize = 40;

/// The KV of a position: its namespace, and all tokens up to it.
type Kv = (u8, Vec<u32>);

#[derive(Clone)]
struct Sequence {
    namespace: u8,
    tokens: Vec<u32>,
    computed: usize,
    /// Where the open step leads.
    planned: Option<usize>,
}

impl Sequence {
    fn kv(&self, position: usize) -> Kv {
        (self.namespace, self.tokens[..=position].to_vec())
    }
}

/// The tokens of a sequence that a step computes.
struct Planned {
    id: u64,
    from: usize,
    to: usize,
}

pub(crate) struct World<M> {
    manager: M,
    promises: Promises,
    num_blocks: usize,
    block_size: usize,
    sequences: BTreeMap<u64, Sequence>,
    next_id: u64,
    step: Vec<Planned>,
    /// By slot.
    cache: Vec<Option<Kv>>,
    /// By block: the tokens of the state that it holds, and the part of it.
    states: Vec<Option<(Kv, usize)>>,
    /// The tokens of each running state.
    running: BTreeMap<u64, Kv>,
}

type Outcome<T = ()> = Result<T, String>;

fn ensure(holds: bool, difference: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(difference()) }
}

impl<M: BlockManager> World<M> {
    pub(crate) fn new(manager: M, num_blocks: usize, block_size: usize) -> Self {
        Self {
            promises: manager.promises(),
            manager,
            num_blocks,
            block_size,
            sequences: BTreeMap::new(),
            next_id: 0,
            step: Vec::new(),
            cache: vec![None; num_blocks * block_size],
            states: vec![None; num_blocks],
            running: BTreeMap::new(),
        }
    }

    pub(crate) fn apply(&mut self, operation: Operation, report: &mut Report) -> Outcome {
        match operation {
            Operation::Add {
                namespace,
                pattern,
                len,
            } => self.add(namespace, tokens(pattern, len)),
            Operation::Prefill {
                sequence,
                max_tokens,
            } => self.prefill(sequence, max_tokens, report)?,
            Operation::Decode => self.decode(report)?,
            Operation::Commit { token } => self.commit(token, report)?,
            Operation::Append { sequence, len } => self.append(sequence, len),
            Operation::Fork(sequence) => self.fork(sequence)?,
            Operation::Preempt(sequence) => self.preempt(sequence)?,
            Operation::Free(sequence) => self.free(sequence),
        }
        self.check()
    }

    /// Commits the open step and frees all sequences: every block can be allocated again.
    pub(crate) fn end(&mut self, report: &mut Report) -> Outcome {
        self.commit(0, report)?;
        while !self.sequences.is_empty() {
            self.free(0);
            self.check()?;
        }
        Ok(())
    }

    /// The id of some sequence that is not in the open step.
    fn at_rest(&self, index: usize) -> Option<u64> {
        let ids: Vec<_> = self
            .sequences
            .iter()
            .filter(|(_, sequence)| sequence.planned.is_none())
            .map(|(id, _)| *id)
            .collect();
        (!ids.is_empty()).then(|| ids[index % ids.len()])
    }

    fn insert(&mut self, sequence: Sequence) -> u64 {
        self.next_id += 1;
        self.sequences.insert(self.next_id, sequence);
        self.next_id
    }

    fn add(&mut self, namespace: u8, tokens: Vec<u32>) {
        if self.sequences.len() == MAX_SEQUENCES {
            return;
        }
        let id = self.insert(Sequence {
            namespace,
            tokens: tokens.clone(),
            computed: 0,
            planned: None,
        });
        self.manager.add(id, namespace, &tokens);
    }

    fn prefill(&mut self, index: usize, max_tokens: usize, report: &mut Report) -> Outcome {
        let Some(id) = self.at_rest(index) else {
            return Ok(());
        };
        let sequence = self.sequences[&id].clone();
        let (before, len) = (sequence.computed, sequence.tokens.len());
        let (table, available) = (self.manager.table(id), self.manager.available());
        let Some(Prefilled { cached, computed }) = self.manager.prefill(id, max_tokens) else {
            report.refusals += 1;
            // A copy of a block that another sequence holds may need one more.
            let needed = len.div_ceil(self.block_size) + 1 - table.len().min(len);
            let needed = needed + self.promises.state_blocks; // held while it is loaded
            ensure(available < needed, || {
                format!(
                    "a prefill of sequence {id} is refused, although {available} blocks can be allocated"
                )
            })?;
            return self.unchanged(id, &table, available);
        };
        report.cached_tokens += cached as u64;
        let (from, to) = (before + cached, before + cached + computed);
        ensure(computed >= 1 && computed <= max_tokens && to <= len, || {
            format!(
                "a prefill of up to {max_tokens} tokens of sequence {id}, with {before} of {len} computed, \
                 reuses {cached} and computes {computed}"
            )
        })?;
        if self.promises.reuses_live_prefixes && before == 0 {
            let expected = self.live_prefix(id).min((len - 1) / self.block_size);
            ensure(cached >= expected * self.block_size, || {
                format!(
                    "sequence {id} reuses {cached} tokens; live sequences have {expected} full blocks of it"
                )
            })?;
        }
        self.plan(id, from, to)
    }

    /// Leading full blocks of a sequence that another one has computed and holds.
    fn live_prefix(&self, id: u64) -> usize {
        let own = &self.sequences[&id];
        let common = |other: &Sequence| {
            let pairs = own.tokens.iter().zip(&other.tokens[..other.computed]);
            pairs.take_while(|(own, other)| own == other).count() / self.block_size
        };
        self.sequences
            .iter()
            .filter(|(other, sequence)| **other != id && sequence.namespace == own.namespace)
            .map(|(_, sequence)| common(sequence))
            .max()
            .unwrap_or(0)
    }

    fn decode(&mut self, report: &mut Report) -> Outcome {
        let ready: Vec<_> = self
            .sequences
            .iter()
            .filter(|(_, seq)| seq.planned.is_none() && seq.computed + 1 == seq.tokens.len())
            .filter(|(_, seq)| seq.computed > 0 && seq.tokens.len() < MAX_TOKENS)
            .map(|(id, seq)| (*id, seq.computed))
            .collect();
        for (id, computed) in ready {
            let (table, available) = (self.manager.table(id), self.manager.available());
            if self.manager.decode(id) {
                self.plan(id, computed, computed + 1)?;
                continue;
            }
            report.refusals += 1;
            ensure(available < 1, || {
                format!(
                    "a decode of sequence {id} is refused, although {available} blocks can be allocated"
                )
            })?;
            self.unchanged(id, &table, available)?;
        }
        Ok(())
    }

    fn plan(&mut self, id: u64, from: usize, to: usize) -> Outcome {
        let blocks = self.manager.table(id).len();
        ensure(blocks * self.block_size >= to, || {
            format!("sequence {id} is planned up to token {to} on {blocks} blocks")
        })?;
        self.step.push(Planned { id, from, to });
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.planned = Some(to);
        }
        Ok(())
    }

    fn unchanged(&mut self, id: u64, table: &[u32], available: usize) -> Outcome {
        let now = (self.manager.table(id), self.manager.available());
        ensure(now.0 == table && now.1 == available, || {
            format!(
                "a refusal changes sequence {id}: {table:?}, {available} available, become {now:?}"
            )
        })
    }

    /// Computes the step in the simulated cache and commits it.
    fn commit(&mut self, token: u8, report: &mut Report) -> Outcome {
        if self.step.is_empty() {
            return Ok(());
        }
        for (source, destination) in self.manager.copies() {
            report.copies += 1;
            for offset in 0..self.block_size {
                let kv = self.cache[source as usize * self.block_size + offset].clone();
                self.cache[destination as usize * self.block_size + offset] = kv;
            }
        }
        let step = std::mem::take(&mut self.step);
        let saves = self.run_states(&step, report)?;
        for Planned { id, from, to } in &step {
            let table = self.manager.table(*id);
            for position in *from..*to {
                let slot = self.slot(*id, &table, position)?;
                self.states[slot / self.block_size] = None;
                self.cache[slot] = Some(self.sequences[id].kv(position));
            }
        }
        for Planned { id, to, .. } in &step {
            self.holds(*id, *to)?;
        }
        self.save_states(saves)?;
        let mut sampled = Vec::new();
        for Planned { id, to, .. } in &step {
            let Some(sequence) = self.sequences.get_mut(id) else {
                continue;
            };
            (sequence.computed, sequence.planned) = (*to, None);
            if *to == sequence.tokens.len() {
                let next = (u32::from(token) + sampled.len() as u32) % 3;
                sequence.tokens.push(next);
                sampled.push((*id, next));
            }
        }
        self.manager.commit(&sampled);
        report.steps += 1;
        Ok(())
    }

    /// Every running state adds the tokens of the step, from where it is or from blocks. Returns the states to be
    /// saved.
    fn run_states(&mut self, step: &[Planned], report: &mut Report) -> Outcome<Vec<StateCopy>> {
        if self.promises.state_blocks == 0 {
            return Ok(Vec::new());
        }
        for copy in self.manager.state_loads() {
            let StateCopy {
                id,
                position,
                blocks,
            } = copy;
            report.states += u64::from(position > 0);
            let Some(sequence) = self.sequences.get(&id) else {
                return Err(format!(
                    "a state of sequence {id} is loaded, which is not there"
                ));
            };
            let tokens = sequence.tokens.get(..position).unwrap_or_default().to_vec();
            let state = (sequence.namespace, tokens);
            let parts = if position > 0 {
                self.promises.state_blocks
            } else {
                0
            };
            ensure(blocks.len() == parts, || {
                format!("the state of {position} tokens of sequence {id} is loaded from {blocks:?}")
            })?;
            for (part, block) in blocks.iter().enumerate() {
                let held = self.states.get(*block as usize).cloned().flatten();
                ensure(held == Some((state.clone(), part)), || {
                    format!(
                        "the state of {position} tokens of sequence {id} is loaded from block {block}, which holds {held:?}"
                    )
                })?;
            }
            self.running.insert(id, state);
        }
        for Planned { id, from, to } in step {
            let sequence = &self.sequences[id];
            let state = |end: usize| (sequence.namespace, sequence.tokens[..end].to_vec());
            let held = self.running.insert(*id, state(*to));
            ensure(held.as_ref() == Some(&state(*from)), || {
                format!("sequence {id} goes on at token {from} with the state of {held:?}")
            })?;
        }
        Ok(self.manager.state_saves())
    }

    fn save_states(&mut self, saves: Vec<StateCopy>) -> Outcome {
        for StateCopy {
            id,
            position,
            blocks,
        } in saves
        {
            let state = self.running.get(&id).cloned();
            let Some(state) = state.filter(|state| state.1.len() == position) else {
                return Err(format!(
                    "the state of {position} tokens of sequence {id} is saved, which it has not"
                ));
            };
            for (part, block) in blocks.into_iter().enumerate() {
                let block = block as usize;
                let slots = block * self.block_size..(block + 1) * self.block_size;
                let Some(slots) = self.cache.get_mut(slots) else {
                    return Err(format!(
                        "a state of sequence {id} is saved to block {block}"
                    ));
                };
                slots.fill(None);
                self.states[block] = Some((state.clone(), part));
            }
        }
        Ok(())
    }

    fn append(&mut self, index: usize, len: usize) {
        let Some(id) = self.at_rest(index) else {
            return;
        };
        if let Some(sequence) = self.sequences.get_mut(&id)
            && sequence.tokens.len() < MAX_TOKENS
        {
            let more = tokens(1, len);
            sequence.tokens.extend(&more);
            self.manager.append(id, &more);
        }
    }

    fn fork(&mut self, index: usize) -> Outcome {
        let Some(id) = self.at_rest(index) else {
            return Ok(());
        };
        if !self.promises.forks || self.sequences.len() == MAX_SEQUENCES {
            return Ok(());
        }
        let parent = self.sequences[&id].clone();
        let child = self.insert(parent.clone());
        self.manager.fork(id, child);
        let computed = self.manager.num_computed(child);
        ensure(
            computed <= parent.computed && computed < parent.tokens.len(),
            || format!("the fork of sequence {id} has {computed} tokens computed"),
        )?;
        if computed == parent.computed
            && let Some(state) = self.running.get(&id).cloned()
        {
            self.running.insert(child, state);
        }
        if let Some(child) = self.sequences.get_mut(&child) {
            child.computed = computed;
        }
        Ok(())
    }

    fn preempt(&mut self, index: usize) -> Outcome {
        let Some(id) = self.at_rest(index) else {
            return Ok(());
        };
        self.manager.preempt(id);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.computed = 0;
        }
        ensure(self.manager.table(id).is_empty(), || {
            format!("sequence {id} is preempted and holds blocks")
        })
    }

    fn free(&mut self, index: usize) {
        if let Some(id) = self.at_rest(index) {
            self.manager.free(id);
            self.sequences.remove(&id);
        }
    }

    fn slot(&self, id: u64, table: &[u32], position: usize) -> Outcome<usize> {
        let block = table.get(position / self.block_size).copied();
        match block {
            Some(block) if (block as usize) < self.num_blocks => {
                Ok(block as usize * self.block_size + position % self.block_size)
            }
            _ => Err(format!(
                "position {position} of sequence {id} is in block {block:?} of {table:?}"
            )),
        }
    }

    /// Every position up to `to` holds the KV that it should.
    fn holds(&self, id: u64, to: usize) -> Outcome {
        let (sequence, table) = (&self.sequences[&id], self.manager.table(id));
        for position in 0..to {
            let slot = self.slot(id, &table, position)?;
            ensure(self.cache[slot] == Some(sequence.kv(position)), || {
                format!(
                    "position {position} of sequence {id} (tokens {:?}) is read from slot {slot}, which holds {:?}",
                    sequence.tokens, self.cache[slot]
                )
            })?;
        }
        Ok(())
    }

    /// Checks the invariants of every state.
    fn check(&mut self) -> Outcome {
        let mut held = BTreeSet::new();
        let mut full: BTreeMap<Kv, u32> = BTreeMap::new();
        for (id, sequence) in &self.sequences {
            let table = self.manager.table(*id);
            let computed = self.manager.num_computed(*id);
            if sequence.planned.is_none() {
                ensure(computed == sequence.computed, || {
                    format!(
                        "sequence {id} has {computed} tokens computed, not {}",
                        sequence.computed
                    )
                })?;
                self.holds(*id, computed)?;
            }
            held.extend(table.iter().copied());
            if self.promises.deduplicates && self.step.is_empty() {
                for (index, block) in table[..computed / self.block_size].iter().enumerate() {
                    let kv = sequence.kv((index + 1) * self.block_size - 1);
                    let first = *full.entry(kv).or_insert(*block);
                    ensure(first == *block, || {
                        format!("blocks {first} and {block} hold the same tokens")
                    })?;
                }
            }
        }
        if self.step.is_empty() {
            let (available, held) = (self.manager.available(), held.len());
            ensure(available + held == self.num_blocks, || {
                format!(
                    "{available} blocks can be allocated and {held} are held, of {}",
                    self.num_blocks
                )
            })?;
        }
        Ok(())
    }
}
