//! Rows of integers times a quantised weight by AMX: a tile multiplies up to 16 rows with a panel's codes for 32 inputs.
//!
//! A panel's codes are made signed bytes once for all tiles of rows. The products of a block are added up by the tile,
//! exactly; then vectors multiply them by the scales and add them to the sums, in the order of [`crate::quantized_product`]
//! and with its bits. So vectors may multiply few rows and tiles many.
//!
//! No closures where vectors are made: they would not take the caller's instructions.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::dots::Build;
use crate::isa::Isa;
use crate::lanes::{Vector, fetch_line};
use crate::lines::WIDTH;
use crate::quantized_format::{BLOCK, Offset};
use crate::quantized_panels::{Codes, InFormat, PanelScales, Scales, in_format};
use crate::quantized_rows::{RowBlock, RowTile};
use crate::quantized_weight::QuantizedWeight;
use crate::tiles::{
    Line, ROWS, Rows, STRIDE, Shape, TILES, Tiles, load, multiply_add_bytes, store, zero,
};

/// Rows of a tile that vectors multiply in fewer instructions. By vectors, a block takes 12 instructions and 11 more a row,
/// two at once: 28 cycles for 4 rows, 39 for 6. By tiles, it takes 23 to unpack it, where there is one tile of rows, 4 more
/// a row, and 16 cycles of the tiles' own beside these: 20 and 24. Of that, stores and loads of tiles take about ten, so
/// tiles begin where they are ahead by more.
const FEW_ROWS: usize = 4;

/// Blocks of a panel that are unpacked at a time: they stay in a core's first cache.
const CHUNK: usize = 32;

/// Products of tiles between which vectors work on those before: sums are in as many tiles.
const TOGETHER: usize = 4;

/// Bytes of a row's numbers in half a block.
const HALF: usize = BLOCK / 2;

/// Sums of [`TOGETHER`] products.
type Found = [Line<i32>; TOGETHER * ROWS];

/// Codes of a panel for 32 inputs as a tile has them, less their offset, and the panel's scales.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Block {
    codes: [[u8; STRIDE]; BLOCK / 4],
    scales: [[f32; WIDTH]; 2],
    minimum: [f32; WIDTH],
}

impl Block {
    const ZERO: Self = Self {
        codes: [[0; STRIDE]; BLOCK / 4],
        scales: [[0.0; WIDTH]; 2],
        minimum: [0.0; WIDTH],
    };
}

/// Whether [`add_tile_products`] is for these tiles of rows.
pub(crate) fn takes(isa: Isa, tiles: &[RowTile]) -> bool {
    isa == Isa::Amx
        && Build::at(isa) == Build::Vnni
        && tiles.iter().all(|tile| tile.width > FEW_ROWS)
}

/// Adds to `sums`, `[panels, rows of the tiles]`, the products of the tiles' rows with these panels. Only for what
/// [`takes`] is for.
pub(crate) fn add_tile_products(
    weight: &QuantizedWeight,
    panels: Range<usize>,
    (tiles, blocks): (&[RowTile], &[RowBlock]),
    sums: &mut [[f32; WIDTH]],
) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add(work: Panels<'_>) {
        in_format(work.weight.kind(), work);
    }
    let work = Panels {
        weight,
        panels,
        tiles,
        blocks,
        sums,
    };
    // SAFETY: every machine with AMX has these instructions.
    unsafe { add(work) };
}

struct Panels<'a> {
    weight: &'a QuantizedWeight,
    panels: Range<usize>,
    tiles: &'a [RowTile],
    blocks: &'a [RowBlock],
    sums: &'a mut [[f32; WIDTH]],
}

