//! The facade: mail, keys, recording; what the calls do is in `state` and `step`.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::Config;
use crate::contents::{Contents, Spot};
use crate::error::Error;
use crate::events::Event;
use crate::handle::{PlanHandle, SeqHandle};
use crate::hash::ContentHasher;
use crate::ids::{BlockId, PlanKey, SeqKey};
use crate::pin::Pin;
use crate::pool::Pool;
use crate::sequence::Sequences;
use crate::shared::{Dropped, Shared};
use crate::snapshot::PoolSnapshot;
use crate::state::State;
use crate::stats::{BlockState, PoolUsage, Stats};
use crate::step::{
    Asked, Extend, PlanView, Prefill, Remapping, SharedPrefixes, StepArrays, Steps, TableRows,
};
use crate::sync::Arc;
use crate::table::BlockTable;
use crate::trace::{Call, Recorder, accepted, ids};

static MANAGERS: AtomicU32 = AtomicU32::new(0);

/// The pool's one owner. Single-threaded by type; pins and handles may be dropped anywhere.
pub struct BlockManager {
    pub(crate) config: Config,
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: State,
    pub(crate) steps: Steps,
    pub(crate) recorder: Option<Box<Recorder>>,
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
        let seqs = Sequences::new(id, groups.len());
        Ok(Self {
            shared,
            state: State::new(&config, groups, pool, seqs),
            steps: Steps::new(id),
            recorder: None,
            config,
        })
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The hasher in force, for those who compute content hashes elsewhere.
    pub fn hasher(&self) -> &ContentHasher {
        self.state.pool.contents.hasher()
    }

    /// Does what dropped handles and pins left to do. Every call that changes something begins with
    /// it; before `view`, `stats` or `plan_view` it may be called for their sake.
    #[inline]
    pub fn settle(&mut self) {
        self.read_mail();
    }

    /// Does what was left in the mailbox: the first thing in every call that looks at blocks.
    #[inline]
    fn read_mail(&mut self) {
        for dropped in self.shared.collect() {
            match dropped {
                Dropped::Blocks(blocks) => self.state.pool.settle(&blocks),
                Dropped::Sequence(key) => {
                    if self.state.seqs.get(key).is_ok() {
                        self.note(|_| Call::drop_sequence(key.id), ());
                        self.state.end_sequence(key.slot);
                    }
                }
                Dropped::Plan(key) => {
                    if self.steps.is_open(key) {
                        self.note(|_| Call::drop_plan(key.serial), ());
                        self.steps.roll_back_from(&mut self.state, key);
                    }
                }
                Dropped::Pin(pin, blocks) => self.end_pin(pin, &blocks),
            }
        }
    }

    /// A pin that was granted while recording is gone: lets go of its blocks, last block first, as
    /// it would have done itself.
    fn end_pin(&mut self, pin: u64, blocks: &[BlockId]) {
        self.note(|_| Call::drop_pin(pin), ());
        for &block in blocks.iter().rev() {
            if self.shared.let_go(block) {
                self.state.pool.settle(&[block]);
            }
        }
        self.shared.forget_pin_refs(blocks.len());
    }

    /// Blocks that freeing this sequence would really give back: those that no one else holds.
    pub fn preview(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.read_mail();
        let table = &self.state.seqs.get(key)?.table;
        let alone = |block: &BlockId| self.state.pool.refs(*block) == 1;
        Ok(table.blocks().filter(alone).count())
    }

    /// The most blocks that one sequence holds at once on its way to `num_tokens` tokens, when a step
    /// computes at most `max_tokens` of them: what the pool must have for it to be served at all.
    pub fn blocks_for(&self, num_tokens: usize, max_tokens: usize) -> usize {
        self.state.groups.blocks_for(num_tokens, max_tokens)
    }

    /// Where every block is.
    pub fn usage(&mut self) -> PoolUsage {
        self.read_mail();
        self.state.pool.usage()
    }

