//! Loads the codes and scales of a panel of quantised weights into vectors.
//!
//! There are no closures around intrinsics: closures do not inherit the caller's target features.

use crate::dots::Dots;
use crate::quantized_format::{Kind, QuantizedFormat as F};
use crate::quantized_weight::QuantizedWeight;

/// Work that is compiled for each format.
pub(crate) trait InFormat {
    /// Inlined, so that it has its caller's target features.
    fn run<C: Codes, S: Scales>(self);
}

/// Runs `work` with the codes and scales of a format.
#[inline(always)]
pub(crate) fn in_format(kind: Kind, work: impl InFormat) {
    match kind {
        Kind::Ggml(F::Q4_0) => work.run::<Four, Halves>(),
        Kind::Ggml(F::Q4_1) => work.run::<Four, HalfPairs>(),
        Kind::Ggml(F::Q5_0) => work.run::<Five, Halves>(),
        Kind::Ggml(F::Q5_1) => work.run::<Five, HalfPairs>(),
        Kind::Ggml(F::Q8_0) => work.run::<Eight, Halves>(),
        Kind::Ggml(F::Q4K) => work.run::<Four, SmallPairs>(),
        Kind::Ggml(F::Q5K) => work.run::<Five, SmallPairs>(),
        Kind::Ggml(F::Q6K) => work.run::<Six, SmallHalves>(),
        Kind::Ggml(F::Mxfp4) => work.run::<Five, Powers>(),
        Kind::HalfGroups(_) => work.run::<Four, Groups<true>>(),
        Kind::FloatGroups(_) => work.run::<Four, Groups<false>>(),
    }
}

/// Codes of a panel's outputs for 32 inputs.
pub(crate) trait Codes {
    const BYTES: usize;
    /// The largest code.
    const MAX_CODE: i32;

    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8];
}

/// Codes of 4 bits.
struct Four;

impl Codes for Four {
    const BYTES: usize = 256;
    const MAX_CODE: i32 = 15;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8] {
        let (lines, _) = block.as_chunks::<64>();
        let [a, e] = V::nibbles(V::codes(&lines[0], half));
        let [b, f] = V::nibbles(V::codes(&lines[1], half));
        let [c, g] = V::nibbles(V::codes(&lines[2], half));
        let [d, h] = V::nibbles(V::codes(&lines[3], half));
        [a, b, c, d, e, f, g, h]
    }
}

/// Codes of 5 bits.
struct Five;

impl Codes for Five {
    const BYTES: usize = 320;
    const MAX_CODE: i32 = 31;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8] {
        const MASK: u8 = 0x10;
        let [a, b, c, d, e, f, g, h] = Four::load::<V, L>(block, half);
        let plane = V::codes(&block.as_chunks::<64>().0[4], half);
        [
            V::with_bits::<0, MASK>(a, plane),
            V::with_bits::<1, MASK>(b, plane),
            V::with_bits::<2, MASK>(c, plane),
            V::with_bits::<3, MASK>(d, plane),
            V::with_bits::<4, MASK>(e, plane),
            V::with_bits::<5, MASK>(f, plane),
            V::with_bits::<6, MASK>(g, plane),
            V::with_bits::<7, MASK>(h, plane),
        ]
    }
}

/// Codes of 6 bits.
struct Six;

impl Codes for Six {
    const BYTES: usize = 384;
    const MAX_CODE: i32 = 63;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8] {
        const MASK: u8 = 0x30;
        let [a, b, c, d, e, f, g, h] = Four::load::<V, L>(block, half);
        let (lines, _) = block.as_chunks::<64>();
        let (low, high) = (V::codes(&lines[4], half), V::codes(&lines[5], half));
        [
            V::with_bits::<0, MASK>(a, low),
            V::with_bits::<2, MASK>(b, low),
            V::with_bits::<4, MASK>(c, low),
            V::with_bits::<6, MASK>(d, low),
            V::with_bits::<0, MASK>(e, high),
            V::with_bits::<2, MASK>(f, high),
            V::with_bits::<4, MASK>(g, high),
            V::with_bits::<6, MASK>(h, high),
        ]
    }
}

/// Codes of 8 bits.
struct Eight;

impl Codes for Eight {
    const BYTES: usize = 512;
    const MAX_CODE: i32 = 255;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8] {
        let (lines, _) = block.as_chunks::<64>();
        [
            V::codes(&lines[0], half),
            V::codes(&lines[1], half),
            V::codes(&lines[2], half),
            V::codes(&lines[3], half),
            V::codes(&lines[4], half),
            V::codes(&lines[5], half),
            V::codes(&lines[6], half),
            V::codes(&lines[7], half),
        ]
    }
}

