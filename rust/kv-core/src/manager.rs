//! The facade: deferred releases, keys and recording. `state` and `step` do the work.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::calls::{Answer, Call, Recorder};
use crate::config::Config;
use crate::error::Error;
use crate::events::{Event, Evicted};
use crate::explain::{Explanation, Miss};
use crate::handles::{Deferred, Pin, PlanHandle, PrefixBlocks, SeqHandle, Shared};
use crate::hash::ContentHasher;
use crate::ids::{BlockId, NodePosition, PlanKey, SeqKey, TransferKey};
use crate::pool::Pool;
use crate::radix::RadixTree;
use crate::state::State;
use crate::stats::{BlockState, PoolSnapshot, PoolUsage, StateUsage, Stats};
use crate::step::{
    Extend, PlanView, Prefill, PrefillRequest, Remapping, SharedPrefixes, StateCopy, StepArrays,
    TableRows,
};
use crate::switch::{Labelled, Namespace};
use crate::sync::Arc;
use crate::table::BlockTable;
use crate::transfers::Reserve;

static MANAGERS: AtomicU32 = AtomicU32::new(0);

/// The owner of the pool. One thread at a time uses it; any thread may drop pins and handles.
pub struct BlockManager {
    config: Config,
    shared: Arc<Shared>,
    pub(crate) state: State,
    recorder: Option<Box<dyn Recorder>>,
    /// Pins granted since the recorder was set.
    pins_recorded: u64,
}

impl BlockManager {
    /// A pool with every block free.
    pub fn new(config: Config) -> Result<Self, Error> {
        let groups = config.validate()?;
        let num_blocks = config.num_blocks;
        let oom = |_| Error::OutOfMemory { num_blocks };
        probe_memory(&config).map_err(oom)?;
        let id = MANAGERS.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared::new(id, num_blocks).map_err(oom)?);
        let pool = Pool::new(&config, Arc::clone(&shared)).map_err(oom)?;
        Ok(Self {
            shared,
            state: State::new(&config, groups, pool, id),
            recorder: None,
            pins_recorded: 0,
            config,
        })
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The hasher in force, to compute block hashes elsewhere.
    pub fn hasher(&self) -> &ContentHasher {
        self.state.pool.tree().hasher()
    }

    /// Applies the releases that dropped handles and pins have deferred. Every call that changes something
    /// begins with it; call it before `view`, `stats` or `plan_view` if they must see dropped handles.
    #[inline]
    pub fn drain_deferred(&mut self) {
        if self.num_deferred() > 0 {
            self.drain_all();
        }
    }

    /// The number of releases that the next call applies, and of their blocks.
    #[inline]
    pub fn num_deferred(&self) -> usize {
        self.shared.num_deferred()
    }

    #[cold]
    fn drain_all(&mut self) {
        for release in self.shared.take_deferred() {
            match release {
                Deferred::Blocks(blocks) => self.state.pool.enqueue_unused(&blocks),
                Deferred::Sequence(key) => {
                    if self.state.seqs.get(key).is_ok() {
                        report(&mut self.recorder, || Call::drop_sequence(key.id), &());
                        self.state.end_sequence(key.seq_idx);
                    }
                }
                Deferred::Plan(key) => {
                    if self.state.steps.is_open(key) {
                        report(&mut self.recorder, || Call::drop_plan(key.serial), &());
                        self.state.roll_back_from(key);
                    }
                }
                Deferred::Transfer(key) => {
                    if self.state.transfers.is_open(key) {
                        report(&mut self.recorder, || Call::drop_transfer(key.serial), &());
                        let ended = self.state.end_transfer(key, 0);
                        debug_assert_eq!(ended, Ok(0));
                    }
                }
                Deferred::Pin(serial, blocks) => self.release_pin(serial, &blocks),
            }
        }
    }

    /// Releases the blocks of a recorded pin, last block first, as the pin itself would have done.
    fn release_pin(&mut self, serial: u64, blocks: &[BlockId]) {
        report(&mut self.recorder, || Call::drop_pin(serial), &());
        for &block in blocks.iter().rev() {
            if self.shared.release(block) {
                self.state.pool.enqueue_unused(&[block]);
            }
        }
        self.shared.forget_pin_refs(blocks.len());
    }

    /// Blocks that freeing this sequence would release: those with no other reference.
    pub fn preview(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.drain_deferred();
        let table = &self.state.seqs.get(key)?.table;
        let alone = |block: &BlockId| self.state.pool.refs(*block) == 1;
        Ok(table.blocks().filter(alone).count())
    }

    /// The most blocks that one sequence holds at once until it has `num_tokens` tokens, if a step computes at most
    /// `max_tokens` of them. A smaller pool cannot serve it.
    pub fn blocks_for(&self, num_tokens: usize, max_tokens: usize) -> usize {
        self.state.groups.blocks_for(num_tokens, max_tokens)
    }

