//! The choice of tokens on the CPU: from arrays of float32, or of bfloat16 passed as uint16.

use cpu_kernels::{Draws, Logprobs, Reported};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{apart, array, by_float, writable};
use crate::memory::{shared_slice, unique_slice};

/// Adds the functions of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(largest_logits, module)?)?;
    module.add_function(wrap_pyfunction!(draw_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(token_logprobs, module)?)
}

/// Writes the id of the largest logit of each row of `logits` `[B, V]` to `out` int64 `[B]`: of equal ones the lowest, and of
/// NaN the first.
///
/// Logits are float32, or bfloat16 as uint16. Raises `BufferError` for arrays that do not fit.
#[pyfunction]
fn largest_logits(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    by_float!(logits, largest_as(py, threads, logits, out))
}

fn largest_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let logits = array::<T>("logits", logits, 2)?;
    let mut out = writable::<i64>("out", out, 1)?;
    apart(("out", &out), &[("logits", &logits)])?;
    let (attention, vocab_size) = (threads.attention()?, logits.shape()[1]);
    let (logits, out) = (shared_slice(&logits), unique_slice(&mut out));
    py.detach(|| attention.largest(logits, vocab_size, out))
        .map_err(raise_attention)
}

/// Writes a token to `out` int64 `[R]` for each of `rows` int64 `[R]`, drawn from `logits` `[B, V]`.
///
/// `settings` float64 `[4, R]` are temperature, min-p, top-k and top-p of each; min-p and top-k are off if 0, top-p if 1.
/// `numbers` float64 `[R]` are random, from 0 to below 1. Otherwise as `largest_logits`. Rows whose largest logit is no
/// number or infinite get that of `largest_logits`.
#[pyfunction]
fn draw_tokens(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    rows: &Bound<'_, PyAny>,
    settings: &Bound<'_, PyAny>,
    numbers: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let rows = array::<i64>("rows", rows, 1)?;
    let settings = array::<f64>("settings", settings, 2)?;
    let numbers = array::<f64>("numbers", numbers, 1)?;
    let mut out = writable::<i64>("out", out, 1)?;
    let count = rows.item_count();
    if settings.shape() != [4, count] {
        let shape = settings.shape();
        return Err(BufferError::new_err(format!(
            "array settings of shape {shape:?} does not fit {count} rows: it must be [4, {count}]"
        )));
    }
    apart(("out", &out), &[("rows", &rows)])?;
    apart(
        ("out", &out),
        &[("settings", &settings), ("numbers", &numbers)],
    )?;
    let column = |at: usize| &shared_slice(&settings)[at * count..][..count];
    let draws = Draws {
        rows: shared_slice(&rows),
        temperature: column(0),
        min_p: column(1),
        top_k: column(2),
        top_p: column(3),
        numbers: shared_slice(&numbers),
    };
    by_float!(logits, draw_as(py, threads, logits, &draws, &mut out))
}

fn draw_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    draws: &Draws<'_>,
    out: &mut PyBuffer<i64>,
) -> PyResult<()> {
    let logits = array::<T>("logits", logits, 2)?;
    apart(("out", &*out), &[("logits", &logits)])?;
    let (attention, vocab_size) = (threads.attention()?, logits.shape()[1]);
    let (logits, out) = (shared_slice(&logits), unique_slice(out));
    py.detach(|| attention.draw(logits, vocab_size, draws, out))
        .map_err(raise_attention)
}

/// The rows, a token of each, and how many of the most probable tokens are reported beside it: int64 `[R]` each.
#[derive(FromPyObject)]
struct ReportedArrays<'py>(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Log-probabilities float32 and ranks int64 of the tokens, `[R]`; ids int64 and log-probabilities float32 of the most
/// probable ones, row after row.
#[derive(FromPyObject)]
struct LogprobArrays<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

/// Writes the log-probabilities of tokens in rows of `logits` `[B, V]`.
///
/// `reported` are rows, a token of each, and how many of the most probable tokens are reported beside it: int64 `[R]`
/// each. `out` are the tokens' log-probabilities float32 and ranks int64, `[R]`; then ids int64 and log-probabilities
/// float32 of the most probable tokens, row after row. Equal logits rank by id. Otherwise as `largest_logits`.
#[pyfunction]
fn token_logprobs(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    reported: ReportedArrays<'_>,
    out: LogprobArrays<'_>,
) -> PyResult<()> {
    by_float!(logits, logprobs_as(py, threads, logits, &reported, &out))
}

fn logprobs_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    logits: &Bound<'_, PyAny>,
    reported: &ReportedArrays<'_>,
    out: &LogprobArrays<'_>,
) -> PyResult<()> {
    let logits = array::<T>("logits", logits, 2)?;
    let rows = array::<i64>("rows", &reported.0, 1)?;
    let token_ids = array::<i64>("token_ids", &reported.1, 1)?;
    let counts = array::<i64>("counts", &reported.2, 1)?;
    let mut logprobs = writable::<f32>("logprobs", &out.0, 1)?;
    let mut ranks = writable::<i64>("ranks", &out.1, 1)?;
    let mut top_ids = writable::<i64>("top_ids", &out.2, 1)?;
    let mut top_logprobs = writable::<f32>("top_logprobs", &out.3, 1)?;
    let read = [
        ("rows", &rows),
        ("token_ids", &token_ids),
        ("counts", &counts),
    ];
    for (name, floats) in [("logprobs", &logprobs), ("top_logprobs", &top_logprobs)] {
        apart((name, floats), &[("logits", &logits)])?;
        apart((name, floats), &read)?;
        apart((name, floats), &[("ranks", &ranks), ("top_ids", &top_ids)])?;
    }
    for (name, integers) in [("ranks", &ranks), ("top_ids", &top_ids)] {
        apart((name, integers), &[("logits", &logits)])?;
        apart((name, integers), &read)?;
    }
    apart(("top_ids", &top_ids), &[("ranks", &ranks)])?;
    apart(("top_logprobs", &top_logprobs), &[("logprobs", &logprobs)])?;
    let (attention, vocab_size) = (threads.attention()?, logits.shape()[1]);
    let reported = Reported {
        rows: shared_slice(&rows),
        token_ids: shared_slice(&token_ids),
        counts: shared_slice(&counts),
    };
    let out = Logprobs {
        logprobs: unique_slice(&mut logprobs),
        ranks: unique_slice(&mut ranks),
        top_ids: unique_slice(&mut top_ids),
        top_logprobs: unique_slice(&mut top_logprobs),
    };
    let logits = shared_slice(&logits);
    py.detach(|| attention.logprobs(logits, vocab_size, &reported, out))
        .map_err(raise_attention)
}
