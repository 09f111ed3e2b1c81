//! Gated delta rules on the CPU, as Python calls them.

use cpu_kernels::{DeltaOptions, DeltaRows, DeltaShape};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::raise_attention;
use crate::float_arrays::{any_array, apart, array, by_float, of_shape, rows, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::states::{CpuStateStep, Written};

/// Adds the functions of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(gated_delta, module)?)?;
    module.add_function(wrap_pyfunction!(log_decays, module)?)
}

/// Advances the state of each sequence by its tokens, by the gated delta rule, and writes what the states answer to the
/// queries to `out`.
///
/// `query` and `key` are `[T, key_heads, key_dim]`, `value` and `out` `[T, value_heads, value_dim]`, `beta` `[T,
/// value_heads]`. `log_decay` float32 `[T, value_heads]`, or `[T, value_heads, key_dim]` for a decay of each number of a
/// key, are natural logarithms, at most 0. `states` float32 are `[slots, value_heads, key_dim, value_dim]`. Consecutive
/// heads of values share a head of keys. Queries are multiplied by `scaling`; with `epsilon`, queries and keys are first
/// divided by `sqrt(sum of squares + epsilon)`. For each token, with `S` the state: `S = exp(log_decay) * S`, then `S = S
/// + key * beta * (value - key S)`, then `out = query S`.
///
/// Arrays of tokens, bits and threads are as in `short_conv`. Raises `BufferError` for arrays that do not fit, and
/// `ConfigError` for heads that do not share keys evenly; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, step, query, key, value, log_decay, beta, states, out, *, scaling, epsilon = None))]
#[allow(clippy::too_many_arguments)]
fn gated_delta(
    py: Python<'_>,
    threads: &CpuAttention,
    step: &CpuStateStep,
    query: &Bound<'_, PyAny>,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    log_decay: &Bound<'_, PyAny>,
    beta: &Bound<'_, PyAny>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scaling: f32,
    epsilon: Option<f32>,
) -> PyResult<()> {
    let options = DeltaOptions { scaling, epsilon };
    let tokens = [query, key, value, beta];
    by_float!(
        query,
        gated_delta_as(
            py,
            (threads, step),
            tokens,
            log_decay,
            states,
            out,
            &options
        )
    )
}

fn gated_delta_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    (threads, step): (&CpuAttention, &CpuStateStep),
    [query, key, value, beta]: [&Bound<'_, PyAny>; 4],
    log_decay: &Bound<'_, PyAny>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    options: &DeltaOptions,
) -> PyResult<()> {
    let (query, key) = (
        any_array::<T>("query", query, 3)?,
        any_array::<T>("key", key, 3)?,
    );
    let (value, beta) = (
        any_array::<T>("value", value, 3)?,
        any_array::<T>("beta", beta, 2)?,
    );
    let log_decay = array::<f32>("log_decay", log_decay, 2)
        .or_else(|_| array::<f32>("log_decay", log_decay, 3))?;
    let mut written = Written {
        states: writable("states", states, 4)?,
        out: writable::<T>("out", out, 3)?,
    };
    let &[_, value_heads, key_dim, value_dim] = written.states.shape() else {
        unreachable!("it has four dimensions");
    };
    let shape = DeltaShape {
        key_heads: query.shape()[1],
        value_heads,
        key_dim,
        value_dim,
    };
    let count = query.shape()[0];
    of_shape("query", &query, &[count, shape.key_heads, key_dim])?;
    of_shape("key", &key, &[count, shape.key_heads, key_dim])?;
    of_shape("value", &value, &[count, value_heads, value_dim])?;
    of_shape("beta", &beta, &[count, value_heads])?;
    let per_number = [count, value_heads, key_dim];
    of_shape(
        "log_decay",
        &log_decay,
        &per_number[..log_decay.dimensions()],
    )?;
    of_shape("out", &written.out, &[count, value_heads, value_dim])?;
    written.apart(&[
        ("query", &query),
        ("key", &key),
        ("value", &value),
        ("beta", &beta),
    ])?;
    written.apart(&[("log_decay", &log_decay)])?;
    let tokens = DeltaRows {
        query: rows("query", &query)?,
        key: rows("key", &key)?,
        value: rows("value", &value)?,
        beta: rows("beta", &beta)?,
        log_decay: shared_slice(&log_decay),
    };
    let attention = threads.attention()?;
    let (states, out) = (
        unique_slice(&mut written.states),
        unique_slice(&mut written.out),
    );
    py.detach(|| attention.gated_delta(step.step(), &shape, &tokens, options, states, out))
        .map_err(raise_attention)
}

/// Writes `-rate * softplus(numbers + dt_bias)`, logarithms of decays, to `out`.
///
/// `numbers` is `[T, size]`, float32 or bfloat16 as uint16, and may be columns of a wider array; `dt_bias` float32
/// `[size]`, `out` float32 `[T, size]`. `rate` float32 has one number for each, or one for each of as many equal groups
/// of consecutive ones. Raises `BufferError` for arrays that do not fit; nothing is written then.
#[pyfunction]
fn log_decays(
    py: Python<'_>,
    threads: &CpuAttention,
    numbers: &Bound<'_, PyAny>,
    dt_bias: &Bound<'_, PyAny>,
    rate: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let vectors =
        [("dt_bias", dt_bias), ("rate", rate)].map(|(name, vector)| array(name, vector, 1));
    let [dt_bias, rate] = vectors;
    let vectors = [dt_bias?, rate?];
    by_float!(numbers, log_decays_as(py, threads, numbers, &vectors, out))
}

fn log_decays_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    numbers: &Bound<'_, PyAny>,
    [dt_bias, rate]: &[PyBuffer<f32>; 2],
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let numbers = any_array::<T>("numbers", numbers, 2)?;
    let mut out = writable::<f32>("out", out, 2)?;
    let shape = [numbers.shape()[0], dt_bias.shape()[0]];
    of_shape("numbers", &numbers, &shape)?;
    of_shape("out", &out, &shape)?;
    apart(("out", &out), &[("numbers", &numbers)])?;
    apart(("out", &out), &[("dt_bias", dt_bias), ("rate", rate)])?;
    let attention = threads.attention()?;
    let (dt_bias, rate) = (shared_slice(dt_bias), shared_slice(rate));
    let (numbers, out) = (rows("numbers", &numbers)?, unique_slice(&mut out));
    py.detach(|| attention.log_decays(numbers, dt_bias, rate, out))
        .map_err(raise_attention)
}
