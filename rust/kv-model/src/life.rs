//! The model: which actions a state has, and where they lead.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::pool::{BlockId, MAX_BLOCK_SIZE};
use crate::state::{NUM_SEQUENCES, Pin, Sequence, State, Step, Transfer};
use crate::tokens::Tokens;

/// How large the explored world is.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Tokens of a block: 1 or 2.
    pub block_size: usize,
    /// The most tokens of a sequence. The last one is sampled and never computed.
    pub max_tokens: usize,
    /// Open steps: 1 or 2.
    pub max_steps: usize,
    /// Whether there are transfers, one at a time.
    pub transfers: bool,
}

/// An enum that lists its variants.
macro_rules! listed {
    ($(#[$enum:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident,)* }) => {
        $(#[$enum])*
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];
        }
    };
}

listed! {
    /// A bug to seed: the checker must find it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Flaw {
        /// Late merge does not release the duplicate.
        KeepsDuplicate,
        /// Late merge releases the duplicate at once, although the next step reads it.
        ReleasesDuplicateEarly,
        /// Late merge remaps to an evictable block and leaves it in the free queue.
        MergesIntoEvictable,
        /// A match compares the tokens of a block and not those before it.
        IgnoresParent,
        /// A rollback leaves prefixes that no step has computed.
        KeepsRolledBack,
        /// Freeing a sequence releases its blocks while a step computes it.
        FreesDuringStep,
        /// A transfer that has failed in part caches all of its blocks.
        CachesFailedLoad,
    }
}

/// An action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Creates a sequence.
    Create {
        /// Where.
        seq: usize,
        /// Its tokens.
        prompt: Tokens,
    },
    /// Opens a step.
    BeginStep,
    /// Plans known tokens, after the cached ones.
    Prefill {
        /// The sequence.
        seq: usize,
        /// The most to compute.
        max_tokens: usize,
    },
    /// Plans the last known or pending token.
    Decode {
        /// The sequence.
        seq: usize,
    },
    /// Runs the oldest step and commits it.
    Commit {
        /// A token for each entry that samples.
        sampled: Tokens,
    },
    /// Rolls the newest step back.
    Rollback,
    /// Frees a sequence.
    Free {
        /// The sequence.
        seq: usize,
    },
    /// Releases the blocks of a sequence and keeps its tokens.
    Reset {
        /// The sequence.
        seq: usize,
    },
    /// Pins the cached prefix of a sequence.
    Pin {
        /// The sequence.
        seq: usize,
    },
    /// Pins the longest cached prefix of these tokens.
    MatchPrefix {
        /// The tokens.
        tokens: Tokens,
    },
    /// Puts the pinned blocks into the table of a sequence without blocks.
    Attach {
        /// The sequence.
        seq: usize,
    },
    /// Drops the pin.
    Unpin,
    /// Evicts the block that is next.
    Evict,
    /// Begins to load the KV of a sequence's tokens, after the cached ones.
    Reserve {
        /// The sequence.
        seq: usize,
    },
    /// Ends the transfer: its first blocks are filled.
    Complete {
        /// How many; none if it has failed.
        blocks: usize,
    },
}

/// A remapping of a table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remapping {
    /// The sequence.
    pub seq: usize,
    /// Index in its table.
    pub index: usize,
    /// The duplicate.
    pub old_block: BlockId,
    /// The block that was cached first.
    pub new_block: BlockId,
}

/// The answer to an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No value.
    Done,
    /// Of a prefill.
    Planned {
        /// Cached tokens that it reused.
        cached_tokens: usize,
        /// Tokens to compute.
        tokens: usize,
        /// Whether it samples.
        samples: bool,
    },
    /// Too few blocks; nothing was changed.
    NoRoom {
        /// Blocks needed.
        needed: usize,
        /// Blocks that can be allocated.
        available: usize,
    },
    /// Of a commit.
    Merged(Vec<Remapping>),
    /// Of a prefill that would reuse blocks of the transfer; nothing was changed.
    Loading,
    /// Of a reservation: the blocks to fill.
    Reserved(Vec<BlockId>),
    /// Of a completed transfer: the tokens that its sequence reuses.
    Reused(usize),
}

