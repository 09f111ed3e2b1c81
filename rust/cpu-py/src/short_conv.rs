//! Short convolutions on the CPU, as Python calls them.

use cpu_kernels::{ConvRows, ShortConv};
use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::raise_attention;
use crate::float_arrays::{any_array, array, by_float, of_shape, rows, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::states::{CpuStateStep, Written};
use crate::weights::activation_of;

/// Adds the function of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(short_conv, module)?)
}

type Gates<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The options of a call.
struct Options<'a, 'py> {
    bias: Option<&'a Bound<'py, PyAny>>,
    activation: Option<&'a str>,
    gates: Option<Gates<'py>>,
}

/// Convolves the tokens of each sequence, channel by channel and causally, and writes the results to `out`.
///
/// `x` and `out` are `[T, channels]`, `weight` float32 `[kernel_size, channels]` with the newest position last, `bias`
/// float32 `[channels]`. `states` float32 `[slots, kernel_size - 1, channels]` are the last inputs of sequences, the
/// newest one last. `activation` is applied to the sums. `gates` are two arrays like `x`: inputs are multiplied by the
/// first, outputs by the second.
///
/// Floats of tokens are float32, or bfloat16 as uint16; `x` and gates may be columns of wider arrays. Numbers are computed
/// in float32 and rounded once. A token has the same bits in every batch, and however its sequence is cut into steps.
/// The GIL is released; no other thread may use the arrays meanwhile.
///
/// Raises `BufferError` for arrays that do not fit, `ConfigError` for a kernel of one position, and `ValueError` for an
/// unknown activation; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, step, x, weight, states, out, *, bias = None, activation = None, gates = None))]
#[allow(clippy::too_many_arguments)]
fn short_conv(
    py: Python<'_>,
    threads: &CpuAttention,
    step: &CpuStateStep,
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    activation: Option<&str>,
    gates: Option<Gates<'_>>,
) -> PyResult<()> {
    let options = Options {
        bias,
        activation,
        gates,
    };
    by_float!(
        x,
        short_conv_as(py, (threads, step), x, weight, states, out, &options)
    )
}

fn short_conv_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    (threads, step): (&CpuAttention, &CpuStateStep),
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    options: &Options<'_, '_>,
) -> PyResult<()> {
    let (x, weight) = (
        any_array::<T>("x", x, 2)?,
        array::<f32>("weight", weight, 2)?,
    );
    let mut written = Written {
        states: writable("states", states, 3)?,
        out: writable::<T>("out", out, 2)?,
    };
    let (kernel_size, channels) = (weight.shape()[0], weight.shape()[1]);
    let before = kernel_size.saturating_sub(1);
    let of_tokens = [x.shape()[0], channels];
    of_shape(
        "states",
        &written.states,
        &[written.states.shape()[0], before, channels],
    )?;
    of_shape("x", &x, &of_tokens)?;
    of_shape("out", &written.out, &of_tokens)?;
    written.apart(&[("x", &x)])?;
    written.apart(&[("weight", &weight)])?;
    let bias = options.bias.map(|bias| array::<f32>("bias", bias, 1));
    let bias = bias.transpose()?;
    if let Some(bias) = &bias {
        written.apart(&[("bias", bias)])?;
    }
    let gates = match &options.gates {
        Some((first, second)) => Some([
            any_array::<T>("gates[0]", first, 2)?,
            any_array::<T>("gates[1]", second, 2)?,
        ]),
        None => None,
    };
    for (name, gate) in ["gates[0]", "gates[1]"]
        .into_iter()
        .zip(gates.iter().flatten())
    {
        of_shape(name, gate, &of_tokens)?;
        written.apart(&[(name, gate)])?;
    }
    let conv = ShortConv {
        weight: shared_slice(&weight),
        kernel_size,
        bias: bias.as_ref().map(shared_slice),
        activation: options.activation.map(activation_of).transpose()?,
    };
    let tokens = ConvRows {
        x: rows("x", &x)?,
        gates: match &gates {
            Some([first, second]) => Some([rows("gates[0]", first)?, rows("gates[1]", second)?]),
            None => None,
        },
    };
    let attention = threads.attention()?;
    let (states, out) = (
        unique_slice(&mut written.states),
        unique_slice(&mut written.out),
    );
    py.detach(|| attention.short_conv(step.step(), &conv, &tokens, states, out))
        .map_err(raise_attention)
}