    /// The most blocks that one sequence takes until it has `num_tokens` tokens, beyond those that it holds after the
    /// first `computed` ones, if a step computes at most `max_tokens` of them.
    pub fn blocks_to_come(&self, num_tokens: usize, max_tokens: usize, computed: usize) -> usize {
        self.state
            .groups
            .blocks_to_come(num_tokens, max_tokens, computed)
    }

    /// Blocks by state. O(1).
    pub fn usage(&mut self) -> PoolUsage {
        self.drain_deferred();
        self.state.pool.usage()
    }

    /// The counters so far.
    pub fn stats(&mut self) -> Stats {
        self.state.pool.stats()
    }

    /// Cached blocks, their ancestors, and namespaces.
    pub fn num_prefixes(&self) -> usize {
        self.state.pool.tree().len()
    }

    /// All references of a block: table entries and pins.
    pub fn refs(&mut self, block: u32) -> Result<u32, Error> {
        self.drain_deferred();
        Ok(self.state.pool.refs(self.known(block)?))
    }

    /// Live sequences whose table contains a block.
    pub fn seq_refs(&mut self, block: u32) -> Result<u32, Error> {
        self.drain_deferred();
        Ok(self.state.pool.seq_refs(self.known(block)?))
    }

    /// The state of a block.
    pub fn state(&mut self, block: u32) -> Result<BlockState, Error> {
        self.drain_deferred();
        Ok(self.state.pool.state(self.known(block)?))
    }

    /// State and references of every block, and the radix tree, in one call. O(blocks).
    pub fn snapshot(&mut self) -> PoolSnapshot {
        self.drain_deferred();
        self.state.pool.snapshot(self.state.steps.num_begun())
    }

    fn known(&self, block: u32) -> Result<BlockId, Error> {
        if (block as usize) < self.config.num_blocks {
            return Ok(BlockId::from(block));
        }
        Err(Error::UnknownBlock {
            block,
            num_blocks: self.config.num_blocks,
        })
    }

    /// The tokens, table and progress of a sequence.
    pub fn view(&self, key: SeqKey) -> Result<SequenceView<'_>, Error> {
        let seq = self.state.seqs.get(key)?;
        Ok(SequenceView {
            id: seq.id,
            tokens: &seq.tokens,
            table: &seq.table,
            num_computed_tokens: seq.computed,
            num_planned_tokens: seq.planned_end,
            num_pending_tokens: usize::from(seq.pending),
            num_cached_tokens: seq.cached as usize,
            num_restored_tokens: seq.restored as usize,
            num_in_flight_tokens: seq.in_flight as usize,
            num_copied_tokens: seq.copied as usize,
            miss: seq.miss.as_deref(),
            num_registered_blocks: seq.registered.end(),
            weights_version: seq.weights_version,
            is_private: seq.is_private,
        })
    }

    /// Evicts every evictable block. Returns how many.
    pub fn evict_all(&mut self) -> usize {
        self.drain_deferred();
        let num_evicted = self.state.pool.evict_all();
        report(&mut self.recorder, Call::evict_all, &num_evicted);
        num_evicted
    }

    /// The version of the weights: 0, then the answers of [`BlockManager::advance_weights_version`].
    pub fn weights_version(&self) -> u32 {
        self.state.pool.weights_version()
    }

    /// The weights have changed: nothing that was computed before is reused by a sequence that begins from now on.
    /// Returns the new version of the weights, one more than before.
    ///
    /// No block and no snapshot is cached any more: [`Event::Cleared`], and the evictable ones are free. Records for
    /// [`BlockManager::take_evicted`] are dropped. Live sequences with computed tokens go on over their blocks, and
    /// so do their forks, but none of their blocks is cached, matched or merged until [`BlockManager::reset`]. Pins hold
    /// their blocks until they are dropped, and can no longer be attached. O(blocks + sequences).
    ///
    /// # Errors
    /// [`Error::WeightsInUse`] while a plan or a transfer is open.
    pub fn advance_weights_version(&mut self) -> Result<u32, Error> {
        self.run(
            Call::advance_weights_version,
            State::advance_weights_version,
        )
    }

    /// Free blocks in the order of allocation, then evictable blocks in the order of eviction under `lru`. O(blocks).
    pub fn queued(&mut self) -> Vec<BlockId> {
        self.drain_deferred();
        self.state.pool.queued()
    }

    /// Changes of the set of cached blocks since the last call, in order, if `Config::events` is on.
    ///
    /// Events of twice the pool's blocks are kept, and of 65,536 blocks at least. If there were more, they are dropped:
    /// the answer is [`Event::Lost`], then all cached blocks.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.drain_deferred();
        self.state.pool.take_events()
    }

    /// Hashes that the next [`BlockManager::take_events`] returns, and blocks that it must hash.
    pub fn num_pending_events(&self) -> usize {
        self.state.pool.num_pending_events()
    }

    /// The hashes of all cached blocks, in no order. O(cached blocks).
    pub fn cached_hashes(&mut self) -> Vec<u128> {
        self.drain_deferred();
        self.state.pool.cached_hashes()
    }
}

