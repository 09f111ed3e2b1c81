//! Counts in: integers of their range, or an error that names argument and value.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyException, PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::errors::ConfigError;

/// Characters of a value that a message shows.
const SHOWN: usize = 100;

/// An argument as an unsigned integer.
#[inline]
pub(crate) fn number<'py, T>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    value.extract::<T>().map_err(|error| {
        not_an_int(value, error.into(), |shown| {
            let bits = 8 * std::mem::size_of::<T>();
            ConfigError::new_err(format!(
                "{name}={shown} is not an unsigned integer of {bits} bits"
            ))
        })
    })
}

/// The error for a value that is not an integer: `refuse` of the value in words, caused by `error`. Errors of
/// the value's own code, an interrupt among them, are passed on.
#[cold]
fn not_an_int(value: &Bound<'_, PyAny>, error: PyErr, refuse: impl FnOnce(&str) -> PyErr) -> PyErr {
    let py = value.py();
    if !error.is_instance_of::<PyTypeError>(py) && !error.is_instance_of::<PyOverflowError>(py) {
        return error;
    }
    let refused = in_words(value).map_or_else(|error| error, |shown| refuse(&shown));
    refused.set_cause(py, Some(error));
    refused
}

/// A value as a message shows it: its beginning, or its type if it has no text.
fn in_words(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = match value.str() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(error) if error.is_instance_of::<PyException>(value.py()) => {
            format!("of type {}", value.get_type().name()?)
        }
        Err(error) => return Err(error),
    };
    Ok(match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    })
}
