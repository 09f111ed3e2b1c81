//! Quantises floating-point weights to 4 or 8 bits when a model is loaded.
//!
//! Each operation is rounded once and sums have one order, so all builds give the same bits, with any number of threads.

use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::dots::widen_half;
use crate::element::{Element, widen};
use crate::error::Error;
use crate::quantized_format::BLOCK;
use crate::step::same_length;

/// Bytes of the 4-bit codes of a group.
const PAIRS: usize = BLOCK / 2;

/// Bytes of a group in [`crate::QuantizedFormat::Q8_0`]: a scale of half precision, and the integers.
const BYTES: usize = 2 + BLOCK;

/// The largest code of 4 bits.
const LARGEST: f32 = 15.0;

/// The largest code of 8 bits.
const LARGEST_BYTE: f32 = 127.0;

/// Fractions of a group's range that its codes may cover: clipping outliers may reduce the error.
const CLIP_RATIOS: [f32; 3] = [1.0, 0.93, 0.86];

/// Partial sums of squared errors, as torch has them on x86: ratios whose errors differ by rounding alone are chosen as
/// torch chooses them.
const LANES: usize = 8;

/// The smallest normal number of half precision, 2^-14.
const MIN_HALF: f32 = f32::from_bits((127 - 14) << 23);

/// The largest number of half precision.
const MAX_HALF: f32 = 65_504.0;

/// Added to a number below 2^22, it rounds to an integer in the lowest bits, ties to even.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// Groups per task.
const CHUNK: usize = 512;

impl Attention {
    /// Rounds a weight `[out_features, in_features]` to 4-bit codes in groups of 32 inputs that stand for `(code - zero) *
    /// scale`: the arrays of [`crate::QuantizedWeight::from_groups`]. Each group gets the clipping ratio with the smallest
    /// squared error. Scales within the range of half precision are rounded to it. A group of zeros has the scale 1, a
    /// group with a NaN or infinity the scale NaN.
    ///
    /// # Errors
    ///
    /// Inputs that are not whole groups, or arrays that do not fit each other: nothing is written then.
    pub fn quantise_groups<E: Element>(
        &self,
        weight: &[E],
        in_features: usize,
        codes: &mut [u8],
        scales: &mut [f32],
        zeros: &mut [u8],
    ) -> Result<(), Error> {
        let count = num_groups(weight.len(), in_features)?;
        same_length("codes", count * PAIRS, codes.len())?;
        same_length("scales", count, scales.len())?;
        same_length("zeros", count, zeros.len())?;
        let (groups, _) = weight.as_chunks();
        let (codes, _) = codes.as_chunks_mut();
        let tasks = groups.chunks(CHUNK).zip(codes.chunks_mut(CHUNK));
        let points = scales.chunks_mut(CHUNK).zip(zeros.chunks_mut(CHUNK));
        let tasks = tasks.zip(points);
        let tasks = tasks.map(|((groups, codes), (scales, zeros))| FourBits {
            groups,
            codes,
            scales,
            zeros,
        });
        self.quantise(tasks.collect());
        Ok(())
    }

    /// Rounds a weight `[out_features, in_features]` to the blocks of [`crate::QuantizedFormat::Q8_0`], as
    /// [`crate::QuantizedWeight::pack`] reads them: 8 bits, and a scale per 32 inputs. NaN, infinities and
    /// numbers beyond half precision give an infinite scale.
    ///
    /// # Errors
    ///
    /// As [`Attention::quantise_groups`].
    pub fn quantise_q8_0<E: Element>(
        &self,
        weight: &[E],
        in_features: usize,
        blocks: &mut [u8],
    ) -> Result<(), Error> {
        let count = num_groups(weight.len(), in_features)?;
        same_length("blocks", count * BYTES, blocks.len())?;
        let ((groups, _), (blocks, _)) = (weight.as_chunks(), blocks.as_chunks_mut());
        let tasks = groups.chunks(CHUNK).zip(blocks.chunks_mut(CHUNK));
        let tasks = tasks.map(|(groups, blocks)| EightBits { groups, blocks });
        self.quantise(tasks.collect());
        Ok(())
    }

