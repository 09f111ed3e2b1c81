//! Changes of the set of contents, for routers and offloaders.

use std::sync::Arc;

use kv_core::Event;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bounded;

/// Contents that were stored together, each the parent of the next one.
struct Row {
    hashes: Vec<u128>,
    parent: Option<u128>,
    tokens: Vec<u32>,
    namespace: Arc<[u8]>,
    switch: Option<(usize, Arc<[u8]>)>,
}

/// A prefix became cached in a block. Parents are stored before their children.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Stored {
    /// One object for all of them: a prompt has thousands, and few are read.
    row: Arc<Row>,
    at: usize,
}

#[pymethods]
impl Stored {
    /// The block hash: 16 bytes, little-endian.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        name(py, self.row.hashes[self.at])
    }

    /// The hash of the parent block; None for the first block of a prompt.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let parent = match self.at {
            0 => self.row.parent,
            at => Some(self.row.hashes[at - 1]),
        };
        parent.map(|parent| name(py, parent))
    }

    /// The token ids of the block.
    #[getter]
    fn tokens(&self) -> &[u32] {
        let block_size = self.row.tokens.len() / self.row.hashes.len();
        &self.row.tokens[self.at * block_size..][..block_size]
    }

    /// The namespace in which it can be matched.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.row.namespace)
    }

    /// Where the namespace switches, and to which name, if the block contains that position or follows it.
    #[getter]
    fn switch<'py>(&self, py: Python<'py>) -> Option<(usize, Bound<'py, PyBytes>)> {
        let (position, name) = self.row.switch.as_ref()?;
        Some((*position, PyBytes::new(py, name)))
    }

    fn __repr__(&self) -> String {
        let (hash, tokens) = (self.row.hashes[self.at], self.tokens());
        format!("Stored(hash={hash:032x}, tokens={tokens:?})")
    }
}

/// A prefix is no longer cached in any block.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Removed {
    hash: u128,
}

#[pymethods]
impl Removed {
    /// The block hash: 16 bytes, little-endian.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        name(py, self.hash)
    }

    fn __repr__(&self) -> String {
        format!("Removed(hash={:032x})", self.hash)
    }
}

/// No block is cached any more.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Cleared {
    weights_version: u32,
}

#[pymethods]
impl Cleared {
    /// The version of the weights that compute the blocks stored from now on.
    #[getter]
    fn weights_version(&self) -> u32 {
        self.weights_version
    }

    fn __repr__(&self) -> String {
        format!("Cleared(weights_version={})", self.weights_version)
    }
}

/// Events were not taken for too long and were dropped. The next events state all cached blocks: `Cleared`, then
/// `Stored`.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Lost {
    num_events: u64,
}

#[pymethods]
impl Lost {
    /// Number of dropped events.
    #[getter]
    fn num_events(&self) -> u64 {
        self.num_events
    }

    fn __repr__(&self) -> String {
        format!("Lost(num_events={})", self.num_events)
    }
}

fn name(py: Python<'_>, hash: u128) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &hash.to_le_bytes())
}

/// Adds the Python objects of an event to a list, one for each content.
pub(crate) fn push_event(event: Event, list: &Bound<'_, PyList>) -> PyResult<()> {
    match event {
        Event::Stored {
            hashes,
            parent,
            tokens,
            namespace,
            switch,
        } => {
            let count = hashes.len();
            let row = Arc::new(Row {
                hashes,
                parent,
                tokens,
                namespace,
                switch,
            });
            bounded::extend(list, 0..count, |at| {
                let row = Arc::clone(&row);
                Ok(Stored { row, at })
            })
        }
        Event::Removed { hashes } => bounded::extend(list, hashes, |hash| Ok(Removed { hash })),
        Event::Cleared { weights_version } => list.append(Cleared { weights_version }),
        Event::Lost { num_events } => list.append(Lost { num_events }),
    }
}
