//! Gated delta rules on the CPU, as Python calls them.

use cpu_kernels::{DeltaLayer, DeltaRows, DeltaShape, KeySharing};
use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::raise_attention;
use crate::float_arrays::{any_array, array, by_float, of_shape, rows, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::states::{CpuStateStep, Written};

/// Adds the function of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(gated_delta, module)?)
}

/// The parameters of a layer.
struct Layer<'py> {
    /// `rate` and `dt_bias`.
    weights: (Bound<'py, PyAny>, Bound<'py, PyAny>),
    scaling: f32,
    epsilon: Option<f32>,
    beta_scale: f32,
    sharing: KeySharing,
}

/// Advances the state of each sequence by its tokens, by the gated delta rule, and writes what the states answer to the
/// queries to `out`.
///
/// `query` and `key` are `[T, key_heads, key_dim]`, `value` and `out` `[T, value_heads, value_dim]`, `beta_gate` `[T,
/// value_heads]`, and `decay_gate` `[T, value_heads]`, or `[T, value_heads * key_dim]` for a decay of each number of a key.
/// `weights` are `rate` `[value_heads]`, which is negative, and `dt_bias` of the size of `decay_gate`, both float32.
/// `states` float32 are `[slots, value_heads, key_dim, value_dim]`. Consecutive heads of values share a head of keys; with
/// `tiled_heads`, head `h` has that of keys `h % key_heads`. With `epsilon`, queries and keys are first divided by
/// `sqrt(sum of squares + epsilon)`. For each token, with `S` the state: `S = exp(rate * softplus(decay_gate + dt_bias)) *
/// S`, then `S = S + key * beta_scale * sigmoid(beta_gate) * (value - key S)`, then `out = scaling * query S`.
///
/// Arrays of tokens, bits and threads are as in `short_conv`. Raises `BufferError` for arrays that do not fit, and
/// `ConfigError` for heads that do not share keys evenly; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, step, query, key, value, decay_gate, beta_gate, weights, states, out, *, scaling, epsilon = None, beta_scale = 1.0, tiled_heads = false))]
#[allow(clippy::too_many_arguments)]
fn gated_delta(
    py: Python<'_>,
    threads: &CpuAttention,
    step: &CpuStateStep,
    query: &Bound<'_, PyAny>,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    decay_gate: &Bound<'_, PyAny>,
    beta_gate: &Bound<'_, PyAny>,
    weights: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scaling: f32,
    epsilon: Option<f32>,
    beta_scale: f32,
    tiled_heads: bool,
) -> PyResult<()> {
    let layer = Layer {
        weights,
        scaling,
        epsilon,
        beta_scale,
        sharing: match tiled_heads {
            true => KeySharing::Tiled,
            false => KeySharing::Consecutive,
        },
    };
    let tokens = [query, key, value, decay_gate, beta_gate];
    by_float!(
        query,
        gated_delta_as(py, (threads, step), tokens, &layer, states, out)
    )
}

fn gated_delta_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    (threads, step): (&CpuAttention, &CpuStateStep),
    [query, key, value, decay_gate, beta_gate]: [&Bound<'_, PyAny>; 5],
    layer: &Layer<'_>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (query, key) = (
        any_array::<T>("query", query, 3)?,
        any_array::<T>("key", key, 3)?,
    );
    let value = any_array::<T>("value", value, 3)?;
    let decay_gate = any_array::<T>("decay_gate", decay_gate, 2)?;
    let beta_gate = any_array::<T>("beta_gate", beta_gate, 2)?;
    let (rate, dt_bias) = (
        array::<f32>("rate", &layer.weights.0, 1)?,
        array::<f32>("dt_bias", &layer.weights.1, 1)?,
    );
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
        sharing: layer.sharing,
    };
    let count = query.shape()[0];
    of_shape("query", &query, &[count, shape.key_heads, key_dim])?;
    of_shape("key", &key, &[count, shape.key_heads, key_dim])?;
    of_shape("value", &value, &[count, value_heads, value_dim])?;
    of_shape("beta_gate", &beta_gate, &[count, value_heads])?;
    of_shape("rate", &rate, &[value_heads])?;
    let decays = match dt_bias.shape()[0] {
        size if size == value_heads => size,
        _ => value_heads.saturating_mul(key_dim),
    };
    of_shape("dt_bias", &dt_bias, &[decays])?;
    of_shape("decay_gate", &decay_gate, &[count, decays])?;
    of_shape("out", &written.out, &[count, value_heads, value_dim])?;
    written.apart(&[
        ("query", &query),
        ("key", &key),
        ("value", &value),
        ("decay_gate", &decay_gate),
        ("beta_gate", &beta_gate),
    ])?;
    written.apart(&[("rate", &rate), ("dt_bias", &dt_bias)])?;
    let tokens = DeltaRows {
        query: rows("query", &query)?,
        key: rows("key", &key)?,
        value: rows("value", &value)?,
        decay_gate: rows("decay_gate", &decay_gate)?,
        beta_gate: rows("beta_gate", &beta_gate)?,
    };
    let layer = DeltaLayer {
        rate: shared_slice(&rate),
        dt_bias: shared_slice(&dt_bias),
        beta_scale: layer.beta_scale,
        scaling: layer.scaling,
        epsilon: layer.epsilon,
    };
    let attention = threads.attention()?;
    let (states, out) = (
        unique_slice(&mut written.states),
        unique_slice(&mut written.out),
    );
    py.detach(|| attention.gated_delta(step.step(), &shape, &tokens, &layer, states, out))
        .map_err(raise_attention)
}
