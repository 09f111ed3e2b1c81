//! `PoolSnapshot`: the whole pool at one moment, in columns of native 32-bit integers.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bounded;
use crate::memory::bytes_filled_by;

/// The pool at one moment, in columns for NumPy: `states` is uint8, all others uint32 in the machine's byte order.
/// It contains no tokens.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct PoolSnapshot(pub(crate) kv_core::PoolSnapshot);

fn column<'py>(
    py: Python<'py>,
    numbers: impl ExactSizeIterator<Item = u32> + Send,
) -> PyResult<Bound<'py, PyBytes>> {
    bytes_filled_by(py, size_of::<u32>() * numbers.len(), |memory| {
        let (columns, _) = memory.as_chunks_mut();
        for (four, number) in columns.iter_mut().zip(numbers) {
            *four = number.to_ne_bytes();
        }
    })
}

macro_rules! columns {
    ($($of_blocks:ident: $doc:literal),* $(,)?) => {
        #[pymethods]
        impl PoolSnapshot {
            $(
                #[doc = $doc]
                #[getter]
                fn $of_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                    column(py, self.0.$of_blocks.iter().copied())
                }
            )*

            /// By block: 0 free, 1 evictable, 2 active, 3 pinned, 4 loading.
            #[getter]
            fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                bounded::bytes(py, &self.0.states)
            }

            /// By node: the number of its parent; 0 for the root of a namespace.
            #[getter]
            fn parents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|node| node.parent))
            }

            /// By node: the number of the parent's blocks after which it is attached.
            #[getter]
            fn parent_indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|node| node.parent_index))
            }

            /// By node: its length in blocks.
            #[getter]
            fn lengths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|node| node.len))
            }

            /// The roots, as (number of the node, namespace).
            #[getter]
            fn namespaces<'py>(&self, py: Python<'py>) -> Vec<(u32, Bound<'py, PyBytes>)> {
                let tree = (1..).zip(&self.0.tree);
                let name = |(number, node): (u32, &kv_core::SnapshotNode)| {
                    let name = node.namespace.as_ref()?;
                    Some((number, PyBytes::new(py, name)))
                };
                tree.filter_map(name).collect()
            }
        }
    };
}

columns! {
    refs: "By block: all references.",
    seq_refs: "By block: live sequences whose table holds it.",
    ages: "By block: steps since it was computed; 0 if it is not cached.",
    nodes: "By block: the number of its radix node, from 1; 0 if it is not cached.",
    node_indices: "By block: its index in that node, from 1; 0 if it is not cached.",
}
