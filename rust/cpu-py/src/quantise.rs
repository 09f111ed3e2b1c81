//! Weights of floats, rounded to integers of 4 or 8 bits: the arrays are checked here.

use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{apart, array, by_float, writable};
use crate::memory::{shared_slice, unique_slice};

/// Weights of a group, and bytes of its codes and of its block in Q8_0.
const GROUP: usize = 32;
const PAIRS: usize = GROUP / 2;
const BYTES: usize = GROUP + 2;

/// Adds the functions of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(quantise_groups, module)?)?;
    module.add_function(wrap_pyfunction!(quantise_q8_0, module)?)
}

/// The arrays of a weight in groups: codes, scales and zero points.
type Groups<'a, 'py> = (
    &'a Bound<'py, PyAny>,
    &'a Bound<'py, PyAny>,
    &'a Bound<'py, PyAny>,
);

/// Rounds `weight` to 4-bit codes in groups of 32 inputs, `(code - zero) * scale`: the arguments of
/// `QuantizedWeight.from_groups`.
///
/// `weight` is float32, or bfloat16 passed as uint16, `[outputs, inputs]`. Writes `codes`, uint8 `[outputs, inputs / 2]`, and
/// `scales` and `zeros`, float32 and uint8 `[outputs, inputs / 32]`. All arrays are C-contiguous. `threads` compute, with the
/// GIL released; the results have the same bits with any number of them. A group with a number that is not finite has such
/// a scale.
///
/// Raises `ConfigError` for inputs that are not whole groups, and `BufferError` for other arrays that do not fit; nothing is
/// written then.
#[pyfunction]
fn quantise_groups(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &Bound<'_, PyAny>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    zeros: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let outputs = (codes, scales, zeros);
    by_float!(weight, groups_as(py, threads, weight, outputs))
}

fn groups_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &Bound<'_, PyAny>,
    (codes, scales, zeros): Groups<'_, '_>,
) -> PyResult<()> {
    let weight = array::<T>("weight", weight, 2)?;
    let mut codes = writable::<u8>("codes", codes, 2)?;
    let mut scales = writable::<f32>("scales", scales, 2)?;
    let mut zeros = writable::<u8>("zeros", zeros, 2)?;
    let (outputs, inputs) = (weight.shape()[0], weight.shape()[1]);
    check_shape("codes", codes.shape(), [outputs, inputs / GROUP * PAIRS])?;
    for (name, shape) in [("scales", scales.shape()), ("zeros", zeros.shape())] {
        check_shape(name, shape, [outputs, inputs / GROUP])?;
    }
    apart(("codes", &codes), &[("weight", &weight)])?;
    apart(("codes", &codes), &[("scales", &scales)])?;
    apart(("codes", &codes), &[("zeros", &zeros)])?;
    apart(("scales", &scales), &[("weight", &weight)])?;
    apart(("scales", &scales), &[("zeros", &zeros)])?;
    apart(("zeros", &zeros), &[("weight", &weight)])?;
    let attention = threads.attention()?;
    let weight = shared_slice(&weight);
    let (codes, scales, zeros) = (
        unique_slice(&mut codes),
        unique_slice(&mut scales),
        unique_slice(&mut zeros),
    );
    py.detach(|| attention.quantise_groups(weight, inputs, codes, scales, zeros))
        .map_err(raise_attention)
}

/// Rounds `weight` to ggml's Q8_0: the data of a `QuantizedWeight` of this format.
///
/// Writes `blocks`, uint8 `[outputs, inputs / 32, 34]`: a float16 scale, and 32 integers. Otherwise as `quantise_groups`.
/// Scales beyond float16 are infinite.
#[pyfunction]
fn quantise_q8_0(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &Bound<'_, PyAny>,
    blocks: &Bound<'_, PyAny>,
) -> PyResult<()> {
    by_float!(weight, q8_0_as(py, threads, weight, blocks))
}

fn q8_0_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &Bound<'_, PyAny>,
    blocks: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let weight = array::<T>("weight", weight, 2)?;
    let mut blocks = writable::<u8>("blocks", blocks, 3)?;
    let (outputs, inputs) = (weight.shape()[0], weight.shape()[1]);
    check_shape("blocks", blocks.shape(), [outputs, inputs / GROUP, BYTES])?;
    apart(("blocks", &blocks), &[("weight", &weight)])?;
    let attention = threads.attention()?;
    let (weight, blocks) = (shared_slice(&weight), unique_slice(&mut blocks));
    py.detach(|| attention.quantise_q8_0(weight, inputs, blocks))
        .map_err(raise_attention)
}

fn check_shape<const N: usize>(name: &str, given: &[usize], expected: [usize; N]) -> PyResult<()> {
    match given == expected {
        true => Ok(()),
        false => Err(BufferError::new_err(format!(
            "array {name} has shape {given:?}, not {expected:?}"
        ))),
    }
}
