//! The manager and its handles. Python objects are read before the lock is taken and made after it is
//! let go: no Python code runs under it, and no thread waits for it while it holds the GIL.

use std::sync::{Arc, Mutex, MutexGuard};

use kv_core::{BlockManager as Core, BlockState, Config, Error, PlanHandle, SeqHandle, SeqKey};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyBytes;

use crate::answers::{Ledger, Redirect, Stats, prefill_answer};
use crate::buffers::StepBuffers;
use crate::errors::{InvariantError, raise};
use crate::events::event;
use crate::numbers::number;
use crate::tokens::token_ids;

/// The core behind its lock, shared by all handles.
struct Locked(Mutex<Core>);

impl Locked {
    /// Tries first; lets go of the GIL to wait.
    #[inline]
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Core>> {
        let mut core = self.0.lock_py_attached(py).map_err(|_| broken())?;
        core.settle();
        Ok(core)
    }
}

fn broken() -> PyErr {
    InvariantError::new_err(
        "an earlier call panicked; this manager's state is unknown, make a new one",
    )
}

/// Decides which physical block holds the KV cache of which tokens.
///
/// `num_blocks` blocks of `block_size` token positions each. `prefix_caching=False` registers, matches
/// and merges nothing. With `in_flight_sharing` a sequence shares blocks that one planned before it in
/// the same step computes. With `events` changes of the set of contents are kept for `take_events`.
/// `hash_seed` makes content hashes equal in every process (random by default);
/// `hash_bits` below 128 forces hash collisions, for tests.
///
/// All calls may come from any thread. Raises `ConfigError`.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct BlockManager {
    core: Arc<Locked>,
    num_blocks: usize,
    block_size: usize,
}

#[pymethods]
impl BlockManager {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, prefix_caching = true, in_flight_sharing = true, events = false, hash_seed = None, hash_bits = 128))]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        prefix_caching: bool,
        in_flight_sharing: bool,
        events: bool,
        hash_seed: Option<&Bound<'_, PyAny>>,
        hash_bits: u32,
    ) -> PyResult<Self> {
        let num_blocks = number("num_blocks", num_blocks)?;
        let block_size = number("block_size", block_size)?;
        let hash_seed = hash_seed
            .map(|seed| number("hash_seed", seed))
            .transpose()?;
        let config = Config {
            num_blocks,
            block_size,
            prefix_caching,
            in_flight_sharing,
            events,
            hash_seed,
            hash_bits,
        };
        let core = Arc::new(Locked(Mutex::new(Core::new(config).map_err(raise)?)));
        Ok(Self {
            core,
            num_blocks,
            block_size,
        })
    }

    /// Blocks in the pool.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Token positions per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The id of the one block more that the tensors have: padded rows write there.
    #[getter]
    fn trash_block(&self) -> usize {
        self.num_blocks
    }

    /// A new sequence of at least one token; it holds no block until it is planned.
    ///
    /// `tokens`: a list of ints or a one-dimensional integer buffer. `namespace` separates everything
    /// under it: nothing is shared across namespaces. With `read_cache=False` every token gets
    /// computed, for those who want the logits of all prompt tokens. Dropping the object frees the
    /// sequence. Raises `TokenError`.
    #[pyo3(signature = (tokens, *, namespace = None, read_cache = true))]
    fn sequence(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        read_cache: bool,
    ) -> PyResult<Sequence> {
        let tokens = token_ids(tokens)?;
        let handle = self
            .core
            .lock(py)?
            .sequence(tokens, namespace.unwrap_or_default(), read_cache)
            .map_err(raise)?;
        Ok(Sequence {
            core: Arc::clone(&self.core),
            handle,
        })
    }

    /// A lease on the longest cached prefix of `tokens`, in whole blocks; perhaps on none.
    #[pyo3(signature = (tokens, *, namespace = None))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
    ) -> PyResult<Lease> {
        let tokens = token_ids(tokens)?;
        Ok(Lease::new(
            self.core
                .lock(py)?
                .match_prefix(&tokens, namespace.unwrap_or_default()),
        ))
    }

    /// Opens a step that may compute `token_budget` tokens. Raises `PlanError` while one is open.
    fn begin_step(&self, py: Python<'_>, token_budget: &Bound<'_, PyAny>) -> PyResult<StepPlan> {
        let token_budget = number("token_budget", token_budget)?;
        let handle = self
            .core
            .lock(py)?
            .begin_step(token_budget)
            .map_err(raise)?;
        Ok(StepPlan {
            core: Arc::clone(&self.core),
            handle,
        })
    }

    /// Where every block is. O(1).
    fn ledger(&self, py: Python<'_>) -> PyResult<Ledger> {
        Ok(Ledger(self.core.lock(py)?.ledger()))
    }

    /// The counters so far. O(1).
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        Ok(Stats(self.core.lock(py)?.stats()))
    }

    /// Blocks that freeing this sequence would really give back: those that no one else holds.
    fn preview(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.core
            .lock(py)?
            .preview(sequence.handle.key())
            .map_err(raise)
    }

    /// All holders of a block: table entries and leases.
    fn refs(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = number("block", block)?;
        self.core.lock(py)?.refs(block).map_err(raise)
    }

    /// Live sequences whose table holds a block.
    fn seq_refs(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = number("block", block)?;
        self.core.lock(py)?.seq_refs(block).map_err(raise)
    }

    /// "free", "idle", "active" or "leased".
    fn state(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<&'static str> {
        let block = number("block", block)?;
        Ok(match self.core.lock(py)?.state(block).map_err(raise)? {
            BlockState::Free => "free",
            BlockState::Idle => "idle",
            BlockState::Active => "active",
            BlockState::Leased => "leased",
        })
    }

    /// Forgets every content that nobody holds: idle blocks become free. Returns how many.
    fn evict_idle(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.core.lock(py)?.evict_idle())
    }

    /// What became of the set of contents since the last call, in order: `Stored`, `Removed`,
    /// `Cleared`. Empty unless the manager was made with `events=True`.
    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let events = self.core.lock(py)?.take_events();
        events.into_iter().map(|one| event(py, one)).collect()
    }

    /// The names (16 bytes, little endian) of all contents that can be matched now. O(contents).
    fn contents<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let contents = self.core.lock(py)?.contents();
        let name = |hash: u128| PyBytes::new(py, &hash.to_le_bytes());
        Ok(contents.into_iter().map(name).collect())
    }

    /// Recounts everything from scratch and compares; runs without the GIL. O(blocks + tokens).
    ///
    /// Raises `InvariantError` with the first difference.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| match self.core.0.lock() {
            Ok(mut core) => core.check().map_err(InvariantError::new_err),
            Err(_) => Err(broken()),
        })
    }
}

