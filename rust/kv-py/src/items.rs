//! Lists of arguments: any iterable, whatever its length claims to be.

use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;

/// The largest length of an iterable for which memory is reserved before it is read.
const BELIEVED: usize = 1 << 16;

/// The items of an iterable, each converted by `read` from the item and its position.
///
/// A length above `max` is refused before anything is read, by the error that `too_many` makes of the number; so is an
/// iterable that turns out longer. Any other length is a hint. Errors of the iterable are passed on.
pub(crate) fn items<'py, T>(
    object: &Bound<'py, PyAny>,
    max: usize,
    too_many: impl Fn(usize) -> PyErr,
    mut read: impl FnMut(&Bound<'py, PyAny>, usize) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let py = object.py();
    let hint = match object.len() {
        Ok(length) => length,
        Err(error) if error.is_instance_of::<PyTypeError>(py) => 0,
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
            let refused = too_many(isize::MAX as usize);
            refused.set_cause(py, Some(error));
            return Err(refused);
        }
        Err(error) => return Err(error),
    };
    if hint > max {
        return Err(too_many(hint));
    }
    let mut items = reserved(hint.min(BELIEVED))?;
    for (at, item) in object.try_iter()?.enumerate() {
        let item = read(&item?, at)?;
        if at >= max {
            return Err(too_many(at + 1));
        }
        if items.len() == items.capacity() {
            items.try_reserve(1).map_err(|_| out_of_memory(at + 1))?;
        }
        items.push(item);
        if at % BELIEVED == BELIEVED - 1 {
            py.check_signals()?; // an iterator without Python code would not be stopped
        }
    }
    Ok(items)
}

/// An empty vector with memory for `count` items.
pub(crate) fn reserved<T>(count: usize) -> PyResult<Vec<T>> {
    let mut items = Vec::new();
    items
        .try_reserve_exact(count)
        .map_err(|_| out_of_memory(count))?;
    Ok(items)
}

fn out_of_memory(count: usize) -> PyErr {
    PyMemoryError::new_err(format!("no memory for {count} items"))
}
