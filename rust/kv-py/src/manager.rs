//! `BlockManager`: the pool.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_core::{BlockManager as Core, Config, Error, StateConfig};
use kv_trace::Record;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::answers::{PoolUsage, StateUsage, Stats, state_name};
use crate::bounded;
use crate::errors::{ConfigError, InvariantError, raise};
use crate::events::push_event;
use crate::explanation::Explanation;
use crate::items::items;
use crate::locked::Locked;
use crate::numbers::number;
use crate::pin::Pin;
use crate::plan::StepPlan;
use crate::replica_index::packed;
use crate::sequence::Sequence;
use crate::snapshot::PoolSnapshot;
use crate::switch::{in_namespace, switch_of};
use crate::tokens::token_ids;
use crate::trace::os_error;
use crate::transfer::evicted_list;

/// Decides which block of the KV cache holds which tokens.
///
/// The pool has `num_blocks` blocks of `block_size` token positions each. `groups` has one entry per layer group:
/// the sliding window of its layers in tokens (a query sees its own position and the `window - 1` positions before
/// it), or None for full attention. Each group has its own block tables over the same pool.
///
/// With `prefix_caching=False`, no block is cached, matched or merged. With `in_flight_sharing`, a sequence shares
/// blocks that an earlier sequence of the same step computes. With `partial_reuse`, a prefill whose match ends
/// inside a block copies the matching tokens of a cached block. Every step must perform the copies of
/// `StepPlan.copies`; `commit` is refused until they were read. With `events`, the manager keeps KV events for
/// `take_events`. With `keep_evicted`, it keeps a record of the blocks that allocations evict, for `take_evicted`.
/// With `explain`, it remembers evictions, and each sequence records why its first prefill computes tokens, for
/// `explain` and `Sequence.explain`.
///
/// With `state_blocks`, the model has layers that keep one state per sequence (Mamba, delta nets, short convolutions).
/// The running states belong to the caller; the manager caches snapshots of them at block boundaries, each in
/// `state_blocks` blocks: the bytes of a state over the bytes of a block, rounded up. `StepPlan.state_loads` and
/// `StepPlan.state_saves` say which ones a step copies. Long prefills keep one every `snapshot_cadence` tokens (512; 0:
/// none), and none within `snapshot_min_tokens` tokens (64) after another.
///
/// `eviction` is the order of eviction: "lru", or "2q", which keeps blocks that were reused longer than blocks that
/// were used once. With `hash_seed`, block hashes are equal in every process (random by default). `hash_bits` below
/// 128 forces hash collisions, for tests.
///
/// Calls may come from any thread. A fork of the process that made it may not use it: each call raises `HandleError`
/// there, and so do those of its sequences, plans, pins and transfers. Raises `ConfigError`.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct BlockManager {
    core: Arc<Locked>,
    num_blocks: usize,
    block_size: usize,
}

#[pymethods]
impl BlockManager {
    #[new]
    #[allow(clippy::too_many_arguments)] // one per keyword
    #[pyo3(signature = (num_blocks, block_size, *, groups = None, prefix_caching = true, in_flight_sharing = true, partial_reuse = true, events = false, keep_evicted = false, explain = false, eviction = "lru", hash_seed = None, hash_bits = None, state_blocks = None, snapshot_cadence = None, snapshot_min_tokens = None))]
    fn new(
        py: Python<'_>,
        num_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        groups: Option<&Bound<'_, PyAny>>,
        prefix_caching: bool,
        in_flight_sharing: bool,
        partial_reuse: bool,
        events: bool,
        keep_evicted: bool,
        explain: bool,
        eviction: &str,
        hash_seed: Option<&Bound<'_, PyAny>>,
        hash_bits: Option<&Bound<'_, PyAny>>,
        state_blocks: Option<&Bound<'_, PyAny>>,
        snapshot_cadence: Option<&Bound<'_, PyAny>>,
        snapshot_min_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let num_blocks = number("num_blocks", num_blocks)?;
        let block_size = number("block_size", block_size)?;
        let groups = groups.map_or(Ok(vec![None]), |groups| windows_of("groups", groups))?;
        let hash_bits = hash_bits.map_or(Ok(128), |bits| number("hash_bits", bits))?;
        let hash_seed = hash_seed
            .map(|seed| number("hash_seed", seed))
            .transpose()?;
        let state_blocks = state_blocks.map_or(Ok(0), |blocks| number("state_blocks", blocks))?;
        let mut state = StateConfig::new(state_blocks);
        if let Some(cadence) = snapshot_cadence {
            state.cadence = number("snapshot_cadence", cadence)?;
        }
        if let Some(min_tokens) = snapshot_min_tokens {
            state.min_tokens = number("snapshot_min_tokens", min_tokens)?;
        }
        let config = Config {
            num_blocks,
            block_size,
            groups,
            state: (state_blocks > 0).then_some(state),
            prefix_caching,
            in_flight_sharing,
            partial_reuse,
            events,
            keep_evicted,
            explain,
            eviction: eviction.parse().map_err(raise)?,
            hash_seed,
            hash_bits,
        };
        let core = py.detach(|| Core::new(config)).map_err(raise)?;
        let core = Arc::new(Locked::new(core));
        Ok(Self {
            core,
            num_blocks,
            block_size,
        })
    }