    /// The counters so far.
    pub fn stats(&mut self) -> Stats {
        self.state.pool.stats()
    }

    /// Contents known, with or without a block, and namespaces.
    pub fn num_contents(&self) -> usize {
        self.state.pool.contents.len()
    }

    /// All holders of a block: table entries and pins.
    pub fn refs(&mut self, block: u32) -> Result<u32, Error> {
        self.read_mail();
        Ok(self.state.pool.refs(self.known(block)?))
    }

    /// Live sequences whose table holds a block.
    pub fn seq_refs(&mut self, block: u32) -> Result<u32, Error> {
        self.read_mail();
        Ok(self.state.pool.seq_refs(self.known(block)?))
    }

    /// Where a block is.
    pub fn state(&mut self, block: u32) -> Result<BlockState, Error> {
        self.read_mail();
        Ok(self.state.pool.state(self.known(block)?))
    }

    /// All of this for every block, and the tree of contents: in one call. O(blocks + contents).
    pub fn snapshot(&mut self) -> PoolSnapshot {
        self.read_mail();
        self.state.pool.snapshot(self.steps.made())
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
            num_cached_tokens: seq.cached,
            num_registered_blocks: seq.registered.rows(),
        })
    }

    /// Forgets every content that nobody holds: evictable blocks become free. Returns how many.
    pub fn evict_all(&mut self) -> usize {
        self.read_mail();
        let gone = self.state.pool.evict_all();
        self.note(|_| Call::evict_all(), gone);
        gone
    }

    /// Blocks that nobody holds: the free ones in the order in which they are handed out, then the evictable
    /// ones in the order in which `lru` evicts them. O(blocks).
    pub fn queued(&mut self) -> Vec<BlockId> {
        self.read_mail();
        self.state.pool.queued()
    }

    /// What became of the set of contents since the last call, in order, if `Config::events` is on.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.read_mail();
        self.state.pool.take_events()
    }

    /// How much the next [`BlockManager::take_events`] has to do: events that wait, and contents to be named.
    pub fn num_waiting_events(&self) -> usize {
        self.state.pool.num_waiting_events()
    }

    /// The hashes of all cached blocks, in no order. O(cached blocks).
    pub fn cached_hashes(&mut self) -> Vec<u128> {
        self.read_mail();
        self.state.pool.names()
    }
}

/// Sequences and pins.
impl BlockManager {
    /// A new sequence of at least one token. It holds no block until it is planned.
    ///
    /// With `read_cache` false nothing is reused for it: every token gets computed, which is what
    /// a caller needs who wants the logits of all prompt tokens.
    pub fn sequence(
        &mut self,
        tokens: Vec<u32>,
        namespace: &[u8],
        read_cache: bool,
    ) -> Result<SeqHandle, Error> {
        self.read_mail();
        if tokens.is_empty() {
            return Err(Error::EmptySequence);
        }
        check_namespace(namespace)?;
        let root = self.state.pool.contents.hold_root(namespace);
        let key = self.state.seqs.insert(tokens, root, read_cache);
        self.note(|it| it.creation(key, namespace), key.id);
        Ok(SeqHandle::new(&self.shared, key))
    }

    /// A pin on the longest cached prefix of `tokens`, in whole blocks; perhaps on none.
    pub fn match_prefix(&mut self, tokens: &[u32], namespace: &[u8]) -> Result<Pin, Error> {
        self.read_mail();
        check_namespace(namespace)?;
        let found = match self.state.pool.contents.root(namespace) {
            Some(root) => self.state.match_prefix(tokens, root),
            None => self.state.no_pin(),
        };
        let pin = self.grant(found);
        self.note(|_| Call::match_prefix(tokens, namespace), pin.num_blocks());
        Ok(pin)
    }

