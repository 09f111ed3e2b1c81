//! Linear layers on the CPU: weights that are packed once, and products of rows with them.

use pyo3::buffer::Element;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{no_weight, raise_attention};
use crate::float_arrays::{array, is_of};
use crate::memory::shared_slice;
use crate::weights::{gather, multiply, multiply_gated};

/// A copy of a linear layer's weight, `[out_features, in_features]` and C-contiguous, in the layout that its
/// products read: float32, or bfloat16 passed as uint16. A float32 weight whose values are all bfloat16 is kept in
/// 16 bits, too. The GIL is released during the copy.
///
/// In the calls, `rows` are `[T, in_features]` and `out` is `[T, out_features]`, both C-contiguous, and float32 or
/// bfloat16 as uint16. Sums are float32. `threads` compute the product, with the GIL released. A row has the same
/// bits in every batch, with any number of threads, and at every instruction level; with bfloat16 rows, the levels
/// that have instructions for bfloat16 have their own bits.
///
/// Raises `BufferError` for arrays that do not fit, and `ConfigError` for an empty weight; `out` is then unchanged.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct PackedWeight {
    weight: cpu_kernels::PackedWeight,
}

#[pymethods]
impl PackedWeight {
    #[new]
    fn new(py: Python<'_>, weight: &Bound<'_, PyAny>) -> PyResult<Self> {
        match is_of::<u16>(weight) {
            true => Self::pack::<u16>(py, weight),
            false => Self::pack::<f32>(py, weight),
        }
    }

    /// A weight of floats of 8 bits (E4M3 without infinities) times scales, kept so.
    ///
    /// `bytes` are uint8 `[out_features, in_features]`. Each `block` inputs of an output have one of `scales`, float32
    /// `[out_features, blocks]`; the last block may be shorter. Inputs and blocks are multiples of 4. A block's products
    /// are added up in float32, and their sum is multiplied with its scale.
    ///
    /// Raises `ValueError` for other shapes, and for a weight or scale that is not finite.
    #[staticmethod]
    fn from_float8(
        py: Python<'_>,
        bytes: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        block: usize,
    ) -> PyResult<Self> {
        let (bytes, scales) = (
            array::<u8>("bytes", bytes, 2)?,
            array::<f32>("scales", scales, 2)?,
        );
        let (outputs, inputs) = (bytes.shape()[0], bytes.shape()[1]);
        let expected = [outputs, inputs.div_ceil(block.max(1))];
        if scales.shape() != expected {
            return Err(PyValueError::new_err(format!(
                "scales of shape {:?} do not fit weights of shape {:?} with block={block}: they must be {expected:?}",
                scales.shape(),
                bytes.shape(),
            )));
        }
        let (bytes, scales) = (shared_slice(&bytes), shared_slice(&scales));
        let packed = py.detach(|| {
            cpu_kernels::PackedWeight::pack_float8(bytes, scales, block, inputs, outputs)
        });
        Ok(Self {
            weight: packed.map_err(no_weight)?,
        })
    }

    /// Copies the rows `outputs` of the weight, int64 `[T]`, to `out`, `[T, in_features]`.
    fn gather(
        &self,
        py: Python<'_>,
        outputs: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        gather(py, &self.weight, outputs, out)
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
        multiply(py, threads, &self.weight, rows, out, bias)
    }

    /// Writes `activation(rows * gate) * (rows * weight)` to `out`, for a gate of the same shape.
    /// `activation` is "silu" or "gelu_tanh".
    ///
    /// Raises `ValueError` for other activations.
    #[pyo3(signature = (threads, rows, gate, out, activation = "silu"))]
    fn multiply_gated(
        &self,
        py: Python<'_>,
        threads: &CpuAttention,
        rows: &Bound<'_, PyAny>,
        gate: &PackedWeight,
        out: &Bound<'_, PyAny>,
        activation: &str,
    ) -> PyResult<()> {
        let (gate, up) = (&gate.weight, &self.weight);
        multiply_gated(py, threads, gate, activation, up, rows, out)
    }
}

impl PackedWeight {
    fn pack<T: Element + cpu_kernels::Element>(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let weight = array::<T>("weight", weight, 2)?;
        let (outputs, inputs) = (weight.shape()[0], weight.shape()[1]);
        let elements = shared_slice(&weight);
        let packed = py.detach(|| cpu_kernels::PackedWeight::pack(elements, inputs, outputs));
        Ok(Self {
            weight: packed.map_err(raise_attention)?,
        })
    }
}