/// Scales of a panel's outputs.
pub(crate) trait Scales {
    /// Scales of a block: one, or one for each half.
    const PER_BLOCK: usize;
    const HAS_MINIMUM: bool;
    /// True if they may use all 24 bits of a float, so that their product with 1.5 is rounded.
    const ARE_LONG: bool = false;

    /// The scales of a block, and its minimums.
    fn load<V: Dots<L>, const L: usize>(
        weight: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V);
}

/// Records of scales of a panel.
pub(crate) struct PanelScales<'a> {
    records: &'a [u8],
    /// Blocks per record.
    blocks: usize,
}

impl<'a> PanelScales<'a> {
    /// The records of a panel.
    #[inline(always)]
    pub(crate) fn of(weight: &'a QuantizedWeight, panel: usize) -> Self {
        Self {
            records: weight.records(panel),
            blocks: weight.kind().record_blocks(),
        }
    }

    /// `N` bytes of a record of `size` bytes, from offset `at`.
    #[inline(always)]
    fn bytes<const N: usize>(&self, size: usize, record: usize, at: usize) -> &[u8; N] {
        self.records[record * size + at..]
            .first_chunk()
            .expect("a whole record")
    }
}

/// A half-precision scale for each block.
struct Halves;

impl Scales for Halves {
    const PER_BLOCK: usize = 1;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        let zero = V::splat(0.0);
        ([V::halves(scales.bytes(32, block, 0), half), zero], zero)
    }
}

/// A half-precision scale and minimum for each block.
struct HalfPairs;

impl Scales for HalfPairs {
    const PER_BLOCK: usize = 1;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        let minimum = V::halves(scales.bytes(64, block, 32), half);
        (
            [V::halves(scales.bytes(64, block, 0), half), V::splat(0.0)],
            minimum,
        )
    }
}

/// A power of two for each block.
struct Powers;

impl Scales for Powers {
    const PER_BLOCK: usize = 1;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        let zero = V::splat(0.0);
        ([V::powers(scales.bytes(16, block, 0), half), zero], zero)
    }
}

/// Q4_K and Q5_K: integer scales and minimums for each block, with two factors per superblock.
struct SmallPairs;

impl Scales for SmallPairs {
    const PER_BLOCK: usize = 1;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        const SIZE: usize = 320;
        let (record, at) = (block / 8, 64 + block % 8 * 32);
        let scale = V::unsigned(scales.bytes(SIZE, record, at), half)
            .multiply(V::halves(scales.bytes(SIZE, record, 0), half));
        let minimum = V::unsigned(scales.bytes(SIZE, record, at + 16), half)
            .multiply(V::splat(-1.0))
            .multiply(V::halves(scales.bytes(SIZE, record, 32), half));
        ([scale, V::splat(0.0)], minimum)
    }
}

/// Q6_K: integer scales for each half of a block, with a factor per superblock.
struct SmallHalves;

impl Scales for SmallHalves {
    const PER_BLOCK: usize = 2;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        const SIZE: usize = 288;
        let (record, at) = (block / 8, 32 + block % 8 * 32);
        let factor = V::halves(scales.bytes(SIZE, record, 0), half);
        let first = V::signed(scales.bytes(SIZE, record, at), half);
        let second = V::signed(scales.bytes(SIZE, record, at + 16), half);
        let scales = [first.multiply(factor), second.multiply(factor)];
        (scales, V::splat(0.0))
    }
}

/// A scale and a zero point for some blocks.
struct Groups<const IS_HALF: bool>;

impl<const IS_HALF: bool> Scales for Groups<IS_HALF> {
    const PER_BLOCK: usize = 1;
    const HAS_MINIMUM: bool = true;
    const ARE_LONG: bool = !IS_HALF;

    #[inline(always)]
    fn load<V: Dots<L>, const L: usize>(
        scales: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V) {
        let record = block / scales.blocks;
        let (scale, zero) = match IS_HALF {
            true => (
                V::halves(scales.bytes(48, record, 0), half),
                V::unsigned(scales.bytes(48, record, 32), half),
            ),
            false => (
                V::floats(scales.bytes(80, record, 0), half),
                V::unsigned(scales.bytes(80, record, 64), half),
            ),
        };
        let minimum = zero.multiply(V::splat(-1.0)).multiply(scale);
        ([scale, V::splat(0.0)], minimum)
    }
}
