//! Rows of integers times a quantised weight: sums of a panel's outputs stay in registers.
//!
//! No closures where vectors are made: they would not take the caller's instructions.
//!
//! A block's products are added up as integers, exactly. Then the sum is multiplied by both scales and added to the
//! output's, in the order of the blocks: a row has the same bits in every batch and at every level of instructions.

use crate::dots::Dots;
use crate::lanes::fetch_line;
use crate::lines::WIDTH;
use crate::quantized_format::{Kind, QuantizedFormat as F};
use crate::quantized_rows::{RowBlock, RowTile};
use crate::quantized_weight::QuantizedWeight;

/// Bytes by which a single pass over a weight is read ahead.
const AHEAD: usize = 2048;

/// Codes of a panel's outputs for 32 inputs.
trait Codes {
    const BYTES: usize;
    /// The largest.
    const MOST: i32;

    fn load<V: Dots<L>, const L: usize>(block: &[u8], half: usize) -> [V::Codes; 8];
}

/// Codes of 4 bits.
struct Four;

impl Codes for Four {
    const BYTES: usize = 256;
    const MOST: i32 = 15;

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
    const MOST: i32 = 31;

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
    const MOST: i32 = 63;

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
    const MOST: i32 = 255;

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
trait Scales {
    /// Of a block: one, or one for each half.
    const EACH: usize;
    const HAS_MINIMUM: bool;

    /// The scales of a block, and what is added to every weight.
    fn load<V: Dots<L>, const L: usize>(
        weight: &PanelScales<'_>,
        block: usize,
        half: usize,
    ) -> ([V; 2], V);
}

/// The records of a panel.
struct PanelScales<'a> {
    records: &'a [u8],
    /// Blocks of a record.
    blocks: usize,
}

impl PanelScales<'_> {
    /// `N` bytes of a record of `size` bytes, from place `at` on.
    #[inline(always)]
    fn bytes<const N: usize>(&self, size: usize, record: usize, at: usize) -> &[u8; N] {
        self.records[record * size + at..]
            .first_chunk()
            .expect("all panels have all records")
    }
}

/// A half-precision scale for each block.
struct Halves;

impl Scales for Halves {
    const EACH: usize = 1;
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

/// The same with a minimum.
struct HalfPairs;

impl Scales for HalfPairs {
    const EACH: usize = 1;
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
    const EACH: usize = 1;
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

/// Q4_K and Q5_K: small integers for each block, with two factors for eight.
struct SmallPairs;

impl Scales for SmallPairs {
    const EACH: usize = 1;
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

/// Q6_K: a small integer for each half of a block, with a factor for eight.
struct SmallHalves;

impl Scales for SmallHalves {
    const EACH: usize = 2;
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
        let each = [first.multiply(factor), second.multiply(factor)];
        (each, V::splat(0.0))
    }
}

/// A scale and a zero point for some blocks.
struct Groups<const IS_HALF: bool>;

impl<const IS_HALF: bool> Scales for Groups<IS_HALF> {
    const EACH: usize = 1;
    const HAS_MINIMUM: bool = true;

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

/// Adds to `sums` the products of a tile's rows with the panel's weights.
#[inline(always)]
pub(crate) fn add_products<V: Dots<L>, const L: usize>(
    weight: &QuantizedWeight,
    panel: usize,
    (tile, blocks): (&RowTile, &[RowBlock]),
    sums: &mut [[f32; WIDTH]],
) {
    let product = Product {
        codes: weight.codes(panel),
        scales: PanelScales {
            records: weight.records(panel),
            blocks: weight.kind().record_blocks(),
        },
        rows: &blocks[tile.blocks.clone()],
        width: tile.width,
        sums,
    };
    match weight.kind() {
        Kind::Ggml(F::Q4_0) => product.add::<V, L, Four, Halves>(),
        Kind::Ggml(F::Q4_1) => product.add::<V, L, Four, HalfPairs>(),
        Kind::Ggml(F::Q5_0) => product.add::<V, L, Five, Halves>(),
        Kind::Ggml(F::Q5_1) => product.add::<V, L, Five, HalfPairs>(),
        Kind::Ggml(F::Q8_0) => product.add::<V, L, Eight, Halves>(),
        Kind::Ggml(F::Q4K) => product.add::<V, L, Four, SmallPairs>(),
        Kind::Ggml(F::Q5K) => product.add::<V, L, Five, SmallPairs>(),
        Kind::Ggml(F::Q6K) => product.add::<V, L, Six, SmallHalves>(),
        Kind::Ggml(F::Mxfp4) => product.add::<V, L, Five, Powers>(),
        Kind::HalfGroups(_) => product.add::<V, L, Four, Groups<true>>(),
        Kind::FloatGroups(_) => product.add::<V, L, Four, Groups<false>>(),
    }
}

/// A panel and a tile of rows.
struct Product<'a> {
    codes: &'a [u8],
    scales: PanelScales<'a>,
    rows: &'a [RowBlock],
    width: usize,
    sums: &'a mut [[f32; WIDTH]],
}

impl Product<'_> {
    #[inline(always)]
    fn add<V: Dots<L>, const L: usize, C: Codes, S: Scales>(self) {
        match self.width {
            1 => self.add_rows::<V, L, C, S, 1>(),
            2 => self.add_rows::<V, L, C, S, 2>(),
            3 if V::MOST_ROWS >= 3 => self.add_rows::<V, L, C, S, 3>(),
            4 if V::MOST_ROWS >= 4 => self.add_rows::<V, L, C, S, 4>(),
            6 if V::MOST_ROWS >= 6 => self.add_rows::<V, L, C, S, 6>(),
            8 if V::MOST_ROWS >= 8 => self.add_rows::<V, L, C, S, 8>(),
            12 if V::MOST_ROWS >= 12 => self.add_rows::<V, L, C, S, 12>(),
            16 if V::MOST_ROWS >= 16 => self.add_rows::<V, L, C, S, 16>(),
            _ => unreachable!("there are no such tiles"),
        }
    }