/// Tokens, their block table, and how many of them have their KV computed.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Sequence {
    core: Arc<Locked>,
    handle: SeqHandle,
}

#[pymethods]
impl Sequence {
    /// The sequence's number, unique in its manager and never reused.
    #[getter]
    fn id(&self) -> u64 {
        self.handle.id()
    }

    /// False once it was freed.
    #[getter]
    fn is_live(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.core.lock(py)?.view(self.handle.key()).is_ok())
    }

    /// Tokens known: prompt and output.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self
            .core
            .lock(py)?
            .view(self.handle.key())
            .map_err(raise)?
            .tokens
            .len())
    }

    /// Tokens whose KV is computed and committed.
    #[getter]
    fn num_computed_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self
            .core
            .lock(py)?
            .view(self.handle.key())
            .map_err(raise)?
            .num_computed_tokens)
    }

    /// Tokens adopted from the cache since the sequence was last without blocks.
    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self
            .core
            .lock(py)?
            .view(self.handle.key())
            .map_err(raise)?
            .num_cached_tokens)
    }

    /// Ids of its blocks, first to last.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let core = self.core.lock(py)?;
        let view = core.view(self.handle.key()).map_err(raise)?;
        Ok(view.table.iter().map(|block| block.get()).collect())
    }

    /// All known token ids.
    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self
            .core
            .lock(py)?
            .view(self.handle.key())
            .map_err(raise)?
            .tokens
            .to_vec())
    }

    /// Puts a lease's blocks into the empty table of this sequence; the lease stays in force.
    ///
    /// Raises `LeaseError` if the lease is no prefix of it, `HandleError`, `PlanError`.
    fn attach(&self, py: Python<'_>, lease: &Lease) -> PyResult<()> {
        let mut core = self.core.lock(py)?;
        lease.with(|lease| match lease {
            Some(lease) => core.attach(self.handle.key(), lease).map_err(raise),
            None => Err(raise(Error::ReleasedLease)),
        })
    }

    /// A lease on the registered blocks of this sequence.
    fn lease(&self, py: Python<'_>) -> PyResult<Lease> {
        Ok(Lease::new(
            self.core
                .lock(py)?
                .lease(self.handle.key())
                .map_err(raise)?,
        ))
    }

    /// A new sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now: a partial last block is copied when one of several holders writes to it
    /// (`StepPlan.copies`). Raises `PlanError` if an open plan holds it, `TokenError` for a length
    /// that it does not have.
    fn fork(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Sequence> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let handle = self
            .core
            .lock(py)?
            .fork(self.handle.key(), num_tokens)
            .map_err(raise)?;
        let core = Arc::clone(&self.core);
        Ok(Sequence { core, handle })
    }

    /// Adds known tokens to its end: the next turn of a conversation, a fork's own token.
    fn append(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = token_ids(tokens)?;
        let mut core = self.core.lock(py)?;
        core.append(self.handle.key(), &tokens).map_err(raise)
    }

    /// Gives back the blocks past the first `num_tokens` tokens: slots reserved for a speculation that
    /// was rejected, to the block. Returns how many.
    ///
    /// Raises `PlanError` for fewer tokens than are computed, or if an open plan holds it.
    fn trim(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let mut core = self.core.lock(py)?;
        core.trim(self.handle.key(), num_tokens).map_err(raise)
    }

    /// Gives its blocks back and keeps its tokens: preemption by recomputation.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.core.lock(py)?.reset(self.handle.key()).map_err(raise)
    }

    /// Ends the sequence; in an open plan it lives on until that is closed.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        self.core.lock(py)?.free(self.handle.key()).map_err(raise)
    }

    fn __repr__(&self) -> String {
        format!("<Sequence {}>", self.handle.id())
    }
}

