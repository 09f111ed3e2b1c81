//! Answers of any length: the GIL is released every few items.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::memory::bytes_filled_by;

/// Items that become Python objects before another thread may run: some ten microseconds.
const AT_ONCE: usize = 1_024;

/// Bytes that are copied with the GIL.
const FEW_BYTES: usize = 64 << 10;

/// A list of `make(item)` of each item.
pub(crate) fn list<'py, T, P>(
    py: Python<'py>,
    items: Vec<T>,
    make: impl Fn(T) -> PyResult<P>,
) -> PyResult<Bound<'py, PyList>>
where
    T: Send,
    P: IntoPyObject<'py>,
{
    let list = PyList::empty(py);
    extend(&list, items, make)?;
    Ok(list)
}

/// Appends `make(item)` of each item to a list that no other thread has.
pub(crate) fn extend<'py, T, P>(
    list: &Bound<'py, PyList>,
    items: impl IntoIterator<Item = T>,
    make: impl Fn(T) -> PyResult<P>,
) -> PyResult<()>
where
    P: IntoPyObject<'py>,
{
    for item in items {
        list.append(make(item)?)?;
        if list.len().is_multiple_of(AT_ONCE) {
            list.py().detach(|| ());
        }
    }
    Ok(())
}

/// These bytes as Python's.
pub(crate) fn bytes<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    match bytes.len() {
        ..=FEW_BYTES => Ok(PyBytes::new(py, bytes)),
        count => bytes_filled_by(py, count, |memory| memory.copy_from_slice(bytes)),
    }
}
