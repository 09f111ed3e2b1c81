//! New keys and values into their slots.

use crate::builds::InEachBuild;
use crate::element::Element;
use crate::error::Error;
use crate::step::{CacheShape, same_length};
use crate::stored::Stored;

/// Rows in memory, each some elements after the last: they may be parts of longer ones.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, E> {
    memory: &'a [E],
    count: usize,
    width: usize,
    stride: usize,
}

impl<'a, E> Rows<'a, E> {
    /// `count` rows of `width` elements, each beginning `stride` after the last; `memory` ends with the last one.
    ///
    /// # Errors
    ///
    /// Memory that is shorter or longer.
    pub fn new(memory: &'a [E], count: usize, width: usize, stride: usize) -> Result<Self, Error> {
        let before = count.saturating_sub(1).checked_mul(stride);
        let expected = match count {
            0 => Some(0),
            _ => before.and_then(|before| before.checked_add(width)),
        };
        same_length("rows", expected.ok_or(Error::TooLarge)?, memory.len())?;
        Ok(Self {
            memory,
            count,
            width,
            stride,
        })
    }

    /// How many there are.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Elements of each.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Checks their number and width; `name` is that of the array.
    pub(crate) fn check(
        &self,
        name: &'static str,
        count: usize,
        width: usize,
    ) -> Result<(), Error> {
        let expected = CacheShape::elements(1, count, width)?;
        same_length(name, expected, self.count * self.width)?;
        same_length(name, count, self.count)
    }

    #[inline(always)]
    pub(crate) fn row(&self, at: usize) -> &'a [E] {
        &self.memory[at * self.stride..][..self.width]
    }
}

/// The keys and values of a cache.
#[derive(Debug)]
pub struct CacheArrays<'a, C> {
    /// `[num_blocks, block_size, kv_heads, dim_k]`
    pub keys: &'a mut [C],
    /// `[num_blocks, block_size, kv_heads, dim_v]`
    pub values: &'a mut [C],
}

/// Checks the arrays of [`Attention::write`](crate::Attention::write).
pub(crate) fn check_write<E, C: Stored<E>>(
    shape: &CacheShape,
    slots: &[i64],
    key: Rows<'_, E>,
    value: Rows<'_, E>,
    cache: &CacheArrays<'_, C>,
) -> Result<(), Error> {
    shape.check(cache.keys.len(), cache.values.len(), C::width)?;
    let num_slots = shape.num_slots()?;
    for (name, rows, dim) in [("key", key, shape.dim_k), ("value", value, shape.dim_v)] {
        let expected = CacheShape::elements(slots.len(), shape.kv_heads, dim)?;
        same_length(name, expected, rows.count * rows.width)?;
        same_length(name, slots.len(), rows.count)?;
    }
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

/// Rows of heads of `dim` numbers, to be copied into their slots; -1: nowhere.
pub(crate) struct CopyRows<'a, E, C> {
    pub(crate) slots: &'a [i64],
    pub(crate) rows: Rows<'a, E>,
    pub(crate) dim: usize,
    pub(crate) cache: &'a mut [C],
}

impl<E: Element, C: Stored<E>> InEachBuild for CopyRows<'_, E, C> {
    #[inline(always)]
    fn run(self) {
        let width = self.rows.width / self.dim * C::width(self.dim);
        let mut scratch = vec![];
        for (at, &slot) in self.slots.iter().enumerate() {
            if let Ok(slot) = usize::try_from(slot) {
                let row = &mut self.cache[slot * width..][..width];
                C::target(row, self.dim, &mut scratch).copy_from_slice(self.rows.row(at));
                C::finish(&scratch, self.dim, row);
            }
        }
    }
}
