//! `SuffixIndex`: draft tokens from earlier text.

use std::sync::{Mutex, PoisonError};

use forks::Own;
use pyo3::prelude::*;

use crate::errors::forked;
use crate::numbers::number;
use crate::tokens::token_ids;

/// Drafts tokens for sequences: the tokens that followed a sequence's suffix at an earlier occurrence, in the sequence
/// or in finished sequences of its namespace. It keeps the latest `max_tokens` tokens of finished sequences.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct SuffixIndex(Own<Mutex<suffix_index::SuffixIndex>>);

impl SuffixIndex {
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut suffix_index::SuffixIndex) -> R + Send,
    ) -> PyResult<R> {
        self.0.origin.check("SuffixIndex").map_err(forked)?;
        let locked = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(py.detach(|| work(&mut locked())))
    }
}

#[pymethods]
impl SuffixIndex {
    #[new]
    #[pyo3(signature = (max_tokens))]
    fn new(max_tokens: &Bound<'_, PyAny>) -> PyResult<Self> {
        let max_tokens = number("max_tokens", max_tokens)?;
        let index = suffix_index::SuffixIndex::new(max_tokens);
        Ok(Self(Own::new(Mutex::new(index))))
    }

    /// Adds a sequence with its prompt. Returns its id.
    #[pyo3(signature = (prompt, *, namespace = None))]
    fn start(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
    ) -> PyResult<u64> {
        let prompt = token_ids(prompt)?;
        let namespace = namespace.unwrap_or_default();
        self.with(py, |index| index.start(namespace, &prompt))
    }

    /// Appends tokens to a sequence. Returns False if it is unknown.
    fn extend(&self, py: Python<'_>, sequence: u64, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tokens = token_ids(tokens)?;
        self.with(py, |index| index.extend(sequence, &tokens))
    }

    /// Keeps the output of a finished sequence for later drafts. Does nothing for an unknown one.
    fn finish(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.with(py, |index| index.finish(sequence))
    }

    /// Up to `max_tokens` draft tokens, and the length of the matched suffix.
    fn draft(
        &self,
        py: Python<'_>,
        sequence: u64,
        max_tokens: usize,
    ) -> PyResult<(Vec<u32>, usize)> {
        let draft = self.with(py, |index| index.draft(sequence, max_tokens))?;
        Ok((draft.tokens, draft.match_len))
    }

    /// Number of kept tokens of finished sequences.
    #[getter]
    fn num_archived(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |index| index.num_archived())
    }

    /// Number of sequences that are not finished.
    #[getter]
    fn num_sequences(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |index| index.num_sequences())
    }
}