/// Sequences and pins.
impl BlockManager {
    /// Creates a sequence of at least one token. It holds no block until it is planned.
    ///
    /// With `read_cache` false it reuses no cached block, so every token is computed: for callers that need the
    /// logits of all prompt tokens.
    ///
    /// # Errors
    /// [`Error::EmptySequence`]; for the namespace [`Error::Namespace`], [`Error::EmptySwitch`],
    /// [`Error::SwitchPosition`].
    pub fn sequence<'a>(
        &mut self,
        tokens: Vec<u32>,
        namespace: impl Into<Namespace<'a>>,
        read_cache: bool,
    ) -> Result<SeqHandle, Error> {
        let namespace = namespace.into();
        self.drain_deferred();
        if tokens.is_empty() {
            return Err(Error::EmptySequence);
        }
        let switch = namespace.check(self.config.block_size)?;
        let root = self.state.pool.acquire_root(namespace.name);
        let version = self.state.pool.weights_version();
        let key = self.state.seqs.insert(tokens, root, read_cache, version);
        let seq = self.state.seqs.at_mut(key.seq_idx);
        seq.set_switch(switch.map(Arc::new));
        let (tokens, name) = (&seq.tokens[..], namespace.name);
        let call = || match namespace.switch {
            None => Call::sequence(tokens, name, read_cache),
            Some((at, to)) => Call::switching_sequence(tokens, name, read_cache, at, to),
        };
        report(&mut self.recorder, call, &key);
        Ok(SeqHandle::new(&self.shared, key))
    }

    /// Pins the longest cached prefix of `tokens`, in whole blocks. The pin may be empty.
    pub fn match_prefix<'a>(
        &mut self,
        tokens: &[u32],
        namespace: impl Into<Namespace<'a>>,
    ) -> Result<Pin, Error> {
        self.drain_deferred();
        let namespace = namespace.into();
        let switch = namespace.check(self.config.block_size)?;
        let (prompt, name) = (Labelled::new(tokens, &switch), namespace.name);
        let blocks = self.state.match_prefix(prompt, name);
        Ok(self.grant(blocks, || match namespace.switch {
            None => Call::match_prefix(tokens, name),
            Some((at, to)) => Call::match_switching_prefix(tokens, name, at, to),
        }))
    }

    /// Explains which tokens of a prompt a prefill would reuse now, and why it would compute the others. It changes
    /// neither blocks nor the order of eviction.
    ///
    /// The answer depends on this namespace alone: on its cached blocks, its sequences and its evictions.
    pub fn explain<'a>(
        &mut self,
        tokens: &[u32],
        namespace: impl Into<Namespace<'a>>,
    ) -> Result<Explanation, Error> {
        self.drain_deferred();
        let namespace = namespace.into();
        let switch = namespace.check(self.config.block_size)?;
        let prompt = Labelled::new(tokens, &switch);
        Ok(self.state.explain(prompt, namespace.name))
    }

    /// Pins the longest prefix of a sequence's registered blocks that is computed and of which no window lacks a
    /// block that a later token reads. The pin may be empty.
    pub fn pin(&mut self, key: SeqKey) -> Result<Pin, Error> {
        self.drain_deferred();
        let blocks = self.state.ready_prefix(key)?;
        Ok(self.grant(blocks, || Call::pin(key.id)))
    }

    /// A pin on these blocks. Cached ones may be queued.
    fn grant(&mut self, blocks: PrefixBlocks, call: impl FnOnce() -> Call) -> Pin {
        let mut num_tokens = 0;
        if blocks.end != NodePosition::NONE {
            let (pool, table) = (&mut self.state.pool, &blocks.table);
            table.blocks().for_each(|block| pool.take_out(block));
            blocks
                .snapshot
                .1
                .iter()
                .for_each(|&block| pool.take_out(block));
            num_tokens = table.end() * self.config.block_size;
        }
        let serial = self.recorder.as_ref().map(|_| {
            self.pins_recorded += 1;
            self.pins_recorded
        });
        let version = self.state.pool.weights_version();
        let pin = Pin::new(&self.shared, serial, blocks, num_tokens, version);
        report(&mut self.recorder, call, &pin);
        pin
    }

    /// Puts the blocks of a pin into the table of a sequence without blocks. The pin stays in force.
    #[expect(
        clippy::missing_panics_doc,
        reason = "a recorder precedes every pin that holds blocks"
    )]
    pub fn attach(&mut self, key: SeqKey, pin: &Pin) -> Result<(), Error> {
        self.drain_deferred();
        self.state.attach(key, pin)?;
        if pin.end().is_some() {
            let serial = || pin.serial().expect("a recorded pin");
            report(&mut self.recorder, || Call::attach(key.id, serial()), &());
        }
        Ok(())
    }

    /// Creates a sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now. A partial last block is copied when a sequence writes to it while another one holds
    /// it (see [`BlockManager::copies`]); the last one writes in place. If a window has slid past the end of the
    /// fork, the fork begins without blocks and matches the cache again.
    pub fn fork(&mut self, key: SeqKey, num_tokens: usize) -> Result<SeqHandle, Error> {
        let call = || Call::fork(key.id, num_tokens);
        let fork = self.run(call, |state| state.fork(key, num_tokens))?;
        Ok(SeqHandle::new(&self.shared, fork))
    }

    /// Appends known tokens to a sequence, for example the next turn of a conversation.
    pub fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        let call = || Call::append(key.id, tokens);
        self.run(call, |state| state.append(key, tokens))
    }

    /// Releases the blocks after the first `num_tokens` tokens, such as lookahead slots of rejected drafts. Returns how
    /// many blocks.
    pub fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        let call = || Call::trim(key.id, num_tokens);
        self.run(call, |state| state.trim(key, num_tokens))
    }

    /// Releases a sequence's blocks and keeps its tokens: preemption by recomputation.
    ///
    /// Its registered blocks become evictable, so most of them are matched again later.
    pub fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        let call = || Call::reset(key.id);
        self.run(call, |state| state.reset(key))
    }

    /// Frees a sequence. One that an open plan holds ends with the plan.
    pub fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.run(|| Call::free(key.id), |state| state.free(key))
    }

    /// Frees a sequence. Of its cached blocks, those after the first `num_tokens` tokens do not stay cached if nothing
    /// else holds them: they are free at once. For the part of an answer that no later prompt repeats.
    pub fn free_keeping(&mut self, key: SeqKey, num_tokens: usize) -> Result<(), Error> {
        let call = || Call::free_keeping(key.id, num_tokens);
        self.run(call, |state| state.free_keeping(key, num_tokens))
    }
}

