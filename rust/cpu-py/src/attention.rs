//! Attention on the CPU: arrays of floats in and out, the GIL released while threads work.
//!
//! Neither NumPy nor the buffer protocol knows bfloat16: its bits come as uint16.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, TryLockError};

use cpu_kernels::{
    Attention, CacheArrays, CacheShape, NewRows, Options, Query, Rows, Sequences, SharedPrefixes,
    Step, Stored,
};
use forks::Own;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::claims::Claim;
use crate::errors::{BufferError, ConfigError, forked, raise_attention};
use crate::float_arrays::{any_array, apart, array, bytes, is_of, rows, writable};
use crate::memory::{shared_slice, unique_slice};
use crate::numbers::number;
use crate::rotation::{RotationArguments, Turning};

type Pair<T> = Mutex<(PyBuffer<T>, PyBuffer<T>)>;

/// Keys and values, by what they hold.
enum Tensors {
    Float32(Pair<f32>),
    BFloat16(Pair<u16>),
    Int8(Pair<i8>),
}

/// Keys and values of one layer: writable arrays `[blocks, block_size, kv_heads, head_dim]`, which may differ in
/// `head_dim`. Both are float32, or both are bfloat16, passed as uint16, or both are int8.
///
/// In int8 the last dimension is `head_dim + 4`: a head has its numbers, and after them the bytes of a float32 scale, a
/// 127th of its largest absolute value. What is stored depends on the head alone.
///
/// Raises `BufferError` for an array of another type, shape or layout, and for an array that shares memory with
/// another `CpuCache` while that exists, because two threads could write there at once.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct CpuCache {
    shape: CacheShape,
    tensors: Tensors,
    /// Dropped last: the arrays are released by then.
    _claim: Claim,
}

/// Keys and values that fit each other.
fn pair<T: Element>(
    keys: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
) -> PyResult<(CacheShape, Pair<T>, Claim)> {
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
    let shape = CacheShape {
        num_blocks: shape[0],
        block_size: shape[1],
        kv_heads: shape[2],
        dim_k: shape[3],
        dim_v,
    };
    let claim = Claim::on(vec![bytes(&keys), bytes(&values)]).map_err(|at| {
        let name = ["keys", "values"][at];
        BufferError::new_err(format!(
            "array {name} shares memory with another CpuCache: use that one, or drop it first"
        ))
    })?;
    Ok((shape, Mutex::new((keys, values)), claim))
}

#[pymethods]
impl CpuCache {
    #[new]
    fn new(keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (shape, tensors, claim) = match () {
            () if is_of::<u16>(keys) => {
                let (shape, pair, claim) = pair(keys, values)?;
                (shape, Tensors::BFloat16(pair), claim)
            }
            () if is_of::<i8>(keys) => {
                let (mut shape, pair, claim) = pair(keys, values)?;
                let scale = <i8 as Stored<f32>>::width(0);
                for dim in [&mut shape.dim_k, &mut shape.dim_v] {
                    *dim = dim.checked_sub(scale).filter(|&dim| dim > 0).ok_or_else(|| {
                        BufferError::new_err(format!(
                            "int8 heads of {dim} bytes have no room for numbers and a scale of {scale} bytes"
                        ))
                    })?;
                }
                (shape, Tensors::Int8(pair), claim)
            }
            () => {
                let (shape, pair, claim) = pair(keys, values)?;
                (shape, Tensors::Float32(pair), claim)
            }
        };
        Ok(Self {
            shape,
            tensors,
            _claim: claim,
        })
    }
}

/// The sequences of one step, copied and checked.
///
/// With T tokens and B sequences: `query_start_loc` int32 `[B + 1]`, `seq_lens` int32 `[B]`, `block_tables` int32
/// `[B, W]`, `slots` int64 `[T]` (-1: the KV is already cached), as `StepPlan.fill` writes them for one layer
/// group. `cache` is that of any layer, because all have the same number of blocks.
///
/// `order` int32 `[B]` and `prefixes` int32 `[P, 5]`, both or neither, are those that `StepPlan.fill` wrote for
/// these tables as `SharedPrefixes`. Blocks that several sequences share are then read once for all of them;
/// results have the same bits either way.
///
/// Raises `BufferError`, naming the value, for arrays that contradict each other or refer to a block or slot that
/// the cache does not have.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct CpuStep {
    step: Step,
    slots: Vec<i64>,
}

