//! Products of 8-bit rows with a quantised weight by AMX: a tile multiplies up to 16 rows with a panel's codes for 32
//! inputs.
//!
//! A panel's codes are unpacked to signed bytes once for all tiles of rows. A tile adds the products of a block exactly.
//! Vectors then multiply by the scales and add to the sums in the order of [`crate::quantized_product`]. Results have the
//! same bits, so few rows may take that path and many this one.
//!
//! There are no closures around intrinsics: closures do not inherit the caller's target features.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::dots::Build;
use crate::isa::Isa;
use crate::lanes::{Vector, fetch_line};
use crate::lines::WIDTH;
use crate::quantized_format::{BLOCK, Offset};
use crate::quantized_panels::{Codes, InFormat, PanelScales, Scales, in_format};
use crate::quantized_rows::{Factors, Numbers, RowBlocks, RowTile};
use crate::quantized_weight::QuantizedWeight;
use crate::tiles::{
    Line, ROWS, Rows, STRIDE, Shape, TILES, Tiles, load, multiply_add_bytes, store, zero,
};

/// Rows from which tiles are faster than vectors: for weights with one scale per block, and with two.
const MIN_ROWS: [usize; 2] = [16, 32];

/// Blocks of a panel that are unpacked at a time: with those of a second panel, they stay in the L2 cache.
const CHUNK: usize = 24;

/// Panels that are multiplied with one load of a tile of rows.
const PAIR: usize = 2;

/// Tile products that are stored before vectors load the first of them: they stay in the L1 cache.
const BATCH: usize = 8;

/// Pairs of products in a batch.
const PAIRS: usize = BATCH / 2;

/// Pairs that are issued before one is stored, which covers the latency of a product.
const LATENCY: usize = 2;

/// Bytes of a row's numbers in half a block.
const HALF: usize = BLOCK / 2;

/// A batch of tile products.
type Products = [Line<i32>; BATCH * ROWS];