/// The allocator's interface, without plans.
impl BlockManager {
    /// Reuses the cached blocks after the block boundary that a sequence has reached. Returns how many tokens they
    /// hold; these count as computed.
    ///
    /// It reuses at most all known tokens but the last one, which is computed for its logits and not written if its
    /// block is reused. It reuses nothing inside a block, and nothing while lookahead slots are allocated (see
    /// [`BlockManager::trim`]) or from blocks that an open plan is to compute.
    ///
    /// With states, it reuses those up to their last snapshot, if the sequence has none: copy that to the running state.
    /// [`BlockManager::pin`] names its blocks.
    ///
    /// # Errors
    /// [`Error::InPlan`]
    pub fn reuse_cached(&mut self, key: SeqKey) -> Result<usize, Error> {
        let call = || Call::reuse_cached(key.id);
        self.run(call, |state| state.reuse_cached(key, usize::MAX))
    }

    /// Caches the state of a sequence at its position, the end of a block, for a caller without plans. Returns the blocks
    /// to which the caller copies the state, in the order of its bytes, before it runs another step; none if the prefix
    /// has a snapshot, or is not cached, or the manager has no states.
    ///
    /// # Errors
    /// [`Error::InPlan`], [`Error::SnapshotPosition`]
    pub fn keep_snapshot(&mut self, key: SeqKey) -> Result<Extend, Error> {
        let call = || Call::keep_snapshot(key.id);
        self.run(call, |state| state.keep_snapshot(key))
    }

    /// Allocates slots for `num_tokens` tokens after the computed ones, for a step that the caller runs.
    ///
    /// All or nothing. Slots that the sequence has already count, so it allocates at block boundaries and after a fork.
    /// Call [`BlockManager::publish`] once they are computed.
    ///
    /// # Errors
    /// [`Error::InPlan`]
    pub fn extend(&mut self, key: SeqKey, num_tokens: usize) -> Result<Extend, Error> {
        let call = || Call::extend(key.id, num_tokens);
        self.run(call, |state| state.extend(key, num_tokens))
    }

