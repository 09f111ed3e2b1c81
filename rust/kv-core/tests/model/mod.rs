//! A naive model of the block manager: cached blocks are named by their whole prefix, and references are
//! counted anew whenever they are needed.

pub(crate) mod op;
#[allow(dead_code)] // not every test records
pub(crate) mod recording;
pub(crate) mod sharing;
mod state;
pub(crate) mod world;

use std::collections::{BTreeMap, HashMap};

use kv_core::{
    BlockId, Config, Error, EvictedBy, Eviction, Explanation, Extend, Miss, MissReason,
    PastEviction, PoolUsage, Prefill, PrefillRequest, Remapping, StateConfig,
};
use op::Switch;
use state::{Snapshot, Work};

/// A namespace and every token up to the end of a block.
type PrefixKey = (u8, Vec<u32>);

/// The blocks of a logical block of tokens, one per layer group; none where no later token sees it.
type LogicalBlock = Vec<Option<u32>>;

/// A token and the version of the weights that computed it. Tokens are below 65,536.
pub(crate) fn stamped(token: u32, version: u32) -> u32 {
    version << 16 | token
}

fn blocks(indices: &[LogicalBlock]) -> impl DoubleEndedIterator<Item = u32> + '_ {
    indices.iter().flatten().copied().flatten()
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Seq {
    pub(crate) namespace: u8,
    pub(crate) switch: Switch,
    /// As [`op::marked`] ones.
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Vec<LogicalBlock>,
    pub(crate) computed: usize,
    /// Where the open plans will have brought it.
    pub(crate) ahead: usize,
    /// Tokens that open plans sample for it.
    pub(crate) pending: usize,
    pub(crate) speculating: bool,
    pub(crate) read_cache: bool,
    /// It has tokens of earlier weights, of these versions: none of its blocks is cached.
    pub(crate) is_private: bool,
    pub(crate) old_versions: Vec<u32>,
    /// Open plans that hold it.
    pub(crate) planned: u8,
    pub(crate) dropped: bool,
    /// Logical blocks that may stay cached when it ends.
    kept_indices: Option<usize>,
    /// Registered logical blocks.
    pub(crate) registered: usize,
    /// Positions of the last state kept and of the answer's, and those at which one is wanted.
    last_kept: usize,
    answer: usize,
    pub(crate) wanted: Vec<usize>,
}

impl Seq {
    /// As they are after its tokens.
    pub(crate) fn marked(&self, tokens: &[u32]) -> Vec<u32> {
        let positions = self.tokens.len()..;
        let tokens = positions.zip(tokens);
        tokens
            .map(|(at, &token)| op::marked(self.switch, at, token))
            .collect()
    }

    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        let tokens = self.marked(tokens);
        self.tokens.extend(tokens);
    }
}

/// The kind of an entry.
enum EntryKind {
    Prefill { replay: usize },
    Lookahead(usize),
    Drafts(Vec<u32>),
}

#[derive(Clone, Debug)]
struct Entry {
    seq: u64,
    start: usize,
    len: usize,
    samples: bool,
    drafts: Vec<u32>,
    /// The sequence before: logical blocks of its table, how far ahead, logical blocks registered.
    before: (usize, usize, usize),
    /// The partial blocks in place of which it writes on copies: logical block, group, block, copy.
    copied: Vec<(usize, usize, u32, u32)>,
    /// The partial blocks that it goes on writing.
    in_place: Vec<u32>,
    /// Blocks reused, already cached, and preregistered.
    reused: Vec<u32>,
    already_cached: Vec<u32>,
    preregistered: Vec<u32>,
    /// The copy sources of the logical block after the match, and their copies.
    source: Vec<(u32, u32)>,
    /// Logical blocks matched and preregistered, and those matched alone.
    indices: usize,
    matched: usize,
    /// Blocks that slide out of windows with the match, pinned by the plan: logical block, group, block.
    unseen: Vec<(usize, usize, u32)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    budget: usize,
    entries: Vec<Entry>,
    pub(crate) copies: Vec<(u32, u32)>,
    pub(crate) works: Vec<Work>,
    /// Sources of copies: the plan holds them until it is closed.
    pinned: Vec<u32>,
}

/// Blocks that are being filled from outside.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    seq: u64,
    /// Logical blocks of its tokens.
    from: usize,
    end: usize,
    /// By logical block, then by layer group.
    pub(crate) loading: Vec<(usize, usize, u32)>,
    /// The blocks of a snapshot, and its prefix, unless the transfer was abandoned.
    snapshot: Option<(Option<PrefixKey>, Vec<u32>)>,
    /// The cached blocks before and among them, in this order.
    held: Vec<u32>,
}

impl Load {
    /// All blocks that it fills.
    fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        let snapshot = self.snapshot.iter().flat_map(|(_, blocks)| blocks);
        self.loading
            .iter()
            .map(|loading| loading.2)
            .chain(snapshot.copied())
    }
}

/// The answer to a reservation.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Reserved(Vec<(usize, usize, u32)>),
    NoRoom(usize, usize),
    Loading(u64),
    NotNeeded,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) block_size: usize,
    /// The sliding window of each layer group.
    pub(crate) groups: Vec<Option<usize>>,
    pub(crate) caching: bool,
    pub(crate) sharing: bool,
    pub(crate) partial_reuse: bool,
    /// Head first.
    queue: Vec<u32>,
    /// By layer group.
    cached_blocks: HashMap<(PrefixKey, usize), u32>,
    pub(crate) seqs: BTreeMap<u64, Seq>,
    pub(crate) pins: BTreeMap<usize, Vec<LogicalBlock>>,
    /// The blocks of the snapshots that they hold.
    pin_states: BTreeMap<usize, Vec<u32>>,
    /// By number.
    pub(crate) loads: BTreeMap<u64, Load>,
    num_loads: u64,
    /// Oldest first.
    pub(crate) plans: Vec<Plan>,
    num_blocks: usize,
    /// Evictions of each namespace, in order: of which tokens, and the cause.
    evictions: BTreeMap<u8, Vec<(Vec<u32>, EvictedBy)>>,
    pub(crate) weights_version: u32,
    pub(crate) state: Option<StateConfig>,
    /// By the tokens that went into the state.
    snapshots: HashMap<PrefixKey, Snapshot>,
}

impl Model {
    pub(crate) fn new(config: &Config) -> Self {
        let num_blocks = config.num_blocks;
        Self {
            block_size: config.block_size,
            groups: config.groups.clone(),
            caching: config.prefix_caching,
            sharing: config.in_flight_sharing,
            partial_reuse: config.partial_reuse && config.state.is_none(),
            queue: (0..num_blocks as u32).collect(),
            num_blocks,
            cached_blocks: HashMap::new(),
            seqs: BTreeMap::new(),
            pins: BTreeMap::new(),
            pin_states: BTreeMap::new(),
            loads: BTreeMap::new(),
            num_loads: 0,
            plans: Vec::new(),
            evictions: BTreeMap::new(),
            weights_version: 0,
            state: config.state,
            snapshots: HashMap::new(),
        }
    }

    /// The first logical block that a group needs of a prefix of `indices` logical blocks: the window of its last
    /// token, and of the one after it.
    fn first_index(&self, group: usize, indices: usize) -> usize {
        self.first_index_of(group, indices, 1)
    }

    /// The same for its last `replay` tokens.
    fn first_index_of(&self, group: usize, indices: usize, replay: usize) -> usize {
        let first = (indices * self.block_size + 1).saturating_sub(replay.max(1));
        self.groups[group].map_or(0, |window| first.saturating_sub(window) / self.block_size)
    }

