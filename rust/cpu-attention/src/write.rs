//! New keys and values into their slots.

use crate::element::Element;
use crate::error::Error;
use crate::step::{CacheShape, same_length};

/// Checks the arrays of [`Attention::write`](crate::Attention::write); `cache` are lengths.
pub(crate) fn check_write<E>(
    shape: &CacheShape,
    slots: &[i64],
    rows: (&[E], &[E]),
    cache: (usize, usize),
) -> Result<(), Error> {
    shape.check(cache.0, cache.1)?;
    let num_slots = shape.num_slots()?;
    let expected = CacheShape::elements(slots.len(), shape.kv_heads, shape.dim_k)?;
    same_length("key", expected, rows.0.len())?;
    let expected = CacheShape::elements(slots.len(), shape.kv_heads, shape.dim_v)?;
    same_length("value", expected, rows.1.len())?;
    let beyond = |slot: &i64| *slot < -1 || *slot >= num_slots as i64;
    if let Some(row) = slots.iter().position(beyond) {
        return Err(Error::Slot {
            row,
            slot: slots[row],
            num_slots,
        });
    }
    Ok(())
}

/// Rows of `size` into their slots; -1: nowhere.
pub(crate) fn copy<E: Element>(slots: &[i64], rows: &[E], cache: &mut [E], size: usize) {
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(size)) {
        if let Ok(slot) = usize::try_from(slot) {
            cache[slot * size..][..size].copy_from_slice(row);
        }
    }
}