    /// A pin on the longest prefix of a sequence's registered blocks whose KV is there, and of which
    /// no window lacks a block that a token after it sees; perhaps on none.
    pub fn pin(&mut self, key: SeqKey) -> Result<Pin, Error> {
        self.read_mail();
        let found = self.state.pin_on(key)?;
        let pin = self.grant(found);
        self.note(|_| Call::pin(key.id), pin.num_blocks());
        Ok(pin)
    }

    fn grant(&mut self, (table, end, rows): (BlockTable, Spot, usize)) -> Pin {
        let pool = &mut self.state.pool;
        table.blocks().for_each(|block| pool.take_out(block));
        let num_tokens = rows * self.config.block_size;
        let serial = self.next_pin();
        Pin::over(&self.shared, serial, table, end, num_tokens)
    }

    /// Puts a pin's blocks into the table of a sequence that has none. The pin stays in force.
    pub fn attach(&mut self, key: SeqKey, pin: &Pin) -> Result<(), Error> {
        self.read_mail();
        self.state.seqs.get(key)?;
        if pin.manager() != self.shared.manager {
            return Err(Error::ForeignPin {
                tokens: pin.num_tokens(),
            });
        }
        self.state.attach(key, pin)?;
        if pin.end().is_some() {
            self.note(|_| Call::attach(key.id, pin.serial()), ());
        }
        Ok(())
    }

    /// A new sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now. A partial last block is copied when one of several holders writes to it
    /// (see [`BlockManager::copies`]); the last holder writes in place. Where a window has slid past
    /// the end of the fork, it begins without blocks and finds again what is cached.
    pub fn fork(&mut self, key: SeqKey, num_tokens: usize) -> Result<SeqHandle, Error> {
        self.read_mail();
        let fork = self.state.fork(key, num_tokens)?;
        self.note(|_| Call::fork(key.id, num_tokens), fork.id);
        Ok(SeqHandle::new(&self.shared, fork))
    }

    /// Adds known tokens to the end of a sequence: the next turn of a conversation, a fork's own token.
    pub fn append(&mut self, key: SeqKey, tokens: &[u32]) -> Result<(), Error> {
        self.read_mail();
        self.state.at_rest(key)?;
        let seq = self.state.seqs.at_mut(key.slot);
        seq.tokens.extend_from_slice(tokens);
        self.note(|_| Call::append(key.id, tokens), ());
        Ok(())
    }

    /// Gives back the blocks past the first `num_tokens` tokens: slots reserved for a speculation that
    /// was rejected, to the block. Returns how many.
    pub fn trim(&mut self, key: SeqKey, num_tokens: usize) -> Result<usize, Error> {
        self.read_mail();
        let given_back = self.state.trim(key, num_tokens)?;
        self.note(|_| Call::trim(key.id, num_tokens), given_back);
        Ok(given_back)
    }

    /// Takes a sequence's blocks away and keeps its tokens: preemption by recomputation.
    ///
    /// Its registered blocks become evictable, so it comes back cheaply.
    pub fn reset(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        self.state.reset(key)?;
        self.note(|_| Call::reset(key.id), ());
        Ok(())
    }

    /// Ends a sequence. One that an open plan holds lives in the plan until that is closed.
    pub fn free(&mut self, key: SeqKey) -> Result<(), Error> {
        self.read_mail();
        self.state.seqs.get(key)?;
        self.note(|_| Call::free(key.id), ());
        self.state.end_sequence(key.slot);
        Ok(())
    }
}

/// Without a plan.
impl BlockManager {
    /// Goes on with what is cached, from the block boundary on which a sequence stands; how many tokens
    /// that are. They are computed then, and held as its own: [`BlockManager::reset`] gives them back.
    ///
    /// At most all known tokens but one: the last is computed for its logits, and its KV is not written where
    /// its block was reused, too. Nothing is reused between blocks, with slots reserved (see
    /// [`BlockManager::trim`]), or of what an open plan computes.
    ///
    /// # Errors
    /// [`Error::InPlan`]
    pub fn reuse_cached(&mut self, key: SeqKey) -> Result<usize, Error> {
        self.read_mail();
        let reused = self.state.reuse_cached(key)?;
        self.note(|_| Call::reuse_cached(key.id), reused);
        Ok(reused)
    }