/// Unrolls code for `$count` rows. A loop would spill the vectors to memory.
macro_rules! each_row {
    ($count:ident, $row:ident => $body:block) => {
        each_row!($count, $row => $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($count:ident, $row:ident => $body:block, $($number:literal)*) => {
        $(if $number < $count {
            let $row: usize = $number;
            $body
        })*
    };
}

/// 1.5 * 2^23: adding a 22-bit integer to its bits adds it to the float.
const LARGE: f32 = 12_582_912.0;

/// A block of a panel, unpacked: codes minus their offset in the layout of a tile, and scales.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Block {
    codes: [[u8; STRIDE]; BLOCK / 4],
    scales: [[f32; WIDTH]; 2],
    /// The scales times minus [`LARGE`].
    starts: [[f32; WIDTH]; 2],
    minimum: [f32; WIDTH],
}

impl Block {
    const ZERO: Self = Self {
        codes: [[0; STRIDE]; BLOCK / 4],
        scales: [[0.0; WIDTH]; 2],
        starts: [[0.0; WIDTH]; 2],
        minimum: [0.0; WIDTH],
    };
}

/// True if [`add_tile_products`] supports this weight and is faster for these tiles of rows.
pub(crate) fn is_faster(isa: Isa, weight: &QuantizedWeight, tiles: &[RowTile]) -> bool {
    let min_rows = match weight.kind().offset() {
        Offset::OfBlock(_) => MIN_ROWS[0],
        Offset::OfHalves(_) => MIN_ROWS[1],
    };
    isa == Isa::Amx
        && Build::at(isa) == Build::Vnni
        && tiles.iter().map(|tile| tile.width).sum::<usize>() >= min_rows
}

/// Adds the products of the tiles' rows with these panels to `sums`, `[panels, rows of the tiles]`. Call it only if
/// [`is_faster`].
pub(crate) fn add_tile_products(
    weight: &QuantizedWeight,
    panels: Range<usize>,
    tiles: &[RowTile],
    blocks: RowBlocks<'_>,
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
    blocks: RowBlocks<'a>,
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
        let chunk = CHUNK.min(num_blocks);
        let mut unpacked = vec![Block::ZERO; PAIR * chunk];
        let mut products = Box::new([[Line([0; WIDTH]); BATCH * ROWS]; 2]);
        let mut set_up: Option<(usize, Tiles)> = None;
        let pairs = self.panels.clone().step_by(PAIR);
        for (panel, sums) in pairs.zip(self.sums.chunks_mut(PAIR * num_rows)) {
            let num_panels = sums.len() / num_rows;
            for first in (0..num_blocks).step_by(chunk) {
                let count = chunk.min(num_blocks - first);
                for (at, unpacked) in unpacked
                    .chunks_exact_mut(chunk)
                    .take(num_panels)
                    .enumerate()
                {
                    let codes = &self.weight.codes(panel + at)[first * C::BYTES..];
                    let scales = PanelScales::of(self.weight, panel + at);
                    unpack::<C, S>(codes, &scales, first, offset, &mut unpacked[..count]);
                }
                let (next_panel, next_first) = match first + count < num_blocks {
                    true => (0, first + count),
                    false => (num_panels, 0),
                };
                let panel_bytes = num_blocks * C::BYTES;
                let mut next = self
                    .weight
                    .codes(panel)
                    .as_ptr()
                    .wrapping_add(next_panel * panel_bytes + next_first * C::BYTES);
                let ahead = (count * C::BYTES / STRIDE).div_ceil(self.tiles.len());
                let mut first_row = 0;
                for tile in self.tiles {
                    if set_up
                        .as_ref()
                        .is_none_or(|(width, _)| *width != tile.width)
                    {
                        drop(set_up.take());
                        let shapes = shapes(tile.width, BLOCK / S::PER_BLOCK);
                        set_up = Some((tile.width, Tiles::of_shapes(&shapes)));
                    }
                    let begin = tile.blocks.start + first * tile.width;
                    let rows = self.blocks.part(begin..begin + count * tile.width);
                    let (even, odd) = unpacked.split_at(chunk);
                    let product = Product {
                        panels: [&even[..count], &odd[..count]],
                        rows,
                        sums,
                        sums_from: [first_row, num_rows + first_row],
                        products: &mut products,
                        next,
                        panel_bytes,
                        ahead,
                    };
                    // SAFETY: the caller has these target features.
                    unsafe {
                        match (S::PER_BLOCK, S::HAS_MINIMUM, S::ARE_LONG) {
                            (2, ..) => product.add::<2, false, false>(num_panels, tile.width),
                            (_, true, true) => product.add::<1, true, true>(num_panels, tile.width),
                            (_, true, _) => product.add::<1, true, false>(num_panels, tile.width),
                            _ => product.add::<1, false, false>(num_panels, tile.width),
                        }
                    }
                    first_row += tile.width;
                    next = next.wrapping_add(ahead * STRIDE);
                }
            }
        }
    }
}

/// Tile shapes for `width` rows and `inputs` inputs per product: tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 codes.
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

/// Unpacks blocks of a panel, from block `first` on.
#[inline(always)]
fn unpack<C: Codes, S: Scales>(
    codes: &[u8],
    scales: &PanelScales<'_>,
    first: usize,
    offset: i8,
    unpacked: &mut [Block],
) {
    /// Distance of prefetches, in bytes.
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
            // SAFETY: the caller has these target features; 64 bytes are written.
            unsafe {
                let signed = _mm512_sub_epi8(codes[at], _mm512_set1_epi8(offset));
                _mm512_store_si512(block.codes[at].as_mut_ptr().cast(), signed);
            }
        }
        let large = <__m512 as Vector<16>>::splat(-LARGE);
        for at in 0..S::PER_BLOCK {
            scales[at].store(&mut block.scales[at]);
            scales[at].multiply(large).store(&mut block.starts[at]);
        }
        minimum.store(&mut block.minimum);
    }
}

/// The product of blocks of one or two panels with a tile of rows.
struct Product<'a> {
    panels: [&'a [Block]; PAIR],
    /// `[blocks, width]`.
    rows: RowBlocks<'a>,
    sums: &'a mut [[f32; WIDTH]],
    /// By panel, the index of its first row in `sums`.
    sums_from: [usize; PAIR],
    products: &'a mut [Products; 2],
    /// Codes to prefetch meanwhile, from as many panels; the bytes of a panel; and the lines of each to prefetch.
    next: *const u8,
    panel_bytes: usize,
    ahead: usize,
}

