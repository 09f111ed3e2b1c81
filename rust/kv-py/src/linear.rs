//! Linear layers on the CPU: weights that are packed once, and products of rows of floats with them.

use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{apart, array, writable};
use crate::memory::{shared_slice, unique_slice};

/// A copy of a linear layer's weight, float32 `[out_features, in_features]` and C-contiguous, in the layout that
/// its products read. The GIL is released during the copy.
///
/// In the calls, `rows` are `[T, in_features]` and `out` is `[T, out_features]`, both float32 and C-contiguous.
/// `threads` compute the product, with the GIL released. A row has the same bits in every batch, with any number of
/// threads, and at every instruction level.
///
/// Raises `BufferError` for arrays that do not fit, and `ConfigError` for an empty weight; `out` is then unchanged.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct PackedWeight {
    weight: cpu_kernels::PackedWeight,
}

#[pymethods]
impl PackedWeight {
    #[new]
    fn new(py: Python<'_>, weight: &Bound<'_, PyAny>) -> PyResult<Self> {
        let weight = array::<f32>("weight", weight, 2)?;
        let (outputs, inputs) = (weight.shape()[0], weight.shape()[1]);
        let elements = shared_slice(&weight);
        let packed = py.detach(|| cpu_kernels::PackedWeight::pack(elements, inputs, outputs));
        Ok(Self {
            weight: packed.map_err(raise_attention)?,
        })
    }

    /// Copies the rows `outputs` of the weight, int64 `[T]`, to `out`, `[T, in_features]`.
    fn gather(
        &self,
        py: Python<'_>,
        outputs: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (outputs, mut out) = (
            array::<i64>("outputs", outputs, 1)?,
            writable("out", out, 2)?,
        );
        let shape = [outputs.shape()[0], self.in_features()];
        if out.shape() != shape {
            return Err(BufferError::new_err(format!(
                "array out has shape {:?}, not {shape:?}",
                out.shape()
            )));
        }
        apart(("out", &out), &[("outputs", &outputs)])?;
        let (outputs, out) = (shared_slice(&outputs), unique_slice(&mut out));
        py.detach(|| self.weight.gather(outputs, out))
            .map_err(raise_attention)
    }

    /// Length of a row of the input.
    #[getter]
    fn in_features(&self) -> usize {
        self.weight.in_features()
    }

    /// Length of a row of the output.
    #[getter]
    fn out_features(&self) -> usize {
        self.weight.out_features()
    }

    /// Writes `rows` times the transposed weight, plus `bias`, `[out_features]`, to `out`.
    #[pyo3(signature = (threads, rows, out, bias = None))]
    fn multiply(
        &self,
        py: Python<'_>,
        threads: &CpuAttention,
        rows: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (rows, mut out) = (array("rows", rows, 2)?, writable("out", out, 2)?);
        self.check_shapes(rows.shape(), out.shape())?;
        apart(("out", &out), &[("rows", &rows)])?;
        let bias = bias.map(|bias| array("bias", bias, 1)).transpose()?;
        if let Some(bias) = &bias {
            apart(("out", &out), &[("bias", bias)])?;
        }
        let bias = bias.as_ref().map(shared_slice);
        let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
        py.detach(|| threads.attention.linear(rows, &self.weight, bias, out))
            .map_err(raise_attention)
    }

    /// Writes `silu(rows * gate) * (rows * weight)` to `out`, for a gate of the same shape.
    fn multiply_gated(
        &self,
        py: Python<'_>,
        threads: &CpuAttention,
        rows: &Bound<'_, PyAny>,
        gate: &PackedWeight,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (rows, mut out) = (array("rows", rows, 2)?, writable("out", out, 2)?);
        self.check_shapes(rows.shape(), out.shape())?;
        apart(("out", &out), &[("rows", &rows)])?;
        let (rows, out) = (shared_slice(&rows), unique_slice(&mut out));
        let (gate, up) = (&gate.weight, &self.weight);
        py.detach(|| threads.attention.gated_linear(rows, gate, up, out))
            .map_err(raise_attention)
    }
}

impl PackedWeight {
    fn check_shapes(&self, rows: &[usize], out: &[usize]) -> PyResult<()> {
        let (inputs, outputs) = (self.in_features(), self.out_features());
        match rows[0] == out[0] && rows[1] == inputs && out[1] == outputs {
            true => Ok(()),
            false => Err(BufferError::new_err(format!(
                "arrays rows and out of shapes {rows:?} and {out:?} do not fit: [T, {inputs}] and [T, {outputs}]"
            ))),
        }
    }
}
