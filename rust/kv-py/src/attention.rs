//! Attention on the CPU: arrays of floats in and out, the GIL released while threads work.

use std::sync::Mutex;

use cpu_attention::{Attention, CacheShape, Options, Query, Sequences, Step, write};
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::cells::{is_swapped, shared_slice, unique_slice};
use crate::errors::{BufferError, no_buffer, raise_attention};
use crate::numbers::number;

/// A C-contiguous array of `T` with so many dimensions.
fn array<T: Element>(
    name: &str,
    object: &Bound<'_, PyAny>,
    dimensions: usize,
) -> PyResult<PyBuffer<T>> {
    let refuse = |what: String| BufferError::new_err(format!("array {name} {what}"));
    let buffer =
        PyUntypedBuffer::get(object).map_err(|error| no_buffer(object.py(), name, error))?;
    if !buffer.is_c_contiguous() {
        return Err(refuse("is not contiguous in C order".into()));
    }
    if buffer.dimensions() != dimensions {
        let found = buffer.dimensions();
        return Err(refuse(format!("has {found} dimensions, not {dimensions}")));
    }
    if is_swapped(&buffer) || buffer.as_typed::<T>().is_err() {
        let format = buffer.format().to_string_lossy();
        let wanted = std::any::type_name::<T>();
        return Err(refuse(format!(
            "has format {format:?}, not that of {wanted}"
        )));
    }
    buffer.into_typed()
}

/// The same, to be written to.
fn writable(name: &str, object: &Bound<'_, PyAny>, dimensions: usize) -> PyResult<PyBuffer<f32>> {
    let buffer = array(name, object, dimensions)?;
    match buffer.readonly() {
        true => Err(BufferError::new_err(format!("array {name} is read-only"))),
        false => Ok(buffer),
    }
}

/// Refuses arrays that share memory with `target`, which is written while they are read.
fn apart(target: (&str, &PyBuffer<f32>), others: &[(&str, &PyBuffer<f32>)]) -> PyResult<()> {
    let bytes = |buffer: &PyBuffer<f32>| {
        let start = buffer.buf_ptr() as usize;
        start..start + buffer.len_bytes()
    };
    let own = bytes(target.1);
    for (name, other) in others {
        let other = bytes(other);
        if own.start < other.end && other.start < own.end {
            let target = target.0;
            return Err(BufferError::new_err(format!(
                "arrays {target} and {name} share memory"
            )));
        }
    }
    Ok(())
}

/// Keys and values of one layer: writable float32 arrays `[blocks, block_size, kv_heads, head_dim]`, which
/// may differ in `head_dim`.
///
/// Raises `BufferError` for an array of another type, shape or layout.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct CpuCache {
    shape: CacheShape,
    tensors: Mutex<(PyBuffer<f32>, PyBuffer<f32>)>,
}

#[pymethods]
impl CpuCache {
    #[new]
    fn new(keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (keys, values) = (writable("keys", keys, 4)?, writable("values", values, 4)?);
        if keys.shape()[..3] != values.shape()[..3] {
            return Err(BufferError::new_err(format!(
                "keys of shape {:?} and values of shape {:?} differ in more than the last dimension",
                keys.shape(),
                values.shape()
            )));
        }
        apart(("keys", &keys), &[("values", &values)])?;
        let (shape, dim_v) = (keys.shape(), values.shape()[3]);
        let (num_blocks, block_size, kv_heads, dim_k) = (shape[0], shape[1], shape[2], shape[3]);
        Ok(Self {
            shape: CacheShape {
                num_blocks,
                block_size,
                kv_heads,
                dim_k,
                dim_v,
            },
            tensors: Mutex::new((keys, values)),
        })
    }
}

/// The sequences of one step, copied and checked; those with at most `most_rows` new tokens attend.
///
/// With T tokens and B sequences: `query_start_loc` int32 `[B + 1]`, `seq_lens` int32 `[B]`,
/// `block_tables` int32 `[B, W]`, `slots` int64 `[T]` (-1: the keys and values are there already), all as
/// `StepPlan.fill` writes them for one layer group. `cache` is one of the layers: they all have its blocks.
///
/// Raises `BufferError`, naming the value, for arrays that contradict each other or refer to a block or
/// slot that the cache does not have.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct CpuStep {
    step: Step,
    slots: Vec<i64>,
}

