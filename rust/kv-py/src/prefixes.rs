//! `SharedPrefixes`: which rows of a step share which leading blocks, in the caller's arrays.

use kv_core::{PrefixArrays, SharedPrefixes as Core};
use pyo3::prelude::*;

use crate::buffers::{IntBuffer, being_filled};
use crate::errors::{BufferError, raise};
use crate::guarded::Guarded;
use crate::numbers::number;

/// The prefixes that rows of a step share, found by `StepPlan.fill(buffers, shared=...)`: a tree, for kernels that
/// read a shared block once for all of its rows.
///
/// The arrays are writable, C-contiguous and int32 or int64. With B sequences in the largest step: `order [B]` has
/// the rows of the batch, ordered so that rows that share a prefix are adjacent. `own_blocks [B]` has, for each row
/// of the batch, the index of the first block in its table that is in no prefix. `prefixes [B - 1, 5]` has, level
/// by level, start and end in `order`, start and end among the blocks, and the parent (-1: none). Elements beyond
/// `num_prefixes`, and beyond the step's sequences, are undefined.
///
/// A prefix has at least `min_blocks` blocks and `min_rows` rows; shorter ones belong to the prefixes inside them,
/// or to the rows themselves. A prefix ends before the first token that one of its rows computes, so no row needs a
/// mask there. `group` is the layer group; groups with a window share no blocks.
///
/// Raises `BufferError` for an array of another type, shape or layout, and `ConfigError` for limits below 1 block
/// or 2 rows.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct SharedPrefixes {
    order: IntBuffer,
    own_blocks: IntBuffer,
    prefixes: IntBuffer,
    core: Guarded<Core>,
}

impl SharedPrefixes {
    /// Calls `fill` for a step of this many sequences, and writes the prefixes to the arrays if they have changed. Runs
    /// no Python code.
    pub(crate) fn with(
        &self,
        sequences: usize,
        fill: impl FnOnce(&mut Core) -> PyResult<()>,
    ) -> PyResult<()> {
        let arrays = PrefixArrays {
            order: self.order.elements(),
            own_blocks: self.own_blocks.elements(),
            prefixes: self.prefixes.elements(),
        };
        arrays.check(sequences).map_err(raise)?;
        let mut core = self.core.try_lock().ok_or_else(being_filled)?;
        let before = core.version();
        fill(&mut core)?;
        if core.version() != before {
            core.write(&arrays);
        }
        Ok(())
    }

    fn look<R>(&self, look: impl FnOnce(&Core) -> R) -> PyResult<R> {
        let core = self.core.try_lock().ok_or_else(being_filled)?;
        Ok(look(&core))
    }
}

#[pymethods]
impl SharedPrefixes {
    #[new]
    #[pyo3(signature = (*, order, own_blocks, prefixes, group = None, min_blocks = None, min_rows = None))]
    fn new(
        order: &Bound<'_, PyAny>,
        own_blocks: &Bound<'_, PyAny>,
        prefixes: &Bound<'_, PyAny>,
        group: Option<&Bound<'_, PyAny>>,
        min_blocks: Option<&Bound<'_, PyAny>>,
        min_rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let group = group.map_or(Ok(0), |group| number("group", group))?;
        let min_blocks = min_blocks.map_or(Ok(1), |blocks| number("min_blocks", blocks))?;
        let min_rows = min_rows.map_or(Ok(2), |rows| number("min_rows", rows))?;
        let prefixes = IntBuffer::over("prefixes", prefixes, 2..=2)?;
        if prefixes.size(0) != PrefixArrays::WIDTH {
            let (given, expected) = (prefixes.size(0), PrefixArrays::WIDTH);
            return Err(BufferError::new_err(format!(
                "array prefixes has {given} columns, not {expected}"
            )));
        }
        let core = Core::new(group, min_blocks, min_rows).map_err(raise)?;
        Ok(Self {
            order: IntBuffer::over("order", order, 1..=1)?,
            own_blocks: IntBuffer::over("own_blocks", own_blocks, 1..=1)?,
            prefixes,
            core: Guarded::new(core, Core::reset),
        })
    }

    /// Number of prefixes in the arrays.
    #[getter]
    fn num_prefixes(&self) -> PyResult<usize> {
        self.look(|core| core.prefixes().len())
    }

    /// Increases whenever the arrays are written: until then, copies of them are valid.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        self.look(Core::version)
    }
}
