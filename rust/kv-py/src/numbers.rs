//! Counts and ids in: integers of their range, or an error that names argument and value.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;

use crate::errors::ConfigError;

/// An argument as an unsigned integer.
#[inline]
pub(crate) fn number<'py, T>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    value.extract().map_err(|_| {
        let bits = 8 * std::mem::size_of::<T>();
        ConfigError::new_err(format!(
            "{name}={value} is not an unsigned integer of {bits} bits"
        ))
    })
}
