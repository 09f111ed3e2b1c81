//! The sequences of a step, for layers with states, and what the kernels of such layers have in common.

use cpu_kernels::StateStep;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::errors::raise_attention;
use crate::float_arrays::{apart, array};

/// The sequences of one step for layers with states, copied and checked.
///
/// With B sequences: `query_start_loc` int32 `[B + 1]` says where the new tokens of each one begin. `sources` int64
/// `[B]` is the slot of each initial state, or -1 for zeros. `slots` int64 `[B]` is the slot that each state is written
/// to after the new tokens, or -1 if it is not kept. All layers of a step use the same one.
///
/// Raises `BufferError`, naming the value, for arrays that contradict each other, and for a slot that one sequence writes
/// and another one reads or writes: copy that state before the step.
#[pyclass(frozen, module = "pyengine._cpu")]
pub(crate) struct CpuStateStep {
    step: StateStep,
}

#[pymethods]
impl CpuStateStep {
    #[new]
    #[pyo3(signature = (*, query_start_loc, sources, slots))]
    fn new(
        py: Python<'_>,
        query_start_loc: &Bound<'_, PyAny>,
        sources: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let starts = array::<i32>("query_start_loc", query_start_loc, 1)?.to_vec(py)?;
        let sources = array::<i64>("sources", sources, 1)?.to_vec(py)?;
        let slots = array::<i64>("slots", slots, 1)?.to_vec(py)?;
        let step = StateStep::new(&starts, &sources, &slots).map_err(raise_attention)?;
        Ok(Self { step })
    }
}

impl CpuStateStep {
    pub(crate) fn step(&self) -> &StateStep {
        &self.step
    }
}

/// The arrays that a kernel writes.
pub(crate) struct Written<T: Element> {
    pub(crate) states: PyBuffer<f32>,
    pub(crate) out: PyBuffer<T>,
}

impl<T: Element> Written<T> {
    /// Refuses arrays that share memory with each other or with one of the others.
    pub(crate) fn apart<U>(&self, others: &[(&str, &PyBuffer<U>)]) -> PyResult<()> {
        apart(("out", &self.out), &[("states", &self.states)])?;
        apart(("out", &self.out), others)?;
        apart(("states", &self.states), others)
    }
}