/// Keeps a prefix alive without being a sequence. Any thread may let go of it at any time: that takes
/// neither the manager's lock nor the GIL.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Lease(Mutex<Option<kv_core::Lease>>);

impl Lease {
    fn new(lease: kv_core::Lease) -> Self {
        Self(Mutex::new(Some(lease)))
    }

    /// The lease, unless it was released.
    fn with<R>(&self, look: impl FnOnce(Option<&kv_core::Lease>) -> R) -> R {
        // Held for a few instructions, and nothing is waited for under it: the GIL may be held.
        let lease = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        look(lease.as_ref())
    }
}

#[pymethods]
impl Lease {
    /// Tokens covered: blocks x block size; 0 once released.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.with(|lease| lease.map_or(0, kv_core::Lease::num_tokens))
    }

    /// Ids of the blocks kept, first to last; empty once released.
    #[getter]
    fn blocks(&self) -> Vec<u32> {
        self.with(|lease| {
            lease.map_or(Vec::new(), |lease| {
                lease.blocks().iter().map(|b| b.get()).collect()
            })
        })
    }

    /// Whether it was let go of.
    #[getter]
    fn is_released(&self) -> bool {
        self.with(|lease| lease.is_none())
    }

    /// Lets go of the blocks; a second call does nothing.
    fn release(&self) {
        let lease = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        drop(lease);
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (exc_type, exc, traceback, /))]
    fn __exit__(
        &self,
        exc_type: &Bound<'_, PyAny>,
        exc: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) {
        let _ = (exc_type, exc, traceback);
        self.release();
    }

    fn __repr__(&self) -> String {
        match self.is_released() {
            true => "<Lease, released>".into(),
            false => format!("<Lease on {} tokens>", self.num_tokens()),
        }
    }
}

/// One step: decodes and prefills, the inputs, then commit or rollback. Dropping an open one rolls it
/// back.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct StepPlan {
    core: Arc<Locked>,
    handle: PlanHandle,
}

impl StepPlan {
    fn view(&self, py: Python<'_>) -> PyResult<kv_core::PlanView> {
        self.core
            .lock(py)?
            .plan_view(self.handle.key())
            .map_err(raise)
    }
}

