//! Sums, norms and activations of rows on the CPU: arrays of float32, or of bfloat16 passed as uint16.

use cpu_kernels::{Gate, Map, Norm};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{apart, array, by_float, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::weights::activation_of;

/// Adds the functions of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(add_norm, module)?)?;
    module.add_function(wrap_pyfunction!(norm_rows, module)?)?;
    module.add_function(wrap_pyfunction!(add_rows, module)?)?;
    module.add_function(wrap_pyfunction!(map_rows, module)?)?;
    module.add_function(wrap_pyfunction!(gate_rows, module)?)
}

/// The weight and the bias of a norm `[size]`, both optional; epsilon; the offset of the weight; whether
/// the mean is subtracted.
#[derive(FromPyObject)]
struct NormArguments<'py>(
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    f32,
    f32,
    bool,
);

/// The same, with its arrays checked.
struct Vectors<T: Element> {
    weight: Option<PyBuffer<T>>,
    bias: Option<PyBuffer<T>>,
    epsilon: f32,
    offset: f32,
    is_centered: bool,
}

impl<T: Element + cpu_kernels::Element> Vectors<T> {
    fn new(arguments: &NormArguments<'_>) -> PyResult<Self> {
        let NormArguments(weight, bias, epsilon, offset, is_centered) = arguments;
        let vector = |name, object: &Option<Bound<'_, PyAny>>| {
            let array = object.as_ref().map(|object| array::<T>(name, object, 1));
            array.transpose()
        };
        Ok(Self {
            weight: vector("weight", weight)?,
            bias: vector("bias", bias)?,
            epsilon: *epsilon,
            offset: *offset,
            is_centered: *is_centered,
        })
    }

    /// Refuses a `target` that shares memory with the norm's arrays.
    fn apart(&self, target: (&str, &PyBuffer<T>)) -> PyResult<()> {
        let vectors = [("weight", &self.weight), ("bias", &self.bias)];
        for (name, vector) in vectors {
            if let Some(vector) = vector {
                apart(target, &[(name, vector)])?;
            }
        }
        Ok(())
    }

    fn norm(&self, size: usize) -> Norm<'_, T> {
        Norm {
            size,
            is_centered: self.is_centered,
            weight: self.weight.as_ref().map(shared_slice),
            bias: self.bias.as_ref().map(shared_slice),
            epsilon: self.epsilon,
            offset: self.offset,
        }
    }
}

/// Adds `change` times `scale` to `stream` in place, and writes the norm of that to `out`; all are `[T, size]`.
///
/// `norm` is `(weight, bias, epsilon, offset, is_centered)`: `x / sqrt(mean(x ^ 2) + epsilon) * (offset + weight) +
/// bias` with weight and bias `[size]` or None, and with `x` less its mean if it `is_centered`. Arrays are
/// C-contiguous, and all float32, or all bfloat16 as uint16. Sums are float32; `stream` is rounded before it is
/// normalized, `out` once. A row has the same bits in every batch. `threads` compute, with the GIL released.
///
/// Raises `BufferError` for arrays that do not fit; nothing is written then.
#[pyfunction]
fn add_norm(
    py: Python<'_>,
    threads: &CpuAttention,
    stream: &Bound<'_, PyAny>,
    change: &Bound<'_, PyAny>,
    scale: f32,
    norm: NormArguments<'_>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    by_float!(
        stream,
        add_norm_as(py, threads, stream, change, scale, &norm, out)
    )
}

fn add_norm_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    stream: &Bound<'_, PyAny>,
    change: &Bound<'_, PyAny>,
    scale: f32,
    norm: &NormArguments<'_>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (mut stream, mut out) = (
        writable::<T>("stream", stream, 2)?,
        writable::<T>("out", out, 2)?,
    );
    let change = array::<T>("change", change, 2)?;
    same_shape(("stream", &stream), ("change", &change))?;
    same_shape(("stream", &stream), ("out", &out))?;
    let vectors = Vectors::new(norm)?;
    apart(("out", &out), &[("stream", &stream), ("change", &change)])?;
    apart(("stream", &stream), &[("change", &change)])?;
    vectors.apart(("out", &out))?;
    vectors.apart(("stream", &stream))?;
    let norm = vectors.norm(stream.shape()[1]);
    let attention = threads.attention()?;
    let change = shared_slice(&change);
    let (stream, out) = (unique_slice(&mut stream), unique_slice(&mut out));
    py.detach(|| attention.add_norm(stream, change, scale, &norm, out))
        .map_err(raise_attention)
}

/// Writes the norm of `rows` to `out`, both `[T, size]`, as `add_norm` does.
#[pyfunction]
fn norm_rows(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    norm: NormArguments<'_>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    by_float!(rows, norm_as(py, threads, rows, &norm, out))
}

