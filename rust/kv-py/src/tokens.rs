//! Token ids in: any one-dimensional integer buffer without a copy through Python objects, or a list.

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

use crate::cells::{cells, is_swapped};
use crate::errors::TokenError;
use crate::ints::leading_ints;

/// Tokens for which there is room beside those given, so that the first ones sampled do not move a
/// prompt in memory.
const ROOM: usize = 64;

/// The token ids of a list or buffer as `u32`; all of them or an error that names the first bad one.
pub(crate) fn token_ids(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = object.cast_exact::<PyList>() {
        return from_list(list);
    }
    if let Ok(buffer) = PyUntypedBuffer::get(object)
        && let Some(tokens) = from_buffer(object.py(), &buffer)?
    {
        return Ok(tokens);
    }
    let mut tokens = Vec::with_capacity(object.len().unwrap_or(0));
    let items = object
        .try_iter()
        .map_err(|error| unreadable(object, error))?;
    for (at, item) in items.enumerate() {
        let item = item.map_err(|error| unreadable(object, error))?;
        tokens.push(token_id(&item, at)?);
    }
    Ok(tokens)
}

fn from_list(list: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    let mut tokens = Vec::with_capacity(list.len() + ROOM);
    leading_ints(list, &mut tokens);
    // What is not a plain int may be one all the same: NumPy's, for example.
    for (at, item) in list.iter().enumerate().skip(tokens.len()) {
        tokens.push(token_id(&item, at)?);
    }
    Ok(tokens)
}

fn token_id(item: &Bound<'_, PyAny>, at: usize) -> PyResult<u32> {
    // A row of one element would turn into an int as well.
    let is_int = item.is_exact_instance_of::<PyInt>()
        || item.is_instance_of::<PyInt>()
        || item.len().is_err();
    let token = item.extract::<u32>().ok().filter(|_| is_int);
    token.ok_or_else(|| bad_token(item, at))
}

/// What is no list of ints: nothing that iterates, or a memoryview of a format that Python itself
/// cannot read. Errors of the iterator are the caller's own.
fn unreadable(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    if error.is_instance_of::<PyNotImplementedError>(py) {
        return TokenError::new_err(format!(
            "token ids in this buffer cannot be read ({}): give them as a NumPy int64 array",
            error.value(py)
        ));
    }
    if error.is_instance_of::<PyTypeError>(py) {
        let kind = object.get_type();
        return TokenError::new_err(format!(
            "token ids are a list of ints or an integer buffer, not {kind}"
        ));
    }
    error
}

fn bad_token(token: impl std::fmt::Display, at: usize) -> PyErr {
    TokenError::new_err(format!(
        "token id {token} at position {at} is not an integer from 0 to 4294967295"
    ))
}

/// The tokens of a buffer; `None` for integers that have to be read one by one, because they are
/// misaligned or in the other byte order.
fn from_buffer(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Option<Vec<u32>>> {
    if buffer.dimensions() != 1 {
        return Err(TokenError::new_err(format!(
            "token ids are one-dimensional, this buffer has {} dimensions",
            buffer.dimensions()
        )));
    }
    macro_rules! first_that_fits {
        ($($int:ty),*) => {
            $(if let Ok(buffer) = buffer.as_typed::<$int>() {
                return convert(py, buffer).map(Some);
            })*
        };
    }
    if !is_swapped(buffer) {
        // The likeliest first: NumPy's and torch's default is int64.
        first_that_fits!(i64, i32, u32, u64, u16, i16, u8, i8);
    }
    let format = buffer.format().to_string_lossy();
    if format.ends_with(['b', 'B', 'h', 'H', 'i', 'I', 'l', 'L', 'q', 'Q', 'n', 'N']) {
        return Ok(None);
    }
    Err(TokenError::new_err(format!(
        "token ids are integers, this buffer has format {format:?}"
    )))
}

fn convert<T: TokenInt>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<u32>> {
    match cells(py, buffer) {
        Some(cells) => narrow(cells.iter().map(|cell| cell.get())),
        None => narrow(buffer.to_vec(py)?.into_iter()),
    }
}

/// Narrows first and looks at what was cut off once, at the end.
fn narrow<T: TokenInt>(values: impl ExactSizeIterator<Item = T> + Clone) -> PyResult<Vec<u32>> {
    let (tokens, cut_off) = low_halves(values.clone());
    if cut_off == 0 {
        return Ok(tokens);
    }
    let bad = |(_, value): &(usize, T)| value.wide() >> 32 != 0;
    let (at, value) = values.enumerate().find(bad).expect("something was cut off");
    Err(bad_token(value, at))
}

/// The lower 32 bits of each value, and what the higher ones of any have: a loop without branches, in
/// vectors twice as wide where the machine has them.
fn low_halves<T: TokenInt>(values: impl ExactSizeIterator<Item = T>) -> (Vec<u32>, u64) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn avx2<T: TokenInt>(values: impl ExactSizeIterator<Item = T>) -> (Vec<u32>, u64) {
            low_halves_here(values)
        }
        // SAFETY: the machine has AVX2, as was looked up.
        #[allow(unsafe_code)]
        return unsafe { avx2(values) };
    }
    low_halves_here(values)
}

#[inline(always)]
fn low_halves_here<T: TokenInt>(values: impl ExactSizeIterator<Item = T>) -> (Vec<u32>, u64) {
    let mut tokens = Vec::with_capacity(values.len() + ROOM);
    let mut cut_off = 0;
    tokens.extend(values.map(|value| {
        let wide = value.wide();
        cut_off |= wide >> 32;
        wide as u32
    }));
    (tokens, cut_off)
}

/// An element of a buffer of token ids.
trait TokenInt: Element + Copy + std::fmt::Display {
    /// As 64 bits; a negative one has its high bits set.
    fn wide(self) -> u64;
}

macro_rules! token_ints {
    ($($int:ty),*) => {
        $(impl TokenInt for $int {
            #[inline]
            fn wide(self) -> u64 {
                self as u64 // extends the sign of a signed one
            }
        })*
    };
}

token_ints!(i64, i32, u32, u64, u16, i16, u8, i8);
