//! Changes of the set of contents, for routers and offloaders.

use std::sync::Arc;

use kv_core::Event;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A block holds this content now; before, none did. Parents are stored before their children.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Stored {
    hash: u128,
    parent: Option<u128>,
    tokens: Box<[u32]>,
    namespace: Arc<[u8]>,
}

#[pymethods]
impl Stored {
    /// The content's name: 16 bytes, little endian.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.hash.to_le_bytes())
    }

    /// The name of the content before it; None for the first block of a prompt.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.parent
            .map(|parent| PyBytes::new(py, &parent.to_le_bytes()))
    }

    /// The block's own token ids.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.tokens.to_vec()
    }

    /// The namespace under which it can be matched.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.namespace)
    }

    fn __repr__(&self) -> String {
        format!("Stored(hash={:032x}, tokens={:?})", self.hash, self.tokens)
    }
}

/// No block holds this content any more.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Removed {
    hash: u128,
}

#[pymethods]
impl Removed {
    /// The content's name: 16 bytes, little endian.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.hash.to_le_bytes())
    }

    fn __repr__(&self) -> String {
        format!("Removed(hash={:032x})", self.hash)
    }
}

/// No block holds any content any more.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Cleared;

#[pymethods]
impl Cleared {
    fn __repr__(&self) -> &'static str {
        "Cleared()"
    }
}

/// An event as the Python object of its kind.
pub(crate) fn event(py: Python<'_>, event: Event) -> PyResult<Py<PyAny>> {
    Ok(match event {
        Event::Stored {
            hash,
            parent,
            tokens,
            namespace,
        } => {
            let stored = Stored {
                hash,
                parent,
                tokens,
                namespace,
            };
            Py::new(py, stored)?.into_any()
        }
        Event::Removed { hash } => Py::new(py, Removed { hash })?.into_any(),
        Event::Cleared => Py::new(py, Cleared)?.into_any(),
    })
}