    /// Publishes the next `num_tokens` tokens of a sequence as computed; `tokens` follow the known ones.
    ///
    /// Registers every block that became full, or merges it into the block that was cached first; returns the
    /// merges, as a commit does. Other sequences may reuse published blocks from now on, so the device must compute
    /// them before it reads them.
    ///
    /// # Errors
    /// [`Error::InPlan`], [`Error::NotExtended`], [`Error::SharedBlock`], [`Error::NotKnown`]
    pub fn publish(
        &mut self,
        key: SeqKey,
        num_tokens: usize,
        tokens: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        let call = || Call::publish(key.id, num_tokens, tokens);
        self.run(call, |state| state.publish(key, num_tokens, tokens))
    }
}

/// Transfers of KV into the pool, and evictions ahead of need.
impl BlockManager {
    /// Reserves blocks for the first `num_tokens` tokens of a sequence, whose KV the caller has elsewhere: on a disk,
    /// in host memory, in another process.
    ///
    /// The transfer restores whole blocks after the longest cached prefix. It ends before a block that an open step
    /// is to compute or another transfer is to fill; ask again later for the rest. All or nothing: it has all of its
    /// blocks, or nothing was changed. The sequence is not changed.
    ///
    /// Until the transfer ends it holds its blocks and the cached ones before them, whatever becomes of the sequence.
    /// A prefill that would reuse one of its blocks answers [`Prefill::Loading`]. A sequence that computes the same
    /// block nevertheless (without `read_cache`) registers it once the transfer has ended.
    ///
    /// For a model with states, the blocks come with the snapshot at the end of the last full block, or that comes alone
    /// if the blocks are cached; all of them or none. The sequence must be new.
    ///
    /// # Errors
    /// [`Error::InPlan`]
    pub fn reserve(&mut self, key: SeqKey, num_tokens: usize) -> Result<Reserve, Error> {
        let call = || Call::reserve(key.id, num_tokens);
        self.run(call, |state| state.reserve(key, num_tokens))
    }

    /// Ends a transfer whose first `num_indices` indices are filled, in every layer group: they are cached now, as if a
    /// step had computed them. Its other blocks are free. Nothing may write to its blocks any more.
    /// [`Transfer::filled_indices`](crate::Transfer::filled_indices) counts the indices.
    ///
    /// If its sequence is alive, in no open plan and has not advanced, it reuses the blocks at once. Returns how many
    /// tokens it reuses; these count as computed.
    ///
    /// # Errors
    /// [`Error::TransferEnded`], [`Error::TransferBlocks`]
    pub fn complete(&mut self, transfer: TransferKey, num_indices: usize) -> Result<usize, Error> {
        let call = || Call::complete(transfer.serial, num_indices);
        self.run(call, |state| state.end_transfer(transfer, num_indices))
    }

    /// Ends a transfer that has failed: its blocks are free, and none of them was ever cached.
    ///
    /// # Errors
    /// [`Error::TransferEnded`]
    pub fn fail(&mut self, transfer: TransferKey) -> Result<(), Error> {
        self.complete(transfer, 0).map(drop)
    }

    /// Abandons an open transfer: no prefill waits for it any more, and completing it caches no block. It holds its
    /// blocks until it ends, because the I/O may still write to them.
    ///
    /// # Errors
    /// [`Error::TransferEnded`]
    pub fn abandon(&mut self, transfer: TransferKey) -> Result<(), Error> {
        let call = || Call::abandon(transfer.serial);
        self.run(call, |state| state.abandon_transfer(transfer))
    }

    /// The cached blocks that allocations evicted since the last call, in order, if `Config::keep_evicted` is on.
    /// Blocks without a hash are left out. Of those not taken, the latest are kept, at least as many as the pool has
    /// blocks: the KV of earlier ones was overwritten.
    ///
    /// Take them after a step is planned and before it runs, or after another call that allocates: until then their
    /// KV is intact. [`BlockManager::evict`] keeps it longer.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        self.state.pool.take_evicted()
    }

    /// Evicts the next `num_blocks` evictable blocks ahead of need, or all of them, and pins them. Returns a record of
    /// each, and the pin: their KV stays intact until the pin is dropped, then they are free.
    ///
    /// For a store that copies blocks in the background: with enough free blocks no allocation evicts.
    pub fn evict(&mut self, num_blocks: usize) -> (Vec<Evicted>, Pin) {
        self.drain_deferred();
        let (blocks, evicted) = self.state.pool.evict_next(num_blocks);
        let table = BlockTable::of_blocks(self.state.groups.len(), blocks);
        let end = NodePosition::NONE;
        let call = || Call::evict(num_blocks);
        let snapshot = (0, Vec::new());
        let blocks = PrefixBlocks {
            table,
            end,
            snapshot,
        };
        let pin = self.grant(blocks, call);
        (evicted, pin)
    }
}