impl InFormat for Panels<'_> {
    #[inline(always)]
    fn run<C: Codes, S: Scales>(self) {
        let offset = match self.weight.kind().offset() {
            Offset::OfBlock(offset) | Offset::OfHalves(offset) => offset as i8,
        };
        let num_blocks = self.weight.in_features() / BLOCK;
        let num_rows = self.sums.len() / self.panels.len();
        let mut unpacked = vec![Block::ZERO; CHUNK.min(num_blocks)];
        let mut found = Box::new([[Line([0; WIDTH]); TOGETHER * ROWS]; 2]);
        let mut set_up: Option<(usize, Tiles)> = None;
        for (number, sums) in self.panels.zip(self.sums.chunks_exact_mut(num_rows)) {
            let codes = self.weight.codes(number);
            let scales = PanelScales::of(self.weight, number);
            for first in (0..num_blocks).step_by(CHUNK) {
                let count = CHUNK.min(num_blocks - first);
                let unpacked = &mut unpacked[..count];
                unpack::<C, S>(
                    &codes[first * C::BYTES..],
                    (&scales, first),
                    offset,
                    unpacked,
                );
                let mut next = codes[first * C::BYTES..]
                    .as_ptr()
                    .wrapping_add(count * C::BYTES);
                let ahead = (count * C::BYTES / STRIDE).div_ceil(self.tiles.len());
                let mut left = &mut *sums;
                for tile in self.tiles {
                    if set_up
                        .as_ref()
                        .is_none_or(|(width, _)| *width != tile.width)
                    {
                        drop(set_up.take());
                        let shapes = shapes(tile.width, BLOCK / S::EACH);
                        set_up = Some((tile.width, Tiles::of_shapes(&shapes)));
                    }
                    let (sums, rest) = left.split_at_mut(tile.width);
                    left = rest;
                    let rows = &self.blocks[tile.blocks.clone()][first * tile.width..];
                    let product = Product {
                        blocks: unpacked,
                        rows: &rows[..count * tile.width],
                        sums,
                        found: &mut found,
                        next,
                        ahead,
                    };
                    match tile.width {
                        6 => product.add::<S, 6>(),
                        8 => product.add::<S, 8>(),
                        12 => product.add::<S, 12>(),
                        16 => product.add::<S, 16>(),
                        _ => unreachable!("there are no such tiles"),
                    }
                    next = next.wrapping_add(ahead * STRIDE);
                }
            }
        }
    }
}

/// The shapes of the tiles for so many rows and so many inputs of a product: sums are in tiles 0 to 3, rows in 4 and 5,
/// codes in 6 and 7.
fn shapes(width: usize, inputs: usize) -> [Shape; TILES] {
    let sums = Shape {
        rows: width,
        bytes: STRIDE,
    };
    let rows = Shape {
        rows: width,
        bytes: inputs,
    };
    let codes = Shape {
        rows: inputs / 4,
        bytes: STRIDE,
    };
    [sums, sums, sums, sums, rows, rows, codes, codes]
}

/// Unpacks some blocks of a panel, from number `first` on.
#[inline(always)]
fn unpack<C: Codes, S: Scales>(
    codes: &[u8],
    (scales, first): (&PanelScales<'_>, usize),
    offset: i8,
    unpacked: &mut [Block],
) {
    /// Bytes by which codes are read ahead.
    const AHEAD: usize = 2048;
    for (number, (block, codes)) in unpacked
        .iter_mut()
        .zip(codes.chunks_exact(C::BYTES))
        .enumerate()
    {
        for line in 0..C::BYTES / STRIDE {
            fetch_line(codes.as_ptr().wrapping_byte_add(AHEAD + line * STRIDE));
        }
        let codes = C::load::<__m512, 16>(codes, 0);
        let (scales, minimum) = S::load::<__m512, 16>(scales, first + number, 0);
        for at in 0..BLOCK / 4 {
            // SAFETY: the machine has these instructions, as whoever calls has them; 64 bytes are written.
            unsafe {
                let signed = _mm512_sub_epi8(codes[at], _mm512_set1_epi8(offset));
                _mm512_store_si512(block.codes[at].as_mut_ptr().cast(), signed);
            }
        }
        for at in 0..2 {
            scales[at].store(&mut block.scales[at]);
        }
        minimum.store(&mut block.minimum);
    }
}

/// Some blocks of a panel and a tile of rows.
struct Product<'a> {
    blocks: &'a [Block],
    /// `[blocks, width]`.
    rows: &'a [RowBlock],
    sums: &'a mut [[f32; WIDTH]],
    found: &'a mut [Found; 2],
    /// What is asked for meanwhile, and how many lines of it.
    next: *const u8,
    ahead: usize,
}

