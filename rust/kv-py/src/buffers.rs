//! The caller's arrays: exported once, filled in place at every step.

use std::ops::RangeInclusive;

use kv_core::{IntArray, StepArrays, TableRows};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::errors::{BufferError, no_buffer};
use crate::exported::kept_buffer_of;
use crate::guarded::Guarded;
use crate::memory::{elements, is_swapped};

pub(crate) enum IntBuffer {
    I32(PyBuffer<i32>),
    I64(PyBuffer<i64>),
}

impl IntBuffer {
    pub(crate) fn over(
        name: &str,
        object: &Bound<'_, PyAny>,
        dimensions: RangeInclusive<usize>,
    ) -> PyResult<Self> {
        let refuse = |what: String| BufferError::new_err(format!("array {name} {what}"));
        let buffer =
            kept_buffer_of(object).map_err(|error| no_buffer(object.py(), name, error.into()))?;
        if buffer.readonly() {
            return Err(refuse("is read-only".into()));
        }
        if !buffer.is_c_contiguous() {
            return Err(refuse("is not contiguous in C order".into()));
        }
        if !dimensions.contains(&buffer.dimensions()) {
            let given = buffer.dimensions();
            let (min, max) = dimensions.into_inner();
            let wanted = match min == max {
                true => format!("{min}"),
                false => format!("{min} (one layer group) or {max}"),
            };
            return Err(refuse(format!("has {given} dimensions, not {wanted}")));
        }
        let native = !is_swapped(&buffer);
        if native && buffer.as_typed::<i32>().is_ok() {
            return Ok(Self::I32(buffer.into_typed()?));
        }
        if native && buffer.as_typed::<i64>().is_ok() {
            return Ok(Self::I64(buffer.into_typed()?));
        }
        let format = buffer.format().to_string_lossy();
        Err(refuse(format!(
            "is int32 or int64, this one has format {format:?}"
        )))
    }

    /// Its size in the dimension `from_last`, counted from the last one.
    pub(crate) fn size(&self, from_last: usize) -> usize {
        let shape = match self {
            Self::I32(buffer) => buffer.shape(),
            Self::I64(buffer) => buffer.shape(),
        };
        shape[shape.len() - 1 - from_last]
    }

    /// Its elements, writable.
    pub(crate) fn elements(&self) -> IntArray<'_> {
        let elements = match self {
            Self::I32(buffer) => elements(buffer).map(IntArray::I32),
            Self::I64(buffer) => elements(buffer).map(IntArray::I64),
        };
        elements.expect("contiguous since it was exported")
    }
}

/// The arrays that `StepPlan.fill` writes: one set per runner, created once.
///
/// Each array is writable, C-contiguous and int32 or int64: a NumPy array, any object with a buffer, or a CPU
/// tensor with DLPack, as those of torch. With T tokens, B sequences and S sampling rows in the largest step:
/// `input_ids [T]`, `positions [T]`, `slot_mapping [T]` (block * block_size + offset; -1: the KV is already
/// cached), `query_start_loc [B + 1]`, `seq_lens [B]`, `block_tables [B, W]`, `logits_indices [S]`.
///
/// With G layer groups: `slot_mapping [G, T]` and `block_tables [G, B, W]`, where the null block stands for a
/// released block.
///
/// Only changed entries of `block_tables` are written, so no other code may write to it.
///
/// The arrays keep their size as long as they are used: torch refuses to resize such a tensor. Do not call
/// `numpy.ndarray.resize(refcheck=False)`, which frees memory that is in use.
///
/// Raises `BufferError` for an array of another type, shape or layout.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct StepBuffers {
    input_ids: IntBuffer,
    positions: IntBuffer,
    slot_mapping: IntBuffer,
    query_start_loc: IntBuffer,
    seq_lens: IntBuffer,
    block_tables: IntBuffer,
    logits_indices: IntBuffer,
    rows: Guarded<TableRows>,
}

impl StepBuffers {
    /// Calls `write` with the arrays. Runs no Python code.
    pub(crate) fn with<R>(
        &self,
        write: impl FnOnce(&StepArrays<'_>, &mut TableRows) -> R,
    ) -> PyResult<R> {
        let arrays = StepArrays {
            input_ids: self.input_ids.elements(),
            positions: self.positions.elements(),
            slot_mapping: self.slot_mapping.elements(),
            slots_width: self.slot_mapping.size(0),
            query_start_loc: self.query_start_loc.elements(),
            seq_lens: self.seq_lens.elements(),
            block_tables: self.block_tables.elements(),
            table_rows: self.block_tables.size(1),
            table_width: self.block_tables.size(0),
            logits_indices: self.logits_indices.elements(),
        };
        let mut rows = self.rows.try_lock().ok_or_else(being_filled)?;
        Ok(write(&arrays, &mut rows))
    }
}

/// The error for arrays that another thread is filling.
pub(crate) fn being_filled() -> PyErr {
    BufferError::new_err("another thread is filling these arrays")
}

#[pymethods]
impl StepBuffers {
    #[new]
    #[pyo3(signature = (*, input_ids, positions, slot_mapping, query_start_loc, seq_lens, block_tables, logits_indices))]
    fn new(
        input_ids: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        query_start_loc: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        logits_indices: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            input_ids: IntBuffer::over("input_ids", input_ids, 1..=1)?,
            positions: IntBuffer::over("positions", positions, 1..=1)?,
            slot_mapping: IntBuffer::over("slot_mapping", slot_mapping, 1..=2)?,
            query_start_loc: IntBuffer::over("query_start_loc", query_start_loc, 1..=1)?,
            seq_lens: IntBuffer::over("seq_lens", seq_lens, 1..=1)?,
            block_tables: IntBuffer::over("block_tables", block_tables, 2..=3)?,
            logits_indices: IntBuffer::over("logits_indices", logits_indices, 1..=1)?,
            rows: Guarded::new(TableRows::default(), |rows| *rows = TableRows::default()),
        })
    }
}