    pub(crate) fn seq_refs(&self, block: u32) -> u32 {
        self.seqs
            .values()
            .filter(|seq| blocks(&seq.table).any(|held| held == block))
            .count() as u32
    }

    pub(crate) fn refs(&self, block: u32) -> u32 {
        let pins = self.pins.values();
        let pinned = self.plans.iter().flat_map(|plan| &plan.pinned);
        let held = self.loads.values().flat_map(|load| &load.held);
        let works = self.plans.iter().flat_map(|plan| &plan.works);
        let of_states = works.flat_map(Work::blocks);
        let of_pins = self.pin_states.values().flatten();
        let pinned = pinned.chain(held).chain(of_states).chain(of_pins);
        self.seq_refs(block)
            + u32::from(self.loading(block).is_some())
            + pins
                .filter(|indices| blocks(indices).any(|held| held == block))
                .count() as u32
            + pinned.filter(|&&pinned| pinned == block).count() as u32
    }

    /// The transfer that is to fill a block.
    fn loading(&self, block: u32) -> Option<u64> {
        let fills = |load: &Load| load.blocks().any(|loading| loading == block);
        let mut loads = self.loads.iter();
        loads
            .find(|(_, load)| fills(load))
            .map(|(&number, _)| number)
    }

    fn is_cached(&self, block: u32) -> bool {
        self.snapshot_of(block).is_some()
            || self
                .cached_blocks
                .values()
                .any(|&block_id| block_id == block)
    }

    pub(crate) fn usage(&self) -> PoolUsage {
        let evictable = self
            .queue
            .iter()
            .filter(|&&block| self.is_cached(block))
            .count();
        let active = (0..self.num_blocks as u32)
            .filter(|&block| self.seq_refs(block) > 0)
            .count();
        let free = self.queue.len() - evictable;
        let loading = self.loads.values().map(|load| load.blocks().count()).sum();
        PoolUsage {
            free,
            evictable,
            active,
            pinned: self.num_blocks - free - evictable - active - loading,
            loading,
        }
    }