impl Product<'_> {
    /// Adds the products of `R` rows: while tiles multiply some blocks, vectors add those before to the sums.
    #[inline(always)]
    fn add<S: Scales, const R: usize>(self) {
        let Self { blocks, rows, .. } = self;
        let each = TOGETHER / S::EACH;
        let num_steps = blocks.len().div_ceil(each);
        let lines = self.ahead.div_ceil(num_steps);
        let mut sums = [<__m512 as Vector<16>>::splat(0.0); R];
        for row in 0..R {
            sums[row] = __m512::load(&self.sums[row]);
        }
        for step in 0..=num_steps {
            let [even, odd] = &mut *self.found;
            let (now, before) = match step % 2 {
                0 => (even, odd),
                _ => (odd, even),
            };
            if step < num_steps {
                let part = step * each..blocks.len().min((step + 1) * each);
                multiply::<S, R>(
                    &blocks[part.clone()],
                    &rows[part.start * R..part.end * R],
                    now,
                );
            }
            if step > 0 {
                let part = (step - 1) * each..blocks.len().min(step * each);
                let rows = &rows[part.start * R..part.end * R];
                scale::<S, R>(&blocks[part], rows, before, &mut sums);
                for line in 0..lines {
                    let line = (step - 1) * lines + line;
                    fetch_line(self.next.wrapping_add(line * STRIDE));
                }
            }
        }
        for row in 0..R {
            sums[row].store(&mut self.sums[row]);
        }
    }
}

/// Sums of the products of up to [`TOGETHER`] blocks, or half as many in two halves each.
#[inline(always)]
fn multiply<S: Scales, const R: usize>(blocks: &[Block], rows: &[RowBlock], found: &mut Found) {
    let count = blocks.len() * S::EACH;
    zero!("tmm0", "tmm1", "tmm2", "tmm3");
    load!("tmm4", numbers::<R>(rows, 0), 0);
    load!("tmm6", codes::<S>(blocks, 0), 0);
    multiply_add_bytes!("tmm0", "tmm4", "tmm6");
    if count > 1 {
        load!("tmm5", numbers::<R>(rows, 1 / S::EACH), 1 % S::EACH * HALF);
        load!("tmm7", codes::<S>(blocks, 1), 0);
        multiply_add_bytes!("tmm1", "tmm5", "tmm7");
    }
    if count > 2 {
        load!("tmm4", numbers::<R>(rows, 2 / S::EACH), 2 % S::EACH * HALF);
        load!("tmm6", codes::<S>(blocks, 2), 0);
        multiply_add_bytes!("tmm2", "tmm4", "tmm6");
    }
    if count > 3 {
        load!("tmm5", numbers::<R>(rows, 3 / S::EACH), 3 % S::EACH * HALF);
        load!("tmm7", codes::<S>(blocks, 3), 0);
        multiply_add_bytes!("tmm3", "tmm5", "tmm7");
    }
    store!("tmm0", found);
    if count > 1 {
        store!("tmm1", found[ROWS..]);
    }
    if count > 2 {
        store!("tmm2", found[2 * ROWS..]);
    }
    if count > 3 {
        store!("tmm3", found[3 * ROWS..]);
    }
}

/// The numbers of `R` rows in a block.
#[inline(always)]
fn numbers<const R: usize>(rows: &[RowBlock], block: usize) -> Rows<'_> {
    Rows::every(&rows[block * R..][..R], size_of::<RowBlock>())
}

/// The codes of the product of this number.
#[inline(always)]
fn codes<S: Scales>(blocks: &[Block], number: usize) -> Rows<'_> {
    let each = BLOCK / 4 / S::EACH;
    let codes = &blocks[number / S::EACH].codes;
    Rows::every(&codes[number % S::EACH * each..][..each], STRIDE)
}

/// Multiplies the sums of products by their scales and adds them to the sums of all blocks.
#[inline(always)]
fn scale<S: Scales, const R: usize>(
    blocks: &[Block],
    rows: &[RowBlock],
    found: &Found,
    sums: &mut [__m512; R],
) {
    for (number, block) in blocks.iter().enumerate() {
        let scales = [
            __m512::load(&block.scales[0]),
            __m512::load(&block.scales[1]),
        ];
        let minimum = __m512::load(&block.minimum);
        let rows = &rows[number * R..][..R];
        for row in 0..R {
            let scale = <__m512 as Vector<16>>::splat(rows[row].scale);
            for half in 0..S::EACH {
                let products = &found[(number * S::EACH + half) * ROWS + row];
                // SAFETY: the machine has this instruction, as whoever calls has it; 64 bytes are read.
                let products =
                    unsafe { _mm512_cvtepi32_ps(_mm512_load_si512(products.0.as_ptr().cast())) };
                sums[row] = products
                    .multiply(scales[half])
                    .multiply_add(scale, sums[row]);
            }
            if S::HAS_MINIMUM {
                let sum = <__m512 as Vector<16>>::splat(rows[row].sum);
                sums[row] = minimum.multiply_add(sum, sums[row]);
            }
        }
    }
}
