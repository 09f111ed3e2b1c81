//! `Sequence`: a handle of the core's sequence.

use std::sync::Arc;

use forks::Own;
use kv_core::{BlockId, Error, SeqHandle, SeqKey, SequenceView};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::answers::{Remapping, extend_answer};
use crate::bounded;
use crate::errors::ConfigError;
use crate::explanation::Explanation;
use crate::items::items;
use crate::locked::Locked;
use crate::numbers::number;
use crate::pin::Pin;
use crate::tokens::token_ids;
use crate::transfer::reserve_answer;

/// The most positions at which a sequence wants snapshots.
const MAX_WANTED: usize = 1 << 16;

/// The tokens of a request, their block tables, and the number of tokens whose KV is computed.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Sequence {
    pub(crate) core: Arc<Locked>,
    pub(crate) handle: Own<SeqHandle>,
}

impl Sequence {
    pub(crate) fn new(core: &Arc<Locked>, handle: SeqHandle) -> Self {
        Self {
            core: Arc::clone(core),
            handle: Own::new(handle),
        }
    }

    pub(crate) fn key(&self) -> SeqKey {
        self.handle.key()
    }

    /// What `look` sees of it.
    fn view<R: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(SequenceView<'_>) -> R + Send,
    ) -> PyResult<R> {
        self.core.with(py, |core| core.view(self.key()).map(look))
    }

    /// Its table in each of the first `groups` layer groups, or in all.
    fn tables(&self, py: Python<'_>, groups: Option<usize>) -> PyResult<Vec<Vec<u32>>> {
        self.core.with(py, |core| {
            let (null, all) = (core.config().num_blocks as u32, core.config().groups.len());
            let view = core.view(self.key())?;
            let id = |block: Option<BlockId>| block.map_or(null, BlockId::get);
            let table = |group| view.table(group).map(id).collect();
            Ok((0..groups.unwrap_or(all)).map(table).collect())
        })
    }
}

#[pymethods]
impl Sequence {
    /// The sequence's number, unique in its manager and never reused.
    #[getter]
    fn id(&self) -> u64 {
        self.handle.id()
    }

    /// False after the sequence was freed.
    #[getter]
    fn is_live(&self, py: Python<'_>) -> PyResult<bool> {
        self.core.with(py, |core| Ok(core.view(self.key()).is_ok()))
    }

