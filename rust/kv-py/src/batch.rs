//! The sequences of a batch: the items of a list, read in place, or of anything else that iterates.

use kv_core::SeqKey;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyList;
use pyo3::types::PyTypeMethods;

use crate::errors::PlanError;
use crate::items::{items, reserved};
use crate::sequence::Sequence;

/// The sequences of a decode batch: a list of them, or anything else that iterates.
pub(crate) struct Batch(pub(crate) Vec<SeqKey>);

impl Batch {
    /// Maximum sequences of an iterable other than a list: its length is not trusted.
    const MAX: usize = 1 << 24;

    fn too_many(count: usize) -> PyErr {
        let max = Self::MAX;
        PlanError::new_err(format!(
            "{count} sequences are more than the {max} that are read one by one; give a list"
        ))
    }
}

impl<'py> FromPyObject<'_, 'py> for Batch {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let key = |item: &Bound<'py, PyAny>| Ok(item.cast::<Sequence>()?.get().key());
        let keys = match object.cast_exact::<PyList>() {
            Ok(list) => sequence_keys(&list),
            Err(_) => items(&object, Self::MAX, Self::too_many, |item, _| key(item)),
        };
        keys.map(Self)
    }
}

/// The keys of a list of sequences.
#[allow(unsafe_code)]
fn sequence_keys(list: &Bound<'_, PyList>) -> PyResult<Vec<SeqKey>> {
    with_critical_section(list.as_any(), || {
        let (count, kind) = (list.len(), list.py().get_type::<Sequence>());
        let mut keys = reserved(count)?;
        for at in 0..count {
            // SAFETY: `list` is a list, this thread is attached to the interpreter, and there is such an
            // item, a borrowed reference until Python code runs, which may remove the item.
            let item = unsafe {
                let item = ffi::PyList_GetItem(list.as_ptr(), at as ffi::Py_ssize_t);
                Borrowed::from_ptr(list.py(), item)
            };
            if item.get_type_ptr() != kind.as_type_ptr() {
                item.cast::<Sequence>()?;
            }
            // SAFETY: its type was checked. (`cast` alone looks up the class each time.)
            keys.push(unsafe { item.cast_unchecked::<Sequence>() }.get().key());
        }
        Ok(keys)
    })
}