/// Steps.
impl BlockManager {
    /// Opens a step that may compute `token_budget` tokens.
    ///
    /// Two may be open: the second is planned while the first one runs, before its tokens are known (see
    /// [`BlockManager::decode`]). They are committed in order.
    pub fn begin_step(&mut self, token_budget: usize) -> Result<PlanHandle, Error> {
        let call = || Call::begin_step(token_budget);
        let key = self.run(call, |state| state.begin_step(token_budget))?;
        Ok(PlanHandle::new(&self.shared, key))
    }

    /// Plans one token for each of `sequences`, in order, as far as blocks and budget suffice.
    ///
    /// Returns the positions in `sequences` of those that were rejected; they are unchanged. Each must have exactly
    /// one token left to compute. On misuse none is planned. `lookahead` allocates slots past the known tokens;
    /// [`BlockManager::trim`] releases those that are not used.
    ///
    /// A sequence that the previous step samples may be decoded while that step is open. Its token is pending:
    /// [`BlockManager::fill`] writes the row that it comes from instead of its value.
    pub fn decode(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> Result<Vec<usize>, Error> {
        let call = || Call::decode(plan.serial, ids(sequences), lookahead);
        self.run(call, |state| state.decode(plan, sequences, lookahead))
    }

    /// Plans a sequence that has one token left to compute, together with `drafts` after it.
    ///
    /// The step computes all of them and samples a row for each; [`BlockManager::commit_accepted`] accepts drafts.
    /// All or nothing: blocks and budget for every draft.
    pub fn speculate(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        let call = || Call::speculate(plan.serial, key.id, drafts);
        self.run(call, |state| state.speculate(plan, key, drafts))
    }

    /// Extends decodes of the plan by drafts: `counts` of `drafts` for each of `sequences`, in order.
    ///
    /// Drafts use the remaining budget and blocks, the first sequence first. Returns how many each sequence got. The
    /// step samples a row for each draft; [`BlockManager::commit_accepted`] accepts drafts. On misuse none is planned.
    ///
    /// # Errors
    /// [`Error::DraftCount`]; [`Error::NotPlanned`], [`Error::NotDecoding`] if a sequence is not in the plan, or
    /// not with one token; [`Error::InPlan`] if its token is pending, or it has drafts already.
    pub fn draft(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        drafts: &[u32],
        counts: &[usize],
    ) -> Result<Vec<usize>, Error> {
        let call = || Call::draft(plan.serial, ids(sequences), drafts, counts);
        self.run(call, |state| state.draft(plan, sequences, drafts, counts))
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    ///
    /// At a block boundary it matches the cache first: cached tokens are reused, and neither charged nor computed. That
    /// includes blocks that sequences planned before it in this step compute. If a transfer is to fill any of them, the
    /// answer is [`Prefill::Loading`]. A chunk that does not reach the last known token ends on a block boundary if it
    /// can. A full hit computes its last token, allocates no block and writes nothing.
    ///
    /// Where the match ends inside a block, the beginning of the cached block that agrees longest is copied, if that is
    /// at least an eighth of a block and the pool has room for both. The copies are among [`BlockManager::copies`].
    ///
    /// It allocates the blocks of this step's tokens. With `spare_blocks`, blocks for all known tokens and this many
    /// more must be available.
    pub fn prefill(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        max_tokens: usize,
        spare_blocks: Option<usize>,
    ) -> Result<Prefill, Error> {
        let request = PrefillRequest {
            max_tokens,
            spare_blocks,
            replay: 0,
        };
        self.prefill_again(plan, key, request)
    }

    /// As [`BlockManager::prefill`], for callers that need the hidden states of the last cached tokens: computes from
    /// [`PrefillRequest::replay`] tokens before the end of the cached ones, all in this step.
    ///
    /// Replayed tokens are charged, and their KV is not written again (slot -1). A full hit is a replay of one token.
    /// With sliding windows, a match must include the windows of the replayed tokens.
    ///
    /// # Errors
    /// As [`BlockManager::prefill`].
    pub fn prefill_again(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        request: PrefillRequest,
    ) -> Result<Prefill, Error> {
        let PrefillRequest {
            max_tokens,
            spare_blocks,
            replay,
        } = request;
        let call = || Call::prefill(plan.serial, key.id, max_tokens, spare_blocks, replay);
        self.run(call, |state| state.prefill(plan, key, request))
    }

    /// Cancels a sequence, as if it had not been planned.
    ///
    /// Sequences that depend on it are cancelled, too: they share blocks that it was to compute, or write in place in
    /// a partial block that it left to them. Returns their ids, in plan order.
    pub fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<Vec<u64>, Error> {
        let call = || Call::cancel(plan.serial, key.id);
        self.run(call, |state| state.cancel(plan, key))
    }

    /// Figures of an open plan.
    pub fn plan_view(&self, key: PlanKey) -> Result<PlanView, Error> {
        self.state.steps.view(key)
    }

    /// Blocks to copy before the step runs, as (source, destination), in order: for forks, and for prefills that begin
    /// inside a block.
    ///
    /// A commit is refused until they were read: [`Error::CopiesNotRead`].
    pub fn copies(&mut self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        self.state.steps.copies(key)
    }

    /// The states that sequences of an open plan begin with, to be copied from the blocks of snapshots before the step
    /// runs; in plan order. Without blocks it is the state of no token. A sequence that is not among them continues its
    /// running state.
    ///
    /// # Errors
    /// [`Error::PlanClosed`], [`Error::WrongManager`]
    pub fn state_loads(&self, plan: PlanKey) -> Result<Vec<StateCopy>, Error> {
        self.state.state_loads(plan)
    }

    /// The states that are to be copied into the blocks of new snapshots after the step has run, in plan order: each is the
    /// running state of its sequence at the end of its tokens in this step.
    ///
    /// A commit caches them. After the rollback of a step that has run, [`reset`](Self::reset) its sequences: their
    /// running states have gone on.
    ///
    /// # Errors
    /// [`Error::PlanClosed`], [`Error::WrongManager`]
    pub fn state_saves(&self, plan: PlanKey) -> Result<Vec<StateCopy>, Error> {
        self.state.state_saves(plan)
    }

    /// Asks for snapshots of a sequence's state at the last block boundaries before these positions, for example the end
    /// of a system prompt. They replace those asked for before. Without a state group it does nothing.
    pub fn want_snapshots(&mut self, key: SeqKey, positions: &[usize]) -> Result<(), Error> {
        let call = || Call::want_snapshots(key.id, positions);
        self.run(call, |state| state.want_snapshots(key, positions))
    }

    /// The positions in `tokens` at which their longest cached prefix has snapshots, in order, without spare ones. It
    /// pins nothing and changes nothing.
    pub fn snapshot_positions<'a>(
        &mut self,
        tokens: &[u32],
        namespace: impl Into<Namespace<'a>>,
    ) -> Result<Vec<usize>, Error> {
        self.drain_deferred();
        let namespace = namespace.into();
        let switch = namespace.check(self.config.block_size)?;
        let prompt = Labelled::new(tokens, &switch);
        Ok(self.state.snapshot_positions(prompt, namespace.name))
    }

    /// Snapshots and their blocks. O(snapshots).
    pub fn state_usage(&mut self) -> StateUsage {
        self.drain_deferred();
        StateUsage {
            pending_blocks: self.state.pending_state_blocks(),
            ..self.state.pool.state_usage()
        }
    }

    /// Writes the inputs of an open plan, entries in plan order. On an error nothing is written.
    pub fn fill(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
    ) -> Result<(), Error> {
        self.state.fill(plan, arrays, written)
    }

    /// As [`BlockManager::fill`]; also finds which rows share which leading blocks. While the batch stays the same,
    /// that costs nothing. On an error nothing is written.
    ///
    /// # Errors
    /// As `fill`; [`Error::UnknownGroup`].
    pub fn fill_shared(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
        shared: &mut SharedPrefixes,
    ) -> Result<(), Error> {
        self.state.fill_shared(plan, arrays, written, shared)
    }

    /// Commits a step that was computed: `sampled` holds one token per sampled row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that was cached first; returns the merges.
    /// Appends the sampled tokens to their sequences. For a plan with drafts use [`BlockManager::commit_accepted`].
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Remapping>, Error> {
        let call = || Call::commit(plan.serial, sampled, &[][..]);
        self.run(call, |state| state.commit(plan, sampled))
    }

    /// Commits a step that was computed: sampling sequences, in plan order, accept `counts` of `tokens` each.
    ///
    /// A sequence accepts its correct drafts and one token after them.
    pub fn commit_accepted(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Remapping>, Error> {
        let call = || Call::commit(plan.serial, tokens, accepted(counts));
        self.run(call, |state| state.commit_accepted(plan, tokens, counts))
    }

    /// Rolls back the plan. Sequences are as before it; dropped ones end now.
    pub fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        let call = || Call::rollback(plan.serial);
        self.run(call, |state| state.rollback(plan))
    }

    /// Recounts references, states, the queue, the tree and the plans. O(blocks + tokens).
    ///
    /// It changes nothing: deferred releases stay deferred. Other threads may drop pins meanwhile.
    ///
    /// # Errors
    /// The first difference, in words: a bug in this crate.
    pub fn check(&self) -> Result<(), String> {
        let pins = self.shared.pin_refs();
        let deferred = self.shared.deferred_blocks();
        let held = self.state.check()?;
        self.state.steps.check(&self.state)?;
        self.state.steps.check_states(&self.state)?;
        let mut counts = self.state.steps.plan_pins(&self.state);
        self.state.check_transfers(&mut counts)?;
        self.state.pool.check(&held, &counts, pins, &deferred)
    }
}

/// Recording.
#[cfg(feature = "trace")]
impl BlockManager {
    /// Whether a recorder can be set now.
    ///
    /// # Errors
    /// [`Error::Recording`] if there is one already, [`Error::NotNew`] after the first sequence or step.
    pub fn check_recordable(&self) -> Result<(), Error> {
        if self.recorder.is_some() {
            return Err(Error::Recording);
        }
        match (self.state.seqs.num_created(), self.state.steps.num_begun()) {
            (0, 0) => Ok(()),
            (sequences, steps) => Err(Error::NotNew { sequences, steps }),
        }
    }