#[pymethods]
impl CpuStep {
    #[new]
    #[pyo3(signature = (cache, *, query_start_loc, seq_lens, block_tables, slots, order = None, prefixes = None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        cache: &CpuCache,
        query_start_loc: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        order: Option<&Bound<'_, PyAny>>,
        prefixes: Option<&Bound<'_, PyAny>>,
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
        let CacheShape {
            num_blocks,
            block_size,
            ..
        } = cache.shape;
        let mut step = Step::new(&sequences, num_blocks, block_size).map_err(raise_attention)?;
        if order.is_some() != prefixes.is_some() {
            return Err(BufferError::new_err(
                "one of the arrays order and prefixes is missing: give both or neither",
            ));
        }
        if let (Some(order), Some(prefixes)) = (order, prefixes) {
            let shared = SharedPrefixes {
                order: &array::<i32>("order", order, 1)?.to_vec(py)?,
                prefixes: &array::<i32>("prefixes", prefixes, 2)?.to_vec(py)?,
            };
            step = step.share(&shared).map_err(raise_attention)?;
        }
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

/// Lets calls of this thread have at most `count` threads, its own included; None: as many as a `CpuAttention` has.
/// Returns the limit before. A `CpuAttention` with an OpenMP runtime has that runtime's limit instead
/// (`omp_set_num_threads`).
///
/// Raises `ConfigError` for no threads.
#[pyfunction]
pub(crate) fn limit_threads(count: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    let count = count.map(|count| number("count", count)).transpose()?;
    if count == Some(0) {
        return Err(ConfigError::new_err("count=0: at least 1 thread, or None"));
    }
    let before = cpu_kernels::limit_threads(count.unwrap_or(usize::MAX));
    Ok((before != usize::MAX).then_some(before))
}

/// Attention in float32 and bfloat16 on `num_threads` threads, including the caller's.
///
/// `openmp` is the file of an OpenMP runtime (libgomp, libomp) whose threads are used, for callers that compute
/// with it between these calls, as torch does. Without it, the threads are a pool of the process, shared by all
/// `CpuAttention`; while one call has it, others compute with their own thread alone.
///
/// `isa` is the instruction level: the best one of this machine, or a lower one named by the environment variable
/// `PYENGINE_CPU_ISA`: "plain", "neon", "avx2", "avx512", "avx512_bf16" or "amx". `is_fast` is True if the kernel
/// has code for that level; otherwise it computes the same numbers slowly.
///
/// Raises `ConfigError` for no threads, more threads than the system allows, a file that is not such a runtime, and
/// a level that is unknown or that this machine lacks; `isa` and `is_fast` raise it for the level.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct CpuAttention {
    attention: Own<Attention>,
}

#[pymethods]
impl CpuAttention {
    #[new]
    #[pyo3(signature = (num_threads, openmp=None))]
    fn new(num_threads: &Bound<'_, PyAny>, openmp: Option<PathBuf>) -> PyResult<Self> {
        let num_threads = number("num_threads", num_threads)?;
        let attention = match openmp {
            None => Attention::new(num_threads),
            Some(runtime) => Attention::with_openmp(num_threads, &runtime),
        };
        let attention = Own::new(attention.map_err(raise_attention)?);
        Ok(Self { attention })
    }

    #[staticmethod]
    fn is_fast() -> PyResult<bool> {
        cpu_kernels::Isa::is_fast().map_err(raise_attention)
    }