impl Product<'_> {
    /// Adds the products of the rows. The constants are those of [`Scales`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add<const PER_BLOCK: usize, const HAS_MINIMUM: bool, const ARE_LONG: bool>(
        self,
        num_panels: usize,
        width: usize,
    ) {
        match (num_panels, width) {
            (1, 8) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 1, 8>(),
            (1, 12) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 1, 12>(),
            (1, 16) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 1, 16>(),
            (2, 8) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 2, 8>(),
            (2, 12) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 2, 12>(),
            (2, 16) => self.add_rows::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, 2, 16>(),
            _ => unreachable!("MIN_ROWS excludes other widths"),
        }
    }

    /// Adds the products of `R` rows with `P` panels. While tiles multiply a batch, vectors add the one before to the sums.
    #[inline(always)]
    fn add_rows<
        const PER_BLOCK: usize,
        const HAS_MINIMUM: bool,
        const ARE_LONG: bool,
        const P: usize,
        const R: usize,
    >(
        self,
    ) {
        let (numbers, factors) = self.rows.by_rows::<R>();
        let mut pairs = Pairs::<PER_BLOCK, P, R> {
            panels: self.panels,
            numbers,
            products: self.products,
            count: (numbers.len() * PER_BLOCK * P).div_ceil(2),
            next: 0,
        };
        let blocks_per_step = BATCH / P / PER_BLOCK;
        let num_steps = numbers.len().div_ceil(blocks_per_step);
        let lines = self.ahead.div_ceil(num_steps);
        pairs.multiply_to(PAIRS + LATENCY);
        for step in 0..num_steps {
            let part = step * blocks_per_step..numbers.len().min((step + 1) * blocks_per_step);
            let end = (step + 2) * PAIRS + LATENCY;
            for panel in 0..P {
                let sums_of_panel = &mut self.sums[self.sums_from[panel]..][..R];
                let mut sums = [<__m512 as Vector<16>>::splat(0.0); R];
                each_row!(R, row => { sums[row] = __m512::load(&sums_of_panel[row]); });
                for (number, (rows, weights)) in factors[part.clone()]
                    .iter()
                    .zip(&self.panels[panel][part.clone()])
                    .enumerate()
                {
                    if (number * PER_BLOCK).is_multiple_of(2) {
                        pairs.multiply_to(end.min(pairs.next + 1));
                    }
                    let at = (panel * blocks_per_step + number) * PER_BLOCK * ROWS;
                    let products = &pairs.products[step % 2][at..][..PER_BLOCK * ROWS];
                    scale::<PER_BLOCK, HAS_MINIMUM, ARE_LONG, R>(
                        weights, rows, products, &mut sums,
                    );
                }
                each_row!(R, row => { sums[row].store(&mut sums_of_panel[row]); });
                for line in 0..lines {
                    let at = panel * self.panel_bytes + (step * lines + line) * STRIDE;
                    fetch_line(self.next.wrapping_add(at));
                }
            }
            pairs.multiply_to(end);
        }
    }
}

/// Pairs of tile products: of a block with two panels, of two blocks with one, or of the halves of blocks. A pair is
/// stored [`LATENCY`] pairs after it was issued.
struct Pairs<'a, const PER_BLOCK: usize, const P: usize, const R: usize> {
    panels: [&'a [Block]; PAIR],
    numbers: &'a [[Numbers; R]],
    /// Batches of even and odd steps, `[panels, blocks, halves]`.
    products: &'a mut [Products; 2],
    count: usize,
    /// The number of the next pair.
    next: usize,
}

