//! `Survey`: all blocks and contents at once, in columns of native 32-bit integers.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bounded;
use crate::cells::bytes_filled_by;

/// The pool at one moment, in columns for NumPy: `states` uint8, all others uint32 of the machine's
/// byte order. No token is in it.
#[pyclass(frozen, module = "pyengine._kv")]
pub(crate) struct Survey(pub(crate) kv_core::Survey);

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
        impl Survey {
            $(
                #[doc = $doc]
                #[getter]
                fn $of_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                    column(py, self.0.$of_blocks.iter().copied())
                }
            )*

            /// By block: 0 free, 1 idle, 2 active, 3 leased.
            #[getter]
            fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                bounded::bytes(py, &self.0.states)
            }

            /// By branch: the number of the one behind which it hangs; 0 for a namespace.
            #[getter]
            fn parents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|branch| branch.parent))
            }

            /// By branch: behind so many rows of that.
            #[getter]
            fn behind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|branch| branch.behind))
            }

            /// By branch: contents in it.
            #[getter]
            fn lengths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                column(py, self.0.tree.iter().map(|branch| branch.rows))
            }

            /// The branches of namespaces, each with its name.
            #[getter]
            fn namespaces<'py>(&self, py: Python<'py>) -> Vec<(u32, Bound<'py, PyBytes>)> {
                let tree = (1..).zip(&self.0.tree);
                let name = |(number, branch): (u32, &kv_core::Branch)| {
                    let name = branch.namespace.as_ref()?;
                    Some((number, PyBytes::new(py, name)))
                };
                tree.filter_map(name).collect()
            }
        }
    };
}

columns! {
    refs: "By block: all holders.",
    seq_refs: "By block: live sequences whose table holds it.",
    ages: "By block: how many steps ago its content was computed; 0 without content.",
    branches: "By block: the number of the branch of its content, counted from 1; 0 without content.",
    rows: "By block: the place of its content in that branch, counted from 1; 0 without content.",
}