impl Answer {
    /// Whether nothing was changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::NoRoom { .. } | Self::Loading)
    }
}

listed! {
    /// Cases that the checker counts: one that never saw a merge has shown nothing about merges.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Event {
        /// A prefill reused cached blocks.
        Hit,
        /// A prefill reused blocks that an open step computes.
        Shared,
        /// A prompt was wholly cached.
        FullHit,
        /// Too few blocks.
        NoRoom,
        /// An allocation evicted a block.
        Evicted,
        /// Late merge, case 1: the prefix is in use.
        Remapped,
        /// Case 1 while the next step is open.
        RemappedDuringStep,
        /// Case 2: the prefix is on an evictable block.
        TakenOver,
        /// Case 3: equal tokens after other tokens.
        OtherParent,
        /// Case 4: the prefix is new.
        Inserted,
        /// The next step computes the prefix: looked up again later.
        Delayed,
        /// A sequence was freed while a step had it.
        Dropped,
        /// A step with preregistered blocks was rolled back.
        RolledBack,
        /// A prefill met a block that is being loaded.
        Awaited,
        /// A commit met a block that is being loaded.
        LoadedMeanwhile,
        /// A transfer ended, and its sequence reused its blocks.
        Restored,
        /// A transfer ended after its sequence.
        Orphaned,
    }
}

/// The life of a block: 2 sequences, a pin and the open steps on one pool.
#[derive(Debug)]
pub struct BlockLife {
    /// How large it is.
    pub bounds: Bounds,
    /// Its bug.
    pub flaw: Option<Flaw>,
    seen: [AtomicU64; Event::ALL.len()],
}

impl BlockLife {
    /// A model of a correct manager.
    ///
    /// # Panics
    ///
    /// More than 8 blocks, or a block size that `Tokens` cannot hold.
    pub fn new(bounds: Bounds) -> Self {
        assert!((1..=MAX_BLOCK_SIZE).contains(&bounds.block_size) && bounds.num_blocks <= 8);
        Self {
            bounds,
            flaw: None,
            seen: Default::default(),
        }
    }

    /// A model of one with a bug.
    pub fn with_flaw(bounds: Bounds, flaw: Flaw) -> Self {
        let flaw = Some(flaw);
        Self {
            flaw,
            ..Self::new(bounds)
        }
    }