    fn quantise<T: InEachBuild + Send>(&self, tasks: Vec<T>) {
        let num_threads = self.threads().count().min(tasks.len());
        self.threads()
            .share_out(num_threads, tasks, |task| best_build(self.isa(), task));
    }
}

/// The groups of a weight.
fn num_groups(length: usize, in_features: usize) -> Result<usize, Error> {
    if in_features == 0 || !in_features.is_multiple_of(BLOCK) {
        return Err(Error::Inputs {
            in_features,
            block: BLOCK,
        });
    }
    same_length("weight", length / in_features * in_features, length)?;
    Ok(length / BLOCK)
}

struct FourBits<'a, E> {
    groups: &'a [[E; BLOCK]],
    codes: &'a mut [[u8; PAIRS]],
    scales: &'a mut [f32],
    zeros: &'a mut [u8],
}

impl<E: Element> InEachBuild for FourBits<'_, E> {
    #[inline(always)]
    fn run(self) {
        let points = self.scales.iter_mut().zip(self.zeros);
        for ((group, codes), (scale, zero)) in self.groups.iter().zip(self.codes).zip(points) {
            let mut floats = [0.0; BLOCK];
            widen(group, &mut floats);
            (*scale, *zero) = four_bits(&floats, codes);
        }
    }
}

/// Writes the codes of a group. Returns its scale and zero point.
#[inline(always)]
fn four_bits(group: &[f32; BLOCK], codes: &mut [u8; PAIRS]) -> (f32, u8) {
    if !is_finite(group) {
        *codes = [0; PAIRS];
        return (f32::NAN, 0);
    }
    let (low, high) = (lowest(group, |float| float), -lowest(group, |float| -float));
    let mut tried = [[0; BLOCK]; CLIP_RATIOS.len()];
    let mut best = (f32::INFINITY, 0, 0.0, 0.0);
    for (at, (ratio, codes)) in CLIP_RATIOS.into_iter().zip(&mut tried).enumerate() {
        let scale = rounded((high - low) * ratio / LARGEST);
        let zero = nearest(-low * ratio / scale, 0.0, LARGEST) - ROUND;
        let mut errors = [0.0; LANES];
        let (parts, _) = group.as_chunks::<LANES>();
        for (floats, codes) in parts.iter().zip(codes.as_chunks_mut::<LANES>().0) {
            for lane in 0..LANES {
                let shifted = nearest(floats[lane] / scale + zero, 0.0, LARGEST);
                let error = (shifted - ROUND - zero) * scale - floats[lane];
                errors[lane] += error * error;
                codes[lane] = shifted.to_bits() as u8;
            }
        }
        let error: f32 = errors.iter().sum();
        if at == 0 || error < best.0 {
            best = (error, at, scale, zero);
        }
    }
    let (_, at, scale, zero) = best;
    for (byte, pair) in codes.iter_mut().zip(tried[at].as_chunks::<2>().0) {
        *byte = pair[0] & 15 | pair[1] << 4;
    }
    (scale, zero as u8)
}

struct EightBits<'a, E> {
    groups: &'a [[E; BLOCK]],
    blocks: &'a mut [[u8; BYTES]],
}

impl<E: Element> InEachBuild for EightBits<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (group, block) in self.groups.iter().zip(self.blocks) {
            let mut floats = [0.0; BLOCK];
            widen(group, &mut floats);
            eight_bits(&floats, block);
        }
    }
}