    #[staticmethod]
    fn isa() -> PyResult<&'static str> {
        let isa = cpu_kernels::Isa::chosen().map_err(raise_attention)?;
        Ok(isa.name())
    }

    /// Sets `out` to `row / sqrt(mean(row ^ 2) + epsilon) * weight` for each row. `rows` and `out` are `[T, size]`,
    /// `weight` is `[size]`, all C-contiguous and float32, or bfloat16 passed as uint16; with bfloat16 rows the weight
    /// may be float32. Sums are float32; the normalized rows are rounded to the type of the weight. The GIL is
    /// released.
    ///
    /// Raises `BufferError` for arrays that do not fit, and `ConfigError` for an empty weight; `out` is then
    /// unchanged.
    fn rms_norm(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        epsilon: f32,
    ) -> PyResult<()> {
        match (is_of::<u16>(rows), is_of::<f32>(weight)) {
            (true, true) => self.normalise::<u16, f32>(py, rows, weight, out, epsilon),
            (true, false) => self.normalise::<u16, u16>(py, rows, weight, out, epsilon),
            (false, _) => self.normalise::<f32, f32>(py, rows, weight, out, epsilon),
        }
    }

    /// Writes the keys and values of all tokens into their slots, then attends with the rows of the step.
    ///
    /// `query` is `[T, query_heads, head_dim_k]`, `key` `[T, kv_heads, head_dim_k]`, `value` `[T, kv_heads,
    /// head_dim_v]`, `out` `[T, query_heads, head_dim_v]`, all of the cache's type, or all float32 or all bfloat16 for
    /// a cache in int8. `out` is C-contiguous, the
    /// others have contiguous rows. Positions before `first_key` have no keys: their own rows see only themselves,
    /// and later rows none of them. `softcap`: scores become `softcap * tanh(score / softcap)`. `sinks` float32
    /// `[query_heads]` is one more score per head, without a value.
    ///
    /// With `rotation`, queries and keys are first rotated by cosines and sines `[T, columns]`, both float32 or
    /// both bfloat16 as uint16. It also says how many elements of each head are rotated, whether pairs are adjacent
    /// or in two halves, and the stride of the columns. Before that, heads may be normalized with weights
    /// `[head_dim_k]`, an epsilon, and an offset that is added to the weights.
    ///
    /// No other thread may write to the arrays during the call; the GIL is released. Raises `BufferError` for
    /// arrays that do not fit, and `ConfigError` for impossible settings; `out` is then unchanged.
    #[pyo3(signature = (step, cache, query, key, value, out, *, scaling, sliding_window = None, first_key = 0, softcap = None, sinks = None, rotation = None))]
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
        first_key: usize,
        softcap: Option<f32>,
        sinks: Option<&Bound<'_, PyAny>>,
        rotation: Option<RotationArguments<'_>>,
    ) -> PyResult<()> {
        let window = sliding_window.map(|window| number("sliding_window", window));
        let sinks = sinks.map(|sinks| array("sinks", sinks, 1)).transpose()?;
        let call = Call {
            attention: self.attention()?,
            step,
            shape: &cache.shape,
            rows: [query, key, value],
            out,
            sinks: sinks.as_ref(),
            rotation,
            options: Options {
                scaling,
                window: window.transpose()?,
                first_key,
                softcap,
                sinks: sinks.as_ref().map(shared_slice),
            },
        };
        match &cache.tensors {
            Tensors::Float32(tensors) => call.run::<f32, f32>(py, tensors),
            Tensors::BFloat16(tensors) => call.run::<u16, u16>(py, tensors),
            Tensors::Int8(tensors) if is_of::<u16>(query) => call.run::<u16, i8>(py, tensors),
            Tensors::Int8(tensors) => call.run::<f32, i8>(py, tensors),
        }
    }
}

impl CpuAttention {
    /// Its threads; an error in a fork, which does not have them.
    pub(crate) fn attention(&self) -> PyResult<&Attention> {
        self.attention
            .origin
            .check("CpuAttention")
            .map_err(forked)?;
        Ok(&self.attention)
    }

    fn normalise<T: Element + cpu_kernels::Element, W: Element + cpu_kernels::Element>(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        epsilon: f32,
    ) -> PyResult<()> {
        let (rows, weight) = (
            array::<T>("rows", rows, 2)?,
            array::<W>("weight", weight, 1)?,
        );
        let mut out = writable::<T>("out", out, 2)?;
        if rows.shape() != out.shape() || rows.shape()[1..] != *weight.shape() {
            let shapes = [rows.shape(), weight.shape(), out.shape()];
            return Err(BufferError::new_err(format!(
                "arrays rows, weight and out of shapes {shapes:?} do not fit: [T, size], [size] and [T, size]"
            )));
        }
        apart(("out", &out), &[("rows", &rows)])?;
        apart(("out", &out), &[("weight", &weight)])?;
        let (rows, weight, out) = (
            shared_slice(&rows),
            shared_slice(&weight),
            unique_slice(&mut out),
        );
        let attention = self.attention()?;
        py.detach(|| attention.rms_norm(rows, weight, epsilon, out))
            .map_err(raise_attention)
    }
}

