//! The other unsafe corner: the items of a list, read in place.
//!
//! PyO3's own way takes a reference to each item and lets go of it again. Lists of thousands of token ids
//! come this way with every prompt, and every sequence that runs with every step.

use std::ffi::c_ulong;

use kv_core::SeqKey;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyList;
use pyo3::types::PyTypeMethods;

use crate::items::reserved;
use crate::sequence::Sequence;

/// Adds the items of a list to `ints`, up to the first one that is no plain int or does not fit.
pub(crate) fn leading_ints(list: &Bound<'_, PyList>, ints: &mut Vec<u32>) {
    // Does nothing where there is a GIL: no one else can change the list before this is done.
    with_critical_section(list.as_any(), || {
        for at in 0..list.len() {
            match int_at(list, at) {
                Some(int) => ints.push(int),
                None => break,
            }
        }
    });
}

/// The keys of a list of sequences.
#[allow(unsafe_code)]
pub(crate) fn sequence_keys(list: &Bound<'_, PyList>) -> PyResult<Vec<SeqKey>> {
    with_critical_section(list.as_any(), || {
        let (count, kind) = (list.len(), list.py().get_type::<Sequence>());
        let mut keys = reserved(count)?;
        for at in 0..count {
            // SAFETY: `list` is a list, this thread is attached to the interpreter, and there is such an
            // item, which the list lends until Python code runs: that may take it out.
            let item = unsafe {
                let item = ffi::PyList_GetItem(list.as_ptr(), at as ffi::Py_ssize_t);
                Borrowed::from_ptr(list.py(), item)
            };
            if item.get_type_ptr() != kind.as_type_ptr() {
                item.cast::<Sequence>()?;
            }
            // SAFETY: its type was looked at. (`cast` alone asks for that of the class each time.)
            keys.push(unsafe { item.cast_unchecked::<Sequence>() }.get().key());
        }
        Ok(keys)
    })
}

/// The largest value stands for an error too, which the caller finds again.
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
    // by `PyList_GetItem`; what it lends stays in the list meanwhile, because no Python code runs:
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