    /// Queues blocks without references, in this order.
    fn enqueue_unused(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            if self.refs(block) > 0 || self.queue.contains(&block) {
                continue;
            }
            match self.is_cached(block) {
                true => self.queue.push(block),
                false => self.queue.insert(0, block),
            }
        }
    }

    fn unqueue(&mut self, block: u32) {
        self.queue.retain(|&queued| queued != block);
    }

    fn known(&self, namespace: u8, tokens: &[u32], group: usize) -> Option<u32> {
        let prefix = (namespace, tokens.to_vec());
        self.cached_blocks.get(&(prefix, group)).copied()
    }

    /// The logical blocks after `from` of the longest prefix that is `usable`: every logical block for a group that
    /// sees everything, the last ones where there is a window.
    fn matched(
        &self,
        namespace: u8,
        tokens: &[u32],
        from: usize,
        replay: usize,
        usable: impl Fn(u32) -> bool,
    ) -> Vec<LogicalBlock> {
        let num_full = tokens.len() / self.block_size;
        let blocks = |indices: usize, index: usize| -> Option<LogicalBlock> {
            let tokens = &tokens[..(index + 1) * self.block_size];
            let entry = |group: usize| match self.known(namespace, tokens, group) {
                _ if index < self.first_index_of(group, indices, replay) => Some(None),
                Some(block) if usable(block) => Some(Some(block)),
                _ => None,
            };
            (0..self.groups.len()).map(entry).collect()
        };
        let hit = |indices: usize| (from..indices).map(|at| blocks(indices, at)).collect();
        (from..=num_full).rev().find_map(hit).unwrap_or_default()
    }

    /// The cached blocks that agree longest with `tokens` after their first `index` logical blocks, for an
    /// eighth of a block at least, and how long that is.
    fn lender(&self, namespace: u8, tokens: &[u32], index: usize) -> (Vec<u32>, usize) {
        let (from, size) = (index * self.block_size, self.block_size);
        let mut best = (Vec::new(), 0);
        let mut first = 0;
        for (((of, known), group), &block) in &self.cached_blocks {
            let is_next = *of == namespace && *group == 0 && known.len() == from + size;
            if !is_next || tokens.get(..from) != Some(&known[..from]) {
                continue;
            }
            // The last token is computed in any case.
            let wanted = tokens.get(from..tokens.len() - 1).unwrap_or(&[]);
            let pairs = known[from..].iter().zip(wanted);
            let agrees = pairs.take_while(|(known, token)| known == token).count();
            let blocks = (0..self.groups.len()).map(|group| self.known(*of, known, group));
            let Some(blocks) = blocks.collect::<Option<Vec<u32>>>() else {
                continue;
            };
            let is_ready = blocks.iter().all(|&block| self.is_ready(block));
            let better = agrees > best.1 || (agrees == best.1 && block < first);
            if is_ready && agrees * 8 >= size && agrees > 0 && better {
                (best, first) = ((blocks, agrees), block);
            }
        }
        best
    }

    fn is_ready(&self, block: u32) -> bool {
        !self.is_computing(block) && self.loading(block).is_none()
    }

    fn is_computing(&self, block: u32) -> bool {
        let entries = self.plans.iter().flat_map(|plan| &plan.entries);
        entries
            .flat_map(|entry| &entry.preregistered)
            .any(|&computing| computing == block)
    }

    pub(crate) fn match_prefix(&mut self, pin: usize, namespace: u8, tokens: &[u32]) {
        let is_ready = |block| self.is_ready(block);
        let indices = match self.state {
            None => self.matched(namespace, tokens, 0, 0, is_ready),
            Some(_) => {
                let limits = (0, tokens.len());
                let found = self.matched_with_state(namespace, tokens, 0, 0, is_ready, limits);
                found.indices
            }
        };
        blocks(&indices).for_each(|block| self.unqueue(block));
        self.pin_state(pin, namespace, &tokens[..indices.len() * self.block_size]);
        self.pins.insert(pin, indices);
    }

    pub(crate) fn pin(&mut self, pin: usize, seq: u64) {
        let seq = &self.seqs[&seq];
        let is_whole = |indices: usize| {
            let ready = blocks(&seq.table[..indices]).all(|block| self.is_ready(block));
            let mut needed = (0..self.groups.len()).flat_map(|group| {
                (self.first_index(group, indices)..indices).map(move |index| (index, group))
            });
            ready && needed.all(|(index, group)| seq.table[index][group].is_some())
        };
        let mut longest_first = (0..=seq.registered).rev();
        let whole = longest_first
            .find(|&indices| is_whole(indices))
            .expect("none is");
        let mut indices = seq.table[..whole].to_vec();
        for (at, blocks) in indices.iter_mut().enumerate() {
            for (group, entry) in blocks.iter_mut().enumerate() {
                if at < self.first_index(group, whole) {
                    *entry = None;
                }
            }
        }
        let (namespace, tokens) = (
            seq.namespace,
            seq.tokens[..whole * self.block_size].to_vec(),
        );
        self.pin_state(pin, namespace, &tokens);
        self.pins.insert(pin, indices);
    }

    pub(crate) fn drop_pin(&mut self, pin: usize) {
        let indices = self.pins.remove(&pin).unwrap_or_default();
        let state = self.pin_states.remove(&pin).unwrap_or_default();
        self.enqueue_unused(state.into_iter().rev());
        self.enqueue_unused(blocks(&indices).rev());
    }

    /// Whether the pin's blocks hold a prefix of the sequence.
    pub(crate) fn attach(&mut self, seq: u64, pin: usize) -> bool {
        let indices = self.pins[&pin].clone();
        let s = &self.seqs[&seq];
        if s.planned > 0 || !s.table.is_empty() {
            return false;
        }
        let tokens = |index: usize| s.tokens.get(..(index + 1) * self.block_size);
        let fits = |index: usize| {
            let entries = indices[index].iter().enumerate();
            tokens(index).is_some_and(|tokens| {
                entries.clone().all(|(group, block)| {
                    block.is_none() || self.known(s.namespace, tokens, group) == *block
                })
            })
        };
        if !(0..indices.len()).all(fits) {
            return false;
        }
        let (size, s) = (self.block_size, self.seqs.get_mut(&seq).expect("live"));
        if !indices.is_empty() && self.state.is_none() {
            s.registered = indices.len();
            s.computed = (indices.len() * size).min(s.tokens.len() - 1);
            s.ahead = s.computed;
            s.table = indices;
        }
        true
    }

    /// Puts a sequence back to what it was; what it held since goes, the last block first.
    fn shorten(&mut self, seq: u64, to: &Seq) {
        let now = self.seqs.insert(seq, to.clone()).expect("live");
        blocks(&to.table).for_each(|block| self.unqueue(block));
        let (kept, grown) = now.table.split_at(to.table.len());
        self.enqueue_unused(blocks(grown).rev());
        self.enqueue_unused(blocks(kept));
    }

    /// Whether a window has slid past what a token after the first `computed` sees.
    fn slid_past(&self, s: &Seq, computed: usize) -> bool {
        let (indices, all) = (
            computed / self.block_size,
            computed.div_ceil(self.block_size),
        );
        (0..self.groups.len()).any(|group| {
            let mut seen = self.first_index(group, indices)..all;
            seen.any(|index| s.table[index][group].is_none())
        })
    }

    pub(crate) fn fork(&mut self, seq: u64, fork: u64, num_tokens: usize) -> bool {
        let s = &self.seqs[&seq];
        if s.planned > 0 || num_tokens == 0 || num_tokens > s.tokens.len() {
            return false;
        }
        let mut computed = s.computed.min(num_tokens);
        let is_cut = self.state.is_some() && num_tokens < s.computed;
        if self.slid_past(s, computed) || is_cut {
            computed = 0;
        }
        let child = Seq {
            tokens: s.tokens[..num_tokens].to_vec(),
            table: s.table[..computed.div_ceil(self.block_size)].to_vec(),
            computed,
            ahead: computed,
            registered: s.registered.min(computed / self.block_size),
            last_kept: if computed > 0 { s.last_kept } else { 0 },
            answer: 0,
            is_private: s.is_private && computed > 0,
            wanted: if computed > 0 {
                s.wanted.clone()
            } else {
                Vec::new()
            },
            ..s.clone()
        };
        self.seqs.insert(fork, child);
        self.slide(fork);
        true
    }

    /// The groups whose partial block is about to be written, and is shared or registered.
    fn must_copy(&self, seq: u64, position: usize) -> Vec<(usize, usize, u32)> {
        let is_private = self.seqs[&seq].is_private;
        let is_pinned = |block| {
            let mut pins = self.pins.values().flat_map(|indices| blocks(indices));
            is_private && pins.any(|pinned| pinned == block)
        };
        self.shared_at(seq, position, |block| {
            self.seq_refs(block) > 1 || is_pinned(block)
        })
    }

    /// The same without a plan: an open step may be yet to copy a block.
    pub(crate) fn held_by_others(&self, seq: u64, position: usize) -> Vec<(usize, usize, u32)> {
        self.shared_at(seq, position, |block| self.refs(block) > 1)
    }

    fn shared_at(
        &self,
        seq: u64,
        position: usize,
        is_shared: impl Fn(u32) -> bool,
    ) -> Vec<(usize, usize, u32)> {
        let (s, index) = (&self.seqs[&seq], position / self.block_size);
        let blocks = s.table.get(index).filter(|_| index >= s.registered);
        let entries = blocks.into_iter().flatten().copied().flatten().enumerate();
        entries
            .filter(|&(_, block)| is_shared(block) || self.is_cached(block))
            .map(|(group, block)| (index, group, block))
            .collect()
    }

    /// In the order of allocation: free blocks first.
    pub(crate) fn queued(&self) -> Vec<u32> {
        let mut blocks = self.queue.clone();
        blocks.sort_by_key(|&block| (self.is_cached(block), self.is_spare(block)));
        blocks
    }

    fn allocate(&mut self) -> u32 {
        while self.state.is_some() && self.is_cached(self.queued()[0]) {
            self.evict_victim();
        }
        let block = self.queued()[0];
        self.unqueue(block);
        self.evict_block(block, EvictedBy::Policy(Eviction::Lru));
        block
    }

    /// A block id holds nothing any more, because it is needed or all are evicted.
    fn evict_block(&mut self, block: u32, by: EvictedBy) {
        self.remember(block, by);
        self.cached_blocks.retain(|_, block_id| *block_id != block);
        self.drop_orphans();
    }

    fn remember(&mut self, block: u32, by: EvictedBy) {
        for ((namespace, tokens), _) in self
            .cached_blocks
            .keys()
            .filter(|key| self.cached_blocks[key] == block)
        {
            let evictions = self.evictions.entry(*namespace).or_default();
            evictions.push((tokens.clone(), by));
        }
    }

    /// Nothing that was computed before is cached; sequences go on over their own blocks. False while the weights are
    /// in use.
    pub(crate) fn advance_weights_version(&mut self) -> bool {
        if !self.plans.is_empty() || !self.loads.is_empty() {
            return false;
        }
        for seq in self.seqs.keys().copied().collect::<Vec<u64>>() {
            let s = self.seqs.get_mut(&seq).expect("live");
            let end = s.computed.div_ceil(self.block_size);
            let gone: Vec<LogicalBlock> = s.table.drain(end..s.registered.max(end)).collect();
            (s.registered, s.answer, s.is_private) = (0, 0, s.computed > 0);
            self.enqueue_unused(blocks(&gone).rev());
            self.slide(seq);
        }
        self.evictions.clear();
        let cached = (0..self.num_blocks as u32).filter(|&block| self.is_cached(block));
        let cached: Vec<u32> = cached.collect();
        for &block in &cached {
            self.remember(block, EvictedBy::WeightsChanged);
            self.unqueue(block);
        }
        self.cached_blocks.clear();
        self.snapshots.clear();
        self.enqueue_unused(cached);
        self.weights_version += 1;
        true
    }

    /// The KV of the last of these tokens of a sequence: all of them, each with the version of the weights that
    /// computed it.
    pub(crate) fn kv_of(&self, seq: u64, tokens: &[u32]) -> PrefixKey {
        let s = &self.seqs[&seq];
        let version = |at: usize| s.old_versions.get(at).copied();
        let stamped = tokens
            .iter()
            .enumerate()
            .map(|(at, &token)| stamped(token, version(at).unwrap_or(self.weights_version)));
        (s.namespace, stamped.collect())
    }

    /// The tokens that a prefill would find in the pool, share in flight and copy, and why it would compute the rest.
    pub(crate) fn explain(&self, namespace: u8, tokens: &[u32]) -> Explanation {
        let (size, mut miss) = (self.block_size, None);
        let mut at = |indices: usize, reason| {
            miss = Some(Miss {
                position: indices * size,
                reason,
            })
        };
        if !self.caching {
            at(0, MissReason::ReadsDisabled);
            return Explanation {
                miss,
                ..Explanation::default()
            };
        }
        if self.state.is_some() {
            return self.explain_with_state(namespace, tokens);
        }
        let ready = self
            .matched(namespace, tokens, 0, 0, |block| self.is_ready(block))
            .len();
        let matched = self.matched(namespace, tokens, 0, 0, |_| true);
        let indices = matched.len();
        if blocks(&matched).any(|block| self.loading(block).is_some()) {
            at(ready, MissReason::Loading);
            let num_pool_tokens = ready * size;
            return Explanation {
                num_pool_tokens,
                miss,
                ..Explanation::default()
            };
        }
        if tokens.len() >= (indices + 1) * size {
            at(indices, self.why(namespace, tokens, indices));
        } else if tokens.len() < size {
            at(0, MissReason::BelowOneBlock);
        }
        // The last token is computed in any case.
        let max_reused = tokens.len() - 1;
        let copied = match self.partial_reuse {
            true => self.lender(namespace, tokens, indices).1,
            false => 0,
        };
        Explanation {
            num_pool_tokens: (ready * size).min(max_reused),
            num_in_flight_tokens: (indices * size).min(max_reused) - (ready * size).min(max_reused),
            num_copied_tokens: copied,
            miss,
        }
    }

    /// Whether a cached prefix agrees with the first `agrees` of these tokens, and goes on with `others`.
    pub(crate) fn leaves_at(
        &self,
        namespace: u8,
        tokens: &[u32],
        agrees: usize,
        others: &[u32],
    ) -> bool {
        let mut cached_blocks = self.cached_blocks.keys();
        cached_blocks.any(|((of, known), _)| {
            *of == namespace
                && known.starts_with(&tokens[..agrees])
                && known.get(agrees) != tokens.get(agrees)
                && op::raw(&known[agrees..]).starts_with(others)
        })
    }

    /// Why the block after the first `indices` of these tokens is not cached.
    fn why(&self, namespace: u8, tokens: &[u32], indices: usize) -> MissReason {
        let (from, end) = (indices * self.block_size, (indices + 1) * self.block_size);
        let wanted = &tokens[..end];
        let is_to_come = |seq: &Seq| {
            seq.namespace == namespace
                && !seq.is_private
                && seq.ahead > 0
                && seq.computed < end
                && seq.tokens.starts_with(wanted)
        };
        if self.seqs.values().any(is_to_come) {
            return MissReason::NotYetComputed;
        }
        let mine = || {
            self.cached_blocks
                .keys()
                .filter(|((of, _), _)| *of == namespace)
                .map(|((_, known), _)| known)
        };
        let evictions = self.evictions.get(&namespace).map_or(&[][..], |all| all);
        let since = evictions
            .iter()
            .rev()
            .position(|(evicted, _)| evicted == wanted);
        if let Some(since) = since.filter(|&since| since < self.num_blocks) {
            let by = evictions[evictions.len() - 1 - since].1;
            let num_blocks_since = since as u64 + 1;
            return MissReason::Evicted(Some(PastEviction {
                by,
                num_blocks_since,
            }));
        }
        if mine().any(|known| known.starts_with(wanted)) {
            return MissReason::Evicted(None);
        }
        let nexts = mine().filter(|known| known.len() >= end && known.starts_with(&tokens[..from]));
        let agrees = |known: &[u32]| {
            known
                .iter()
                .zip(tokens)
                .take_while(|(known, token)| known == token)
                .count()
        };
        match nexts.map(|known| (agrees(known), &known[..end])).max() {
            Some((position, known)) if position > 0 => MissReason::Diverged {
                position,
                tokens: known[position..].to_vec(),
            },
            _ => MissReason::New,
        }
    }

    fn copy(&mut self, seq: u64, index: usize, group: usize, source: u32) -> u32 {
        let copy = self.allocate();
        self.seqs.get_mut(&seq).expect("live").table[index][group] = Some(copy);
        let plan = self.newest();
        plan.copies.push((source, copy));
        plan.pinned.push(source);
        copy
    }

    pub(crate) fn reset(&mut self, seq: u64) {
        let s = self.seqs[&seq].clone();
        self.shorten(
            seq,
            &Seq {
                table: Vec::new(),
                computed: 0,
                ahead: 0,
                registered: 0,
                ..s.clone()
            },
        );
        self.touch(&s);
        let s = self.seqs.get_mut(&seq).expect("live");
        (s.last_kept, s.answer, s.is_private) = (0, 0, false);
        s.old_versions.clear();
    }

    pub(crate) fn free(&mut self, seq: u64) {
        self.seqs.get_mut(&seq).expect("live").dropped = true;
        self.bury(seq);
    }

    /// At most the first `num_tokens` tokens of a sequence stay cached for its sake.
    pub(crate) fn keep(&mut self, seq: u64, num_tokens: usize) {
        self.seqs.get_mut(&seq).expect("live").kept_indices = Some(num_tokens / self.block_size);
    }

    /// Ends a dropped sequence unless a plan holds it.
    fn bury(&mut self, seq: u64) {
        if self.seqs[&seq].dropped && self.seqs[&seq].planned == 0 {
            self.discard(seq);
            let s = self.seqs.remove(&seq).expect("live");
            self.enqueue_unused(blocks(&s.table).rev());
            self.touch(&s);
        }
    }

    /// Blocks that a sequence does not leave cached, and that have no other reference, are not cached any more.
    fn discard(&mut self, seq: u64) {
        let s = &self.seqs[&seq];
        let mut gone = Vec::new();
        for index in (s.kept_indices.unwrap_or(s.registered)..s.registered).rev() {
            for (group, own) in s.table[index].iter().enumerate() {
                let known = &s.tokens[..(index + 1) * self.block_size];
                let cached = self.known(s.namespace, known, group);
                let others = |block: u32| self.refs(block) - u32::from(*own == Some(block));
                gone.extend(cached.filter(|&block| others(block) == 0));
            }
        }
        for block in &gone {
            self.cached_blocks.retain(|_, cached| cached != block);
            self.unqueue(*block);
            self.drop_orphans();
        }
        self.enqueue_unused(gone);
    }

    pub(crate) fn begin(&mut self, budget: usize) {
        self.plans.push(Plan {
            budget,
            entries: Vec::new(),
            copies: Vec::new(),
            works: Vec::new(),
            pinned: Vec::new(),
        });
    }

    fn push(
        &mut self,
        seq: u64,
        (matched, source): (&[LogicalBlock], &[u32]),
        start: usize,
        len: usize,
        kind: EntryKind,
    ) {
        let preregisters = matches!(kind, EntryKind::Prefill { .. });
        let (lookahead, drafts, replay) = match kind {
            EntryKind::Lookahead(slots) => (slots, Vec::new(), 0),
            EntryKind::Drafts(drafts) => (0, drafts, 0),
            EntryKind::Prefill { replay } => (0, Vec::new(), replay),
        };
        let s = &self.seqs[&seq];
        let before = (s.table.len(), s.ahead, s.registered);
        blocks(matched).for_each(|block| self.unqueue(block));
        let copied = match matched.is_empty() && source.is_empty() {
            true => self.must_copy(seq, start),
            false => Vec::new(),
        };
        let copied = copied
            .into_iter()
            .map(|(index, group, block)| (index, group, block, self.copy(seq, index, group, block)))
            .collect();
        let s = self.seqs.get_mut(&seq).expect("live");
        let at_hand = matched.is_empty() && source.is_empty();
        let written = s.table.get(start / self.block_size);
        let written = written.filter(|_| at_hand && start / self.block_size >= s.registered);
        let in_place = written.into_iter().flatten().copied().flatten().collect();
        // Slots that were reserved past the boundary move up.
        let stood = s.registered;
        s.table.splice(stood..stood, matched.iter().cloned());
        s.registered += matched.len();
        let unseen = match matched.is_empty() {
            true => Vec::new(),
            false => self.take_unseen(seq, replay),
        };
        let source = self.copy_partial(seq, source);
        let s = self.seqs.get_mut(&seq).expect("live");
        let samples = start + len == s.tokens.len() + s.pending + drafts.len();
        (s.ahead, s.speculating) = (start + len, !drafts.is_empty());
        s.pending += usize::from(samples);
        s.planned += 1;
        let (mut already_cached, mut preregistered) = (Vec::new(), Vec::new());
        if preregisters && self.caching && self.sharing && !self.seqs[&seq].is_private {
            while self.seqs[&seq].registered < (start + len) / self.block_size
                && self.preregister(seq, start, &mut already_cached, &mut preregistered)
            {
            }
        }
        while self.seqs[&seq].table.len() < (start + len + lookahead).div_ceil(self.block_size) {
            let new = (0..self.groups.len()).map(|_| Some(self.allocate()));
            let new = new.collect();
            self.seqs.get_mut(&seq).expect("live").table.push(new);
        }
        let indices = self.seqs[&seq].registered - before.2;
        let plan = self.newest();
        plan.budget -= len;
        plan.entries.push(Entry {
            seq,
            start,
            len,
            samples,
            drafts,
            before,
            copied,
            in_place,
            reused: blocks(matched).collect(),
            already_cached,
            preregistered,
            source,
            indices,
            matched: matched.len(),
            unseen,
        });
    }

    /// The logical block behind the match gets copies of these blocks, which the plan holds.
    fn copy_partial(&mut self, seq: u64, source: &[u32]) -> Vec<(u32, u32)> {
        for &source in source {
            self.unqueue(source);
            self.newest().pinned.push(source);
        }
        let index = self.seqs[&seq].registered;
        if !source.is_empty() && self.seqs[&seq].table.len() == index {
            let new = source.iter().map(|_| Some(self.allocate())).collect();
            self.seqs.get_mut(&seq).expect("live").table.push(new);
        }
        let copies = source
            .iter()
            .zip(self.seqs[&seq].table.get(index).into_iter().flatten());
        let copies = copies.map(|(&source, copy)| (source, copy.expect("not slid past")));
        let copies: Vec<(u32, u32)> = copies.collect();
        self.newest().copies.extend(&copies);
        copies
    }

    /// Takes what no token after its registered logical blocks sees out of a table, the last one first.
    fn take_unseen(&mut self, seq: u64, replay: usize) -> Vec<(usize, usize, u32)> {
        let mut unseen = Vec::new();
        for group in 0..self.groups.len() {
            let s = &self.seqs[&seq];
            for index in (0..self.first_index_of(group, s.registered, replay)).rev() {
                let s = self.seqs.get_mut(&seq).expect("live");
                if let Some(block) = s.table[index][group].take() {
                    self.newest().pinned.push(block);
                    unseen.push((index, group, block));
                }
            }
        }
        unseen
    }

    /// Pre-registers the next logical block, which this step computes from `start` on. False if the commit must
    /// merge it.
    fn preregister(
        &mut self,
        seq: u64,
        start: usize,
        already_cached: &mut Vec<u32>,
        preregistered: &mut Vec<u32>,
    ) -> bool {
        let s = &self.seqs[&seq];
        let index = s.registered;
        if (index + 1) * self.block_size <= start {
            return false;
        }
        let tokens = s.tokens[..(index + 1) * self.block_size].to_vec();
        let (namespace, mine) = (s.namespace, s.table.get(index).cloned());
        let prefix = (namespace, tokens.clone());
        let mut known = (0..self.groups.len()).filter_map(|g| self.known(namespace, &tokens, g));
        if known.any(|block| self.loading(block).is_some()) {
            return false;
        }
        let mut entries = Vec::new();
        for group in 0..self.groups.len() {
            // Allocating for one group may evict what was there for the next.
            let cached = self.known(namespace, &tokens, group);
            if mine.is_some() {
                let any =
                    (0..self.groups.len()).any(|g| self.known(namespace, &tokens, g).is_some());
                if any && group == 0 {
                    return false;
                }
            }
            let block = match (cached, &mine) {
                (Some(block), _) => {
                    self.unqueue(block);
                    already_cached.push(block);
                    block
                }
                (None, Some(mine)) => mine[group].expect("not slid past"),
                (None, None) => self.allocate(),
            };
            if cached.is_none() {
                preregistered.push(block);
            }
            entries.push(Some(block));
        }
        for (group, block) in entries.iter().enumerate() {
            let prefix = (prefix.clone(), group);
            self.cached_blocks
                .insert(prefix, block.expect("just taken"));
        }
        let s = self.seqs.get_mut(&seq).expect("live");
        s.registered += 1;
        if mine.is_none() {
            s.table.push(entries);
        }
        true
    }

    fn newest(&mut self) -> &mut Plan {
        self.plans.last_mut().expect("open")
    }

    fn blocks_to_write(&self, seq: u64, len: usize) -> usize {
        let s = &self.seqs[&seq];
        let indices = (s.ahead + len).div_ceil(self.block_size);
        let copies = self.must_copy(seq, s.ahead).len();
        indices.saturating_sub(s.table.len()) * self.groups.len() + copies
    }

    pub(crate) fn decode(&mut self, seq: u64, lookahead: usize) -> bool {
        let needed = self.blocks_to_write(seq, 1 + lookahead);
        let fits = self.budget() > 0 && needed <= self.queue.len();
        if fits {
            let start = self.seqs[&seq].ahead;
            self.push(seq, (&[], &[]), start, 1, EntryKind::Lookahead(lookahead));
        }
        fits
    }

    pub(crate) fn speculate(&mut self, seq: u64, drafts: Vec<u32>) -> Prefill {
        let tokens = 1 + drafts.len();
        let (needed, available) = (self.blocks_to_write(seq, tokens), self.queue.len());
        if tokens > self.budget() {
            return Prefill::NoBudget;
        }
        if needed > available {
            return Prefill::NoRoom { needed, available };
        }
        let start = self.seqs[&seq].ahead;
        self.push(seq, (&[], &[]), start, tokens, EntryKind::Drafts(drafts));
        self.plan_decode_states(&[seq], false);
        Prefill::Planned {
            cached_tokens: 0,
            tokens,
            samples: true,
        }
    }

    /// Drafts for a decode of the newest plan, as many as there is budget and room for.
    pub(crate) fn draft(&mut self, seq: u64, mut drafts: Vec<u32>) -> usize {
        if !drafts.is_empty() {
            self.drop_save(seq);
        }
        let indices = self.queue.len() / self.groups.len() + self.seqs[&seq].table.len();
        let end = self.seqs[&seq].ahead;
        let capacity = indices * self.block_size - end;
        drafts.truncate(capacity.min(self.budget()));
        let count = drafts.len();
        if count == 0 {
            return 0;
        }
        let plan = self.newest();
        plan.budget -= count;
        let entry = plan.entries.iter_mut().find(|entry| entry.seq == seq);
        let entry = entry.expect("planned");
        entry.len += count;
        entry.drafts = drafts;
        while self.seqs[&seq].table.len() < (end + count).div_ceil(self.block_size) {
            let new = (0..self.groups.len()).map(|_| Some(self.allocate()));
            let new = new.collect();
            self.seqs.get_mut(&seq).expect("live").table.push(new);
        }
        let s = self.seqs.get_mut(&seq).expect("live");
        (s.ahead, s.speculating) = (end + count, true);
        count
    }

    pub(crate) fn trim(&mut self, seq: u64, num_tokens: usize) -> Option<usize> {
        let s = &self.seqs[&seq];
        if s.planned > 0 || num_tokens < s.computed {
            return None;
        }
        let keep = num_tokens.div_ceil(self.block_size).max(s.registered);
        let mut shorter = s.clone();
        shorter.table.truncate(keep);
        let gone = s.table.len() - shorter.table.len();
        self.shorten(seq, &shorter);
        Some(gone * self.groups.len())
    }

    pub(crate) fn prefill(&mut self, seq: u64, request: PrefillRequest) -> Result<Prefill, Error> {
        if request.max_tokens.min(self.budget()) == 0 {
            return Ok(Prefill::NoBudget);
        }
        if self.state.is_some() {
            return Ok(self.prefill_with_state(seq, request));
        }
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let may_match = self.caching && s.read_cache && s.ahead == s.registered * size;
        let may_match = may_match && !s.is_private;
        let matched = if may_match {
            self.matched(s.namespace, &s.tokens, s.registered, request.replay, |_| {
                true
            })
        } else {
            Vec::new()
        };
        if let Some(transfer) = blocks(&matched).find_map(|block| self.loading(block)) {
            return Ok(Prefill::Loading { transfer });
        }
        let source = if may_match && self.partial_reuse {
            self.lender(s.namespace, &s.tokens, s.registered + matched.len())
        } else {
            (Vec::new(), 0)
        };
        let answer = self.prefill_behind(seq, request, &matched, source.clone());
        match answer {
            Ok(Prefill::NoRoom { .. }) if source.1 > 0 => {
                self.prefill_behind(seq, request, &matched, (Vec::new(), 0))
            }
            answer => answer,
        }
    }

    fn prefill_behind(
        &mut self,
        seq: u64,
        request: PrefillRequest,
        matched: &[LogicalBlock],
        (source, copied_tokens): (Vec<u32>, usize),
    ) -> Result<Prefill, Error> {
        let PrefillRequest {
            max_tokens,
            spare_blocks,
            replay,
        } = request;
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let indices = s.table.len() + matched.len();
        let cached = matched.len() * size + copied_tokens;
        let cached_end = s.ahead + cached;
        let start = match cached {
            0 => s.ahead,
            _ => (cached_end - replay.min(cached)).min(s.tokens.len() - 1),
        };
        let limit = max_tokens.min(self.budget());
        let (all, fits) = (s.tokens.len(), start + limit);
        let end = match fits / size * size {
            _ if fits >= all => all,
            boundary if boundary > start && boundary >= cached_end => boundary,
            _ => fits,
        };
        let tokens = end - start;
        if end < cached_end {
            return Ok(Prefill::NoBudget);
        }
        let revived = blocks(matched)
            .chain(source.iter().copied())
            .filter(|block| self.queue.contains(block))
            .count();
        let copies = match matched.is_empty() && source.is_empty() {
            true => self.must_copy(seq, start).len(),
            false => 0,
        };
        let now = (start + tokens).div_ceil(size).saturating_sub(indices);
        let all = s.tokens.len().div_ceil(size).saturating_sub(indices);
        let new: usize = (0..self.groups.len())
            .map(|group| match (spare_blocks, self.groups[group]) {
                (None, _) => now,
                (Some(_), None) => all,
                (Some(_), Some(window)) => {
                    // Logical blocks that slide out of the window are reused: at most so many at once.
                    let reach = window.div_ceil(size) + (max_tokens + 2 * size - 2) / size;
                    // Blocks that slide out with the match are pinned by the plan.
                    let unseen = match matched.is_empty() {
                        true => 0,
                        false => self.first_index_of(group, s.registered + matched.len(), replay),
                    };
                    let (registered, reserved) = s.table.split_at(s.registered);
                    let held = registered
                        .iter()
                        .chain(matched)
                        .chain(reserved)
                        .skip(unseen);
                    let held = held.filter(|blocks| blocks[group].is_some()).count();
                    let peak = reach.min(s.tokens.len().div_ceil(size));
                    peak.saturating_sub(held).max(now)
                }
            })
            .sum();
        let needed = revived + new + copies + spare_blocks.unwrap_or(0);
        if needed > self.queue.len() {
            return Ok(Prefill::NoRoom {
                needed,
                available: self.queue.len(),
            });
        }
        let kind = EntryKind::Prefill { replay };
        self.push(seq, (matched, &source), start, tokens, kind);
        Ok(Prefill::Planned {
            cached_tokens: start - s.ahead,
            tokens,
            samples: start + tokens == s.tokens.len(),
        })
    }

    fn undo(&mut self, entry: Entry) {
        self.cached_blocks
            .retain(|_, block_id| !entry.preregistered.contains(block_id));
        let copied = entry.copied.iter().map(|copied| copied.3);
        let source = entry.source.iter().map(|source| source.1);
        let copies: Vec<u32> = copied.chain(source).collect();
        self.newest().copies.retain(|(_, to)| !copies.contains(to));
        let (table_len, ahead, registered) = entry.before;
        let mut s = self.seqs[&entry.seq].clone();
        let gone = s.table.split_off(table_len + entry.matched);
        let matched: Vec<LogicalBlock> = s
            .table
            .drain(registered..registered + entry.matched)
            .collect();
        for &(index, group, source, _) in &entry.copied {
            s.table[index][group] = Some(source);
        }
        for &(index, group, block) in &entry.unseen {
            s.table[index][group] = Some(block);
        }
        if entry.indices > 0 {
            s.registered = registered;
        }
        (s.ahead, s.speculating) = (ahead, false);
        s.pending -= usize::from(entry.samples);
        s.planned -= 1;
        self.seqs.insert(entry.seq, s.clone());
        blocks(&s.table).for_each(|block| self.unqueue(block));
        self.enqueue_unused(blocks(&gone).rev());
        self.enqueue_unused(blocks(&matched).rev());
        let copies = entry.copied.iter().map(|&(.., copy)| copy);
        self.enqueue_unused(copies);
        self.undo_work(entry.seq);
        self.slide(entry.seq);
        self.bury(entry.seq);
    }

    /// The others that had to go with it, because they were to share what it computes.
    pub(crate) fn cancel(&mut self, seq: u64) -> Option<Vec<u64>> {
        let plan = self.newest();
        let first = plan.entries.iter().position(|entry| entry.seq == seq);
        let (mut out, mut gone, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for (at, entry) in plan.entries.iter().enumerate() {
            let mut shared = entry.reused.iter().chain(&entry.already_cached);
            let mut in_place = entry.in_place.iter();
            let reuses = shared.any(|block| gone.contains(block));
            if Some(at) == first || reuses || in_place.any(|block| left.contains(block)) {
                gone.extend(entry.preregistered.clone());
                left.extend(entry.copied.iter().map(|copied| copied.2));
                out.push(at);
            }
        }
        let removed: Vec<Entry> = out
            .iter()
            .rev()
            .map(|&at| plan.entries.remove(at))
            .collect();
        plan.budget += removed.iter().map(|entry| entry.len).sum::<usize>();
        let ids = removed
            .iter()
            .rev()
            .map(|entry| entry.seq)
            .skip(1)
            .collect();
        removed.into_iter().for_each(|entry| self.undo(entry));
        first.map(|_| ids)
    }

    pub(crate) fn roll_back(&mut self) {
        // Every undo sees the pin; it is lifted at the end.
        while let Some(entry) = self.newest().entries.pop() {
            self.undo(entry);
        }
        self.close(self.plans.len() - 1);
    }

    /// Removes a plan; its pins end one by one.
    fn close(&mut self, plan: usize) {
        while !self.plans[plan].pinned.is_empty() {
            let block = self.plans[plan].pinned.remove(0);
            self.enqueue_unused([block]);
        }
        self.plans.remove(plan);
    }

    /// `accepted` holds the tokens of each sampling entry, in plan order.
    pub(crate) fn commit(&mut self, accepted: &[Vec<u32>]) -> Vec<Remapping> {
        let mut accepted = accepted.iter();
        let plan = self.plans[0].clone();
        let mut remappings = Vec::new();
        for entry in &plan.entries {
            let seq = &entry.seq;
            let mut s = self.seqs[seq].clone();
            s.computed = entry.start + entry.len;
            if entry.samples {
                let tokens = accepted.next().expect("one per sampling entry");
                s.extend(tokens);
                s.computed -= entry.drafts.len() + 1 - tokens.len();
                s.pending -= 1;
            }
            if !entry.drafts.is_empty() {
                (s.ahead, s.speculating) = (s.computed, false);
            }
            s.planned -= 1;
            let full = if self.caching && !s.is_private {
                s.computed / self.block_size
            } else {
                0
            };
            self.seqs.insert(*seq, s);
            let registered = self.seqs[seq].registered;
            for index in registered..full {
                if !self.merge(*seq, index, 1, &mut remappings) {
                    break;
                }
            }
            self.slide(*seq);
        }
        self.close_works();
        plan.entries.iter().for_each(|entry| self.bury(entry.seq));
        self.close(0);
        remappings
    }

    /// Late merge of a logical block that became full, while all plans from `later` on stay open. False if it is
    /// asked again later.
    fn merge(
        &mut self,
        seq: u64,
        index: usize,
        later: usize,
        remappings: &mut Vec<Remapping>,
    ) -> bool {
        let s = &self.seqs[&seq];
        let prefix = (
            s.namespace,
            s.tokens[..(index + 1) * self.block_size].to_vec(),
        );
        let entries = self.plans.iter().skip(later).flat_map(|plan| &plan.entries);
        let computing: Vec<u32> = entries
            .flat_map(|entry| entry.preregistered.clone())
            .collect();
        let cached = |group: usize| self.cached_blocks.get(&(prefix.clone(), group)).copied();
        let cached: Vec<Option<u32>> = (0..self.groups.len()).map(cached).collect();
        if cached
            .iter()
            .flatten()
            .any(|&block| computing.contains(&block) || self.loading(block).is_some())
        {
            return false; // a later step or a transfer is to bring it, if it comes to that
        }
        for (group, cached) in cached.into_iter().enumerate() {
            let mine = self.seqs[&seq].table[index][group].expect("not slid past");
            match cached {
                Some(first) if first == mine => {}
                Some(first) if self.refs(first) > 0 => {
                    self.seqs.get_mut(&seq).expect("live").table[index][group] = Some(first);
                    remappings.push(Remapping {
                        sequence: seq,
                        group,
                        index,
                        old_block: mine.into(),
                        new_block: first.into(),
                    });
                    if self.plans.len() > later {
                        self.newest().pinned.push(mine);
                    }
                    self.enqueue_unused([mine]);
                }
                known => {
                    self.cached_blocks.insert((prefix.clone(), group), mine);
                    if let Some(evictable) = known {
                        self.unqueue(evictable);
                        self.enqueue_unused([evictable]);
                    }
                }
            }
        }
        self.seqs.get_mut(&seq).expect("live").registered = index + 1;
        true
    }

    /// Gives back what no later token sees.
    fn slide(&mut self, seq: u64) {
        let s = &self.seqs[&seq];
        let full = s.computed / self.block_size;
        let indices = if self.caching && !s.is_private {
            full.min(s.registered)
        } else {
            full
        };
        for group in 0..self.groups.len() {
            for index in (0..self.first_index(group, indices)).rev() {
                let s = self.seqs.get_mut(&seq).expect("live");
                let gone = s.table[index][group].take();
                self.enqueue_unused(gone);
            }
        }
    }

    pub(crate) fn reuse_cached(&mut self, seq: u64) -> usize {
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let stands = s.computed == s.registered * size && s.table.len() == s.registered;
        if !stands || s.is_private || !self.caching || !s.read_cache {
            return 0;
        }
        let matched = match self.state {
            None => self.matched(s.namespace, &s.tokens, s.registered, 0, |block| {
                self.is_ready(block)
            }),
            Some(_) => self.matched_to_snapshot(seq, &s),
        };
        if matched.is_empty() {
            return 0;
        }
        blocks(&matched).for_each(|block| self.unqueue(block));
        let now = self.seqs.get_mut(&seq).expect("live");
        now.table.extend(matched);
        now.registered = now.table.len();
        now.computed = (now.registered * size).min(s.tokens.len() - 1);
        now.ahead = now.computed;
        let (registered, reused) = (now.registered, now.computed - s.computed);
        for group in 0..self.groups.len() {
            let unseen = self.first_index(group, registered).min(s.registered);
            for index in (0..unseen).rev() {
                let gone = self.seqs.get_mut(&seq).expect("live").table[index][group].take();
                self.enqueue_unused(gone);
            }
        }
        reused
    }

    pub(crate) fn reserve(&mut self, seq: u64, num_tokens: usize) -> Answer {
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let stands = s.computed == s.registered * size && s.table.len() == s.registered;
        let has_begun = self.state.is_some() && s.ahead > 0;
        if !stands || s.is_private || has_begun || !self.caching || !s.read_cache {
            return Answer::NotNeeded;
        }
        let is_ready = |block| self.is_ready(block);
        let whole = num_tokens.min(s.tokens.len()) / size;
        let tokens = match self.state {
            None => &s.tokens[..],
            Some(_) => &s.tokens[..whole * size],
        };
        let matched = self.matched(s.namespace, tokens, s.registered, 0, is_ready);
        let from = s.registered + matched.len();
        let known = |index: usize| -> Vec<Option<u32>> {
            let tokens = &s.tokens[..(index + 1) * size];
            let groups = 0..self.groups.len();
            groups
                .map(|group| self.known(s.namespace, tokens, group))
                .collect()
        };
        let is_unready = |index: &usize| {
            let mut blocks = known(*index).into_iter().flatten();
            blocks.any(|block| !self.is_ready(block))
        };
        let unready = (from..whole).find(is_unready);
        let end = unready.unwrap_or(whole).max(from);
        if let Some(unready) = unready
            && (unready == from || self.state.is_some())
        {
            let mut blocks = known(unready).into_iter().flatten();
            let loading = blocks.find_map(|block| self.loading(block));
            return loading.map_or(Answer::NotNeeded, Answer::Loading);
        }
        let mut held: Vec<u32> = blocks(&s.table).chain(blocks(&matched)).collect();
        let prefix = (s.namespace, s.tokens[..end * size].to_vec());
        let mut loads_state = self.state.is_some() && end > 0;
        if loads_state && let Some(snapshot) = self.snapshots.get(&prefix) {
            held.extend(&snapshot.blocks);
            loads_state = false;
        }
        let loads_it = |load: &Load| match &load.snapshot {
            Some((of, _)) => of.as_ref() == Some(&prefix),
            None => false,
        };
        let mut loads = self.loads.iter();
        if loads_state && let Some((&transfer, _)) = loads.find(|(_, load)| loads_it(load)) {
            return Answer::Loading(transfer);
        }
        // A snapshot needs its last block in every layer group.
        let first = match loads_state {
            true => from.min(end - 1),
            false => from,
        };
        let mut missing = Vec::new();
        for index in first..end {
            for (group, block) in known(index).into_iter().enumerate() {
                let is_read = index >= self.first_index(group, end);
                match block {
                    Some(block) if index < from && held.contains(&block) => {}
                    Some(block) => held.push(block),
                    None if is_read || loads_state && index == end - 1 => {
                        missing.push((index, group));
                    }
                    None => {}
                }
            }
        }
        let num_state_blocks = match loads_state {
            true => self.state.map_or(0, |state| state.blocks),
            false => 0,
        };
        if missing.len() + num_state_blocks == 0 {
            return Answer::NotNeeded;
        }
        let revived = held.iter().filter(|block| self.queue.contains(block));
        let (needed, available) = (
            missing.len() + num_state_blocks + revived.count(),
            self.queue.len(),
        );
        if needed > available {
            return Answer::NoRoom(needed, available);
        }
        held.iter().for_each(|&block| self.unqueue(block));
        if let Some(held) = self.snapshots.get_mut(&prefix) {
            held.is_spare = false;
        }
        let loading = missing.into_iter();
        let loading: Vec<_> = loading
            .map(|(index, group)| (index, group, self.allocate()))
            .collect();
        let of_state: Vec<u32> = (0..num_state_blocks).map(|_| self.allocate()).collect();
        for &(index, group, block) in &loading {
            let tokens = s.tokens[..(index + 1) * size].to_vec();
            self.cached_blocks
                .insert(((s.namespace, tokens), group), block);
        }
        self.num_loads += 1;
        let load = Load {
            seq,
            from: first,
            end,
            loading: loading.clone(),
            snapshot: loads_state.then(|| (Some(prefix), of_state.clone())),
            held,
        };
        self.loads.insert(self.num_loads, load);
        let of_state = of_state.into_iter();
        let of_state = of_state.map(|block| (end - 1, self.groups.len(), block));
        Answer::Reserved(loading.into_iter().chain(of_state).collect())
    }

    /// The logical blocks of a transfer.
    pub(crate) fn rows_of(&self, load: u64) -> std::ops::Range<usize> {
        let load = &self.loads[&load];
        load.from..load.end
    }

    /// Whether others can meet the blocks of a transfer.
    pub(crate) fn is_awaited(&self, load: u64) -> bool {
        let load = &self.loads[&load];
        let mut loading = load.loading.iter();
        let snapshot = load.snapshot.as_ref();
        loading.all(|loading| self.is_cached(loading.2))
            && snapshot.is_none_or(|(prefix, _)| prefix.is_some())
    }

    /// Returns the tokens that its sequence reuses.
    pub(crate) fn end_load(&mut self, number: u64, num_blocks: usize) -> usize {
        let awaited = self.is_awaited(number);
        let ended = self.loads.remove(&number).expect("open");
        let end = ended.from + num_blocks;
        let mut restored = 0;
        for &(index, _, block) in &ended.loading {
            if index >= end || !awaited {
                self.cached_blocks.retain(|_, block_id| *block_id != block);
            } else {
                restored += 1;
            }
        }
        let held: Vec<u32> = ended.held.iter().copied().chain(ended.blocks()).collect();
        if end == ended.end
            && let Some((Some(prefix), blocks)) = &ended.snapshot
        {
            self.restore_snapshot(prefix, blocks);
        }
        // Nothing is loading any more, and everything is held until its sequence has reused it.
        let last = Load {
            loading: Vec::new(),
            snapshot: None,
            held: held.clone(),
            ..ended
        };
        let seq = last.seq;
        self.loads.insert(number, last);
        let at_rest = self.seqs.get(&seq);
        let at_rest = at_rest.is_some_and(|seq| seq.planned == 0);
        let reused = match restored > 0 && at_rest && self.state.is_none() {
            true => self.reuse_cached(seq),
            false => 0,
        };
        self.loads.remove(&number);
        self.enqueue_unused(held.into_iter().rev());
        reused
    }

    pub(crate) fn abandon(&mut self, load: u64) {
        let load = self.loads.get_mut(&load).expect("open");
        let held = std::mem::take(&mut load.held);
        let loading = load.loading.clone();
        if let Some((prefix, _)) = &mut load.snapshot {
            *prefix = None;
        }
        for (_, _, block) in loading {
            self.cached_blocks.retain(|_, block_id| *block_id != block);
        }
        self.enqueue_unused(held.into_iter().rev());
    }

    pub(crate) fn evict(&mut self, pin: usize, count: usize) -> Vec<u32> {
        let queued = self.queued().into_iter();
        let evictable = queued.filter(|&block| self.is_cached(block));
        let mut evicted: Vec<u32> = evictable.take(count).collect();
        if self.state.is_some() {
            evicted = self.evict_with_state(count);
        }
        for &block in &evicted {
            self.unqueue(block);
            self.evict_block(block, EvictedBy::Policy(Eviction::Lru));
        }
        let indices = evicted.iter().map(|&block| vec![Some(block)]);
        self.pins.insert(pin, indices.collect());
        evicted
    }

    pub(crate) fn extend(&mut self, seq: u64, num_tokens: usize) -> Extend {
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let (mut new, mut copies) = (Vec::new(), Vec::new());
        let indices = (s.computed + num_tokens).div_ceil(size);
        if num_tokens > 0 {
            let to_copy = self.held_by_others(seq, s.computed);
            let missing = indices.saturating_sub(s.table.len()) * self.groups.len();
            let (needed, available) = (missing + to_copy.len(), self.queue.len());
            if needed > available {
                return Extend::NoRoom { needed, available };
            }
            for (index, group, source) in to_copy {
                let copy = self.allocate();
                self.seqs.get_mut(&seq).expect("live").table[index][group] = Some(copy);
                self.enqueue_unused([source]);
                copies.push((source.into(), copy.into()));
            }
            while self.seqs[&seq].table.len() < indices {
                let added: LogicalBlock = (0..self.groups.len())
                    .map(|_| Some(self.allocate()))
                    .collect();
                new.extend(added.iter().flatten().map(|&block| BlockId::from(block)));
                self.seqs.get_mut(&seq).expect("live").table.push(added);
            }
        }
        Extend::Extended {
            blocks: new,
            copies,
        }
    }

    pub(crate) fn publish(
        &mut self,
        seq: u64,
        num_tokens: usize,
        tokens: &[u32],
    ) -> Vec<Remapping> {
        let s = self.seqs.get_mut(&seq).expect("live");
        s.extend(tokens);
        s.computed += num_tokens;
        s.ahead = s.computed;
        let (registered, full) = (s.registered, s.computed / self.block_size);
        let mut remappings = Vec::new();
        if self.caching && !self.seqs[&seq].is_private {
            for index in registered..full {
                if !self.merge(seq, index, 0, &mut remappings) {
                    break;
                }
            }
        }
        self.slide(seq);
        remappings
    }

    pub(crate) fn budget(&self) -> usize {
        self.plans.last().map_or(0, |plan| plan.budget)
    }

    pub(crate) fn evict_all(&mut self) -> usize {
        let queued = self.queued().into_iter();
        let evictable: Vec<u32> = queued.filter(|&block| self.is_cached(block)).collect();
        for &block in &evictable {
            if let Some(prefix) = self.snapshot_of(block) {
                self.drop_snapshot(&prefix);
            }
        }
        for &block in &evictable {
            if self.is_cached(block) {
                self.unqueue(block);
                self.evict_block(block, EvictedBy::EvictAll);
                self.enqueue_unused([block]);
            }
        }
        evictable.len()
    }
}
