//! Gated norms on the CPU, as Python calls them.

use cpu_kernels::{GateFunction, GatedNorm};
use pyo3::buffer::Element;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::raise_attention;
use crate::float_arrays::{any_array, apart, array, by_float, of_shape, rows, writable};
use crate::memory::{shared_slice, unique_slice};

/// Adds the function of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(gated_norm, module)?)
}

/// The options of a call.
struct Options {
    epsilon: f32,
    group_size: Option<usize>,
    gate: GateFunction,
    is_norm_first: bool,
}

/// Writes a root mean square norm of `rows` with a gate to `out`.
///
/// `rows`, `gates` and `out` are `[T, width]`, `weight` `[size]`; all are float32, or bfloat16 as uint16, and the first two
/// may be columns of wider arrays. Each `group_size` numbers of a row, as many as `weight` has if it is None, are divided
/// by `sqrt(mean of squares + epsilon)` and multiplied by their part of `weight`, which is repeated for the whole row.
/// The gate is `function` ("silu" or "sigmoid") of `gates`; it multiplies normalized numbers if `is_norm_first`, else the
/// numbers before the norm. Numbers are computed in float32 and rounded once. `threads` compute, with the GIL released.
///
/// Raises `BufferError` for arrays that do not fit, and `ValueError` for another function; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, rows, gates, weight, out, epsilon, *, group_size = None, function = "silu", is_norm_first = true))]
#[allow(clippy::too_many_arguments)]
fn gated_norm(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    gates: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    epsilon: f32,
    group_size: Option<usize>,
    function: &str,
    is_norm_first: bool,
) -> PyResult<()> {
    let gate = match function {
        "silu" => GateFunction::Silu,
        "sigmoid" => GateFunction::Sigmoid,
        name => {
            return Err(PyValueError::new_err(format!(
                "function is {name:?}, not \"silu\" or \"sigmoid\""
            )));
        }
    };
    let options = Options {
        epsilon,
        group_size,
        gate,
        is_norm_first,
    };
    by_float!(
        rows,
        gated_norm_as(py, threads, [rows, gates, weight], out, &options)
    )
}

fn gated_norm_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    [numbers, gates, weight]: [&Bound<'_, PyAny>; 3],
    out: &Bound<'_, PyAny>,
    options: &Options,
) -> PyResult<()> {
    let (numbers, gates) = (
        any_array::<T>("rows", numbers, 2)?,
        any_array::<T>("gates", gates, 2)?,
    );
    let (weight, mut out) = (
        array::<T>("weight", weight, 1)?,
        writable::<T>("out", out, 2)?,
    );
    of_shape("gates", &gates, numbers.shape())?;
    of_shape("out", &out, numbers.shape())?;
    let inputs = [("rows", &numbers), ("gates", &gates), ("weight", &weight)];
    apart(("out", &out), &inputs)?;
    let norm = GatedNorm {
        weight: shared_slice(&weight),
        group_size: options.group_size.unwrap_or(weight.shape()[0]),
        epsilon: options.epsilon,
        gate: options.gate,
        is_norm_first: options.is_norm_first,
    };
    let attention = threads.attention()?;
    let (numbers, gates) = (rows("rows", &numbers)?, rows("gates", &gates)?);
    let out = unique_slice(&mut out);
    py.detach(|| attention.gated_norm(numbers, gates, &norm, out))
        .map_err(raise_attention)
}