/// Writes the block of a group.
#[inline(always)]
fn eight_bits(group: &[f32; BLOCK], block: &mut [u8; BYTES]) {
    let size = -lowest(group, |float| -float.abs());
    let half = match is_finite(group) {
        true => narrow_half(size / LARGEST_BYTE),
        false => narrow_half(f32::INFINITY),
    };
    let scale = widen_half(half);
    let divisor = if scale > MIN_HALF { scale } else { MIN_HALF };
    let (scale, numbers) = block.split_at_mut(2);
    scale.copy_from_slice(&half.to_le_bytes());
    for (byte, float) in numbers.iter_mut().zip(group) {
        let shifted = nearest(float / divisor, -LARGEST_BYTE, LARGEST_BYTE);
        *byte = shifted.to_bits() as u8;
    }
}

#[inline(always)]
fn is_finite(group: &[f32; BLOCK]) -> bool {
    let infinite = |float: &f32| u32::from(float.to_bits() & 0x7f80_0000 == 0x7f80_0000);
    group.iter().map(infinite).sum::<u32>() == 0
}

/// The minimum of 0 and the values of a function.
#[inline(always)]
fn lowest(group: &[f32; BLOCK], of: impl Fn(f32) -> f32) -> f32 {
    let smaller = |a: f32, b: f32| if b < a { b } else { a };
    let mut lanes = [0.0; LANES];
    for floats in group.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            lanes[lane] = smaller(lanes[lane], of(floats[lane]));
        }
    }
    lanes.into_iter().fold(0.0, smaller)
}

/// The nearest integer within the bounds, plus [`ROUND`].
#[inline(always)]
fn nearest(float: f32, lowest: f32, largest: f32) -> f32 {
    let float = if float > lowest { float } else { lowest };
    let float = if float < largest { float } else { largest };
    float + ROUND
}

/// Rounds a scale to half precision, if it is within its range; 1 for 0.
#[inline(always)]
fn rounded(scale: f32) -> f32 {
    let is_half = (MIN_HALF..=MAX_HALF).contains(&scale);
    let bits = scale.to_bits();
    let half = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    match scale == 0.0 {
        true => 1.0,
        false if is_half => half,
        false => scale,
    }
}

/// Rounds a non-negative number to half precision, ties to even.
#[inline(always)]
fn narrow_half(float: f32) -> u16 {
    /// Floats from here on have the spacing of subnormal numbers of half precision.
    const HALF: f32 = 0.5;
    const INFINITY: u32 = 0x1f << 10;
    let bits = float.to_bits();
    let subnormal = (float + HALF).to_bits() - HALF.to_bits();
    let normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    let half = if float < MIN_HALF { subnormal } else { normal };
    half.min(INFINITY) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every non-negative half but infinity: itself, what is beside it, and the middle to the next one.
    #[test]
    fn half_precision_is_rounded_to_the_nearest_and_to_even_in_a_tie() {
        for half in 0..0x7c00_u16 {
            let float = widen_half(half);
            assert_eq!(narrow_half(float), half);
            let next = match half + 1 {
                0x7c00 => 65_536.0,
                next => widen_half(next),
            };
            let middle = f32::midpoint(float, next);
            let [below, above] = [-1, 1].map(|step| middle.to_bits().wrapping_add_signed(step));
            assert_eq!(narrow_half(f32::from_bits(below)), half, "{float:e}");
            assert_eq!(narrow_half(middle), half + half % 2, "{float:e}");
            assert_eq!(narrow_half(f32::from_bits(above)), half + 1, "{float:e}");
        }
        for large in [65_536.0, 1e6, f32::MAX, f32::INFINITY] {
            assert_eq!(narrow_half(large), 0x7c00);
        }
    }

    #[test]
    fn scales_are_numbers_of_half_precision_where_it_has_their_size() {
        for bits in (0..f32::INFINITY.to_bits()).step_by(4099) {
            let (scale, actual) = (f32::from_bits(bits), rounded(f32::from_bits(bits)));
            let expected = match scale {
                0.0 => 1.0,
                MIN_HALF..=MAX_HALF => widen_half(narrow_half(scale)),
                _ => scale,
            };
            assert_eq!(actual.to_bits(), expected.to_bits(), "{scale:e}");
        }
    }
}
