//! The memory of an object: by the buffer protocol, or by DLPack, as torch's tensors offer it.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The reason why an object has no buffer.
pub(crate) enum NoBuffer {
    /// The error of the buffer protocol.
    Protocol(PyErr),
    /// The error of DLPack for a tensor: memory on another device, or elements that NumPy lacks.
    DlPack(PyErr),
}

impl From<NoBuffer> for PyErr {
    fn from(error: NoBuffer) -> Self {
        let (NoBuffer::Protocol(error) | NoBuffer::DlPack(error)) = error;
        error
    }
}

/// An object's buffer, which is kept after the call.
///
/// torch frees the memory of a tensor that is resized or gets other data, also if DLPack has given it away. Memory that
/// it has given to NumPy by `numpy()` stays.
pub(crate) fn kept_buffer_of(object: &Bound<'_, PyAny>) -> Result<PyUntypedBuffer, NoBuffer> {
    let buffer = buffer_of(object)?;
    let py = object.py();
    if PyUntypedBuffer::get(object).is_ok() {
        return Ok(buffer);
    }
    match object.call_method0(intern!(py, "numpy")) {
        Ok(array) => Ok(PyUntypedBuffer::get(&array)
            .ok()
            .filter(|own| own.buf_ptr() == buffer.buf_ptr()) // else it is a copy
            .unwrap_or(buffer)),
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(buffer),
        Err(error) => Err(NoBuffer::Protocol(error)),
    }
}

/// An object's buffer. One that has none and speaks DLPack is wrapped in an array of NumPy, which shares its
/// memory: no library of tensors is imported for it.
pub(crate) fn buffer_of(object: &Bound<'_, PyAny>) -> Result<PyUntypedBuffer, NoBuffer> {
    let py = object.py();
    let error = match PyUntypedBuffer::get(object) {
        Ok(buffer) => return Ok(buffer),
        Err(error) => error,
    };
    let is_tensor = error.is_instance_of::<PyTypeError>(py)
        && object.hasattr(intern!(py, "__dlpack__")).unwrap_or(false);
    if !is_tensor {
        return Err(NoBuffer::Protocol(error));
    }
    static FROM_DLPACK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let from_dlpack = FROM_DLPACK.import(py, "numpy", "from_dlpack");
    let array = from_dlpack.and_then(|from_dlpack| from_dlpack.call1((object,)));
    let buffer = array.and_then(|array| PyUntypedBuffer::get(&array));
    buffer.map_err(NoBuffer::DlPack)
}
