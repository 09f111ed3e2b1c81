//! The manager, the model and a simulated KV cache, and each operation on all of them.

mod direct;
mod steps;
mod transfers;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use kv_core::{
    BlockId, BlockManager, BlockState, Config, Error, Event, Evicted, Eviction, Miss, MissReason,
    Pin, PlanHandle, PoolUsage, SeqHandle, SharedI32, SharedI64, SharedPrefixes, StateCopy, Stats,
    TableRows,
};
#[allow(unused_imports)] // not every test records
use kv_trace::Record;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::op::{self, Op, tokens};
use super::sharing::Limits;
use super::{Model, Seq, blocks};

/// The KV of a position: the namespace and every token up to it, each with the version of the weights.
type Kv = (u8, Vec<u32>);

pub(crate) struct World {
    manager: BlockManager,
    model: Model,
    /// False where hashes collide on purpose: then the simulated KV cache is the judge, and the model
    /// only keeps the sequences' tokens.
    exact: bool,
    handles: Vec<SeqHandle>,
    pins: Vec<(usize, Pin)>,
    /// Blocks evicted ahead of need, and what they held.
    victims: Vec<(usize, Vec<Evicted>, Pin)>,
    loads: Vec<transfers::Load>,
    /// The open steps, oldest first.
    steps: VecDeque<Step>,
    next_pin: usize,
    /// The tokens that the last committed step sampled, by row.
    sampled: Vec<u32>,
    /// How often each of `COUNTED` has happened.
    counts: BTreeMap<&'static str, u64>,
    num_explained: usize,
    /// The set of cached blocks by the events.
    emitted: HashSet<u128>,
    kv: Vec<Option<Kv>>,
    /// By block: the part of a snapshot that it holds, and the tokens that went into it.
    states: Vec<Option<(Kv, usize)>>,
    /// The running state of each sequence: the tokens that went into it.
    running: HashMap<u64, Vec<u32>>,
    arrays: Arrays,
    rows: TableRows,
    sharing: Sharing,
}

/// Shared prefixes of each layer group under two limits, and their counts.
struct Sharing {
    prefixes: Vec<(Limits, SharedPrefixes)>,
    fills: u64,
    num_prefixes: u64,
    num_unchanged: u64,
}

impl Sharing {
    fn new(groups: usize) -> Self {
        let all = [(1, 2), (2, 3)].map(|(blocks, rows)| Limits { blocks, rows });
        let all = (0..groups).flat_map(|group| all.map(|limits| (group, limits)));
        let shared = |(group, limits): (usize, Limits)| {
            let shared = SharedPrefixes::new(group, limits.blocks, limits.rows);
            (limits, shared.expect("valid"))
        };
        Self {
            prefixes: all.map(shared).collect(),
            fills: 0,
            num_prefixes: 0,
            num_unchanged: 0,
        }
    }
}

/// An open step: whose rows are in it, and its inputs once they were handed to the device.
struct Step {
    handle: PlanHandle,
    rows: Vec<u64>,
    /// Those of them that decode one token.
    decodes: Vec<u64>,
    drafts: HashMap<u64, Vec<u32>>,
    launched: Option<Inputs>,
}

/// The inputs of a step as a device would have them.
struct Inputs {
    copies: Vec<(usize, usize)>,
    loads: Vec<StateCopy>,
    saves: Vec<StateCopy>,
    rows: Vec<Row>,
}

struct Row {
    first: usize,
    ids: Vec<i64>,
    /// By layer group.
    slots: Vec<Vec<i64>>,
    tables: Vec<Vec<usize>>,
    samples: usize,
}

struct Arrays {
    ids: Vec<SharedI64>,
    positions: Vec<SharedI32>,
    slots: Vec<SharedI64>,
    starts: Vec<SharedI32>,
    lens: Vec<SharedI32>,
    tables: Vec<SharedI32>,
    logits: Vec<SharedI64>,
}

/// Events that every long run reaches.
const COUNTED: &str = "pending_tokens reused_tokens published_tokens kept_snapshots transfers awaited_transfers waiting_prefills \
    kept_blocks explained_hits explained_new explained_diverged explained_evicted \
    explained_not_yet_computed explained_loading explained_reads_disabled explained_below_one_block explained_no_snapshot computing_prefills private_sequences new_sequences";

/// So few that an operation soon comes back to one; the oldest goes.
const MAX_SEQUENCES: usize = 6;
const MAX_LEASES: usize = 3;

