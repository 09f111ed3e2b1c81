//! New keys and values into their slots.

use crate::element::Element;
use crate::error::Error;
use crate::step::{CacheShape, same_length};

/// Writes a key `[kv_heads, dim_k]` and a value `[kv_heads, dim_v]` of each row into its slot,
/// `block * block_size + offset`; -1: nowhere.
///
/// `rows` and `cache` are keys and values.
///
/// # Errors
///
/// Arrays of the wrong length, or a slot beyond the cache: nothing is written then.
pub fn write<E: Element>(
    shape: &CacheShape,
    slots: &[i64],
    rows: (&[E], &[E]),
    cache: (&mut [E], &mut [E]),
) -> Result<(), Error> {
    shape.check(cache.0.len(), cache.1.len())?;
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
    copy(slots, rows.0, cache.0, shape.kv_heads * shape.dim_k);
    copy(slots, rows.1, cache.1, shape.kv_heads * shape.dim_v);
    Ok(())
}

fn copy<E: Element>(slots: &[i64], rows: &[E], cache: &mut [E], size: usize) {
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(size)) {
        if let Ok(slot) = usize::try_from(slot) {
            cache[slot * size..][..size].copy_from_slice(row);
        }
    }
}
