//! Token ids in: any one-dimensional integer buffer without a copy through Python objects, or a list.

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{
    PyBufferError, PyException, PyNotImplementedError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

use crate::errors::TokenError;
use crate::exported::{NoBuffer, buffer_of};
use crate::items::{items, reserved};
use crate::lists::leading_ints;
use crate::memory::{copy_elements, is_swapped};
use crate::numbers::{in_words, not_an_int};

/// Spare capacity of a prompt, in tokens: the first sampled tokens do not reallocate it.
const SPARE: usize = 64;

/// Elements of a buffer that are copied before they are checked: other threads may write to the buffer.
const CHUNK: usize = 256;

/// The most tokens of a sequence: as many as 32-bit positions reach.
const MAX_TOKENS: usize = 1 << 31;

/// The token ids of a list or buffer as `u32`; all of them or an error that names the first bad one.
pub(crate) fn token_ids(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = object.cast_exact::<PyList>() {
        return from_list(list);
    }
    let py = object.py();
    match buffer_of(object) {
        Ok(buffer) => {
            if let Some(tokens) = from_buffer(py, &buffer)? {
                return Ok(tokens);
            }
        }
        Err(NoBuffer::Protocol(error))
            if error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyBufferError>(py)
                || error.is_instance_of::<PyValueError>(py) => {} // no buffer, or none of numbers
        Err(NoBuffer::DlPack(error)) if error.is_instance_of::<PyException>(py) => {
            return Err(unreadable_tensor(object, error));
        }
        Err(error) => return Err(error.into()),
    }
    items(object, MAX_TOKENS, too_many, token_id).map_err(|error| unreadable(object, error))
}

fn from_list(list: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    let mut tokens = with_spare(list.len())?;
    leading_ints(list, &mut tokens);
    // An item that is not a plain int may be an integer of NumPy, for example.
    for (at, item) in list.iter().enumerate().skip(tokens.len()) {
        tokens.push(token_id(&item, at)?);
    }
    Ok(tokens)
}

fn with_spare(count: usize) -> PyResult<Vec<u32>> {
    match count <= MAX_TOKENS {
        true => reserved(count + SPARE),
        false => Err(too_many(count)),
    }
}

fn too_many(count: usize) -> PyErr {
    TokenError::new_err(format!(
        "{count} token ids are more than the {MAX_TOKENS} that 32-bit positions reach"
    ))
}

fn token_id(item: &Bound<'_, PyAny>, at: usize) -> PyResult<u32> {
    let py = item.py();
    let is_int = item.is_exact_instance_of::<PyInt>() || item.is_instance_of::<PyInt>();
    if !is_int {
        // An array of one element would convert to an int, too.
        match item.len() {
            Ok(_) => return Err(bad_token(&in_words(item)?, at)),
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {}
            Err(error) => return Err(error),
        }
    }
    let token = item.extract::<u32>();
    token.map_err(|error| not_an_int(item, error, |shown| bad_token(&shown, at)))
}

/// The error for an object that cannot be iterated, or a memoryview of a format that Python itself cannot read. Errors
/// of the iterator are raised as they are.
fn unreadable(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    let refused = if error.is_instance_of::<PyNotImplementedError>(py) {
        TokenError::new_err(format!(
            "token ids in this buffer cannot be read ({}): give them as a NumPy int64 array",
            error.value(py)
        ))
    } else if error.is_instance_of::<PyTypeError>(py) {
        let kind = object.get_type();
        TokenError::new_err(format!(
            "token ids are a list of ints or an integer buffer, not {kind}"
        ))
    } else {
        return error;
    };
    refused.set_cause(py, Some(error));
    refused
}

/// The error for a tensor whose memory cannot be read, for example one of a GPU.
fn unreadable_tensor(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    let refused = TokenError::new_err(format!(
        "token ids in this tensor cannot be read ({}): give them as integers in the memory of the CPU",
        error.value(py)
    ));
    refused.set_cause(py, Some(error));
    refused
}

fn bad_token(token: &dyn std::fmt::Display, at: usize) -> PyErr {
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
        // int64 first: it is the default of NumPy and torch.
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
    let mut tokens = with_spare(buffer.item_count())?;
    if buffer.is_c_contiguous() {
        let mut copy = [T::default(); CHUNK];
        for first in (0..buffer.item_count()).step_by(CHUNK) {
            let copy = &mut copy[..CHUNK.min(buffer.item_count() - first)];
            copy_elements(buffer, first, copy);
            narrow(&mut tokens, copy)?;
        }
        return Ok(tokens);
    }
    let mut in_a_row = reserved(buffer.item_count())?;
    in_a_row.resize(buffer.item_count(), T::default());
    buffer.copy_to_slice(py, &mut in_a_row)?;
    narrow(&mut tokens, &in_a_row)?;
    Ok(tokens)
}

/// Appends values, which no other thread writes to. Narrows all of them, then checks the higher bits once.
fn narrow<T: TokenInt>(tokens: &mut Vec<u32>, values: &[T]) -> PyResult<()> {
    let first = tokens.len();
    if low_halves(tokens, values) == 0 {
        return Ok(());
    }
    let is_bad = |value: &T| value.wide() >> 32 != 0;
    let at = values
        .iter()
        .position(is_bad)
        .expect("a value has higher bits");
    Err(bad_token(&values[at], first + at))
}

/// Appends the lower 32 bits of each value; returns the higher bits of all: a loop without branches, in the widest
/// vectors that the machine has.
fn low_halves<T: TokenInt>(tokens: &mut Vec<u32>, values: &[T]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    macro_rules! with {
        ($feature:tt) => {
            if is_x86_feature_detected!($feature) {
                #[target_feature(enable = $feature)]
                fn wide<T: TokenInt>(tokens: &mut Vec<u32>, values: &[T]) -> u64 {
                    low_halves_here(tokens, values)
                }
                // SAFETY: the processor has the feature, as checked above.
                #[allow(unsafe_code)]
                return unsafe { wide(tokens, values) };
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    {
        with!("avx512f");
        with!("avx2");
    }
    low_halves_here(tokens, values)
}

#[inline(always)]
fn low_halves_here<T: TokenInt>(tokens: &mut Vec<u32>, values: &[T]) -> u64 {
    let mut cut_off = 0;
    tokens.extend(values.iter().map(|value| {
        let wide = value.wide();
        cut_off |= wide >> 32;
        wide as u32
    }));
    cut_off
}

/// An element of a buffer of token ids.
trait TokenInt: Element + Copy + Default + std::fmt::Display {
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
