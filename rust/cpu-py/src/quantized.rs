//! Linear layers on the CPU by weights of few bits: the file's bits, repacked, and products of rows with them.

use cpu_kernels::QuantizedFormat;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::no_weight;
use crate::float_arrays::array;
use crate::memory::shared_slice;
use crate::weights::{gather, multiply, multiply_gated};

/// A linear layer's weight of few bits, copied once into the layout that its products read; it is never expanded.
///
/// `format` is ggml's: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K" or
/// "MXFP4", whose codes take 5 bits. `data` is uint8, flat, and may be read-only: the
/// blocks of `[out_features, in_features]` weights as a GGUF file has them. The GIL is released during the copy.
///
/// In the calls, `rows` are `[T, in_features]` and `out` is `[T, out_features]`, both C-contiguous, and both float32 or both
/// bfloat16 passed as uint16. Each 32 numbers of a row are rounded to integers from -127 to 127 times a scale, as
/// llama.cpp rounds them; sums are float32. `threads` compute the product, with the GIL released. A row has the same bits
/// in every batch, with any number of threads, and at every instruction level.
///
/// Raises `ValueError` for an unknown format, and for data that does not fit the shape or has a scale that is not finite.
/// The calls raise `BufferError` for arrays that do not fit; `out` is then unchanged.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct QuantizedWeight {
    weight: cpu_kernels::QuantizedWeight,
    group_size: Option<usize>,
}

#[pymethods]
impl QuantizedWeight {
    #[new]
    fn new(
        py: Python<'_>,
        format: &str,
        data: &Bound<'_, PyAny>,
        out_features: usize,
        in_features: usize,
    ) -> PyResult<Self> {
        let known = QuantizedFormat::ALL.map(QuantizedFormat::name).join(", ");
        let format = QuantizedFormat::named(format).ok_or_else(|| {
            PyValueError::new_err(format!("format={format:?} is not known: use {known}"))
        })?;
        let data = array::<u8>("data", data, 1)?;
        let bytes = shared_slice(&data);
        let weight = py.detach(|| {
            cpu_kernels::QuantizedWeight::pack(format, bytes, in_features, out_features)
        });
        Ok(Self {
            weight: weight.map_err(no_weight)?,
            group_size: None,
        })
    }

    /// A weight of 4-bit codes: `(code - zero) * scale`, as AWQ, GPTQ and compressed-tensors have it.
    ///
    /// `codes` are uint8 `[out_features, in_features / 2]`; of two neighbouring inputs the first is in the lower bits.
    /// `scales` are float32 `[out_features, groups]`, for each `group_size` inputs, which are 32, 64 or 128. `zeros` are
    /// uint8 of the same shape; without, they are 8. Scales that half precision has exactly take 2 bytes, others 4.
    ///
    /// Raises `ValueError` as the constructor.
    #[staticmethod]
    #[pyo3(signature = (codes, scales, zeros = None, *, group_size))]
    fn from_groups(
        py: Python<'_>,
        codes: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
        group_size: usize,
    ) -> PyResult<Self> {
        let (codes, scales) = (
            array::<u8>("codes", codes, 2)?,
            array::<f32>("scales", scales, 2)?,
        );
        let zeros = zeros.map(|zeros| array::<u8>("zeros", zeros, 2));
        let zeros = zeros.transpose()?;
        let shape = [codes.shape()[0], codes.shape()[1].saturating_mul(2)];
        let expected = [shape[0], shape[1] / group_size.max(1)];
        let fits = |array: &[usize]| array == expected;
        if !fits(scales.shape()) || !zeros.as_ref().is_none_or(|zeros| fits(zeros.shape())) {
            return Err(PyValueError::new_err(format!(
                "scales of shape {:?} and zeros of shape {:?} do not fit codes of {shape:?} inputs and outputs with \
                 group_size={group_size}: they must be {expected:?}",
                scales.shape(),
                zeros.as_ref().map(|zeros| zeros.shape()),
            )));
        }
        let zeros = zeros.as_ref().map(shared_slice);
        let (codes, scales) = (shared_slice(&codes), shared_slice(&scales));
        let weight = py.detach(|| {
            let [outputs, inputs] = shape;
            cpu_kernels::QuantizedWeight::from_groups(
                codes, scales, zeros, group_size, inputs, outputs,
            )
        });
        Ok(Self {
            weight: weight.map_err(no_weight)?,
            group_size: Some(group_size),
        })
    }

    /// ggml's name of the format, or "groups of " and the group size.
    #[getter]
    fn format(&self) -> String {
        match (self.weight.format(), self.group_size) {
            (Some(format), _) => format.name().to_owned(),
            (None, size) => format!("groups of {}", size.unwrap_or_default()),
        }
    }

    /// `(out_features, in_features)`.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.out_features(), self.in_features())
    }

    /// Bytes of memory.
    #[getter]
    fn num_bytes(&self) -> usize {
        self.weight.num_bytes()
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

    /// Copies the rows `outputs` of the weight, int64 `[T]`, to `out`, `[T, in_features]`, as ggml dequantises them.
    fn gather(
        &self,
        py: Python<'_>,
        outputs: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        gather(py, &self.weight, outputs, out)
    }

    /// Writes `rows` times the transposed weight, plus `bias`, float32 `[out_features]`, to `out`.
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

    /// Writes `activation(rows * gate) * (rows * weight)` to `out`, for a gate of the same shape. Both products are float32.
    /// `activation` is "silu" or "gelu_tanh".
    ///
    /// Raises `ValueError` for other activations.
    #[pyo3(signature = (threads, rows, gate, out, activation = "silu"))]
    fn multiply_gated(
        &self,
        py: Python<'_>,
        threads: &CpuAttention,
        rows: &Bound<'_, PyAny>,
        gate: &QuantizedWeight,
        out: &Bound<'_, PyAny>,
        activation: &str,
    ) -> PyResult<()> {
        let (gate, up) = (&gate.weight, &self.weight);
        multiply_gated(py, threads, gate, activation, up, rows, out)
    }
}
