//! Products of rows with the weight of a linear layer, in floats or in few bits: the arrays of both are checked here.

use cpu_kernels::{Activation, Attend, Attention, Error, PackedWeight, QuantizedWeight};
use pyo3::buffer::Element;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{apart, array, by_float, is_of, writable};
use crate::memory::{shared_slice, unique_slice};

/// The weight of a linear layer.
pub(crate) trait Weight: Sync {
    /// The elements of a bias, for rows of `T`.
    type Bias<T: Element + Attend>: Element + Sync;

    /// The lengths of a row of the input and of the output.
    fn features(&self) -> (usize, usize);

    /// Copies some rows of the weight.
    fn gather<T: Attend>(&self, outputs: &[i64], out: &mut [T]) -> Result<(), Error>;

    /// Sets `out` to the products of the rows, plus the bias.
    fn multiply<T: Element + Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        bias: Option<&[Self::Bias<T>]>,
        out: &mut [T],
    ) -> Result<(), Error>;

    /// Sets `out` to the products of the rows times the activations of those with the gate.
    fn multiply_gated<T: Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        gate: &Self,
        activation: Activation,
        out: &mut [T],
    ) -> Result<(), Error>;
}

impl Weight for PackedWeight {
    type Bias<T: Element + Attend> = T;

    fn features(&self) -> (usize, usize) {
        (self.in_features(), self.out_features())
    }

    fn gather<T: Attend>(&self, outputs: &[i64], out: &mut [T]) -> Result<(), Error> {
        self.gather(outputs, out)
    }

    fn multiply<T: Element + Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        bias: Option<&[T]>,
        out: &mut [T],
    ) -> Result<(), Error> {
        attention.linear(rows, self, bias, out)
    }

    fn multiply_gated<T: Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        gate: &Self,
        activation: Activation,
        out: &mut [T],
    ) -> Result<(), Error> {
        attention.gated_linear(rows, gate, activation, self, out)
    }
}

impl Weight for QuantizedWeight {
    type Bias<T: Element + Attend> = f32;

    fn features(&self) -> (usize, usize) {
        (self.in_features(), self.out_features())
    }

    fn gather<T: Attend>(&self, outputs: &[i64], out: &mut [T]) -> Result<(), Error> {
        self.gather(outputs, out)
    }

    fn multiply<T: Element + Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        bias: Option<&[f32]>,
        out: &mut [T],
    ) -> Result<(), Error> {
        attention.quantized_linear(rows, self, bias, out)
    }

    fn multiply_gated<T: Attend>(
        &self,
        attention: &Attention,
        rows: &[T],
        gate: &Self,
        activation: Activation,
        out: &mut [T],
    ) -> Result<(), Error> {
        attention.quantized_gated_linear(rows, gate, activation, self, out)
    }
}

/// [`Weight::gather`] with arrays of float32, or of bfloat16 as uint16.
pub(crate) fn gather(
    py: Python<'_>,
    weight: &impl Weight,
    outputs: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    by_float!(out, gather_as(py, weight, outputs, out))
}

/// [`Weight::multiply`] with such arrays.
pub(crate) fn multiply(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &impl Weight,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    match is_of::<u16>(rows) {
        true => multiply_as::<u16, _>(py, threads, weight, rows, out, bias),
        false => multiply_as::<f32, _>(py, threads, weight, rows, out, bias),
    }
}

/// [`Weight::multiply_gated`] with such arrays, and the name of an activation.
pub(crate) fn multiply_gated<W: Weight>(
    py: Python<'_>,
    threads: &CpuAttention,
    gate: &W,
    activation: &str,
    up: &W,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let activation = activation_of(activation)?;
    match is_of::<u16>(rows) {
        true => multiply_gated_as::<u16, _>(py, threads, gate, activation, up, rows, out),
        false => multiply_gated_as::<f32, _>(py, threads, gate, activation, up, rows, out),
    }
}

pub(crate) fn activation_of(name: &str) -> PyResult<Activation> {
    let mut all = Activation::ALL.into_iter();
    all.find(|activation| activation.name() == name)
        .ok_or_else(|| {
            let known = Activation::ALL.map(Activation::name);
            PyValueError::new_err(format!("activation is {name:?}, not one of {known:?}"))
        })
}

fn gather_as<T: Element + Attend>(
    py: Python<'_>,
    weight: &impl Weight,
    outputs: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let outputs = array::<i64>("outputs", outputs, 1)?;
    let mut out = writable::<T>("out", out, 2)?;
    let shape = [outputs.shape()[0], weight.features().0];
    if out.shape() != shape {
        return Err(BufferError::new_err(format!(
            "array out has shape {:?}, not {shape:?}",
            out.shape()
        )));
    }
    apart(("out", &out), &[("outputs", &outputs)])?;
    // A copy: other threads may change the numbers after they were checked.
    let (outputs, out) = (outputs.to_vec(py)?, unique_slice(&mut out));
    py.detach(|| weight.gather(&outputs, out))
        .map_err(raise_attention)
}

fn multiply_as<T: Element + Attend, W: Weight>(
    py: Python<'_>,
    threads: &CpuAttention,
    weight: &W,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let (rows, mut out) = (array::<T>("rows", rows, 2)?, writable::<T>("out", out, 2)?);
    check_shapes(weight, rows.shape(), out.shape())?;
    apart(("out", &out), &[("rows", &rows)])?;
    let bias = bias.map(|bias| array::<W::Bias<T>>("bias", bias, 1));
    let bias = bias.transpose()?;
    if let Some(bias) = &bias {
        apart(("out", &out), &[("bias", bias)])?;
    }
    let bias = bias.as_ref().map(shared_slice);
    let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
    let attention = threads.attention()?;
    py.detach(|| weight.multiply(attention, rows, bias, out))
        .map_err(raise_attention)
}

fn multiply_gated_as<T: Element + Attend, W: Weight>(
    py: Python<'_>,
    threads: &CpuAttention,
    gate: &W,
    activation: Activation,
    up: &W,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (rows, mut out) = (array::<T>("rows", rows, 2)?, writable::<T>("out", out, 2)?);
    check_shapes(up, rows.shape(), out.shape())?;
    apart(("out", &out), &[("rows", &rows)])?;
    let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
    let attention = threads.attention()?;
    py.detach(|| up.multiply_gated(attention, rows, gate, activation, out))
        .map_err(raise_attention)
}

fn check_shapes(weight: &impl Weight, rows: &[usize], out: &[usize]) -> PyResult<()> {
    let (inputs, outputs) = weight.features();
    match rows[0] == out[0] && rows[1] == inputs && out[1] == outputs {
        true => Ok(()),
        false => Err(BufferError::new_err(format!(
            "arrays rows and out of shapes {rows:?} and {out:?} do not fit: [T, {inputs}] and [T, {outputs}]"
        ))),
    }
}
