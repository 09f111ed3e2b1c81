//! `StepPlan`: one step, in a constant number of calls.

use std::sync::Arc;

use kv_core::{BlockId, PlanHandle};
use pyo3::prelude::*;

use crate::answers::{Remapping, prefill_answer};
use crate::batch::Batch;
use crate::buffers::StepBuffers;
use crate::errors::{PlanError, raise};
use crate::items::items;
use crate::locked::Locked;
use crate::numbers::number;
use crate::prefixes::SharedPrefixes;
use crate::sequence::Sequence;
use crate::tokens::token_ids;

/// One step: decodes and prefills, the inputs, then commit or rollback. Dropping an open one rolls it
/// back.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct StepPlan {
    pub(crate) core: Arc<Locked>,
    pub(crate) handle: PlanHandle,
}

impl StepPlan {
    fn view(&self, py: Python<'_>) -> PyResult<kv_core::PlanView> {
        self.core.with(py, |core| core.plan_view(self.handle.key()))
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
        let key = self.handle.key();
        self.core.with(py, |core| Ok(core.plan_view(key).is_ok()))
    }

    /// Plans one token for each sequence, in their order, as far as blocks and budget reach.
    ///
    /// Returns the positions in `sequences` of those that did not fit. Each must have exactly one
    /// token left to compute; on misuse (`PlanError`, `HandleError`) none is planned. With
    /// `lookahead` each gets blocks for so many slots past its known tokens too.
    #[pyo3(signature = (sequences, *, lookahead = None))]
    fn decode(
        &self,
        py: Python<'_>,
        sequences: Batch,
        lookahead: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<usize>> {
        let lookahead = lookahead.map_or(Ok(0), |slots| number("lookahead", slots))?;
        let plan = self.handle.key();
        self.core
            .with(py, |core| core.decode(plan, &sequences.0, lookahead))
    }

    /// Plans up to `max_tokens` of the sequence's uncomputed tokens: match, reuse, allocate, charge.
    ///
    /// `reserve=None`: the blocks of this step's tokens must be there. `reserve=n`: those of all its
    /// known tokens must be there with `n` to spare (only this step's are taken): admission. `replay=n`
    /// computes the last `n` cached tokens again, all in this step, and writes none of them (slot -1).
    /// Where fewer were found, all of those.
    #[pyo3(signature = (sequence, max_tokens, *, reserve = None, replay = None))]
    fn prefill(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: &Bound<'_, PyAny>,
        reserve: Option<&Bound<'_, PyAny>>,
        replay: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let max_tokens = number("max_tokens", max_tokens)?;
        let reserve = reserve
            .map(|reserve| number("reserve", reserve))
            .transpose()?;
        let replay = replay.map_or(Ok(0), |tokens| number("replay", tokens))?;
        let (plan, key) = (self.handle.key(), sequence.key());
        let limits = (max_tokens, reserve);
        let answer = self
            .core
            .with(py, |core| core.prefill_again(plan, key, limits, replay))?;
        prefill_answer(py, answer)
    }

    /// Takes a sequence out of the plan again, as if it had not been planned.
    ///
    /// Sequences that depend on it go with it, as they share what it was to compute, or write in place in
    /// a partial block that it left to them; returns their ids, in plan order.
    fn cancel(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Vec<u64>> {
        let (plan, key) = (self.handle.key(), sequence.key());
        self.core.with(py, |core| core.cancel(plan, key))
    }

    /// Blocks to copy before the step runs, as (source, destination), in order. `commit` is refused until they
    /// were read.
    fn copies(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        let ids = |(from, to): &(BlockId, BlockId)| (from.get(), to.get());
        self.core.with(py, |core| {
            let copies = core.copies(self.handle.key())?;
            Ok(copies.iter().map(ids).collect())
        })
    }

    /// Writes the step's inputs into the arrays, sequences in plan order; on an error, nothing.
    ///
    /// With `shared`, which of its rows share which leading blocks, too. That is found anew when the rows of
    /// these buffers are others than before, or share something else; until then it costs nothing.
    #[pyo3(signature = (buffers, *, shared = None))]
    fn fill(
        &self,
        py: Python<'_>,
        buffers: &StepBuffers,
        shared: Option<&SharedPrefixes>,
    ) -> PyResult<()> {
        let plan = self.handle.key();
        self.core.read(py, |core| {
            let Some(shared) = shared else {
                let filled = buffers.with(|arrays, rows| core.fill(plan, arrays, rows))?;
                return filled.map_err(raise);
            };
            let sequences = core.plan_view(plan).map_err(raise)?.num_sequences;
            shared.with(sequences, |shared| {
                let filled =
                    buffers.with(|arrays, rows| core.fill_shared(plan, arrays, rows, shared))?;
                filled.map_err(raise)
            })
        })
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
        let (plan, key) = (self.handle.key(), sequence.key());
        let answer = self
            .core
            .with(py, |core| core.speculate(plan, key, &drafts))?;
        prefill_answer(py, answer)
    }

    /// Extends decodes that are in the plan by drafts that may follow them: `counts` says how many of
    /// `drafts` are for each of `sequences`, one sequence after the other.
    ///
    /// Drafts take what is left of budget and blocks, and no decode waits for them: returns how many each
    /// got. The step samples a row for each, as after `speculate`. On misuse (`PlanError`, `HandleError`)
    /// no sequence gets any.
    fn draft(
        &self,
        py: Python<'_>,
        sequences: Batch,
        drafts: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<usize>> {
        let drafts = token_ids(drafts)?;
        let most = sequences.0.len();
        let too_many = |counts| PlanError::new_err(format!("{counts} counts for {most} sequences"));
        let counts = items(counts, most, too_many, |count, _| number("counts", count))?;
        let plan = self.handle.key();
        self.core
            .with(py, |core| core.draft(plan, &sequences.0, &drafts, &counts))
    }

    /// Takes the step as computed. `sampled`: one token id per sampling sequence, in plan order; or
    /// all accepted ones, with `counts` saying how many each sequence accepted.
    ///
    /// A sequence accepts the drafts that turned out right and one token after them. Registers every
    /// block that became full or merges it into the one that held its content first; returns the
    /// merges. Raises `PlanError` and changes nothing if the counts are wrong, a token is no draft, or blocks are
    /// to be copied and `copies` was not read since they were planned.
    #[pyo3(signature = (sampled, counts = None))]
    fn commit(
        &self,
        py: Python<'_>,
        sampled: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Remapping>> {
        let sampled = token_ids(sampled)?;
        let counts = counts.map(|counts| accepted(counts, sampled.len()));
        let counts = counts.transpose()?;
        let plan = self.handle.key();
        let remappings = self.core.with(py, |core| match counts {
            None => core.commit(plan, &sampled),
            Some(counts) => core.commit_accepted(plan, &sampled, &counts),
        })?;
        Ok(remappings.into_iter().map(Remapping::from).collect())
    }

    /// Undoes the plan: its sequences are what they were before it.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.rollback(self.handle.key()))
    }

    fn __repr__(&self) -> String {
        format!("<StepPlan {}>", self.handle.key().serial())
    }
}

/// How many tokens each sequence accepted: one or more each, so there are no more counts than tokens.
fn accepted(counts: &Bound<'_, PyAny>, tokens: usize) -> PyResult<Vec<usize>> {
    let too_many = |counts| {
        PlanError::new_err(format!(
            "{counts} counts for {tokens} sampled tokens; a sequence accepts one token or more"
        ))
    };
    items(counts, tokens, too_many, |count, _| number("counts", count))
}