    /// How often exploring came across an event.
    pub fn count(&self, event: Event) -> u64 {
        self.seen[event as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn saw(&self, event: Event) {
        self.seen[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Blocks that `tokens` tokens take.
    pub(crate) fn num_blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.bounds.block_size)
    }

    /// The block that is cached under `prefix`, computed or not.
    pub(crate) fn find(&self, state: &State, prefix: Tokens) -> Option<BlockId> {
        match self.flaw {
            Some(Flaw::IgnoresParent) => {
                state.pool.find(|cached| self.equal_blocks(cached, prefix))
            }
            _ => state.pool.find(|cached| cached == prefix),
        }
    }

    /// Whether two prefixes are as long, and their last blocks hold equal tokens.
    pub(crate) fn equal_blocks(&self, left: Tokens, right: Tokens) -> bool {
        let start = |of: Tokens| of.len() - self.bounds.block_size;
        left.len() == right.len() && left.from(start(left)) == right.from(start(right))
    }

    /// The actions of a state. Some of them may be refused.
    pub fn enabled(&self, state: &State, actions: &mut Vec<Action>) {
        let longest = self.bounds.max_tokens;
        if let Some(seq) = state.sequences.iter().position(Option::is_none) {
            let prompts = (1..longest).flat_map(Tokens::all);
            actions.extend(prompts.map(|prompt| Action::Create { seq, prompt }));
        }
        let newest = state.steps.len().checked_sub(1);
        for seq in 0..NUM_SEQUENCES {
            let Some(sequence) = &state.sequences[seq] else {
                continue;
            };
            if sequence.dropped {
                continue;
            }
            if newest.is_some() {
                self.plannable(state, seq, sequence, actions);
            }
            actions.push(Action::Free { seq });
            if state.is_planned(seq) {
                continue;
            }
            if self.bounds.transfers && self.to_load(state, seq).is_some() {
                actions.push(Action::Reserve { seq });
            }
            if !sequence.table.is_empty() {
                actions.push(Action::Reset { seq });
            }
            let attaches = |pin: &Pin| sequence.tokens.starts_with(pin.tokens);
            if sequence.table.is_empty() && state.pin.as_ref().is_some_and(attaches) {
                actions.push(Action::Attach { seq });
            }
        }
        if state.steps.len() < self.bounds.max_steps {
            actions.push(Action::BeginStep);
        }
        if newest.is_some() {
            actions.push(Action::Rollback);
            let samples = state.steps[0].entries.iter().filter(|entry| entry.samples);
            actions.extend(Tokens::all(samples.count()).map(|sampled| Action::Commit { sampled }));
        }
        if !state.pool.evictable.is_empty() {
            actions.push(Action::Evict);
        }
        if let Some(transfer) = &state.transfer {
            let all = 0..=transfer.blocks.len();
            actions.extend(all.map(|blocks| Action::Complete { blocks }));
        }
        if state.pin.is_some() {
            actions.push(Action::Unpin);
            return;
        }
        let unpinned = (0..NUM_SEQUENCES).filter(|&seq| !self.prefix_of(state, seq).is_empty());
        actions.extend(unpinned.map(|seq| Action::Pin { seq }));
        let size = self.bounds.block_size;
        let all = Tokens::all((longest - 1) / size * size);
        let cached = all.filter(|&tokens| !self.longest_cached(state, tokens).is_empty());
        actions.extend(cached.map(|tokens| Action::MatchPrefix { tokens }));
    }

    fn plannable(&self, state: &State, seq: usize, sequence: &Sequence, actions: &mut Vec<Action>) {
        let newest = state.steps.last().expect("an open step");
        let known = sequence.tokens.len() + sequence.pending;
        let left = known - sequence.planned;
        if newest.entries.iter().any(|entry| entry.seq == seq) || known == self.bounds.max_tokens {
            return;
        }
        if left == 1 {
            actions.push(Action::Decode { seq });
        }
        if sequence.pending == 0 && left > 0 {
            let max_tokens = self.bounds.max_tokens;
            actions.push(Action::Prefill { seq, max_tokens });
            if left > 1 {
                let max_tokens = 1;
                actions.push(Action::Prefill { seq, max_tokens });
            }
        }
    }

    /// The blocks of the longest prefix of a sequence that is cached and computed.
    fn prefix_of(&self, state: &State, seq: usize) -> Vec<BlockId> {
        let Some(sequence) = state.sequences[seq].as_ref().filter(|of| !of.dropped) else {
            return Vec::new();
        };
        let registered = sequence.table[..sequence.registered].iter().copied();
        let is_ready = |block: &BlockId| state.pool.block(*block).is_ready();
        registered.take_while(is_ready).collect()
    }

    /// The blocks of the longest prefix of `tokens` that is cached and computed.
    pub(crate) fn longest_cached(&self, state: &State, tokens: Tokens) -> Vec<BlockId> {
        let indices = 1..=tokens.len() / self.bounds.block_size;
        let blocks = indices
            .map_while(|index| self.find(state, tokens.first(index * self.bounds.block_size)));
        let is_ready = |block: &BlockId| state.pool.block(*block).is_ready();
        blocks.take_while(is_ready).collect()
    }

    /// The state after an action, and its answer.
    pub fn apply(&self, state: &State, action: Action) -> (State, Answer) {
        let mut next = state.clone();
        let answer = self.change(&mut next, action);
        (next, answer)
    }

    fn change(&self, state: &mut State, action: Action) -> Answer {
        match action {
            Action::Create { seq, prompt } => {
                state.sequences[seq] = Some(Sequence {
                    tokens: prompt,
                    computed: 0,
                    planned: 0,
                    pending: 0,
                    registered: 0,
                    table: Vec::new(),
                    dropped: false,
                });
            }
            Action::BeginStep => state.steps.push(Step::default()),
            Action::Prefill { seq, max_tokens } => return self.prefill(state, seq, max_tokens),
            Action::Decode { seq } => return self.decode(state, seq),
            Action::Commit { sampled } => return Answer::Merged(self.commit(state, sampled)),
            Action::Rollback => self.roll_back(state),
            Action::Free { seq } => self.free(state, seq),
            Action::Reset { seq } => {
                self.shorten(state, seq, 0);
                let sequence = state.at_mut(seq);
                (sequence.computed, sequence.planned, sequence.registered) = (0, 0, 0);
            }
            Action::Pin { seq } => {
                let blocks = self.prefix_of(state, seq);
                let tokens = state.at(seq).tokens;
                self.pin(state, blocks, tokens);
            }
            Action::MatchPrefix { tokens } => {
                let blocks = self.longest_cached(state, tokens);
                self.pin(state, blocks, tokens);
            }
            Action::Attach { seq } => self.attach(state, seq),
            Action::Unpin => {
                let pin = state.pin.take().expect("a pin");
                for block in pin.blocks.into_iter().rev() {
                    state.pool.unpin(block);
                }
            }
            Action::Evict => state.pool.evict(),
            Action::Reserve { seq } => return self.reserve(state, seq),
            Action::Complete { blocks } => return Answer::Reused(self.complete(state, blocks)),
        }
        Answer::Done
    }

    fn pin(&self, state: &mut State, blocks: Vec<BlockId>, tokens: Tokens) {
        for &block in &blocks {
            state.pool.pin(block);
        }
        let tokens = tokens.first(blocks.len() * self.bounds.block_size);
        state.pin = Some(Pin { tokens, blocks });
    }

    fn attach(&self, state: &mut State, seq: usize) {
        let Pin { tokens, blocks } = state.pin.clone().expect("a pin");
        for &block in &blocks {
            state.pool.hold(block);
        }
        let sequence = state.at_mut(seq);
        sequence.registered = blocks.len();
        sequence.table = blocks;
        // The last token is computed in any case.
        sequence.computed = tokens.len().min(sequence.tokens.len() - 1);
        sequence.planned = sequence.computed;
    }

    fn free(&self, state: &mut State, seq: usize) {
        if !state.is_planned(seq) || self.flaw == Some(Flaw::FreesDuringStep) {
            return self.end_sequence(state, seq);
        }
        self.saw(Event::Dropped);
        self.leave_transfer(state, seq);
        state.at_mut(seq).dropped = true;
    }

    /// Ends a sequence that no step has any more.
    pub(crate) fn end_sequence(&self, state: &mut State, seq: usize) {
        self.leave_transfer(state, seq);
        self.shorten(state, seq, 0);
        state.sequences[seq] = None;
    }

    /// A transfer goes on without the sequence that asked for it.
    fn leave_transfer(&self, state: &mut State, seq: usize) {
        if let Some(transfer) = &mut state.transfer {
            transfer.owner = transfer.owner.filter(|&owner| owner != seq);
        }
    }

    /// Shortens a table to `indices` blocks, the last one first.
    pub(crate) fn shorten(&self, state: &mut State, seq: usize, indices: usize) {
        for block in state.at_mut(seq).table.split_off(indices).into_iter().rev() {
            state.pool.release(block);
        }
    }
}

/// Transfers.
impl BlockLife {
    /// The cached blocks after a sequence's position, and how many blocks after them can be loaded. `None`: nothing.
    fn to_load(&self, state: &State, seq: usize) -> Option<(Vec<BlockId>, usize)> {
        let block_size = self.bounds.block_size;
        let matched = self.match_ready(state, seq)?;
        let sequence = state.at(seq);
        let from = sequence.registered + matched.len();
        let is_missing = |index: &usize| {
            let prefix = sequence.tokens.first((index + 1) * block_size);
            self.find(state, prefix).is_none()
        };
        let indices = (from..sequence.tokens.len() / block_size)
            .take_while(is_missing)
            .count();
        (indices > 0 && state.transfer.is_none()).then_some((matched, indices))
    }

    /// The cached and computed blocks after the block boundary that a sequence has reached.
    fn match_ready(&self, state: &State, seq: usize) -> Option<Vec<BlockId>> {
        let (sequence, block_size) = (state.at(seq), self.bounds.block_size);
        let registered = sequence.registered;
        if sequence.table.len() != registered || sequence.planned != registered * block_size {
            return None;
        }
        let cached = self.longest_cached(state, sequence.tokens);
        Some(cached.get(registered..).unwrap_or_default().to_vec())
    }

    fn reserve(&self, state: &mut State, seq: usize) -> Answer {
        let (matched, count) = self.to_load(state, seq).expect("something to load");
        let is_queued = |block: &&BlockId| state.pool.is_queued(**block);
        let needed = count + matched.iter().filter(is_queued).count();
        let available = state.pool.available();
        if needed > available {
            self.saw(Event::NoRoom);
            return Answer::NoRoom { needed, available };
        }
        let sequence = state.at(seq);
        let held = [&sequence.table[..], &matched].concat();
        let (tokens, block_size) = (sequence.tokens, self.bounds.block_size);
        for &block in &held {
            state.pool.pin_for_step(block);
        }
        let mut blocks = Vec::new();
        for _ in 0..count {
            blocks.push(state.pool.allocate_loading());
        }
        for (index, &block) in (held.len()..).zip(&blocks) {
            state
                .pool
                .store(block, tokens.first((index + 1) * block_size), None);
        }
        state.transfer = Some(Transfer {
            owner: Some(seq),
            tokens: tokens.first((held.len() + count) * block_size),
            blocks: blocks.clone(),
            held,
        });
        Answer::Reserved(blocks)
    }

    /// Ends the transfer. Returns how many tokens its sequence reuses.
    fn complete(&self, state: &mut State, count: usize) -> usize {
        let transfer = state.transfer.take().expect("an open transfer");
        let block_size = self.bounds.block_size;
        for (at, &id) in transfer.blocks.iter().enumerate() {
            let block = state.pool.block_mut(id);
            block.is_loading = false;
            if at < count {
                let start = (transfer.held.len() + at) * block_size;
                for offset in 0..block_size {
                    block.kv[offset] = Some(transfer.tokens.first(start + offset + 1));
                }
            } else if self.flaw != Some(Flaw::CachesFailedLoad) {
                state.pool.forget(id);
            }
        }
        let owner = transfer.owner.filter(|&seq| !state.is_planned(seq));
        let reused = match owner {
            Some(seq) if count > 0 => self.reuse_cached(state, seq),
            _ => 0,
        };
        self.saw(match transfer.owner {
            Some(_) if reused > 0 => Event::Restored,
            _ => Event::Orphaned,
        });
        for &block in transfer.held.iter().chain(&transfer.blocks).rev() {
            // The block of a failed load has no KV that could be lost.
            state.pool.unpin_for_step(block);
        }
        reused
    }

    /// Puts the cached blocks after a sequence's position into its table. Returns how many tokens it reuses.
    fn reuse_cached(&self, state: &mut State, seq: usize) -> usize {
        let Some(matched) = self.match_ready(state, seq).filter(|of| !of.is_empty()) else {
            return 0;
        };
        for &block in &matched {
            state.pool.hold(block);
        }
        let block_size = self.bounds.block_size;
        let sequence = state.at_mut(seq);
        sequence.table.extend(&matched);
        sequence.registered += matched.len();
        let before = sequence.computed;
        // The last token is computed in any case.
        sequence.computed = (sequence.registered * block_size).min(sequence.tokens.len() - 1);
        sequence.planned = sequence.computed;
        sequence.computed - before
    }
}
