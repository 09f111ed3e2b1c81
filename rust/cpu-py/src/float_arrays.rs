//! Arrays of floats: exported, checked, and apart from each other.

use cpu_kernels::Rows;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::claims::overlap;
use crate::errors::{BufferError, no_buffer};
use crate::memory::{is_swapped, shared_rows};

/// Whether an array holds elements of this type: `u16` for the bits of bfloat16.
pub(crate) fn is_of<T: Element>(array: &Bound<'_, PyAny>) -> bool {
    PyUntypedBuffer::get(array).is_ok_and(|array| array.as_typed::<T>().is_ok())
}

/// A C-contiguous array of `T` with this many dimensions.
pub(crate) fn array<T: Element>(
    name: &str,
    object: &Bound<'_, PyAny>,
    dimensions: usize,
) -> PyResult<PyBuffer<T>> {
    let buffer = any_array(name, object, dimensions)?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => Err(BufferError::new_err(format!(
            "array {name} is not contiguous in C order"
        ))),
    }
}

/// The rows of an array `[T, size]` or `[T, heads, dim]`, each of which is contiguous; they may be parts of longer ones.
pub(crate) fn rows<'a, T: Element>(name: &str, buffer: &'a PyBuffer<T>) -> PyResult<Rows<'a, T>> {
    shared_rows(buffer).ok_or_else(|| {
        BufferError::new_err(format!(
            "array {name} has rows that are not contiguous, or not one after another"
        ))
    })
}

/// An array of `T` with this many dimensions, of any strides.
pub(crate) fn any_array<T: Element>(
    name: &str,
    object: &Bound<'_, PyAny>,
    dimensions: usize,
) -> PyResult<PyBuffer<T>> {
    let refuse = |what: String| BufferError::new_err(format!("array {name} {what}"));
    let buffer =
        PyUntypedBuffer::get(object).map_err(|error| no_buffer(object.py(), name, error))?;
    if buffer.dimensions() != dimensions {
        let given = buffer.dimensions();
        return Err(refuse(format!("has {given} dimensions, not {dimensions}")));
    }
    if buffer.suboffsets().is_some() {
        return Err(refuse("is of pointers to its rows, not of rows".into()));
    }
    if is_swapped(&buffer) || buffer.as_typed::<T>().is_err() {
        let format = buffer.format().to_string_lossy();
        let wanted = std::any::type_name::<T>();
        return Err(refuse(format!(
            "has format {format:?}, not that of {wanted}"
        )));
    }
    buffer.into_typed()
}

/// Calls a function for the type of an array's elements: float32, or bfloat16 as uint16.
macro_rules! by_float {
    ($array:expr, $function:ident($($argument:expr),*)) => {
        match crate::float_arrays::is_of::<u16>($array) {
            true => $function::<u16>($($argument),*),
            false => $function::<f32>($($argument),*),
        }
    };
}

pub(crate) use by_float;

/// The same, to be written to.
pub(crate) fn writable<T: Element>(
    name: &str,
    object: &Bound<'_, PyAny>,
    dimensions: usize,
) -> PyResult<PyBuffer<T>> {
    let buffer = array(name, object, dimensions)?;
    match buffer.readonly() {
        true => Err(BufferError::new_err(format!("array {name} is read-only"))),
        false => Ok(buffer),
    }
}

/// Refuses an array of another shape.
pub(crate) fn of_shape<T>(name: &str, array: &PyBuffer<T>, shape: &[usize]) -> PyResult<()> {
    match array.shape() == shape {
        true => Ok(()),
        false => Err(BufferError::new_err(format!(
            "array {name} has shape {:?}, not {shape:?}",
            array.shape()
        ))),
    }
}

/// Refuses arrays that share memory with `target`, which is written while they are read.
pub(crate) fn apart<T, U>(
    target: (&str, &PyBuffer<T>),
    others: &[(&str, &PyBuffer<U>)],
) -> PyResult<()> {
    let own = bytes(target.1);
    for (name, other) in others {
        if overlap(&own, &bytes(other)) {
            let target = target.0;
            return Err(BufferError::new_err(format!(
                "arrays {target} and {name} share memory"
            )));
        }
    }
    Ok(())
}

/// The addresses of a buffer, from its first element to the last; strides are not negative.
pub(crate) fn bytes<T>(buffer: &PyBuffer<T>) -> std::ops::Range<usize> {
    let start = buffer.buf_ptr() as usize;
    let last = buffer.shape().iter().zip(buffer.strides());
    let last = last.map(|(&count, &stride)| count.saturating_sub(1) * stride.unsigned_abs());
    match buffer.item_count() {
        0 => start..start,
        _ => start..start + last.sum::<usize>() + buffer.item_size(),
    }
}