const TOKENS: usize = 4096;
const WIDTH: usize = 256;
const ROWS: usize = 64;

impl World {
    /// A manager of these settings, and its judges. The model knows one eviction policy and no collisions.
    pub(crate) fn new(config: Config) -> Self {
        let config = Config {
            events: true,
            keep_evicted: true,
            explain: config.hash_bits == 128,
            hash_seed: Some(1),
            ..config
        };
        let groups = config.groups.len();
        let exact = config.eviction == Eviction::Lru;
        Self {
            model: Model::new(&config),
            exact,
            handles: Vec::new(),
            pins: Vec::new(),
            victims: Vec::new(),
            loads: Vec::new(),
            steps: VecDeque::new(),
            next_pin: 0,
            sampled: Vec::new(),
            counts: COUNTED.split(' ').map(|name| (name, 0)).collect(),
            num_explained: 0,
            emitted: HashSet::new(),
            kv: vec![None; config.num_blocks * config.block_size],
            states: vec![None; config.num_blocks],
            running: HashMap::new(),
            arrays: Arrays {
                ids: vec![SharedI64::new(0); TOKENS],
                positions: vec![SharedI32::new(0); TOKENS],
                slots: vec![SharedI64::new(0); groups * TOKENS],
                starts: vec![SharedI32::new(0); ROWS + 1],
                lens: vec![SharedI32::new(0); ROWS],
                tables: vec![SharedI32::new(-7); groups * ROWS * WIDTH],
                logits: vec![SharedI64::new(0); ROWS],
            },
            rows: TableRows::default(),
            sharing: Sharing::new(groups),
            manager: BlockManager::new(config).expect("a valid config"),
        }
    }

    /// A world whose model never shares anything: it soon differs from the manager.
    #[allow(dead_code)] // the fuzz target has no use for it
    pub(crate) fn with_a_difference(config: Config) -> Self {
        let model = Model::new(&Config {
            prefix_caching: false,
            ..config.clone()
        });
        Self {
            model,
            ..Self::new(config)
        }
    }

    /// Writes down everything that is done from now on.
    #[allow(dead_code)] // not every test records
    pub(crate) fn record(&mut self, writer: impl std::io::Write + Send + 'static) {
        self.manager.record(writer).expect("nothing was done yet");
    }

    /// Ends the recording; the usage and the counters at its end.
    #[allow(dead_code)]
    pub(crate) fn stop_recording(&mut self) -> (PoolUsage, Stats) {
        self.manager.stop_recording().expect("the writer is sound");
        (self.manager.usage(), self.manager.stats())
    }

    fn pick<T>(list: &[T], index: usize) -> Option<usize> {
        (!list.is_empty()).then(|| index % list.len())
    }