    /// Slots for `num_tokens` tokens after those that are computed, for a step of the caller's own.
    ///
    /// All or nothing. Slots that are there already count, so a call is due where a block ends, and after
    /// a fork. What is computed in them is told by [`BlockManager::publish`].
    ///
    /// # Errors
    /// [`Error::InPlan`]
    pub fn extend(&mut self, key: SeqKey, num_tokens: usize) -> Result<Extend, Error> {
        self.read_mail();
        let answer = self.state.extend(key, num_tokens)?;
        self.note(|_| Call::extend(key.id, num_tokens), &answer);
        Ok(answer)
    }

    /// The next `num_tokens` tokens of a sequence are computed; `tokens` follow those that were known.
    ///
    /// Registers every block that became full, or merges it into the block that held the content first,
    /// and reports the latter, as a commit does. From now on others reuse what was published: whatever
    /// reads it must come after what computes it on the device.
    ///
    /// # Errors
    /// [`Error::InPlan`], [`Error::NotExtended`], [`Error::SharedBlock`], [`Error::NotKnown`]
    pub fn publish(
        &mut self,
        key: SeqKey,
        num_tokens: usize,
        tokens: &[u32],
    ) -> Result<Vec<Remapping>, Error> {
        self.read_mail();
        let remappings = self
            .steps
            .publish(&mut self.state, key, num_tokens, tokens)?;
        self.note(|_| Call::publish(key.id, num_tokens, tokens), &remappings);
        Ok(remappings)
    }
}

/// Steps.
impl BlockManager {
    /// Opens a step that may compute `token_budget` tokens.
    ///
    /// Two may be open: the second is planned while the first one runs, before its tokens are known
    /// (see [`BlockManager::decode`]). They are committed in order.
    pub fn begin_step(&mut self, token_budget: usize) -> Result<PlanHandle, Error> {
        self.read_mail();
        let key = self.steps.begin(&mut self.state, token_budget)?;
        self.note(|_| Call::begin_step(token_budget), key.serial);
        Ok(PlanHandle::new(&self.shared, key))
    }

    /// Plans one token for each of `sequences`, in their order, as far as blocks and budget reach.
    ///
    /// Returns the positions (in `sequences`) of those that did not fit; they are unchanged. Each
    /// must have exactly one token left to compute. On misuse none is planned. With `lookahead` a
    /// sequence gets blocks for so many slots past its known tokens too; [`BlockManager::trim`] gives
    /// back those that are not used.
    ///
    /// A sequence that the step before samples may be decoded while that step is open: its token is
    /// pending, and [`BlockManager::fill`] writes where it will come from instead of its value.
    pub fn decode(
        &mut self,
        plan: PlanKey,
        sequences: &[SeqKey],
        lookahead: usize,
    ) -> Result<Vec<usize>, Error> {
        self.read_mail();
        let misfits = self
            .steps
            .decode(&mut self.state, plan, sequences, lookahead)?;
        self.note(
            |_| Call::decode(plan.serial, ids(sequences), lookahead),
            &misfits,
        );
        Ok(misfits)
    }

    /// Plans a sequence that has one token left to compute together with `drafts` that may follow it.
    ///
    /// The step computes all of them and samples a row for each; the commit says which were accepted
    /// (see [`BlockManager::commit_accepted`]). All or nothing: blocks and budget for every draft.
    pub fn speculate(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        drafts: &[u32],
    ) -> Result<Prefill, Error> {
        self.read_mail();
        let answer = self.steps.speculate(&mut self.state, plan, key, drafts)?;
        self.note(|_| Call::speculate(plan.serial, key.id, drafts), answer);
        Ok(answer)
    }