impl<const PER_BLOCK: usize, const P: usize, const R: usize> Pairs<'_, PER_BLOCK, P, R> {
    /// Issues the pairs before `end`, and stores those whose products are complete.
    #[inline(always)]
    fn multiply_to(&mut self, end: usize) {
        for pair in self.next..end.min(self.count + LATENCY) {
            let stored = pair.wrapping_sub(LATENCY);
            let at = stored % PAIRS * ROWS;
            let products = &mut self.products[stored / PAIRS % 2];
            let [first, second] = match P {
                1 => [2 * at, 2 * at + ROWS],
                _ => [at, PAIRS * ROWS + at],
            };
            if pair % 2 == 0 {
                if pair >= LATENCY {
                    store!("tmm0", products[first..]);
                    store!("tmm1", products[second..]);
                }
                if pair < self.count {
                    zero!("tmm0", "tmm1");
                    load!("tmm4", self.rows(pair, 0), self.half(pair, 0) * HALF);
                    load!("tmm6", self.codes(pair, 0), 0);
                    multiply_add_bytes!("tmm0", "tmm4", "tmm6");
                    load!("tmm7", self.codes(pair, 1), 0);
                    if P == 1 {
                        load!("tmm5", self.rows(pair, 1), self.half(pair, 1) * HALF);
                        multiply_add_bytes!("tmm1", "tmm5", "tmm7");
                    } else {
                        multiply_add_bytes!("tmm1", "tmm4", "tmm7");
                    }
                }
            } else {
                if pair >= LATENCY {
                    store!("tmm2", products[first..]);
                    store!("tmm3", products[second..]);
                }
                if pair < self.count {
                    zero!("tmm2", "tmm3");
                    load!("tmm5", self.rows(pair, 0), self.half(pair, 0) * HALF);
                    load!("tmm6", self.codes(pair, 0), 0);
                    multiply_add_bytes!("tmm2", "tmm5", "tmm6");
                    load!("tmm7", self.codes(pair, 1), 0);
                    if P == 1 {
                        load!("tmm4", self.rows(pair, 1), self.half(pair, 1) * HALF);
                        multiply_add_bytes!("tmm3", "tmm4", "tmm7");
                    } else {
                        multiply_add_bytes!("tmm3", "tmm5", "tmm7");
                    }
                }
            }
            self.next = pair + 1;
        }
    }

    /// The block of a product. With one panel and an odd number of blocks, the last one is multiplied twice.
    #[inline(always)]
    fn block(&self, pair: usize, number: usize) -> usize {
        match P {
            1 => ((2 * pair + number) / PER_BLOCK).min(self.numbers.len() - 1),
            _ => pair / PER_BLOCK,
        }
    }

    /// The half of the block, if blocks have two scales.
    #[inline(always)]
    fn half(&self, pair: usize, number: usize) -> usize {
        match P {
            1 => number % PER_BLOCK,
            _ => pair % PER_BLOCK,
        }
    }

    /// The rows of a product.
    #[inline(always)]
    fn rows(&self, pair: usize, number: usize) -> Rows<'_> {
        Rows::every(
            &self.numbers[self.block(pair, number)],
            size_of::<Numbers>(),
        )
    }

    /// The codes of a product.
    #[inline(always)]
    fn codes(&self, pair: usize, number: usize) -> Rows<'_> {
        let panel = if P == 1 { 0 } else { number };
        let block = &self.panels[panel][self.block(pair, number)];
        let lines = BLOCK / 4 / PER_BLOCK;
        Rows::every(
            &block.codes[self.half(pair, number) * lines..][..lines],
            STRIDE,
        )
    }
}

/// Multiplies the sums of a block's products by their scales and adds them to the sums of all blocks. While AMX is active,
/// half of the floating-point units are idle and the integer units are not, so an integer addition converts the sums to
/// floats. The multiplication that subtracts [`LARGE`] again rounds once, like that of a converted sum.
#[inline(always)]
fn scale<const PER_BLOCK: usize, const HAS_MINIMUM: bool, const ARE_LONG: bool, const R: usize>(
    block: &Block,
    rows: &[Factors; R],
    products: &[Line<i32>],
    sums: &mut [__m512; R],
) {
    let (products, _) = products.as_chunks::<ROWS>();
    let products = &products[..PER_BLOCK];
    let scales = [
        __m512::load(&block.scales[0]),
        __m512::load(&block.scales[1]),
    ];
    let starts = [
        __m512::load(&block.starts[0]),
        __m512::load(&block.starts[1]),
    ];
    let minimum = __m512::load(&block.minimum);
    each_row!(R, row => {
        let scale = <__m512 as Vector<16>>::splat(rows[row].scale);
        for half in 0..PER_BLOCK {
            // SAFETY: the caller has these target features; 64 bytes are read.
            let products = unsafe {
                let products = _mm512_load_si512(products[half][row].0.as_ptr().cast());
                if ARE_LONG {
                    _mm512_cvtepi32_ps(products).multiply(scales[half])
                } else {
                    let large = _mm512_set1_epi32(LARGE.to_bits().cast_signed());
                    _mm512_castsi512_ps(_mm512_add_epi32(products, large))
                        .multiply_add(scales[half], starts[half])
                }
            };
            sums[row] = products.multiply_add(scale, sums[row]);
        }
        if HAS_MINIMUM {
            let sum = <__m512 as Vector<16>>::splat(rows[row].sum);
            sums[row] = minimum.multiply_add(sum, sums[row]);
        }
    });
}