/// What `forward` was given: `rows` are query, key and value.
struct Call<'a, 'py> {
    attention: &'a Attention,
    step: &'a CpuStep,
    shape: &'a CacheShape,
    rows: [&'a Bound<'py, PyAny>; 3],
    out: &'a Bound<'py, PyAny>,
    sinks: Option<&'a PyBuffer<f32>>,
    rotation: Option<RotationArguments<'py>>,
    options: Options<'a>,
}

impl Call<'_, '_> {
    fn run<T, C>(self, py: Python<'_>, tensors: &Pair<C>) -> PyResult<()>
    where
        T: Element + cpu_kernels::Attend,
        C: Element + Stored<T>,
    {
        let [query, key, value] = self.rows;
        let query = any_array::<T>("query", query, 3)?;
        let heads = query.shape()[1];
        let (key, value) = (any_array("key", key, 3)?, any_array("value", value, 3)?);
        let new = NewRows {
            query: rows("query", &query)?,
            key: rows("key", &key)?,
            value: rows("value", &value)?,
        };
        let rotation = self.rotation.map(Turning::<T>::new).transpose()?;
        let mut out = writable("out", self.out, 3)?;
        let mut tensors = lock(tensors)?;
        let (keys, values) = &mut *tensors;
        let read = [("query", &query), ("key", &key), ("value", &value)];
        for target in [("keys", &*keys), ("values", values)] {
            apart_from(target, &read, self.sinks, rotation.as_ref())?;
        }
        apart_from(("out", &out), &read, self.sinks, rotation.as_ref())?;
        apart(("out", &out), &[("keys", keys), ("values", values)])?;
        let cache = CacheArrays {
            keys: unique_slice(keys),
            values: unique_slice(values),
        };
        let work = Work {
            attention: self.attention,
            step: self.step,
            shape: self.shape,
            heads,
            options: self.options,
        };
        let out = unique_slice(&mut out);
        py.detach(|| work.run(new, rotation.as_ref(), cache, out))
            .map_err(raise_attention)
    }
}

/// The arrays, for this thread alone. A panic under the lock has not changed which arrays they are.
fn lock<T>(pair: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
    match pair.try_lock() {
        Ok(pair) => Ok(pair),
        Err(TryLockError::Poisoned(pair)) => Ok(pair.into_inner()),
        Err(TryLockError::WouldBlock) => Err(BufferError::new_err(
            "another thread attends over this cache",
        )),
    }
}

/// Refuses a `target` that shares memory with an array that is read.
fn apart_from<T: Element + cpu_kernels::Element, U>(
    target: (&str, &PyBuffer<U>),
    read: &[(&str, &PyBuffer<T>)],
    sinks: Option<&PyBuffer<f32>>,
    rotation: Option<&Turning<T>>,
) -> PyResult<()> {
    apart(target, read)?;
    if let Some(sinks) = sinks {
        apart(target, &[("sinks", sinks)])?;
    }
    rotation.map_or(Ok(()), |rotation| rotation.apart(target))
}

/// A call whose arrays are checked.
struct Work<'a> {
    attention: &'a Attention,
    step: &'a CpuStep,
    shape: &'a CacheShape,
    heads: usize,
    options: Options<'a>,
}

impl Work<'_> {
    fn run<T: Element + cpu_kernels::Attend, C: Stored<T>>(
        &self,
        new: NewRows<'_, T>,
        rotation: Option<&Turning<T>>,
        CacheArrays { keys, values }: CacheArrays<'_, C>,
        out: &mut [T],
    ) -> Result<(), cpu_kernels::Error> {
        let (attention, step, shape) = (self.attention, self.step, self.shape);
        let cache = CacheArrays {
            keys: &mut *keys,
            values: &mut *values,
        };
        let query = new.query;
        let scratch;
        let rows = match rotation {
            None => {
                attention.write(shape, &step.slots, new.key, new.value, cache)?;
                query
            }
            Some(rotation) => {
                let mut turned = attention.scratch(query.len() * query.width());
                rotation.write(attention, shape, &step.slots, new, cache, &mut turned)?;
                scratch = turned;
                Rows::new(&scratch, query.len(), query.width(), query.width())?
            }
        };
        let query = Query {
            rows,
            heads: self.heads,
        };
        attention.attend(&step.step, shape, keys, values, query, &self.options, out)
    }
}