    /// Number of known tokens: prompt and output.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.tokens.len())
    }

    /// Number of tokens whose KV is computed and committed.
    #[getter]
    fn num_computed_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_computed_tokens)
    }

    /// Number of tokens reused from the cache since the sequence last had no blocks.
    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_cached_tokens)
    }

    /// The version of the weights with which it began.
    #[getter]
    fn weights_version(&self, py: Python<'_>) -> PyResult<u32> {
        self.view(py, |view| view.weights_version)
    }

    /// Whether the weights have changed since: it goes on over its blocks, and none of them is cached until `reset`.
    #[getter]
    fn is_private(&self, py: Python<'_>) -> PyResult<bool> {
        self.view(py, |view| view.is_private)
    }

    /// Number of tokens that its own transfers restored since the sequence last had no blocks.
    #[getter]
    fn num_restored_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_restored_tokens)
    }

    /// The tokens that it has reused, by source, since it last had no blocks, and why its first prefill computed
    /// others. No reason is known unless the manager was created with `explain=True`.
    fn explain(&self, py: Python<'_>) -> PyResult<Explanation> {
        self.core.with(py, |core| {
            let view = core.view(self.key())?;
            let (num_in_flight_tokens, num_copied_tokens) =
                (view.num_in_flight_tokens, view.num_copied_tokens);
            let others = num_in_flight_tokens + num_copied_tokens;
            let explanation = kv_core::Explanation {
                num_pool_tokens: view.num_cached_tokens.saturating_sub(others),
                num_in_flight_tokens,
                num_copied_tokens,
                miss: view.miss.cloned(),
            };
            Ok(Explanation::new(explanation, core.config()))
        })
    }

    /// Ids of its blocks in order; with several layer groups, those of the first group.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.tables(py, Some(1))?.swap_remove(0))
    }

    /// Ids of its blocks, one list per layer group. The null block replaces a block that was released because no
    /// later token sees it.
    #[getter]
    fn block_tables(&self, py: Python<'_>) -> PyResult<Vec<Vec<u32>>> {
        self.tables(py, None)
    }

    /// All known token ids.
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tokens = self.view(py, |view| view.tokens.to_vec())?;
        bounded::list(py, tokens, Ok)
    }

    /// Puts the blocks of a pin into the empty table of this sequence. The pin remains valid.
    ///
    /// Raises `PinError` if the pin is not a prefix of the sequence, `HandleError`, `PlanError`.
    fn attach(&self, py: Python<'_>, pin: &Pin) -> PyResult<()> {
        pin.check_process()?;
        self.core.with(py, |core| {
            pin.with(|pin| match pin {
                Some(pin) => core.attach(self.key(), pin),
                None => Err(Error::ReleasedPin),
            })
        })
    }

    /// Pins the longest computed prefix of this sequence's cached blocks for which each window still has all blocks
    /// that the next token sees. It may be empty.
    fn pin(&self, py: Python<'_>) -> PyResult<Pin> {
        let pin = self.core.with(py, |core| core.pin(self.key()))?;
        Ok(Pin::new(pin))
    }

    /// Creates a sequence from the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// It copies no KV: a shared partial block is copied on the first write to it (`StepPlan.copies`).
    /// Raises `PlanError` if an open plan holds this sequence, and `TokenError` for a length that it does not have.
    fn fork(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Sequence> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let handle = self
            .core
            .with(py, |core| core.fork(self.key(), num_tokens))?;
        Ok(Sequence::new(&self.core, handle))
    }

    /// Asks for snapshots of its state at the last block boundaries before these positions, such as the end of a system
    /// prompt, in place of those asked for before.
    fn want_snapshots(&self, py: Python<'_>, positions: &Bound<'_, PyAny>) -> PyResult<()> {
        let too_many = |given| {
            let message = format!("at most {MAX_WANTED} positions of snapshots, got {given}");
            ConfigError::new_err(message)
        };
        let read = |position: &Bound<'_, PyAny>, _| number("positions", position);
        let positions: Vec<usize> = items(positions, MAX_WANTED, too_many, read)?;
        self.core
            .with(py, |core| core.want_snapshots(self.key(), &positions))
    }

    /// Appends known tokens, such as the next turn of a conversation or the first token of a fork.
    fn append(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = token_ids(tokens)?;
        self.core.with(py, |core| core.append(self.key(), &tokens))
    }

    /// Releases the blocks beyond the first `num_tokens` tokens, such as slots for rejected drafts. Returns their
    /// number.
    ///
    /// Raises `PlanError` for fewer tokens than are computed, or if an open plan holds the sequence.
    fn trim(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_tokens = number("num_tokens", num_tokens)?;
        self.core.with(py, |core| core.trim(self.key(), num_tokens))
    }

    /// Attaches the cached blocks that continue this sequence from a block boundary. Their tokens count as
    /// computed. Returns the number of these tokens.
    ///
    /// At most all known tokens but one are reused. The last token must still be computed; its KV is not written if
    /// its block was reused. Nothing is reused if the computed tokens end inside a block, if slots are reserved, or
    /// from blocks that an open plan computes. With `state_blocks`, a sequence without computed tokens reuses those up to
    /// the last snapshot of its prefix: copy that (`pin().state_blocks`) to the running state. Raises `PlanError` if an
    /// open plan holds the sequence.
    fn reuse_cached(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.with(py, |core| core.reuse_cached(self.key()))
    }

    /// Reserves blocks for KV that the caller has outside the pool: for the whole blocks of the first `num_tokens`
    /// tokens that follow the longest cached prefix.
    ///
    /// Returns a `Transfer`; `NoRoom`; `Loading` if another transfer will fill the next block; or None if there is
    /// nothing to restore, because the blocks are cached, an open step computes them, or the computed tokens end
    /// inside a block. It reserves all blocks or none, and does not change the sequence. Raises `PlanError` if an
    /// open plan holds the sequence.
    fn reserve(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let answer = self
            .core
            .with(py, |core| core.reserve(self.key(), num_tokens))?;
        reserve_answer(py, &self.core, answer)
    }

    /// Caches the state of the sequence at its position, the end of a block, for an engine without plans. Returns
    /// `NoRoom`, or `Extended` whose `blocks[0]` are the blocks to which the engine copies the state, in the order of its
    /// bytes, before it runs another step: none if the prefix has a snapshot or is not cached, or without
    /// `state_blocks`. Raises `PlanError` if the computed tokens do not end with a block, or if an open plan holds the
    /// sequence.
    fn keep_snapshot(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let answer = self.core.with(py, |core| core.keep_snapshot(self.key()))?;
        extend_answer(py, answer, 1)
    }

    /// Reserves slots for the `num_tokens` tokens after the computed ones, for a step without a plan.
    ///
    /// It reserves all slots or none. Slots that are already reserved count, so a call is needed only at a block
    /// boundary and after a fork. Raises `PlanError` if an open plan holds the sequence.
    fn extend(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let (answer, groups) = self.core.with(py, |core| {
            let groups = core.config().groups.len();
            Ok((core.extend(self.key(), num_tokens)?, groups))
        })?;
        extend_answer(py, answer, groups)
    }

    /// Marks the next `num_tokens` tokens as computed, and appends `tokens` to the known ones.
    ///
    /// Every block that became full is cached, or merged into the block that already holds the same prefix; the
    /// merges are returned. Other sequences may reuse the published blocks at once, so their reads must run after
    /// the writes on the device. Raises `PlanError` and changes nothing if an open plan holds the sequence, or for
    /// more tokens than it knows or has slots for.
    #[pyo3(signature = (num_tokens, tokens = None))]
    fn publish(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Remapping>> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let tokens = tokens.map(token_ids).transpose()?.unwrap_or_default();
        let remappings = self
            .core
            .with(py, |core| core.publish(self.key(), num_tokens, &tokens))?;
        Ok(remappings.into_iter().map(Remapping::from).collect())
    }

    /// Releases its blocks and keeps its tokens: preemption by recomputation.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.reset(self.key()))
    }

    /// Frees the sequence. If an open plan holds it, it lives until the plan is closed.
    ///
    /// With `keep`, only the blocks of its first `keep` tokens stay cached: later ones that nothing else holds are
    /// free at once. Use it if later prompts repeat only a part of an answer.
    #[pyo3(signature = (*, keep=None))]
    fn free(&self, py: Python<'_>, keep: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let keep = keep.map(|keep| number("keep", keep)).transpose()?;
        self.core.with(py, |core| match keep {
            None => core.free(self.key()),
            Some(keep) => core.free_keeping(self.key(), keep),
        })
    }

    fn __repr__(&self) -> String {
        format!("<Sequence {}>", self.handle.id())
    }
}
