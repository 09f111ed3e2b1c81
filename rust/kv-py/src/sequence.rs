//! `Sequence`: a handle of the core's sequence.

use std::sync::Arc;

use kv_core::{BlockId, Error, SeqHandle, SeqKey, SequenceView};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::answers::{Remapping, extend_answer};
use crate::bounded;
use crate::locked::Locked;
use crate::numbers::number;
use crate::pin::Pin;
use crate::tokens::token_ids;
use crate::transfer::reserve_answer;

/// Tokens, their block table, and how many of them have their KV computed.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Sequence {
    pub(crate) core: Arc<Locked>,
    pub(crate) handle: SeqHandle,
}

impl Sequence {
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

    /// False once it was freed.
    #[getter]
    fn is_live(&self, py: Python<'_>) -> PyResult<bool> {
        self.core.with(py, |core| Ok(core.view(self.key()).is_ok()))
    }

    /// Tokens known: prompt and output.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.tokens.len())
    }

    /// Tokens whose KV is computed and committed.
    #[getter]
    fn num_computed_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_computed_tokens)
    }

    /// Tokens reused from the cache since the sequence was last without blocks.
    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_cached_tokens)
    }

    /// Tokens that its own transfers restored since it was last without blocks.
    #[getter]
    fn num_restored_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.view(py, |view| view.num_restored_tokens)
    }

    /// Ids of its blocks, first to last; those of the first layer group where there are several.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.tables(py, Some(1))?.swap_remove(0))
    }

    /// Ids of its blocks, one list per layer group. A block that was given back, because no later
    /// token sees it, reads as the null block.
    #[getter]
    fn block_tables(&self, py: Python<'_>) -> PyResult<Vec<Vec<u32>>> {
        self.tables(py, None)
    }

    /// All known token ids.
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tokens = self.view(py, |view| view.tokens.to_vec())?;
        bounded::list(py, tokens, Ok)
    }

    /// Puts a pin's blocks into the empty table of this sequence; the pin stays in force.
    ///
    /// Raises `PinError` if the pin is no prefix of it, `HandleError`, `PlanError`.
    fn attach(&self, py: Python<'_>, pin: &Pin) -> PyResult<()> {
        self.core.with(py, |core| {
            pin.with(|pin| match pin {
                Some(pin) => core.attach(self.key(), pin),
                None => Err(Error::ReleasedPin),
            })
        })
    }

    /// A pin on the longest prefix of this sequence's registered blocks that is computed and whole:
    /// no window lacks a block of it that the next token sees. Perhaps on none.
    fn pin(&self, py: Python<'_>) -> PyResult<Pin> {
        let pin = self.core.with(py, |core| core.pin(self.key()))?;
        Ok(Pin::new(pin))
    }

    /// A new sequence of the first `num_tokens` tokens of this one, on the same blocks.
    ///
    /// Nothing is copied now: a partial last block is copied when one of several sequences writes to it
    /// (`StepPlan.copies`). Raises `PlanError` if an open plan holds it, `TokenError` for a length
    /// that it does not have.
    fn fork(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Sequence> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let handle = self
            .core
            .with(py, |core| core.fork(self.key(), num_tokens))?;
        let core = Arc::clone(&self.core);
        Ok(Sequence { core, handle })
    }

    /// Adds known tokens to its end: the next turn of a conversation, a fork's own token.
    fn append(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = token_ids(tokens)?;
        self.core.with(py, |core| core.append(self.key(), &tokens))
    }

    /// Gives back the blocks past the first `num_tokens` tokens: slots reserved for a speculation that
    /// was rejected, to the block. Returns how many.
    ///
    /// Raises `PlanError` for fewer tokens than are computed, or if an open plan holds it.
    fn trim(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let num_tokens = number("num_tokens", num_tokens)?;
        self.core.with(py, |core| core.trim(self.key(), num_tokens))
    }

    /// Goes on with what is cached, from the block boundary on which it stands: its tokens are computed then
    /// and its blocks held. Returns how many tokens that are.
    ///
    /// At most all known tokens but one, whose KV is not written where its block was reused, too. Nothing
    /// is reused between blocks, with slots reserved, or of what an open plan computes. Raises `PlanError` if
    /// an open plan holds it.
    fn reuse_cached(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.with(py, |core| core.reuse_cached(self.key()))
    }

    /// Blocks for the first `num_tokens` tokens, whose KV the caller has outside the pool: for the whole blocks after
    /// the longest cached prefix.
    ///
    /// A `Transfer`; `NoRoom`; `Loading` if another transfer is to fill the next block; None if there is nothing to
    /// restore: the blocks are cached, or an open step computes them, or the sequence stands between blocks. All or
    /// nothing, and the sequence is not changed. Raises `PlanError` if an open plan holds it.
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

    /// Slots for `num_tokens` tokens after those that are computed, for a step without a plan.
    ///
    /// All or nothing. Slots that are there already count, so a call is due where a block ends, and after
    /// a fork. Raises `PlanError` if an open plan holds it.
    fn extend(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let num_tokens = number("num_tokens", num_tokens)?;
        let (answer, groups) = self.core.with(py, |core| {
            let groups = core.config().groups.len();
            Ok((core.extend(self.key(), num_tokens)?, groups))
        })?;
        extend_answer(py, answer, groups)
    }

    /// The next `num_tokens` tokens are computed; `tokens` follow those that were known.
    ///
    /// Registers every block that became full or merges it into the one that held its content first;
    /// returns the merges. From now on others reuse what was published: whatever reads it must come after what
    /// computes it on the device. Raises `PlanError` and changes nothing if an open plan holds it, or for more
    /// tokens than it has slots for or knows.
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

    /// Gives its blocks back and keeps its tokens: preemption by recomputation.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.reset(self.key()))
    }

    /// Ends the sequence; in an open plan it lives on until that is closed.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.free(self.key()))
    }

    fn __repr__(&self) -> String {
        format!("<Sequence {}>", self.handle.id())
    }
}
