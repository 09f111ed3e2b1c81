//! `Suffixes`: texts that grow, and what came after their ends before.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::numbers::number;
use crate::tokens::token_ids;

/// What came after the end of a text where it stood before: in the text, and in earlier ones of its
/// namespace. These are kept up to `max_tokens` tokens, the latest ones.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Suffixes(Mutex<suffix::Suffixes>);

impl Suffixes {
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut suffix::Suffixes) -> R + Send,
    ) -> R {
        py.detach(|| work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Suffixes {
    #[new]
    #[pyo3(signature = (max_tokens))]
    fn new(max_tokens: &Bound<'_, PyAny>) -> PyResult<Self> {
        let most = number("max_tokens", max_tokens)?;
        Ok(Self(Mutex::new(suffix::Suffixes::new(most))))
    }

    /// A text that begins with a prompt; what it is called.
    #[pyo3(signature = (prompt, *, namespace = None))]
    fn begin(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        namespace: Option<&[u8]>,
    ) -> PyResult<u64> {
        let prompt = token_ids(prompt)?;
        let namespace = namespace.unwrap_or_default();
        Ok(self.with(py, |known| known.begin(namespace, &prompt)))
    }

    /// The text goes on; false if there is none of this name.
    fn extend(&self, py: Python<'_>, text: u64, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tokens = token_ids(tokens)?;
        Ok(self.with(py, |known| known.extend(text, &tokens)))
    }

    /// The text has ended: its answer is kept for later ones. Nothing if there is none of this name.
    fn end(&self, py: Python<'_>, text: u64) {
        self.with(py, |known| known.end(text));
    }

    /// At most `most` tokens that may come next, and how many before them are the same where they did.
    fn guess(&self, py: Python<'_>, text: u64, most: usize) -> (Vec<u32>, usize) {
        let guess = self.with(py, |known| known.guess(text, most));
        (guess.tokens, guess.support)
    }

    /// Tokens of ended texts that are kept.
    #[getter]
    fn num_archived(&self, py: Python<'_>) -> usize {
        self.with(py, |known| known.num_archived())
    }

    /// Texts that grow.
    #[getter]
    fn num_growing(&self, py: Python<'_>) -> usize {
        self.with(py, |known| known.num_known().0)
    }
}