fn norm_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    norm: &NormArguments<'_>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (rows, mut out) = (array::<T>("rows", rows, 2)?, writable::<T>("out", out, 2)?);
    same_shape(("rows", &rows), ("out", &out))?;
    let vectors = Vectors::new(norm)?;
    apart(("out", &out), &[("rows", &rows)])?;
    vectors.apart(("out", &out))?;
    let norm = vectors.norm(rows.shape()[1]);
    let attention = threads.attention()?;
    let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
    py.detach(|| attention.norm(rows, &norm, out))
        .map_err(raise_attention)
}

/// Adds `addends` times `scale` to `sums` in place. Both are `[T, size]`; otherwise as `add_norm`.
#[pyfunction]
fn add_rows(
    py: Python<'_>,
    threads: &CpuAttention,
    sums: &Bound<'_, PyAny>,
    addends: &Bound<'_, PyAny>,
    scale: f32,
) -> PyResult<()> {
    by_float!(sums, add_as(py, threads, sums, addends, scale))
}

fn add_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    sums: &Bound<'_, PyAny>,
    addends: &Bound<'_, PyAny>,
    scale: f32,
) -> PyResult<()> {
    let mut sums = writable::<T>("sums", sums, 2)?;
    let addends = array::<T>("addends", addends, 2)?;
    same_shape(("sums", &sums), ("addends", &addends))?;
    apart(("sums", &sums), &[("addends", &addends)])?;
    let attention = threads.attention()?;
    let (addends, sums) = (shared_slice(&addends), unique_slice(&mut sums));
    py.detach(|| attention.add(sums, addends, scale))
        .map_err(raise_attention)
}

/// Writes a function of each of `rows` to `out`, both `[T, size]`; otherwise as `add_norm`.
///
/// `function` is an activation ("silu", "gelu", "gelu_tanh", "relu", "relu2"), "sigmoid", "scale" (`x * number`) or
/// "cap" (`number * tanh(x / number)`). Raises `ValueError` for others.
#[pyfunction]
#[pyo3(signature = (threads, rows, out, function, number = 1.0))]
fn map_rows(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    function: &str,
    number: f32,
) -> PyResult<()> {
    let map = match function {
        "sigmoid" => Map::Sigmoid,
        "scale" => Map::Scale(number),
        "cap" => Map::Cap(number),
        name => Map::Activation(activation_of(name)?),
    };
    by_float!(rows, map_as(py, threads, rows, map, out))
}

fn map_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    map: Map,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (rows, mut out) = (array::<T>("rows", rows, 2)?, writable::<T>("out", out, 2)?);
    same_shape(("rows", &rows), ("out", &out))?;
    apart(("out", &out), &[("rows", &rows)])?;
    let attention = threads.attention()?;
    let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
    py.detach(|| attention.map(rows, map, out))
        .map_err(raise_attention)
}

/// Writes `activation(gate) * up` to `out` `[T, size]`, for `rows` `[T, 2 * size]` with the gate first; otherwise as
/// `add_norm`.
///
/// With `clamped`, `(alpha, limit)`, it is `gate * sigmoid(alpha * gate) * (up + 1)`, where `gate` is at most `limit`,
/// and `up` is from `-limit` to it. Raises `ValueError` for an activation that `map_rows` does not know.
#[pyfunction]
#[pyo3(signature = (threads, rows, out, activation = "silu", clamped = None))]
fn gate_rows(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    activation: &str,
    clamped: Option<(f32, f32)>,
) -> PyResult<()> {
    let gate = match clamped {
        Some((alpha, limit)) => Gate::Clamped { alpha, limit },
        None => Gate::Activation(activation_of(activation)?),
    };
    by_float!(rows, gate_as(py, threads, rows, gate, out))
}

fn gate_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    gate: Gate,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (rows, mut out) = (array::<T>("rows", rows, 2)?, writable::<T>("out", out, 2)?);
    let (shape, size) = (rows.shape(), out.shape()[1]);
    if shape[0] != out.shape()[0] || Some(shape[1]) != size.checked_mul(2) {
        return Err(BufferError::new_err(format!(
            "arrays rows and out of shapes {shape:?} and {:?} do not fit: [T, 2 * size] and [T, size]",
            out.shape()
        )));
    }
    apart(("out", &out), &[("rows", &rows)])?;
    let attention = threads.attention()?;
    let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
    py.detach(|| attention.gate(rows, size, gate, out))
        .map_err(raise_attention)
}

fn same_shape<T>(first: (&str, &PyBuffer<T>), second: (&str, &PyBuffer<T>)) -> PyResult<()> {
    match first.1.shape() == second.1.shape() {
        true => Ok(()),
        false => Err(BufferError::new_err(format!(
            "arrays {} and {} of shapes {:?} and {:?} do not fit: they must be of one shape",
            first.0,
            second.0,
            first.1.shape(),
            second.1.shape()
        ))),
    }
}