    /// Reports every operation from now on to `recorder`.
    ///
    /// # Errors
    /// As [`BlockManager::check_recordable`].
    pub fn set_recorder(&mut self, recorder: Box<dyn Recorder>) -> Result<(), Error> {
        self.check_recordable()?;
        (self.recorder, self.pins_recorded) = (Some(recorder), 0);
        Ok(())
    }

    /// The recorder.
    pub fn recorder(&self) -> Option<&dyn Recorder> {
        self.recorder.as_deref()
    }

    /// Removes the recorder.
    pub fn take_recorder(&mut self) -> Option<Box<dyn Recorder>> {
        self.recorder.take()
    }
}

impl BlockManager {
    /// Runs an operation, and reports it if it succeeded.
    fn run<A>(
        &mut self,
        call: impl FnOnce() -> Call,
        operation: impl FnOnce(&mut State) -> Result<A, Error>,
    ) -> Result<A, Error>
    where
        Answer: for<'a> From<&'a A>,
    {
        self.drain_deferred();
        let answer = operation(&mut self.state)?;
        report(&mut self.recorder, call, &answer);
        Ok(answer)
    }
}

/// Reports an operation, if there is a recorder: one branch if not.
fn report<A>(recorder: &mut Option<Box<dyn Recorder>>, call: impl FnOnce() -> Call, answer: A)
where
    Answer: From<A>,
{
    #[cold]
    #[inline(never)]
    fn send<A: Into<Answer>>(to: &mut dyn Recorder, call: impl FnOnce() -> Call, answer: A) {
        if to.is_open() {
            to.record(&call(), &answer.into());
        }
    }
    if let Some(recorder) = recorder {
        send(&mut **recorder, call, answer);
    }
}

fn ids(keys: &[SeqKey]) -> Vec<u64> {
    keys.iter().map(|key| key.id).collect()
}

/// The counts of a commit as they are recorded: none if each is 1.
fn accepted(counts: &[usize]) -> &[usize] {
    let ones = counts.iter().all(|&count| count == 1);
    if ones { &[] } else { counts }
}

/// Fails if the memory of all tables cannot be allocated at once.
fn probe_memory(config: &Config) -> Result<(), std::collections::TryReserveError> {
    let per_block = Pool::BYTES_PER_BLOCK + RadixTree::bytes_per_block(config.block_size);
    Vec::<u8>::new().try_reserve_exact(config.num_blocks.saturating_mul(per_block))
}

/// The state of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    /// Its number, never reused.
    pub id: u64,
    /// All known tokens.
    pub tokens: &'a [u32],
    table: &'a BlockTable,
    /// Tokens whose KV is computed and committed.
    pub num_computed_tokens: usize,
    /// The same once the open plans are committed.
    pub num_planned_tokens: usize,
    /// Tokens after the known ones that open plans sample.
    pub num_pending_tokens: usize,
    /// Cached tokens that it reuses, since it was last without blocks.
    pub num_cached_tokens: usize,
    /// Tokens that its own transfers restored, since then.
    pub num_restored_tokens: usize,
    /// Of the cached tokens, those that an open step was to compute when they were reused.
    pub num_in_flight_tokens: usize,
    /// Of the cached tokens, those copied from the beginning of a block.
    pub num_copied_tokens: usize,
    /// Why its first prefill computes tokens although it could have reused them, if [`Config::explain`] is on. `None`:
    /// every whole block of it was cached.
    pub miss: Option<&'a Miss>,
    /// Leading blocks that are registered.
    pub num_registered_blocks: usize,
    /// The version of the weights with which it began.
    pub weights_version: u32,
    /// Whether the weights have changed since: none of its blocks is cached.
    pub is_private: bool,
}

impl<'a> SequenceView<'a> {
    /// Its blocks in a layer group, first to last; `None` for released ones, which no later token reads.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn table(&self, group: usize) -> impl ExactSizeIterator<Item = Option<BlockId>> + 'a {
        let (table, groups) = (self.table, self.table.groups());
        assert!(group < groups, "one of {groups} layer groups");
        (0..table.end()).map(move |index| table.get(group, index))
    }
}