    /// Extends decodes that are in the plan by drafts that may follow them: `counts` says how many of
    /// `drafts` are for each of `sequences`, one sequence after the other.
    ///
    /// Drafts take what is left of budget and blocks, the first sequence first, and nobody waits for
    /// them: returns how many each got. As after [`BlockManager::speculate`] the step samples a row for each,
    /// and the commit says which were accepted. On misuse nobody gets any.
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
        self.read_mail();
        let given = (drafts, counts);
        let taken = self.steps.draft(&mut self.state, plan, sequences, given)?;
        self.note(
            |_| Call::draft(plan.serial, ids(sequences), drafts, counts),
            &taken,
        );
        Ok(taken)
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens.
    ///
    /// A chunk that does not reach the last known token ends on a block boundary if it can, because on
    /// a block boundary the index is asked first: what is cached is reused, and neither charged
    /// nor computed, including what sequences planned before it in this step compute. A sequence whose
    /// every token is cached computes its last one, takes no block and writes nothing.
    ///
    /// Where the match ends inside a block, the content that agrees longest lends its first tokens, an
    /// eighth of a block at least: they are among [`BlockManager::copies`], and computing starts behind them.
    /// It does so only where there is room for both blocks.
    ///
    /// `reserve: None` asks for the blocks of this step's tokens only;
    /// `Some(n)` makes the answer [`Prefill::NoRoom`] unless all known tokens could get a block now
    /// with `n` blocks to spare (blocks are taken for this step's tokens all the same).
    pub fn prefill(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        max_tokens: usize,
        reserve: Option<usize>,
    ) -> Result<Prefill, Error> {
        self.prefill_again(plan, key, (max_tokens, reserve), 0)
    }

    /// As [`BlockManager::prefill`], for those who need the hidden states of the last cached tokens too:
    /// computes from `replay` tokens before the end of what is cached, or from its beginning if that is
    /// less, all of them in this step.
    ///
    /// They are charged, and their KV is not written again (slot -1). A full hit is a replay of one
    /// token. Where there are sliding windows, a hit is what has the windows of the replayed tokens too.
    ///
    /// # Errors
    /// As [`BlockManager::prefill`].
    pub fn prefill_again(
        &mut self,
        plan: PlanKey,
        key: SeqKey,
        (max_tokens, reserve): (usize, Option<usize>),
        replay: usize,
    ) -> Result<Prefill, Error> {
        self.read_mail();
        let asked = Asked {
            max_tokens,
            reserve,
            replay,
        };
        let answer = self.steps.prefill(&mut self.state, plan, key, asked)?;
        self.note(
            |_| Call::prefill(plan.serial, key.id, max_tokens, reserve, replay),
            answer,
        );
        Ok(answer)
    }

    /// Takes a sequence out of the plan again, as if it had not been planned.
    ///
    /// Sequences that depend on it are taken out with it, as they share what it was to compute in this
    /// step, or write in place in a partial block that it left to them; returns their ids, in plan order.
    pub fn cancel(&mut self, plan: PlanKey, key: SeqKey) -> Result<Vec<u64>, Error> {
        self.read_mail();
        let ids = self.steps.cancel(&mut self.state, plan, key)?;
        self.note(|_| Call::cancel(plan.serial, key.id), &ids);
        Ok(ids)
    }

    /// The figures of an open plan.
    pub fn plan_view(&self, key: PlanKey) -> Result<PlanView, Error> {
        self.steps.view(key)
    }

    /// Blocks that must be copied before the step runs, as (source, destination), in order: for forks,
    /// and for prefills that begin inside a block.
    ///
    /// A commit is refused until they were read: [`Error::CopiesNotRead`].
    pub fn copies(&mut self, key: PlanKey) -> Result<&[(BlockId, BlockId)], Error> {
        self.steps.copies(key)
    }

    /// Writes the inputs of an open plan, entries in plan order. On an error nothing is written.
    pub fn fill(
        &self,
        plan: PlanKey,
        arrays: &StepArrays<'_>,
        written: &mut TableRows,
    ) -> Result<(), Error> {
        self.steps.fill(&self.state, plan, arrays, written)
    }

