//! Gated norms on the CPU, as Python calls them.

use cpu_kernels::{GateFunction, GatedNorm, GroupNorm};
use pyo3::buffer::{Element, PyBuffer};
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

/// Weight, numbers of a group, and epsilon.
type NormArguments<'py> = (Bound<'py, PyAny>, usize, f32);

/// Writes `rows` with a gate and a norm to `out`.
///
/// `rows`, `gates` and `out` are `[T, width]` in float32, or bfloat16 as uint16; the first two may be columns of wider
/// arrays. `norm` is `(weight, group_size, epsilon)`, or None for a gate alone: each `group_size` numbers of a row are
/// divided by `sqrt(mean of squares + epsilon)` and multiplied by their part of `weight`, float32, which has one or
/// several groups and is repeated for the whole row. The gate is `function` ("silu" or "sigmoid") of `gates`. It
/// multiplies normalized numbers if `is_norm_first`, else the numbers before the norm. Numbers are computed in float32 and
/// rounded once. `threads` compute, with the GIL released.
///
/// Raises `BufferError` for arrays that do not fit, `ConfigError` for a group of no numbers, and `ValueError` for another
/// function; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, rows, gates, norm, out, *, function = "silu", is_norm_first = true))]
#[allow(clippy::too_many_arguments)]
fn gated_norm(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    gates: &Bound<'_, PyAny>,
    norm: Option<NormArguments<'_>>,
    out: &Bound<'_, PyAny>,
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
    let norm = norm.map(|(weight, group_size, epsilon)| {
        PyResult::Ok((array::<f32>("weight", &weight, 1)?, group_size, epsilon))
    });
    let norm = norm.transpose()?;
    let gated = GatedNorm {
        norm: norm
            .as_ref()
            .map(|(weight, group_size, epsilon)| GroupNorm {
                weight: shared_slice(weight),
                group_size: *group_size,
                epsilon: *epsilon,
            }),
        gate,
        is_norm_first,
    };
    let weight = norm.as_ref().map(|(weight, ..)| weight);
    by_float!(
        rows,
        gated_norm_as(py, threads, [rows, gates], &gated, weight, out)
    )
}

fn gated_norm_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    [numbers, gates]: [&Bound<'_, PyAny>; 2],
    norm: &GatedNorm<'_>,
    weight: Option<&PyBuffer<f32>>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let numbers = any_array::<T>("rows", numbers, 2)?;
    let gates = any_array::<T>("gates", gates, 2)?;
    let mut out = writable::<T>("out", out, 2)?;
    of_shape("gates", &gates, numbers.shape())?;
    of_shape("out", &out, numbers.shape())?;
    apart(("out", &out), &[("rows", &numbers), ("gates", &gates)])?;
    if let Some(weight) = weight {
        apart(("out", &out), &[("weight", weight)])?;
    }
    let attention = threads.attention()?;
    let (numbers, gates) = (rows("rows", &numbers)?, rows("gates", &gates)?);
    let out = unique_slice(&mut out);
    py.detach(|| attention.gated_norm(numbers, gates, norm, out))
        .map_err(raise_attention)
}
