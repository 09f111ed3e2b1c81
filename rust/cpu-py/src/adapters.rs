//! Low-rank adapters on the CPU, as Python calls them.

use cpu_kernels::{AdapterMatrices, Adapters};
use pyo3::buffer::Element;
use pyo3::prelude::*;

use crate::attention::CpuAttention;
use crate::errors::{BufferError, raise_attention};
use crate::float_arrays::{any_array, apart, array, by_float, is_of, rows, writable};
use crate::memory::{shared_slice, unique_slice};

/// Adds the function of this file to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(add_adapters, module)?)
}

/// Adds the low-rank adapters of a linear layer to its results `out`.
///
/// For a row x of `rows` `[T, in_features]` in slot s of `slots` (int32 `[T]`; -1: none), `B A x` is added to its row of
/// `out` `[T, out_features]`. Both are float32, or bfloat16 as uint16; `rows` may be columns of a wider array. Outputs are
/// in parts, which end at `ends` (int64 `[parts]`). `down` `[slots, in_features, parts, lanes]` is A, transposed, with as
/// many lanes as ranks, rounded up to a multiple of 16; `up` `[slots, rank, out_features]` is B, transposed and scaled.
/// Both are float32, or two bfloat16 in a uint32: of inputs 2i and 2i + 1, or of ranks 2i and 2i + 1, the first in its
/// lower half. `ranks` (int32 `[slots, parts]`) are the rows of A that are used. Numbers are computed in float32 and
/// rounded once; a row has the same bits in every batch. `threads` compute, with the GIL released.
///
/// Raises `BufferError` for arrays that do not fit, and slots and ranks that do not exist; nothing is written then.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn add_adapters(
    py: Python<'_>,
    threads: &CpuAttention,
    rows: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    slots: &Bound<'_, PyAny>,
    down: &Bound<'_, PyAny>,
    up: &Bound<'_, PyAny>,
    ranks: &Bound<'_, PyAny>,
    ends: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let others = [slots, ranks, ends];
    by_float!(
        rows,
        add_adapters_as(py, threads, rows, out, down, up, others)
    )
}

fn add_adapters_as<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    numbers: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    down: &Bound<'_, PyAny>,
    up: &Bound<'_, PyAny>,
    others: [&Bound<'_, PyAny>; 3],
) -> PyResult<()> {
    if is_of::<u32>(down) {
        let (down, up) = (array::<u32>("down", down, 4)?, array::<u32>("up", up, 3)?);
        let matrices = AdapterMatrices::Halves(shared_slice(&down), shared_slice(&up));
        let shape = (down.shape(), 2 * up.shape()[1], 2);
        return add::<T>(py, threads, numbers, out, matrices, shape, others);
    }
    let (down, up) = (array::<f32>("down", down, 4)?, array::<f32>("up", up, 3)?);
    let matrices = AdapterMatrices::Floats(shared_slice(&down), shared_slice(&up));
    let shape = (down.shape(), up.shape()[1], 1);
    add::<T>(py, threads, numbers, out, matrices, shape, others)
}

/// `shape` of A, the most rows of it, and its inputs in an element.
fn add<T: Element + cpu_kernels::Element>(
    py: Python<'_>,
    threads: &CpuAttention,
    numbers: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    matrices: AdapterMatrices<'_>,
    (shape, rank, inputs): (&[usize], usize, usize),
    [slots, ranks, ends]: [&Bound<'_, PyAny>; 3],
) -> PyResult<()> {
    let numbers = any_array::<T>("rows", numbers, 2)?;
    let mut out = writable::<T>("out", out, 2)?;
    let slots = array::<i32>("slots", slots, 1)?;
    let (ranks, ends) = (
        array::<i32>("ranks", ranks, 2)?,
        array::<i64>("ends", ends, 1)?,
    );
    apart(("out", &out), &[("rows", &numbers)])?;
    let in_features = numbers.shape()[1];
    let is_other = [shape[0], shape[2]] != ranks.shape()[..] || shape[2] != ends.shape()[0];
    if is_other || shape[1] != in_features.div_ceil(inputs) {
        return Err(BufferError::new_err(format!(
            "array down has shape {shape:?}, rows {:?}, ranks {:?}, ends {:?}: slots, inputs or parts differ",
            numbers.shape(),
            ranks.shape(),
            ends.shape()
        )));
    }
    let adapters = Adapters {
        matrices,
        ranks: shared_slice(&ranks),
        ends: shared_slice(&ends),
        rank,
        in_features,
    };
    let attention = threads.attention()?;
    let numbers = rows("rows", &numbers)?;
    let (slots, out) = (shared_slice(&slots), unique_slice(&mut out));
    py.detach(|| attention.add_adapters(numbers, slots, &adapters, out))
        .map_err(raise_attention)
}
