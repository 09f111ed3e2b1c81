//! `pyengine._cpu`: the CPU's arithmetic for Python. Thin: arrays, threads, errors.
#![deny(unsafe_code)]

mod adapters;
mod attention;
mod claims;
mod errors;
mod float_arrays;
mod gated_delta;
mod gated_norm;
mod linear;
mod mamba;
mod memory;
mod numbers;
mod quantise;
mod quantized;
mod rotation;
mod rows;
mod sampling;
mod short_conv;
mod states;
mod weights;

use pyo3::prelude::*;

/// Attention over a KV cache and products with weights on the CPU, written in Rust.
#[pymodule(gil_used = false)]
fn _cpu(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    forks::count_forks()?;
    errors::add_to(module)?;
    module.add_class::<attention::CpuAttention>()?;
    module.add_class::<attention::CpuCache>()?;
    module.add_class::<attention::CpuStep>()?;
    module.add_class::<states::CpuStateStep>()?;
    module.add_class::<linear::PackedWeight>()?;
    module.add_class::<quantized::QuantizedWeight>()?;
    module.add_function(wrap_pyfunction!(attention::limit_threads, module)?)?;
    adapters::add_to(module)?;
    gated_delta::add_to(module)?;
    gated_norm::add_to(module)?;
    mamba::add_to(module)?;
    quantise::add_to(module)?;
    rows::add_to(module)?;
    sampling::add_to(module)?;
    short_conv::add_to(module)
}
