//! `StepPlan`: one step, in a constant number of calls.

use std::sync::Arc;

use forks::Own;
use kv_core::{BlockId, PlanHandle, PrefillRequest, StateCopy};
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

/// One step: plan decodes and prefills, fill the inputs, then commit or roll back. Dropping an open plan rolls it back.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct StepPlan {
    core: Arc<Locked>,
    handle: Own<PlanHandle>,
}

impl StepPlan {
    pub(crate) fn new(core: &Arc<Locked>, handle: PlanHandle) -> Self {
        Self {
            core: Arc::clone(core),
            handle: Own::new(handle),
        }
    }

    fn view(&self, py: Python<'_>) -> PyResult<kv_core::PlanView> {
        self.core.with(py, |core| core.plan_view(self.handle.key()))
    }
}

#[pymethods]
impl StepPlan {
    /// Number of tokens to compute.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_tokens)
    }

    /// Number of sequences in the plan.
    #[getter]
    fn num_sequences(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_sequences)
    }

    /// Number of rows whose logits give a token, for each of which `commit` needs one.
    #[getter]
    fn num_samples(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.num_samples)
    }

    /// Number of tokens that may still be planned.
    #[getter]
    fn budget_left(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.view(py)?.budget_left)
    }

    /// True if the plan is neither committed nor rolled back.
    #[getter]
    fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        let key = self.handle.key();
        self.core.with(py, |core| Ok(core.plan_view(key).is_ok()))
    }

    /// Plans one token for each sequence, in order, while blocks and budget last.
    ///
    /// Returns the positions in `sequences` of those that did not fit. Each sequence must have exactly one token
    /// left to compute. On misuse (`PlanError`, `HandleError`), none is planned. With `lookahead`, each sequence
    /// also gets blocks for that many slots beyond its known tokens.
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

    /// Plans up to `max_tokens` uncomputed tokens of the sequence: matches the prefix, reuses and allocates blocks,
    /// and charges the budget.
    ///
    /// Without `spare_blocks` the pool needs blocks for the tokens of this step. With `spare_blocks=n`, for admission,
    /// it needs blocks for all known tokens and `n` more; only those of this step are allocated.
    /// `replay=n` computes the last `n` cached tokens again, all in this step, without writing their KV (slot -1);
    /// if fewer tokens are cached, all of them.
    ///
    /// With `state_blocks`, the tokens after the last snapshot are computed again, in as many steps as it takes, and their
    /// KV is not written if it is cached. A chunk ends where a snapshot is kept.
    #[pyo3(signature = (sequence, max_tokens, *, spare_blocks = None, replay = None))]
    fn prefill(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        max_tokens: &Bound<'_, PyAny>,
        spare_blocks: Option<&Bound<'_, PyAny>>,
        replay: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let request = PrefillRequest {
            max_tokens: number("max_tokens", max_tokens)?,
            spare_blocks: spare_blocks
                .map(|blocks| number("spare_blocks", blocks))
                .transpose()?,
            replay: replay.map_or(Ok(0), |tokens| number("replay", tokens))?,
        };
        let (plan, key) = (self.handle.key(), sequence.key());
        let answer = self
            .core
            .with(py, |core| core.prefill_again(plan, key, request))?;
        prefill_answer(py, answer)
    }

    /// Removes a sequence from the plan, as if it had not been planned.
    ///
    /// Sequences that depend on it are removed too: those that share blocks that it was to compute, and those that
    /// would write in place to a partial block that it left to them. Returns their ids, in plan order.
    fn cancel(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Vec<u64>> {
        let (plan, key) = (self.handle.key(), sequence.key());
        self.core.with(py, |core| core.cancel(plan, key))
    }

    /// Blocks to copy before the step runs, as (source, destination), in order. `commit` is refused until they were
    /// read.
    fn copies(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        let ids = |(from, to): &(BlockId, BlockId)| (from.get(), to.get());
        self.core.with(py, |core| {
            let copies = core.copies(self.handle.key())?;
            Ok(copies.iter().map(ids).collect())
        })
    }

    /// The states that sequences begin with, to be copied from blocks of snapshots before the step runs: (id of the
    /// sequence, position, block ids), in plan order. Position 0 has no blocks: the state of no token. A sequence that is
    /// not listed continues its running state.
    fn state_loads(&self, py: Python<'_>) -> PyResult<Vec<(u64, usize, Vec<u32>)>> {
        let key = self.handle.key();
        let loads = self.core.with(py, |core| core.state_loads(key))?;
        Ok(loads.into_iter().map(state_copy).collect())
    }

    /// The snapshots to be written after the step has run: (id of the sequence, position, block ids), in plan order. Each is
    /// the running state of the sequence at the end of its tokens in this step, which is the position. `commit` caches
    /// them.
    ///
    /// If a step that has run is rolled back, reset its sequences: their running states have gone on.
    fn state_saves(&self, py: Python<'_>) -> PyResult<Vec<(u64, usize, Vec<u32>)>> {
        let key = self.handle.key();
        let saves = self.core.with(py, |core| core.state_saves(key))?;
        Ok(saves.into_iter().map(state_copy).collect())
    }

    /// Writes the inputs of the step into the arrays, with sequences in plan order. On an error, it writes nothing.
    ///
    /// With `shared`, it also finds which rows share which leading blocks. This takes time only if the rows or
    /// their shared blocks have changed since the last call with these buffers.
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

    /// Plans a sequence that has one token left to compute, together with drafts that may follow it.
    ///
    /// The step computes all of them, and samples a row for each. All drafts are planned, or none. Raises the
    /// errors of `decode`.
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

    /// Adds drafts to decodes that are already planned. `drafts` holds those of all `sequences` one after the
    /// other, and `counts` their number for each.
    ///
    /// Drafts use only the budget and blocks that are left, so no decode waits for them. Returns the number planned
    /// for each sequence. The step samples a row for each draft, as with `speculate`. On misuse (`PlanError`,
    /// `HandleError`), no draft is added.
    fn draft(
        &self,
        py: Python<'_>,
        sequences: Batch,
        drafts: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<usize>> {
        let drafts = token_ids(drafts)?;
        let max = sequences.0.len();
        let too_many = |counts| PlanError::new_err(format!("{counts} counts for {max} sequences"));
        let counts = items(counts, max, too_many, |count, _| number("counts", count))?;
        let plan = self.handle.key();
        self.core
            .with(py, |core| core.draft(plan, &sequences.0, &drafts, &counts))
    }

    /// Commits the step after it was computed. `sampled` has one token id per sampling sequence, in plan order.
    /// With `counts`, it has all accepted tokens, and `counts` says how many belong to each sequence.
    ///
    /// A sequence accepts its correct drafts and one token after them. Every block that became full is cached, or
    /// merged into the block that already holds the same prefix; the merges are returned. Raises `PlanError` and
    /// changes nothing if the counts are wrong, an accepted token is not the draft, or `copies` was not read
    /// although there are blocks to copy.
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

    /// Undoes the plan and restores its sequences.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        self.core.with(py, |core| core.rollback(self.handle.key()))
    }

    fn __repr__(&self) -> String {
        format!("<StepPlan {}>", self.handle.key().serial())
    }
}

fn state_copy(copy: StateCopy) -> (u64, usize, Vec<u32>) {
    let blocks = copy.blocks.iter().map(|block| block.get());
    (copy.sequence, copy.position, blocks.collect())
}

/// How many tokens each sequence accepted: at least one each, so at most one count per token.
fn accepted(counts: &Bound<'_, PyAny>, tokens: usize) -> PyResult<Vec<usize>> {
    let too_many = |counts| {
        PlanError::new_err(format!(
            "{counts} counts for {tokens} sampled tokens; a sequence accepts one token or more"
        ))
    };
    items(counts, tokens, too_many, |count, _| number("counts", count))
}