#[pymethods]
impl StepPlan {
    /// Tokens to compute.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_tokens)
    }

    /// Sequences in the plan.
    #[getter]
    fn num_sequences(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_sequences)
    }

    /// Rows whose logits give a token: what `commit` takes.
    #[getter]
    fn num_samples(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_samples)
    }

    /// Tokens that may still be planned.
    #[getter]
    fn budget_left(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.budget_left)
    }

    /// Neither committed nor rolled back.
    #[getter]
    fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.core.lock(py)?.plan_view(self.handle.key()).is_ok())
    }

    /// Plans one token for each sequence, in their order, as far as blocks and budget reach.
    ///
    /// Returns the positions in `sequences` of those that did not fit. Each must have exactly one
    /// token left to compute; on misuse (`PlanError`, `HandleError`) none is planned. With
    /// `lookahead` each gets blocks for so many slots past its known tokens too.
    #[pyo3(signature = (sequences, *, lookahead = 0))]
    fn decode(
        &self,
        py: Python<'_>,
        sequences: Vec<Bound<'_, Sequence>>,
        lookahead: usize,
    ) -> PyResult<Vec<usize>> {
        let keys: Vec<SeqKey> = sequences
            .iter()
            .map(|sequence| sequence.get().handle.key())
            .collect();
        self.core
            .lock(py)?
            .decode(self.handle.key(), &keys, lookahead)
            .map_err(raise)
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens: match, adopt, allocate, charge.
    ///
    /// `reserve=None`: the blocks of this step's tokens must be there. `reserve=n`: those of all its
    /// known tokens must be there with `n` to spare (only this step's are taken): admission.
    #[pyo3(signature = (sequence, max_tokens, *, reserve = None))]
    fn prefill(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: &Bound<'_, PyAny>,
        reserve: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let max_tokens = number("max_tokens", max_tokens)?;
        let reserve = reserve
            .map(|reserve| number("reserve", reserve))
            .transpose()?;
        let (plan, key) = (self.handle.key(), sequence.handle.key());
        let answer = self
            .core
            .lock(py)?
            .prefill(plan, key, max_tokens, reserve)
            .map_err(raise)?;
        prefill_answer(py, answer)
    }

    /// Takes a sequence out of the plan again, as if it had not been planned.
    ///
    /// Sequences that share what it was to compute go with it; returns their ids, in plan order.
    fn cancel(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Vec<u64>> {
        let (plan, key) = (self.handle.key(), sequence.handle.key());
        self.core.lock(py)?.cancel(plan, key).map_err(raise)
    }

    /// Blocks to copy before the step runs, as (source, destination), in order.
    fn copies(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        let core = self.core.lock(py)?;
        let copies = core.copies(self.handle.key()).map_err(raise)?;
        Ok(copies
            .iter()
            .map(|(from, to)| (from.get(), to.get()))
            .collect())
    }

    /// Writes the step's inputs into the arrays, sequences in plan order; on an error, nothing.
    fn fill(&self, py: Python<'_>, buffers: &StepBuffers) -> PyResult<()> {
        let core = self.core.lock(py)?;
        let filled = buffers.with(py, |arrays, rows| {
            core.fill(self.handle.key(), arrays, rows)
        })?;
        filled.map_err(raise)
    }

    /// Plans a sequence that has one token left to compute together with drafts that may follow it.
    ///
    /// The step computes all of them and samples a row for each. All or nothing. Raises as `decode`.
    fn speculate(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        drafts: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let drafts = token_ids(drafts)?;
        let (plan, key) = (self.handle.key(), sequence.handle.key());
        let answer = self.core.lock(py)?.speculate(plan, key, &drafts);
        prefill_answer(py, answer.map_err(raise)?)
    }

    /// Takes the step as computed. `sampled`: one token id per sampling sequence, in plan order; or
    /// all accepted ones, with `counts` saying how many each sequence accepted.
    ///
    /// A sequence accepts the drafts that turned out right and one token after them. Registers every
    /// block that became full or merges it into the one that held its content first; returns the
    /// merges. Raises `PlanError` and changes nothing if the counts are wrong or a token is no draft.
    #[pyo3(signature = (sampled, counts = None))]
    fn commit(
        &self,
        py: Python<'_>,
        sampled: &Bound<'_, PyAny>,
        counts: Option<Vec<usize>>,
    ) -> PyResult<Vec<Redirect>> {
        let sampled = token_ids(sampled)?;
        let plan = self.handle.key();
        let mut core = self.core.lock(py)?;
        let redirects = match counts {
            None => core.commit(plan, &sampled),
            Some(counts) => core.commit_accepted(plan, &sampled, &counts),
        };
        drop(core);
        let redirects = redirects.map_err(raise)?;
        Ok(redirects.into_iter().map(Redirect::from).collect())
    }

    /// Undoes the plan: its sequences are what they were before it.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        self.core
            .lock(py)?
            .rollback(self.handle.key())
            .map_err(raise)
    }

    fn __repr__(&self) -> String {
        format!("<StepPlan {}>", self.handle.key().serial())
    }
}
