//! Counts and ids in: integers of their range, or an error that names argument and value.

use std::time::Duration;

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

/// A time to live.
pub(crate) fn seconds(ttl: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(ttl) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err(ConfigError::new_err(format!(
            "ttl={ttl} is not a number of seconds above 0"
        ))),
    }
}
