//! Mamba and Mamba-2 on the CPU, as Python calls them.

use cpu_kernels::{Mamba2Shape, MambaRows, MambaWeights};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::raise_attention;
use crate::float_arrays::{any_array, array, by_float, of_shape, rows, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::states::{CpuStateStep, Written};

/// Adds the functions of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(mamba2, module)?)?;
    module.add_function(wrap_pyfunction!(mamba, module)?)
}

/// `a`, `dt_bias` and `d`.
type Weights<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The arguments of a call.
struct Call<'a, 'py> {
    threads: &'a CpuAttention,
    step: &'a CpuStateStep,
    x: &'a Bound<'py, PyAny>,
    dt: &'a Bound<'py, PyAny>,
    b: &'a Bound<'py, PyAny>,
    c: &'a Bound<'py, PyAny>,
    gate: Option<&'a Bound<'py, PyAny>>,
    weights: Weights<'py>,
    dt_limits: (f32, f32),
    states: &'a Bound<'py, PyAny>,
    out: &'a Bound<'py, PyAny>,
}

/// Advances the state of each sequence by its tokens, as Mamba-2 does, and writes the outputs to `out`.
///
/// `x` and `out` are `[T, heads, head_dim]`, `dt` `[T, heads]`, `b` and `c` `[T, groups, state_size]`, and `gate`, if
/// there is one, is like `x`. `weights` are `a`, `dt_bias` and `d`, all float32 `[heads]`; `a` is negative. `states`
/// float32 are `[slots, heads, state_size, head_dim]`: numbers of a head are innermost. Consecutive heads share a group.
/// For each token, with `S` the state: `dt = clamp(softplus(dt + dt_bias), *dt_limits)`, then `S = exp(dt * a) * S + b *
/// dt * x`, then `out = (c S + d * x) * silu(gate)`.
///
/// Arrays of tokens, bits and threads are as in `short_conv`. Raises `BufferError` for arrays that do not fit, and
/// `ConfigError` for heads that do not share groups evenly; nothing is written then.
#[pyfunction]
#[pyo3(signature = (threads, step, x, dt, b, c, weights, states, out, *, gate = None, dt_limits = (0.0, f32::INFINITY)))]
#[allow(clippy::too_many_arguments)]
fn mamba2(
    py: Python<'_>,
    threads: &CpuAttention,
    step: &CpuStateStep,
    x: &Bound<'_, PyAny>,
    dt: &Bound<'_, PyAny>,
    b: &Bound<'_, PyAny>,
    c: &Bound<'_, PyAny>,
    weights: Weights<'_>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    gate: Option<&Bound<'_, PyAny>>,
    dt_limits: (f32, f32),
) -> PyResult<()> {
    let call = Call {
        threads,
        step,
        x,
        dt,
        b,
        c,
        gate,
        weights,
        dt_limits,
        states,
        out,
    };
    by_float!(x, mamba2_as(py, &call))
}

/// Advances the state of each sequence by its tokens, as Mamba does, and writes the outputs to `out`.
///
/// `x`, `dt`, `out` and `gate`, if there is one, are `[T, channels]`, `b` and `c` `[T, state_size]`. `weights` are `a`
/// `[state_size, channels]`, which is negative, `dt_bias` and `d` `[channels]`, all float32. `states` float32 are `[slots,
/// state_size, channels]`: channels are innermost. Otherwise as `mamba2`, each channel being a head of one number.
#[pyfunction]
#[pyo3(signature = (threads, step, x, dt, b, c, weights, states, out, *, gate = None))]
#[allow(clippy::too_many_arguments)]
fn mamba(
    py: Python<'_>,
    threads: &CpuAttention,
    step: &CpuStateStep,
    x: &Bound<'_, PyAny>,
    dt: &Bound<'_, PyAny>,
    b: &Bound<'_, PyAny>,
    c: &Bound<'_, PyAny>,
    weights: Weights<'_>,
    states: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    gate: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let call = Call {
        threads,
        step,
        x,
        dt,
        b,
        c,
        gate,
        weights,
        dt_limits: (0.0, f32::INFINITY),
        states,
        out,
    };
    by_float!(x, mamba_as(py, &call))
}