    /// Adds the products of `R` rows.
    #[inline(always)]
    fn add_rows<V: Dots<L>, const L: usize, C: Codes, S: Scales, const R: usize>(self) {
        let zeros = [V::splat(0.0); 2];
        let mut sums = [zeros; R];
        for (sums, from) in sums.iter_mut().zip(&*self.sums) {
            let (from, _) = from.as_chunks::<L>();
            for (sum, from) in sums.iter_mut().zip(from) {
                *sum = V::load(from);
            }
        }
        let blocks = self.codes.chunks_exact(C::BYTES);
        for (number, (block, rows)) in blocks.zip(self.rows.as_chunks::<R>().0).enumerate() {
            for line in 0..C::BYTES / 64 {
                fetch_line(block.as_ptr().wrapping_byte_add(AHEAD + line * 64));
            }
            for half in 0..WIDTH / L {
                let codes = C::load::<V, L>(block, half);
                let (scales, minimum) = S::load::<V, L>(&self.scales, number, half);
                for (row, sums) in rows.iter().zip(&mut sums) {
                    let sum = &mut sums[half];
                    *sum = match S::EACH {
                        1 => {
                            let dot = dot::<V, L, C, 8>(&codes, row, 0);
                            let scaled = dot.multiply(scales[0]);
                            scaled.multiply_add(V::splat(row.scale), *sum)
                        }
                        _ => {
                            let scale = V::splat(row.scale);
                            let first = dot::<V, L, C, 4>(&codes, row, 0);
                            let first = first.multiply(scales[0]).multiply_add(scale, *sum);
                            let second = dot::<V, L, C, 4>(&codes, row, 1);
                            second.multiply(scales[1]).multiply_add(scale, first)
                        }
                    };
                    if S::HAS_MINIMUM {
                        *sum = minimum.multiply_add(V::splat(row.sum), *sum);
                    }
                }
            }
        }
        for (sums, to) in sums.iter().zip(self.sums) {
            let (to, _) = to.as_chunks_mut::<L>();
            for (sum, to) in sums.iter().zip(to) {
                sum.store(to);
            }
        }
    }
}

/// The products of a part of a block, of `N` times four codes.
#[inline(always)]
fn dot<V: Dots<L>, const L: usize, C: Codes, const N: usize>(
    codes: &[V::Codes; 8],
    row: &RowBlock,
    part: usize,
) -> V {
    let codes = &codes[part * N..][..N];
    let (numbers, start) = (&row.numbers[part * N..][..N], row.starts[part]);
    match C::MOST {
        15 => V::dot::<N, 15>(codes, numbers, start),
        31 => V::dot::<N, 31>(codes, numbers, start),
        63 => V::dot::<N, 63>(codes, numbers, start),
        _ => V::dot::<N, 255>(codes, numbers, start),
    }
}
