//! Elements of the cache: float32, or bfloat16 as its 16 bits. Sums are float32 in either case.

use std::sync::Mutex;

/// A number as queries, keys, values and results have it in memory.
pub trait Element: Copy + Send + Sync + Memory + 'static {
    /// Its value.
    fn widen(self) -> f32;

    /// The nearest number there is, ties to the even one; NaN stays NaN.
    fn narrow(float: f32) -> Self;

    /// `row` as floats: where it lies, or widened into `scratch`.
    #[doc(hidden)]
    fn floats<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// `row` as the bits of bfloat16, if that is what it is.
    #[doc(hidden)]
    fn halves(row: &[Self]) -> Option<&[u16]>;

    /// Where floats for all elements of `rows`, which are equally long, are added up: there, or in
    /// `scratch`, which is empty otherwise.
    #[doc(hidden)]
    fn sums<'a>(rows: &'a mut [&mut [Self]], scratch: &'a mut Vec<f32>) -> Vec<&'a mut [f32]>;

    /// `row` where it lies, if that is floats.
    #[doc(hidden)]
    fn in_place(row: &[Self]) -> Option<&[f32]>;
}

/// Memory that is kept from call to call, by element.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    floats: Mutex<Vec<f32>>,
    halves: Mutex<Vec<u16>>,
}

/// The memory for each element.
#[allow(private_interfaces)] // sealed: no other crate can name this trait
pub trait Memory: Sized {
    #[doc(hidden)]
    fn kept(memory: &Kept) -> &Mutex<Vec<Self>>;
}

#[allow(private_interfaces)]
impl Memory for f32 {
    fn kept(memory: &Kept) -> &Mutex<Vec<f32>> {
        &memory.floats
    }
}

#[allow(private_interfaces)]
impl Memory for u16 {
    fn kept(memory: &Kept) -> &Mutex<Vec<u16>> {
        &memory.halves
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(float: f32) -> f32 {
        float
    }

    #[inline(always)]
    fn floats<'a>(row: &'a [f32], _: &'a mut Vec<f32>) -> &'a [f32] {
        row
    }

    #[inline(always)]
    fn halves(_: &[f32]) -> Option<&[u16]> {
        None
    }

    #[inline(always)]
    fn sums<'a>(rows: &'a mut [&mut [f32]], scratch: &'a mut Vec<f32>) -> Vec<&'a mut [f32]> {
        scratch.clear();
        rows.iter_mut().map(|row| &mut **row).collect()
    }

    #[inline(always)]
    fn in_place(row: &[f32]) -> Option<&[f32]> {
        Some(row)
    }
}

/// bfloat16: the upper half of a float32.
impl Element for u16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }

    #[inline(always)]
    fn narrow(float: f32) -> u16 {
        let bits = float.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 | 0x40;
        (if float.is_nan() { nan } else { nearest }) as u16
    }

    #[inline(always)]
    fn floats<'a>(row: &'a [u16], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(row.len(), 0.0);
        widen(row, scratch);
        scratch
    }

    #[inline(always)]
    fn halves(row: &[u16]) -> Option<&[u16]> {
        Some(row)
    }

    #[inline(always)]
    fn sums<'a>(rows: &'a mut [&mut [u16]], scratch: &'a mut Vec<f32>) -> Vec<&'a mut [f32]> {
        let size = rows.first().map_or(0, |row| row.len());
        scratch.resize(size * rows.len(), 0.0);
        scratch.chunks_mut(size.max(1)).collect()
    }

    #[inline(always)]
    fn in_place(_: &[u16]) -> Option<&[f32]> {
        None
    }
}

/// As many as there is room for.
#[inline(always)]
pub(crate) fn widen<E: Element>(row: &[E], floats: &mut [f32]) {
    for (float, &half) in floats.iter_mut().zip(row) {
        *float = half.widen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bfloat16, by the distance of its two neighbours, in f64.
    #[test]
    fn rounding_is_to_the_nearest_and_to_even_in_a_tie() {
        for half in 0..=u16::MAX {
            let exact = half.widen();
            if exact.is_nan() {
                assert!(u16::narrow(exact).widen().is_nan());
                continue;
            }
            assert_eq!(u16::narrow(exact), half);
            let next = half.wrapping_add(1).widen(); // away from zero
            if !exact.is_finite() || !next.is_finite() {
                continue;
            }
            for low in [1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let between = f32::from_bits(exact.to_bits() | low);
                let [down, up] = [exact, next].map(|end| f64::from(end) - f64::from(between));
                let nearest = match down.abs().total_cmp(&up.abs()) {
                    std::cmp::Ordering::Less => half,
                    std::cmp::Ordering::Greater => half + 1,
                    std::cmp::Ordering::Equal => half + half % 2,
                };
                assert_eq!(u16::narrow(between), nearest, "{between:e}");
            }
        }
        assert_eq!(u16::narrow(f32::MAX).widen(), f32::INFINITY);
        assert!(u16::narrow(f32::from_bits(0x7f80_0001)).widen().is_nan());
    }
}