    /// As [`BlockManager::fill`]; finds, too, which rows share which leading blocks. While the batch stays
    /// the same, that costs nothing more. On an error nothing is written.
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
        self.steps
            .fill_shared(&self.state, plan, arrays, written, shared)
    }

    /// Takes the step as computed: `sampled` holds one token per sampling row, in plan order.
    ///
    /// Registers every block that became full, or merges it into the block that held the content
    /// first, and reports the latter. Appends the sampled tokens to their sequences. In a plan with
    /// drafts use [`BlockManager::commit_accepted`].
    pub fn commit(&mut self, plan: PlanKey, sampled: &[u32]) -> Result<Vec<Remapping>, Error> {
        self.read_mail();
        let remappings = self.steps.commit(&mut self.state, plan, sampled)?;
        self.shared.close_plan(plan);
        self.note(|_| Call::commit(plan.serial, sampled, &[][..]), &remappings);
        Ok(remappings)
    }

    /// Takes the step as computed: `counts` says how many tokens each sampling sequence accepted, in
    /// plan order, and `tokens` holds them, one sequence after the other.
    ///
    /// A sequence accepts the drafts that turned out right and one token after them.
    pub fn commit_accepted(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<Vec<Remapping>, Error> {
        self.read_mail();
        let state = &mut self.state;
        let remappings = self.steps.commit_accepted(state, plan, tokens, counts)?;
        self.shared.close_plan(plan);
        self.note(
            |_| Call::commit(plan.serial, tokens, accepted(counts)),
            &remappings,
        );
        Ok(remappings)
    }

    /// Undoes the plan. Sequences are what they were before it; dropped ones end now.
    pub fn rollback(&mut self, plan: PlanKey) -> Result<(), Error> {
        self.read_mail();
        self.steps.rollback(&mut self.state, plan)?;
        self.note(|_| Call::rollback(plan.serial), ());
        Ok(())
    }

    /// Recounts references, states, the queue, the tree and the plans. O(blocks + tokens).
    ///
    /// It changes nothing: what dropped handles left to do is still to be done after it. Pins may be
    /// dropped by other threads meanwhile; everything else must stand still.
    ///
    /// # Errors
    /// The first difference found, in words: a bug in this crate.
    pub fn check(&self) -> Result<(), String> {
        let pins = self.shared.pin_refs();
        let posted = self.shared.posted_blocks();
        let held = self.state.check()?;
        self.steps.check(&self.state)?;
        self.state
            .pool
            .check(&held, &self.steps.fences(), pins, &posted)
    }
}

/// Bytes of a namespace.
const LONGEST_NAMESPACE: usize = 65_536;

fn check_namespace(namespace: &[u8]) -> Result<(), Error> {
    match namespace.len() {
        ..=LONGEST_NAMESPACE => Ok(()),
        bytes => Err(Error::Namespace { bytes }),
    }
}

/// Asks for the memory of all tables at once, before any of it is touched.
fn probe_memory(config: &Config) -> Result<(), std::collections::TryReserveError> {
    let per_block = Pool::BYTES_PER_BLOCK + Contents::bytes_per_block(config.block_size);
    Vec::<u8>::new().try_reserve_exact(config.num_blocks.saturating_mul(per_block))
}

/// A look at one sequence.
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
    /// Tokens reused from the cache since it was last without blocks.
    pub num_cached_tokens: usize,
    /// Leading blocks whose contents are registered.
    pub num_registered_blocks: usize,
}

impl<'a> SequenceView<'a> {
    /// Its blocks in a layer group, first to last; `None` where one was given back because no later
    /// token sees it.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn table(&self, group: usize) -> impl ExactSizeIterator<Item = Option<BlockId>> + 'a {
        let (table, groups) = (self.table, self.table.groups());
        assert!(group < groups, "one of {groups} layer groups");
        (0..table.rows()).map(move |row| table.get(group, row))
    }
}