    /// One operation on both; they must give the same answer.
    pub(crate) fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::New {
                namespace,
                switch,
                pattern,
                len,
                read_cache,
            } => {
                self.make_way();
                let tokens = tokens(pattern, len);
                let handle = self
                    .manager
                    .sequence(tokens.clone(), op::namespace(namespace, switch), read_cache)
                    .expect("not empty");
                let mut seq = Seq {
                    namespace,
                    switch,
                    read_cache,
                    ..Seq::default()
                };
                seq.extend(&tokens);
                self.model.seqs.insert(handle.id(), seq);
                self.handles.push(handle);
            }
            Op::Drop(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    self.model.free(self.handles.swap_remove(i).id());
                }
            }
            Op::Free(i, kept) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let handle = self.handles.swap_remove(i);
                    match kept {
                        None => self.manager.free(handle.key()).expect("live"),
                        Some(kept) => {
                            self.model.keep(handle.id(), kept);
                            self.manager.free_keeping(handle.key(), kept).expect("live");
                        }
                    }
                    prop_assert_eq!(
                        self.manager.free(handle.key()),
                        Err(Error::FreedSequence {
                            sequence: handle.id()
                        })
                    );
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
                        let seq = self.model.seqs.get_mut(&id).expect("live");
                        seq.old_versions.clear();
                        self.running.remove(&id);
                    }
                }
            }
            Op::Match {
                namespace,
                switch,
                pattern,
                len,
            } => {
                let tokens = tokens(pattern, len);
                let pin = self
                    .manager
                    .match_prefix(&tokens, op::namespace(namespace, switch))
                    .expect("short");
                let tokens = Seq {
                    switch,
                    ..Seq::default()
                }
                .marked(&tokens);
                self.model.match_prefix(self.next_pin, namespace, &tokens);
                self.keep(pin);
            }
            Op::Pin(i) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let pin = self.manager.pin(self.handles[i].key()).expect("live");
                    self.model.pin(self.next_pin, self.handles[i].id());
                    self.keep(pin);
                }
            }
            Op::Attach(i, j) => {
                if let (Some(i), Some(j)) =
                    (Self::pick(&self.handles, i), Self::pick(&self.pins, j))
                {
                    let answer = self.manager.attach(self.handles[i].key(), &self.pins[j].1);
                    let agreed = self.model.attach(self.handles[i].id(), self.pins[j].0);
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
                        seq.extend(&tokens);
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
            Op::DropPin(i) => {
                if let Some(i) = Self::pick(&self.pins, i) {
                    self.model.drop_pin(self.pins.swap_remove(i).0);
                }
            }
            Op::EvictAll => {
                let gone = self.manager.evict_all();
                let expected = self.model.evict_all();
                prop_assert!(!self.exact || gone == expected);
            }
            Op::Reuse(i) => self.reuse_cached(i)?,
            Op::Extend(i, more) => self.extend(i, more)?,
            Op::Publish(i, how) => self.publish(i, how)?,
            Op::Reserve(i, len) => self.reserve(i, len)?,
            Op::Complete(i, how) => self.complete(i, how)?,
            Op::DropTransfer(i) => self.drop_transfer(i)?,
            Op::Abandon(i) => self.abandon(i)?,
            Op::Evict(count) => self.evict(count)?,
            Op::Want(i, one, other) => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    let (key, id) = (self.handles[i].key(), self.handles[i].id());
                    let wanted = self.manager.want_snapshots(key, &[one, other]);
                    prop_assert_eq!(wanted, Ok(()));
                    let size = self.model.block_size;
                    let wanted = vec![one / size * size, other / size * size];
                    self.model.seqs.get_mut(&id).expect("live").wanted = wanted;
                }
            }
            Op::Keep(i) => self.keep_snapshot(i)?,
            Op::Advance => self.advance_weights_version()?,
            _ => self.apply_step(op)?,
        }
        Ok(())
    }

    /// Steps and transfers end first, as a rule.
    fn advance_weights_version(&mut self) -> Result<(), TestCaseError> {
        let refused = Error::WeightsInUse {
            plans: self.steps.len(),
            transfers: self.loads.len(),
        };
        let answer = self.manager.advance_weights_version();
        if !self.steps.is_empty() || !self.loads.is_empty() {
            prop_assert_eq!(answer, Err(refused));
            while !self.loads.is_empty() {
                self.drop_transfer(0)?;
            }
            while !self.steps.is_empty() {
                self.apply_step(&Op::Commit(0))?;
            }
            return self.advance_weights_version();
        }
        let before = self.model.weights_version;
        prop_assert_eq!(answer, Ok(before + 1));
        prop_assert_eq!(self.manager.weights_version(), before + 1);
        prop_assert_eq!(self.manager.usage().evictable, 0);
        if self.exact {
            prop_assert!(self.model.advance_weights_version());
        } else {
            self.model.weights_version += 1;
        }
        for handle in &self.handles {
            let view = self.manager.view(handle.key()).expect("live");
            let seq = self.model.seqs.get_mut(&handle.id()).expect("live");
            seq.old_versions.resize(view.num_computed_tokens, before);
            let counted = match view.is_private {
                true => "private_sequences",
                false => "new_sequences",
            };
            *self.counts.entry(counted).or_default() += 1;
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
        let view = self.manager.view(fork.key()).expect("live");
        let seq = self.model.seqs.get_mut(&fork.id()).expect("new");
        seq.old_versions.truncate(view.num_computed_tokens);
        if self.model.state.is_some() && view.num_computed_tokens > 0 {
            let state = self.running[&id].clone();
            self.running.insert(fork.id(), state);
        }
        self.make_way();
        self.handles.push(fork);
        Ok(())
    }

    fn make_way(&mut self) {
        if self.handles.len() == MAX_SEQUENCES {
            self.model.free(self.handles.remove(0).id());
        }
    }

    /// A pin holds what a token after it sees, and no more.
    fn keep(&mut self, pin: Pin) {
        let max_blocks = self.manager.blocks_for(pin.num_tokens(), 0);
        // Tokens that are computed again for a state see more than a token after the prefix.
        let is_whole = self.model.state.is_some();
        assert!(pin.num_blocks() <= max_blocks || is_whole, "{pin:?}");
        if self.pins.len() == MAX_LEASES {
            self.model.drop_pin(self.pins.remove(0).0);
        }
        self.pins.push((self.next_pin, pin));
        self.next_pin += 1;
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

    /// A replayed event log gives exactly the cached blocks, each stored once and
    /// removed once, parents before children.
    fn replay_events(&mut self) -> Result<(), TestCaseError> {
        for event in self.manager.take_events() {
            match event {
                Event::Stored {
                    hashes,
                    parent,
                    tokens,
                    switch,
                    ..
                } => {
                    let size = self.manager.config().block_size;
                    prop_assert_eq!(tokens.len(), hashes.len() * size);
                    // Where no layer sees everything, a transfer restores the last blocks of a prefix only.
                    let sees_all = self.model.groups.contains(&None);
                    let known = parent.is_none_or(|parent| self.emitted.contains(&parent));
                    let known = known || !sees_all;
                    prop_assert!(known, "{hashes:x?} were stored before {parent:x?}");
                    let (mut before, parent_of_first) = (parent, parent);
                    for (hash, tokens) in hashes.into_iter().zip(tokens.chunks(size)) {
                        prop_assert!(self.emitted.insert(hash), "{hash:x} was stored twice");
                        let hasher = self.manager.hasher();
                        let of = |parent| hasher.child(parent, tokens);
                        if let Some(parent) = before {
                            let label = switch.as_ref().filter(|_| before == parent_of_first);
                            let switched = label
                                .map(|(at, to)| of(hasher.switch(parent, (at % size) as u32, to)));
                            let is_its = hash == of(parent) || Some(hash) == switched;
                            prop_assert!(is_its, "{hash:x} after {parent:x}");
                        }
                        before = Some(hash);
                    }
                }
                Event::Removed { hashes } => {
                    for hash in hashes {
                        prop_assert!(self.emitted.remove(&hash), "{hash:x} was removed twice");
                    }
                }
                Event::Cleared { weights_version } => {
                    prop_assert_eq!(weights_version, self.model.weights_version);
                    self.emitted.clear();
                }
                Event::Lost { num_events } => {
                    panic!("{num_events} events since the last operation")
                }
            }
        }
        let held: HashSet<u128> = self.manager.cached_hashes().into_iter().collect();
        prop_assert_eq!(&self.emitted, &held);
        Ok(())
    }

    /// Explains a prompt that this operation did not touch, as a rule.
    fn explain_another(&mut self) -> Result<(), TestCaseError> {
        self.num_explained += 1;
        let number = self.num_explained.wrapping_mul(2_654_435_761) >> 8;
        let (namespace, pattern, len) = (number % 2, number / 2 % 4, 1 + number / 8 % 30);
        let tokens = tokens(pattern as u8, len);
        if self.is_explained() {
            let switch = op::choose_switch(number / 8 % 48);
            self.explain(namespace as u8, switch, &tokens)?;
        }
        Ok(())
    }

    /// Whether the model knows the answers.
    pub(super) fn is_explained(&self) -> bool {
        let config = self.manager.config();
        self.exact && config.explain && config.prefix_caching == self.model.caching
    }

    /// The model says the same; of several cached blocks that agree as long, either may be named.
    pub(super) fn explain(
        &mut self,
        namespace: u8,
        switch: op::Switch,
        tokens: &[u32],
    ) -> Result<Option<Miss>, TestCaseError> {
        let name = op::namespace(namespace, switch);
        let explanation = self.manager.explain(tokens, name).expect("short");
        let prompt = Seq {
            switch,
            ..Seq::default()
        };
        let tokens = &prompt.marked(tokens)[..];
        let mut expected = self.model.explain(namespace, tokens);
        let mut misses = (&explanation.miss, &mut expected.miss);
        if let (Some(miss), Some(expected)) = &mut misses
            && let MissReason::Diverged {
                position,
                tokens: cached,
            } = &miss.reason
            && let MissReason::Diverged { tokens: known, .. } = &mut expected.reason
        {
            let leaves = { &self.model }.leaves_at(namespace, tokens, *position, cached);
            prop_assert!(leaves, "{miss:?}");
            known.clone_from(cached);
        }
        prop_assert_eq!(&explanation, &expected, "{:?} in {}", tokens, namespace);
        let name = match explanation.miss.as_ref().map(|miss| &miss.reason) {
            None => "explained_hits",
            Some(MissReason::New) => "explained_new",
            Some(MissReason::Diverged { .. }) => "explained_diverged",
            Some(MissReason::Evicted(Some(_))) => "explained_evicted",
            Some(MissReason::Evicted(None)) => "explained_forgotten",
            Some(MissReason::NotYetComputed) => "explained_not_yet_computed",
            Some(MissReason::Loading) => "explained_loading",
            Some(MissReason::ReadsDisabled) => "explained_reads_disabled",
            Some(MissReason::BelowOneBlock) => "explained_below_one_block",
            Some(MissReason::NoSnapshot { .. }) => "explained_no_snapshot",
        };
        *self.counts.entry(name).or_default() += 1;
        Ok(explanation.miss)
    }

    pub(crate) fn compare(&mut self) -> Result<(), TestCaseError> {
        if !self.exact {
            self.count_plans();
        }
        self.check_all_evicted()?;
        self.replay_events()?;
        self.explain_another()?;
        self.manager.check().map_err(TestCaseError::fail)?;
        let usage = self.manager.usage();
        let num_blocks = self.manager.config().num_blocks;
        prop_assert_eq!(usage.num_blocks(), num_blocks);
        if !self.exact {
            return Ok(());
        }
        prop_assert_eq!(usage, self.model.usage());
        let queued = self.manager.queued().into_iter().map(BlockId::get);
        prop_assert_eq!(queued.collect::<Vec<_>>(), self.model.queued());
        let snapshot = self.manager.snapshot();
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
            let at = block as usize;
            let surveyed = (
                snapshot.states[at],
                snapshot.refs[at],
                snapshot.seq_refs[at],
            );
            prop_assert_eq!(surveyed, (state as u8, refs, seq_refs));
        }
        for handle in &self.handles {
            let view = self.manager.view(handle.key()).expect("live");
            let seq = &self.model.seqs[&handle.id()];
            let mut held = 0;
            for group in 0..self.model.groups.len() {
                let table = view.table(group).map(|block| block.map(BlockId::get));
                let expected = seq.table.iter().map(|blocks| blocks[group]);
                prop_assert!(table.eq(expected), "{:?}", view);
                let given_back = view.table(group).take_while(Option::is_none).count();
                let blocks = view.table(group).flatten().count();
                prop_assert_eq!(given_back + blocks, seq.table.len(), "a hole: {:?}", view);
                held += blocks;
            }
            // It holds no more blocks than from its final ones to the end of its table.
            let size = self.model.block_size;
            let len = seq.table.len();
            let full = view.num_computed_tokens / size;
            let final_len = match self.model.caching {
                true => full.min(view.num_registered_blocks),
                false => full,
            };
            let max_blocks = self
                .manager
                .blocks_for(len * size, (len - final_len) * size);
            prop_assert!(
                held <= max_blocks,
                "{held} blocks, {max_blocks} needed: {view:?}"
            );
            prop_assert_eq!(view.tokens, &op::raw(&seq.tokens)[..]);
            prop_assert_eq!(
                (view.num_computed_tokens, view.num_registered_blocks),
                (seq.computed, seq.registered)
            );
            prop_assert_eq!(view.is_private, seq.is_private);
        }
        if let Some(step) = self.steps.back() {
            let view = self.manager.plan_view(step.handle.key()).expect("open");
            prop_assert_eq!(view.budget_left, self.model.budget());
        }
        for handle in &self.handles {
            let alone = blocks(&self.model.seqs[&handle.id()].table)
                .filter(|&block| self.model.refs(block) == 1)
                .count();
            prop_assert_eq!(self.manager.preview(handle.key()), Ok(alone));
        }
        Ok(())
    }

    /// Releases everything: the pool must be whole again, and every cached block must be counted.
    pub(crate) fn end(mut self) -> Result<Vec<(&'static str, u64)>, TestCaseError> {
        self.steps.clear();
        self.handles.clear();
        self.pins.clear();
        self.loads.clear();
        self.victims.clear();
        self.manager.check().map_err(TestCaseError::fail)?;
        let usage = self.manager.usage();
        prop_assert_eq!((usage.active, usage.pinned, usage.loading), (0, 0, 0));
        self.manager.evict_all();
        prop_assert_eq!(self.manager.usage().free, self.manager.config().num_blocks);
        prop_assert_eq!(
            self.manager.num_prefixes(),
            0,
            "cached blocks outlive their block ids"
        );
        let more = [
            ("shared_prefixes", self.sharing.num_prefixes),
            ("unchanged_prefixes", self.sharing.num_unchanged),
        ];
        let stats = self.manager.stats();
        Ok(stats.each().chain(more).chain(self.counts).collect())
    }
}
