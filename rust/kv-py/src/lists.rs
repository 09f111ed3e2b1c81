//! Integers of a list, read in place: PyO3 would take and release a reference to each of thousands of token ids.

use std::ffi::c_ulong;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyList;

/// Adds the items of a list to `ints`, up to the first one that is not a plain int or does not fit.
pub(crate) fn leading_ints(list: &Bound<'_, PyList>, ints: &mut Vec<u32>) {
    // With a GIL, this does nothing: no other thread can change the list meanwhile.
    with_critical_section(list.as_any(), || {
        for at in 0..list.len() {
            match int_at(list, at) {
                Some(int) => ints.push(int),
                None => break,
            }
        }
    });
}

/// The largest value means an error too, which the caller meets again.
#[cold]
fn no_int(list: &Bound<'_, PyList>, value: c_ulong) -> Option<u32> {
    if value == c_ulong::MAX {
        drop(PyErr::take(list.py()));
    }
    None
}

#[inline]
#[allow(unsafe_code)]
fn int_at(list: &Bound<'_, PyList>, at: usize) -> Option<u32> {
    // SAFETY: `list` is a list and this thread is attached to the interpreter. The index is checked
    // by `PyList_GetItem`; the borrowed item stays in the list, because no Python code runs:
    // a plain int is read without any.
    let value = unsafe {
        let item = ffi::PyList_GetItem(list.as_ptr(), at as ffi::Py_ssize_t);
        if item.is_null() || ffi::PyLong_CheckExact(item) == 0 {
            return None;
        }
        ffi::PyLong_AsUnsignedLong(item)
    };
    u32::try_from(value).ok().or_else(|| no_int(list, value))
}