fn mamba2_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    call: &Call<'_, '_>,
) -> PyResult<()> {
    let mut arrays = Arrays::<T>::of(call, 3, 1)?;
    let &[num_slots, heads, state_size, head_dim] = arrays.written.states.shape() else {
        unreachable!("it has four dimensions");
    };
    let (count, groups) = (arrays.x.shape()[0], arrays.b.shape()[1]);
    let of_b = [count, groups, state_size];
    arrays.check(&[count, heads, head_dim], &[count, heads], &of_b)?;
    let [a, ..] = &arrays.weights;
    of_shape("a", a, &[heads])?;
    let of_states = [num_slots, heads, state_size, head_dim];
    of_shape("states", &arrays.written.states, &of_states)?;
    let shape = Mamba2Shape {
        heads,
        head_dim,
        groups,
        state_size,
    };
    arrays.run(py, call, Some(&shape))
}

fn mamba_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    call: &Call<'_, '_>,
) -> PyResult<()> {
    let mut arrays = Arrays::<T>::of(call, 2, 2)?;
    let &[_, state_size, channels] = arrays.written.states.shape() else {
        unreachable!("it has three dimensions");
    };
    let count = arrays.x.shape()[0];
    let of_x = [count, channels];
    arrays.check(&of_x, &of_x, &[count, state_size])?;
    let [a, ..] = &arrays.weights;
    of_shape("a", a, &[state_size, channels])?;
    arrays.run(py, call, None)
}

/// The arrays of a call, of the right numbers of dimensions.
struct Arrays<T: Element> {
    x: PyBuffer<T>,
    dt: PyBuffer<T>,
    b: PyBuffer<T>,
    c: PyBuffer<T>,
    gate: Option<PyBuffer<T>>,
    weights: [PyBuffer<f32>; 3],
    written: Written<T>,
}

impl<T: Element + cpu_kernels::Element> Arrays<T> {
    /// `dimensions`: of `x` and what is like it.
    fn of(call: &Call<'_, '_>, dimensions: usize, of_a: usize) -> PyResult<Self> {
        let (a, dt_bias, d) = &call.weights;
        let gate = call.gate.map(|gate| any_array("gate", gate, dimensions));
        Ok(Self {
            x: any_array("x", call.x, dimensions)?,
            dt: any_array("dt", call.dt, 2)?,
            b: any_array("b", call.b, dimensions)?,
            c: any_array("c", call.c, dimensions)?,
            gate: gate.transpose()?,
            weights: [
                array("a", a, of_a)?,
                array("dt_bias", dt_bias, 1)?,
                array("d", d, 1)?,
            ],
            written: Written {
                states: writable("states", call.states, dimensions + 1)?,
                out: writable("out", call.out, dimensions)?,
            },
        })
    }

    fn check(&self, of_x: &[usize], of_dt: &[usize], of_b: &[usize]) -> PyResult<()> {
        of_shape("x", &self.x, of_x)?;
        of_shape("dt", &self.dt, of_dt)?;
        of_shape("b", &self.b, of_b)?;
        of_shape("c", &self.c, of_b)?;
        of_shape("out", &self.written.out, of_x)?;
        let [a, dt_bias, d] = &self.weights;
        of_shape("dt_bias", dt_bias, &of_dt[1..])?;
        of_shape("d", d, &of_dt[1..])?;
        let tokens = [
            ("x", &self.x),
            ("dt", &self.dt),
            ("b", &self.b),
            ("c", &self.c),
        ];
        self.written.apart(&tokens)?;
        self.written
            .apart(&[("a", a), ("dt_bias", dt_bias), ("d", d)])?;
        match &self.gate {
            Some(gate) => {
                of_shape("gate", gate, of_x)?;
                self.written.apart(&[("gate", gate)])
            }
            None => Ok(()),
        }
    }

    /// `shape`: of Mamba-2.
    fn run(
        &mut self,
        py: Python<'_>,
        call: &Call<'_, '_>,
        shape: Option<&Mamba2Shape>,
    ) -> PyResult<()> {
        let [a, dt_bias, d] = &self.weights;
        let weights = MambaWeights {
            a: shared_slice(a),
            dt_bias: shared_slice(dt_bias),
            d: shared_slice(d),
            dt_limits: call.dt_limits,
        };
        let gate = self.gate.as_ref().map(|gate| rows("gate", gate));
        let tokens = MambaRows {
            x: rows("x", &self.x)?,
            dt: rows("dt", &self.dt)?,
            b: rows("b", &self.b)?,
            c: rows("c", &self.c)?,
            gate: gate.transpose()?,
        };
        let (attention, step) = (call.threads.attention()?, call.step.step());
        let states = unique_slice(&mut self.written.states);
        let out = unique_slice(&mut self.written.out);
        py.detach(|| match shape {
            Some(shape) => attention.mamba2(step, shape, &tokens, &weights, states, out),
            None => attention.mamba(step, &tokens, &weights, states, out),
        })
        .map_err(raise_attention)
    }
}