#[pymethods]
impl CpuStep {
    #[new]
    #[pyo3(signature = (cache, *, query_start_loc, seq_lens, block_tables, slots, most_rows))]
    fn new(
        py: Python<'_>,
        cache: &CpuCache,
        query_start_loc: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        most_rows: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let starts = array::<i32>("query_start_loc", query_start_loc, 1)?.to_vec(py)?;
        let lens = array::<i32>("seq_lens", seq_lens, 1)?.to_vec(py)?;
        let tables = array::<i32>("block_tables", block_tables, 2)?;
        let sequences = Sequences {
            starts: &starts,
            lens: &lens,
            tables: &tables.to_vec(py)?,
            width: tables.shape()[1],
        };
        let most_rows = number("most_rows", most_rows)?;
        let CacheShape {
            num_blocks,
            block_size,
            ..
        } = cache.shape;
        let step =
            Step::new(&sequences, num_blocks, block_size, most_rows).map_err(raise_attention)?;
        let slots = array::<i64>("slots", slots, 1)?.to_vec(py)?;
        if slots.len() != step.num_rows() {
            return Err(BufferError::new_err(format!(
                "array slots has {} elements, the step has {} tokens",
                slots.len(),
                step.num_rows()
            )));
        }
        Ok(Self { step, slots })
    }
}

/// Threads that attend: `num_threads`, the caller's among them. float32.
///
/// `is_fast` is whether this machine has the instructions that the kernel is written for; without them it
/// gives the same numbers slowly.
///
/// Raises `ConfigError` for no threads, or more than the system gives.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct CpuAttention {
    attention: Attention,
}

#[pymethods]
impl CpuAttention {
    #[new]
    fn new(num_threads: &Bound<'_, PyAny>) -> PyResult<Self> {
        let attention =
            Attention::new(number("num_threads", num_threads)?).map_err(raise_attention)?;
        Ok(Self { attention })
    }

    #[staticmethod]
    fn is_fast() -> bool {
        cpu_attention::Isa::is_fast()
    }

    /// Writes keys and values of all tokens into their slots, then attends with the rows of the step.
    ///
    /// `query` is float32 `[T, query_heads, head_dim_k]`, `key` `[T, kv_heads, head_dim_k]`, `value`
    /// `[T, kv_heads, head_dim_v]`, `out` `[T, query_heads, head_dim_v]`, all C-contiguous; rows of
    /// sequences with more than `most_rows` tokens are left in `out` as they were. `softcap`: scores become
    /// `softcap * tanh(score / softcap)`. `sinks` float32 `[query_heads]`: one more score per head, without
    /// a value. No other thread may write to the arrays meanwhile; the GIL is released.
    ///
    /// Raises `BufferError` for arrays that do not fit and `ConfigError` for settings that cannot be; then
    /// `out` is as it was.
    #[pyo3(signature = (step, cache, query, key, value, out, *, scaling, sliding_window = None, softcap = None, sinks = None))]
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        step: &CpuStep,
        cache: &CpuCache,
        query: &Bound<'_, PyAny>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        scaling: f32,
        sliding_window: Option<&Bound<'_, PyAny>>,
        softcap: Option<f32>,
        sinks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let query = array::<f32>("query", query, 3)?;
        let heads = query.shape()[1];
        let (key, value) = (array("key", key, 3)?, array("value", value, 3)?);
        let mut out = writable("out", out, 3)?;
        let window = sliding_window.map(|window| number("sliding_window", window));
        let sinks = sinks.map(|sinks| array("sinks", sinks, 1)).transpose()?;
        let options = Options {
            scaling,
            window: window.transpose()?,
            softcap,
            sinks: sinks.as_ref().map(shared_slice),
        };
        let Ok(mut tensors) = cache.tensors.try_lock() else {
            return Err(BufferError::new_err(
                "another thread attends over this cache",
            ));
        };
        let (keys, values) = &mut *tensors;
        let read = [("query", &query), ("key", &key), ("value", &value)];
        for target in [("keys", &*keys), ("values", values), ("out", &out)] {
            apart(target, &read)?;
            if let Some(sinks) = &sinks {
                apart(target, &[("sinks", sinks)])?;
            }
        }
        apart(("out", &out), &[("keys", keys), ("values", values)])?;
        let (keys, values) = (unique_slice(keys), unique_slice(values));
        let query = Query {
            rows: shared_slice(&query),
            heads,
        };
        let rows = (shared_slice(&key), shared_slice(&value));
        let out = unique_slice(&mut out);
        let shape = &cache.shape;
        py.detach(|| {
            write(shape, &step.slots, rows, (&mut *keys, &mut *values))?;
            self.attention
                .attend(&step.step, shape, keys, values, query, &options, out)
        })
        .map_err(raise_attention)
    }
}
