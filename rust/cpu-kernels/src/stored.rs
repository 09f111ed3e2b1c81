//! How keys and values are kept in the cache: as they were computed, or as 8-bit integers with a scale.

use crate::element::{Element, widen};
use crate::step::TILE;

/// Bytes of a scale, a float32 in little endian, behind the numbers that it is for.
pub(crate) const SCALE: usize = size_of::<f32>();

/// The largest number that is kept.
pub(crate) const LARGEST: f32 = 127.0;

/// An element of the cache, for keys and values of `E`: `E` itself, or `i8`.
///
/// A head of `i8` has so many numbers from -127 to 127, and after them the bytes of the scale that they are multiplied with:
/// a 127th of the largest absolute value. What is kept depends on the head alone, and so has the same bits wherever it is
/// computed. A head with a number that is not finite is kept as NaN.
pub trait Stored<E>: Copy + Send + Sync + 'static {
    /// Elements of a head of `dim` numbers.
    fn width(dim: usize) -> usize;

    /// Where the heads of a row are written before [`Stored::finish`]: there, or in `scratch`.
    #[doc(hidden)]
    fn target<'a>(row: &'a mut [Self], dim: usize, scratch: &'a mut Vec<E>) -> &'a mut [E];

    /// Keeps the heads of `dim` numbers in `scratch` in `row`, if they were written there.
    #[doc(hidden)]
    fn finish(scratch: &[E], dim: usize, row: &mut [Self]);

    #[doc(hidden)]
    #[allow(private_interfaces)] // sealed: no other crate can name this type
    fn cached<'a>(keys: &'a [Self], values: &'a [Self]) -> Cached<'a, E>;
}

macro_rules! stored_into_computed {
    ($($element:ty),*) => {$(
        impl Stored<$element> for $element {
            fn width(dim: usize) -> usize {
                dim
            }

            #[inline(always)]
            fn target<'a>(
                row: &'a mut [$element],
                _: usize,
                _: &'a mut Vec<$element>,
            ) -> &'a mut [$element] {
                row
            }

            #[inline(always)]
            fn finish(_: &[$element], _: usize, _: &mut [$element]) {}

            #[allow(private_interfaces)]
            fn cached<'a>(keys: &'a [Self], values: &'a [Self]) -> Cached<'a, $element> {
                Cached::Computed { keys, values }
            }
        }
    )*};
}

stored_into_computed!(f32, u16);

impl<E: Element> Stored<E> for i8 {
    fn width(dim: usize) -> usize {
        dim + SCALE
    }

    #[inline(always)]
    fn target<'a>(row: &'a mut [i8], dim: usize, scratch: &'a mut Vec<E>) -> &'a mut [E] {
        let num_heads = row.len() / <i8 as Stored<E>>::width(dim);
        scratch.resize(num_heads * dim, E::narrow(0.0));
        scratch
    }

    #[inline(always)]
    fn finish(scratch: &[E], dim: usize, row: &mut [i8]) {
        let heads = row.chunks_exact_mut(<i8 as Stored<E>>::width(dim));
        for (head, kept) in scratch.chunks_exact(dim).zip(heads) {
            let (numbers, scale) = kept.split_at_mut(dim);
            let bytes = quantised(head, numbers).to_le_bytes();
            scale.copy_from_slice(&bytes.map(u8::cast_signed));
        }
    }

    #[allow(private_interfaces)]
    fn cached<'a>(keys: &'a [Self], values: &'a [Self]) -> Cached<'a, E> {
        Cached::Int8 { keys, values }
    }
}

/// Numbers nearest to those of `head`, ties to the even one, and their scale.
#[inline(always)]
fn quantised<E: Element>(head: &[E], numbers: &mut [i8]) -> f32 {
    // As integers, so that NaN is the largest.
    let bits = |element: &E| element.widen().to_bits() & 0x7fff_ffff;
    let largest = f32::from_bits(head.iter().map(bits).fold(0, u32::max));
    let inverse = LARGEST / largest;
    if largest == 0.0 || inverse.is_infinite() {
        numbers.fill(0);
        return 0.0;
    }
    for (number, element) in numbers.iter_mut().zip(head) {
        *number = (element.widen() * inverse).round_ties_even() as i8;
    }
    match largest.is_finite() {
        true => largest / LARGEST,
        false => f32::NAN,
    }
}

/// Keys and values of a cache, `[slots, kv_heads]` of heads each.
pub(crate) enum Cached<'a, E> {
    /// Of `dim` elements.
    Computed { keys: &'a [E], values: &'a [E] },
    /// Of numbers and a scale.
    Int8 { keys: &'a [i8], values: &'a [i8] },
}

