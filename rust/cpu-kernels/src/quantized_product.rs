//! Products of 8-bit rows with a quantised weight. Sums of a panel's outputs stay in registers.
//!
//! There are no closures around intrinsics: closures do not inherit the caller's target features.
//!
//! The products of a block are added as integers, which is exact. The sum is multiplied by both scales and added to the
//! output, block by block in order, so a row has the same bits in every batch and at every instruction level.

use std::marker::PhantomData;

use crate::dots::Dots;
use crate::lanes::fetch_line;
use crate::lines::WIDTH;
use crate::quantized_panels::{Codes, InFormat, PanelScales, Scales, in_format};
use crate::quantized_rows::{Factors, Numbers, RowBlocks, RowTile};
use crate::quantized_weight::QuantizedWeight;

/// Distance of prefetches, in bytes.
const AHEAD: usize = 2048;

/// Adds the products of a tile's rows with a panel to `sums`.
#[inline(always)]
pub(crate) fn add_products<V: Dots<L>, const L: usize>(
    weight: &QuantizedWeight,
    panel: usize,
    tile: &RowTile,
    blocks: RowBlocks<'_>,
    sums: &mut [[f32; WIDTH]],
) {
    let product = Product::<V, L> {
        codes: weight.codes(panel),
        scales: PanelScales::of(weight, panel),
        rows: blocks.part(tile.blocks.clone()),
        width: tile.width,
        sums,
        vectors: PhantomData,
    };
    in_format(weight.kind(), product);
}

/// The product of a panel and a tile of rows.
struct Product<'a, V, const L: usize> {
    codes: &'a [u8],
    scales: PanelScales<'a>,
    rows: RowBlocks<'a>,
    width: usize,
    sums: &'a mut [[f32; WIDTH]],
    vectors: PhantomData<V>,
}

impl<V: Dots<L>, const L: usize> InFormat for Product<'_, V, L> {
    #[inline(always)]
    fn run<C: Codes, S: Scales>(self) {
        match self.width {
            1 => self.add_rows::<C, S, 1>(),
            2 => self.add_rows::<C, S, 2>(),
            3 if V::MAX_ROWS >= 3 => self.add_rows::<C, S, 3>(),
            4 if V::MAX_ROWS >= 4 => self.add_rows::<C, S, 4>(),
            6 if V::MAX_ROWS >= 6 => self.add_rows::<C, S, 6>(),
            8 if V::MAX_ROWS >= 8 => self.add_rows::<C, S, 8>(),
            12 if V::MAX_ROWS >= 12 => self.add_rows::<C, S, 12>(),
            16 if V::MAX_ROWS >= 16 => self.add_rows::<C, S, 16>(),
            _ => unreachable!("TILE_ROWS has no other numbers"),
        }
    }
}

impl<V: Dots<L>, const L: usize> Product<'_, V, L> {
    /// Adds the products of `R` rows.
    #[inline(always)]
    fn add_rows<C: Codes, S: Scales, const R: usize>(self) {
        let zeros = [V::splat(0.0); 2];
        let mut sums = [zeros; R];
        for (sums, from) in sums.iter_mut().zip(&*self.sums) {
            let (from, _) = from.as_chunks::<L>();
            for (sum, from) in sums.iter_mut().zip(from) {
                *sum = V::load(from);
            }
        }
        let blocks = self.codes.chunks_exact(C::BYTES);
        let (numbers, factors) = self.rows.by_rows::<R>();
        for (number, (block, (numbers, factors))) in
            blocks.zip(numbers.iter().zip(factors)).enumerate()
        {
            for line in 0..C::BYTES / 64 {
                fetch_line(block.as_ptr().wrapping_byte_add(AHEAD + line * 64));
            }
            for half in 0..WIDTH / L {
                let codes = C::load::<V, L>(block, half);
                let (scales, minimum) = S::load::<V, L>(&self.scales, number, half);
                for ((row, factors), sums) in numbers.iter().zip(factors).zip(&mut sums) {
                    let sum = &mut sums[half];
                    *sum = match S::PER_BLOCK {
                        1 => {
                            let dot = dot::<V, L, C, 8>(&codes, row, factors, 0);
                            let scaled = dot.multiply(scales[0]);
                            scaled.multiply_add(V::splat(factors.scale), *sum)
                        }
                        _ => {
                            let scale = V::splat(factors.scale);
                            let first = dot::<V, L, C, 4>(&codes, row, factors, 0);
                            let first = first.multiply(scales[0]).multiply_add(scale, *sum);
                            let second = dot::<V, L, C, 4>(&codes, row, factors, 1);
                            second.multiply(scales[1]).multiply_add(scale, first)
                        }
                    };
                    if S::HAS_MINIMUM {
                        *sum = minimum.multiply_add(V::splat(factors.sum), *sum);
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

/// The sum of products of a part of a block, of `4 * N` codes.
#[inline(always)]
fn dot<V: Dots<L>, const L: usize, C: Codes, const N: usize>(
    codes: &[V::Codes; 8],
    row: &Numbers,
    factors: &Factors,
    part: usize,
) -> V {
    let codes = &codes[part * N..][..N];
    let (numbers, start) = (&row.0[part * N..][..N], factors.starts[part]);
    match C::MAX_CODE {
        15 => V::dot::<N, 15>(codes, numbers, start),
        31 => V::dot::<N, 31>(codes, numbers, start),
        63 => V::dot::<N, 63>(codes, numbers, start),
        _ => V::dot::<N, 255>(codes, numbers, start),
    }
}
