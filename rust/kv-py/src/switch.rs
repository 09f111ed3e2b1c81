//! `switch=(position, name)`: where a namespace switches to another name.

use kv_core::Namespace;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::numbers::number;

/// A position, and the name of the other namespace.
pub(crate) type Switch = Option<(usize, Vec<u8>)>;

pub(crate) fn switch_of(switch: Option<&Bound<'_, PyAny>>) -> PyResult<Switch> {
    let Some(switch) = switch else {
        return Ok(None);
    };
    let (position, name): (Bound<'_, PyAny>, Bound<'_, PyBytes>) = switch.extract()?;
    let position: u32 = number("position of the switch", &position)?;
    Ok(Some((position as usize, name.as_bytes().to_vec())))
}

/// The namespace with its switch.
pub(crate) fn in_namespace<'a>(name: Option<&'a [u8]>, switch: &'a Switch) -> Namespace<'a> {
    Namespace {
        name: name.unwrap_or_default(),
        switch: switch.as_ref().map(|(at, to)| (*at, &to[..])),
    }
}