/// The heads of a tile.
pub(crate) enum Heads<'t, E> {
    Computed([&'t [E]; TILE]),
    /// Numbers with their scale.
    Int8([&'t [i8]; TILE]),
}

impl<'t, E> Heads<'t, E> {
    /// The heads of these numbers.
    #[inline(always)]
    pub(crate) fn computed(heads: &'t [E], numbers: [usize; TILE], dim: usize) -> Self {
        let mut tile: [&[E]; TILE] = [&[]; TILE];
        for (head, number) in tile.iter_mut().zip(numbers) {
            *head = &heads[number * dim..][..dim];
        }
        Self::Computed(tile)
    }

    /// As `computed`, in 8 bits with their scales.
    #[inline(always)]
    pub(crate) fn int8(heads: &'t [i8], numbers: [usize; TILE], dim: usize) -> Self {
        let width = dim + SCALE;
        let mut tile: [&[i8]; TILE] = [&[]; TILE];
        for (head, number) in tile.iter_mut().zip(numbers) {
            *head = &heads[number * width..][..width];
        }
        Self::Int8(tile)
    }

    /// The heads of a cache of computed floats.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn into_computed(self) -> [&'t [E]; TILE] {
        match self {
            Self::Computed(tile) => tile,
            Self::Int8(_) => unreachable!("another kernel is chosen for these"),
        }
    }

    /// The heads of a cache of 8-bit numbers with their scales.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn into_int8(self) -> [&'t [i8]; TILE] {
        match self {
            Self::Int8(tile) => tile,
            Self::Computed(_) => unreachable!("another kernel is chosen for these"),
        }
    }
}

impl<'t, E: Element> Heads<'t, E> {
    /// Head `at` in place, if it is float32.
    #[inline(always)]
    pub(crate) fn in_place(&self, at: usize) -> Option<&'t [f32]> {
        match self {
            Self::Computed(tile) => E::in_place(tile[at]),
            Self::Int8(_) => None,
        }
    }

    /// Writes head `at` as floats.
    #[inline(always)]
    pub(crate) fn widen(&self, at: usize, floats: &mut [f32]) {
        match self {
            Self::Computed(tile) => widen(tile[at], floats),
            Self::Int8(tile) => {
                let scale = scale_of(tile[at]);
                for (float, &number) in floats.iter_mut().zip(tile[at]) {
                    *float = f32::from(number) * scale;
                }
            }
        }
    }
}

/// The scale behind the numbers of a head.
#[inline(always)]
pub(crate) fn scale_of(head: &[i8]) -> f32 {
    let bytes = head.last_chunk().expect("a head ends with its scale");
    f32::from_le_bytes(bytes.map(i8::cast_unsigned))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(head: &[f32]) -> (Vec<i8>, f32) {
        let mut row = vec![1; <i8 as Stored<f32>>::width(head.len())];
        let mut scratch = vec![];
        <i8 as Stored<f32>>::target(&mut row, head.len(), &mut scratch).copy_from_slice(head);
        <i8 as Stored<f32>>::finish(&scratch, head.len(), &mut row);
        (row[..head.len()].to_vec(), scale_of(&row))
    }

    #[test]
    fn numbers_are_the_nearest_ones() {
        let head: Vec<f32> = (0..1000)
            .map(|at| ((at * 7919 % 4001) as f32 - 2000.0) / 300.0)
            .collect();
        let (numbers, scale) = kept(&head);
        let largest = head
            .iter()
            .fold(0.0f32, |largest, float| largest.max(float.abs()));
        assert_eq!(scale, largest / 127.0);
        for (number, float) in numbers.iter().zip(&head) {
            let error = (f64::from(*number) * f64::from(scale) - f64::from(*float)).abs();
            assert!(error <= f64::from(scale) * 0.5001, "{float}: {error}");
        }
        assert!(numbers.contains(&127) || numbers.contains(&-127));
        assert!(!numbers.contains(&-128));
    }

    #[test]
    fn a_head_of_zeros_stays_one_and_what_is_not_finite_is_nan() {
        assert_eq!(kept(&[0.0, -0.0, 0.0]), (vec![0; 3], 0.0));
        assert_eq!(kept(&[1e-44, 0.0]), (vec![0; 2], 0.0));
        for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(kept(&[1.0, wrong, 2.0]).1.is_nan());
        }
        let (numbers, scale) = kept(&[f32::MAX, -f32::MAX, 1.0]);
        assert_eq!((numbers, scale), (vec![127, -127, 0], f32::MAX / 127.0));
    }
}