    /// Number of blocks in the pool.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Token positions per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The sliding window of each layer group in tokens, or None.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let groups = self
            .core
            .with(py, |core| Ok(core.config().groups.clone()))?;
        PyTuple::new(py, groups)
    }

    /// The id of the null block, which follows the pool's last block in the tensors: padded rows write there.
    #[getter]
    fn null_block(&self) -> usize {
        self.num_blocks
    }

    /// Creates a sequence of at least one token. It holds no block until it is planned.
    ///
    /// `tokens` is a list of ints, a one-dimensional integer buffer, or such a tensor in CPU memory (DLPack). No block
    /// is shared across different values of `namespace`. With `read_cache=False`, every token is computed, for callers
    /// that need the logits of all prompt tokens. Dropping the object frees the sequence. Raises `TokenError`.
    ///
    /// With `switch=(position, name)`, blocks that end at or before `position` are those of `namespace`; the block that
    /// contains it and those after it are shared only between sequences with the same position and name. Raises
    /// `ConfigError` for an empty name, or a position that is negative or beyond 32 bits.
    #[pyo3(signature = (tokens, *, namespace = None, read_cache = true, switch = None))]
    fn sequence(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        read_cache: bool,
        switch: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Sequence> {
        let tokens = token_ids(tokens)?;
        let switch = switch_of(switch)?;
        let namespace = in_namespace(namespace, &switch);
        let handle = self
            .core
            .with(py, |core| core.sequence(tokens, namespace, read_cache))?;
        Ok(Sequence::new(&self.core, handle))
    }

    /// Pins the longest cached prefix of `tokens`, in whole blocks; it may be empty.
    #[pyo3(signature = (tokens, *, namespace = None, switch = None))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        switch: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pin> {
        let tokens = token_ids(tokens)?;
        let switch = switch_of(switch)?;
        let namespace = in_namespace(namespace, &switch);
        self.core
            .with(py, |core| core.match_prefix(&tokens, namespace))
            .map(Pin::new)
    }

    /// The positions in `tokens` at which their longest cached prefix has snapshots, in order, without spare ones.
    #[pyo3(signature = (tokens, *, namespace = None, switch = None))]
    fn snapshot_positions(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        switch: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<usize>> {
        let tokens = token_ids(tokens)?;
        let switch = switch_of(switch)?;
        let namespace = in_namespace(namespace, &switch);
        self.core
            .with(py, |core| core.snapshot_positions(&tokens, namespace))
    }

    /// Explains which tokens of a prompt a prefill would reuse now, and why it would compute the others. It changes no
    /// block and no order of eviction.
    ///
    /// The answer depends on this namespace alone. Evictions are remembered by a manager that was created with
    /// `explain=True`.
    #[pyo3(signature = (tokens, *, namespace = None, switch = None))]
    fn explain(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
        switch: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Explanation> {
        let tokens = token_ids(tokens)?;
        let switch = switch_of(switch)?;
        let namespace = in_namespace(namespace, &switch);
        self.core.with(py, |core| {
            let explanation = core.explain(&tokens, namespace)?;
            Ok(Explanation::new(explanation, core.config()))
        })
    }

    /// Opens a step that may compute `token_budget` tokens.
    ///
    /// Two steps may be open: the second is planned while the first one runs. They are committed in order. Raises
    /// `PlanError` for a third.
    fn begin_step(&self, py: Python<'_>, token_budget: &Bound<'_, PyAny>) -> PyResult<StepPlan> {
        let token_budget = number("token_budget", token_budget)?;
        let handle = self.core.with(py, |core| core.begin_step(token_budget))?;
        Ok(StepPlan::new(&self.core, handle))
    }

    /// The number of blocks in each state. O(1).
    fn usage(&self, py: Python<'_>) -> PyResult<PoolUsage> {
        self.core.with(py, |core| Ok(core.usage())).map(PoolUsage)
    }

    /// The number of snapshots of states and of their blocks. O(snapshots).
    fn state_usage(&self, py: Python<'_>) -> PyResult<StateUsage> {
        let usage = self.core.with(py, |core| Ok(core.state_usage()))?;
        Ok(usage.into())
    }

    /// The counters so far. With events on, it first hashes the blocks stored since events were last taken.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.core.with_events(py, Core::stats).map(Stats)
    }

    /// The number of blocks that freeing this sequence would release: those with no other reference.
    fn preview(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.core.with(py, |core| core.preview(sequence.key()))
    }

    /// The largest number of blocks that one sequence holds at once until it has `num_tokens` tokens, if a step
    /// computes at most `max_tokens` of them. A pool needs at least that many to serve it. With `computed`, the largest
    /// number that it takes beyond those that it holds after so many tokens.
    #[pyo3(signature = (num_tokens, max_tokens, *, computed = None))]
    fn blocks_for(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        computed: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let max_tokens = number("max_tokens", max_tokens)?;
        let computed = computed.map_or(Ok(0), |computed| number("computed", computed))?;
        if computed > num_tokens {
            let message = format!("computed={computed}: there are {num_tokens} tokens");
            return Err(ConfigError::new_err(message));
        }
        self.core.with(py, |core| {
            Ok(match computed {
                0 => core.blocks_for(num_tokens, max_tokens),
                _ => core.blocks_to_come(num_tokens, max_tokens, computed),
            })
        })
    }

    /// The number of references to a block: table entries, pins, open steps and transfers.
    fn refs(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = number("block", block)?;
        self.core.with(py, |core| core.refs(block))
    }

    /// The number of live sequences whose table contains a block.
    fn seq_refs(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = number("block", block)?;
        self.core.with(py, |core| core.seq_refs(block))
    }

    /// The state of a block: "free", "evictable", "active", "pinned" or "loading".
    fn state(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<&'static str> {
        let block = number("block", block)?;
        self.core.with(py, |core| core.state(block)).map(state_name)
    }

    /// `state`, `refs` and `seq_refs` of every block, and the radix tree of cached prefixes, at one moment, for
    /// dashboards. O(blocks + cached blocks), without the GIL.
    fn snapshot(&self, py: Python<'_>) -> PyResult<PoolSnapshot> {
        self.core
            .detached(py, |core| Ok(PoolSnapshot(core.snapshot())))
    }

    /// Evicts all evictable blocks, which become free. Returns their number. O(cached blocks), without the GIL.
    fn evict_all(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.detached(py, |core| Ok(core.evict_all()))
    }

    /// The version of the weights: 0, then the answers of `advance_weights_version`.
    #[getter]
    fn weights_version(&self, py: Python<'_>) -> PyResult<u32> {
        self.core.with(py, |core| Ok(core.weights_version()))
    }

    /// The weights have changed: nothing that was computed before is reused by a sequence that begins from now on.
    /// Returns the new version of the weights, one more than before. O(blocks + sequences), without the GIL.
    ///
    /// No block is cached any more (event `Cleared`). Live sequences with computed tokens go on over their blocks, and so
    /// do their forks, but none of their blocks is cached, matched or merged until `reset` (`is_private`). Pins hold their
    /// blocks until they are released, and can no longer be attached.
    ///
    /// Raises PlanError while a plan or a transfer is open.
    fn advance_weights_version(&self, py: Python<'_>) -> PyResult<u32> {
        self.core
            .detached(py, |core| core.advance_weights_version().map_err(raise))
    }

    /// The cached blocks that allocations evicted since the last call, in order. It is empty unless the manager was
    /// created with `keep_evicted=True`. A block without a hash, because another block has the same one, is left out.
    /// Of those not taken, the latest are kept, at least as many as the pool has blocks: earlier ones were overwritten.
    ///
    /// Take them after a step is planned and before it runs: until then their KV is intact.
    fn take_evicted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let evicted = self.core.with_events(py, Core::take_evicted)?;
        evicted_list(py, evicted)
    }

    /// Evicts the next `num_blocks` evictable blocks ahead of need, or all of them if there are fewer, and pins them.
    /// Returns a record of each block, and the pin. Their KV is intact until the pin is released; then they are free.
    fn evict<'py>(
        &self,
        py: Python<'py>,
        num_blocks: &Bound<'_, PyAny>,
    ) -> PyResult<(Bound<'py, PyList>, Pin)> {
        let num_blocks = number("num_blocks", num_blocks)?;
        let (evicted, pin) = self.core.with_events(py, |core| core.evict(num_blocks))?;
        Ok((evicted_list(py, evicted)?, Pin::new(pin)))
    }

    /// The changes of the set of cached blocks since the last call, in order: `Stored`, `Removed`, `Cleared`. It is
    /// empty unless the manager was created with `events=True`.
    ///
    /// The manager keeps at most 65,536 events, or two for each block of a larger pool. If there were more, it drops
    /// them, and the answer begins with `Lost` and `Cleared`; then each cached block is `Stored`.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (events, list) = (
            self.core.with_events(py, Core::take_events)?,
            PyList::empty(py),
        );
        for event in events {
            push_event(event, &list)?;
        }
        Ok(list)
    }

    /// The same events as bytes: one byte per event for its kind (0 removed, 1 stored, 2 cleared), and 16 bytes per
    /// event for the block hash, which are zeros in a cleared event. `Lost` is left out, because the events after it
    /// state all cached blocks. `ReplicaIndex.apply` accepts them.
    fn take_packed_events<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let packed = |core: &mut Core| packed(&core.take_events());
        let (kinds, names) = self.core.with_events(py, packed)?;
        Ok((bounded::bytes(py, &kinds)?, bounded::bytes(py, &names)?))
    }

    /// The hashes (16 bytes, little-endian) of all cached blocks. O(cached blocks), without the GIL.
    fn cached_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let contents = self.core.detached(py, |core| Ok(core.cached_hashes()))?;
        bounded::list(py, contents, |hash| {
            Ok(PyBytes::new(py, &hash.to_le_bytes()))
        })
    }

    /// Writes all further operations to a new file, for `replay`.
    ///
    /// Only a new manager, without a sequence or step so far, can be recorded. A separate thread writes the file. If
    /// writing fails or falls 32 MiB behind, the recording ends and the manager continues; `stop_recording` then
    /// raises an error. Raises `TraceError` without creating a file, or `OSError` if the file cannot be created.
    fn record(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.core.with(py, |core| core.check_recordable())?;
        // Without the lock and without the GIL: a pipe waits here for its reader.
        let file = py.detach(|| File::create(&path));
        let file = file.map_err(|error| os_error(&error, Some(&path)))?;
        self.core.with(py, |core| core.record(file))
    }

    /// Ends the recording and closes its file; does nothing without a recording. It waits for the file without the
    /// manager's lock and without the GIL.
    ///
    /// Raises `OSError` if the recording is not complete.
    fn stop_recording(&self, py: Python<'_>) -> PyResult<()> {
        let Some(mut ended) = self.core.with(py, |core| Ok(core.end_recording()))? else {
            return Ok(());
        };
        loop {
            if let Some(written) = py.detach(|| ended.wait(SIGNALS_EVERY)) {
                return written.map_err(|error| os_error(&error, None));
            }
            py.check_signals()?;
        }
    }

    /// Recounts everything and compares, without the GIL. O(blocks + tokens).
    ///
    /// Raises `InvariantError` with the first difference.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.core
            .detached(py, |core| core.check().map_err(InvariantError::new_err))
    }
}

/// The longest wait between two checks for interrupts.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// Windows that are read of a list that is too long: the core says how many are possible.
const MAX_WINDOWS: usize = 1 << 10;

/// The window of each layer group.
pub(crate) fn windows_of(name: &str, groups: &Bound<'_, PyAny>) -> PyResult<Vec<Option<usize>>> {
    let too_many = |given| {
        raise(Error::OutOfRange {
            name: "the number of layer groups",
            min: 1,
            max: 64,
            given,
        })
    };
    items(groups, MAX_WINDOWS, too_many, |window, _| {
        match window.is_none() {
            true => Ok(None),
            false => number(name, window).map(Some),
        }
    })
}
