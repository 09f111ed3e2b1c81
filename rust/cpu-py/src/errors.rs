//! The one place where the kernels' errors become Python's: one exception per decision a caller can take.

use forks::Forked;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyMemoryError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    pyengine._cpu,
    CpuError,
    PyException,
    "Base of all errors of the CPU kernels. The call that raised it has changed nothing."
);
create_exception!(
    pyengine._cpu,
    ConfigError,
    CpuError,
    "A setting is invalid, such as no threads, an empty weight, or an instruction level that this machine lacks."
);
create_exception!(
    pyengine._cpu,
    BufferError,
    CpuError,
    "An array is not writable, not contiguous, of another type or shape, or does not fit the others."
);
create_exception!(
    pyengine._cpu,
    HandleError,
    CpuError,
    "The object was made by the process of which this one is a fork."
);

/// Adds the exceptions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("CpuError", py.get_type::<CpuError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())?;
    module.add("BufferError", py.get_type::<BufferError>())?;
    module.add("HandleError", py.get_type::<HandleError>())
}

/// The error for an object that the process made of which this one is a fork.
#[cold]
pub(crate) fn forked(error: Forked) -> PyErr {
    HandleError::new_err(error.to_string())
}

/// The error for an array that gives no buffer, caused by `error`; an interrupt as it is.
pub(crate) fn no_buffer(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let refused = BufferError::new_err(format!("array {name} has no buffer: {error}"));
    refused.set_cause(py, Some(error));
    refused
}

/// A weight that cannot be made: a value that is wrong, or memory that the system does not give.
pub(crate) fn no_weight(error: cpu_kernels::Error) -> PyErr {
    match error {
        cpu_kernels::Error::OutOfMemory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// Every error of the kernels as a Python exception: settings, arrays that do not fit, or no memory.
pub(crate) fn raise_attention(error: cpu_kernels::Error) -> PyErr {
    use cpu_kernels::Error as E;
    let text = error.to_string();
    match error {
        E::OutOfMemory { .. } => PyMemoryError::new_err(text),
        E::Zero(_)
        | E::TooLarge
        | E::Heads { .. }
        | E::Groups { .. }
        | E::Layout { .. }
        | E::Softcap(_)
        | E::Threads(_)
        | E::UnknownIsa(_)
        | E::Isa { .. }
        | E::GroupSize(_)
        | E::Inputs { .. }
        | E::Scale { .. }
        | E::Weight { .. } => ConfigError::new_err(text),
        E::Length { .. }
        | E::Starts { .. }
        | E::SeqLen { .. }
        | E::TableWidth { .. }
        | E::Block { .. }
        | E::Prefix { .. }
        | E::Slot { .. }
        | E::StateSlot { .. }
        | E::SharedState { .. }
        | E::Index { .. }
        | E::Output { .. }
        | E::OtherCache { .. } => BufferError::new_err(text),
    }
}
