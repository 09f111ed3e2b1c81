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
use crate::quantized_rows::{Factors, Numbers, RowBlocks, RowTile};
use crate::quantized_weight::QuantizedWeight;
use crate::tiles::{
    Line, ROWS, Rows, STRIDE, Shape, TILES, Tiles, load, multiply_add_bytes, store, zero,
};

/// Rows from which on tiles are faster than vectors, of weights with one scale for a block and with two.
const MANY_ROWS: [usize; 2] = [16, 32];

/// Blocks of a panel that are unpacked at a time: with those of a second panel, they stay in a core's second cache.
const CHUNK: usize = 24;

/// Panels that are multiplied together: they share a tile of rows.
const PAIR: usize = 2;

/// Products of tiles that are stored before vectors load the first of them: until then it is in the first cache.
const TOGETHER: usize = 8;

/// Pairs of them.
const PAIRS: usize = TOGETHER / 2;

/// Pairs that are multiplied before one is stored: a product takes as long.
const LATER: usize = 2;

/// Bytes of a row's numbers in half a block.
const HALF: usize = BLOCK / 2;

/// Sums of [`TOGETHER`] products.
type Found = [Line<i32>; TOGETHER * ROWS];

/// Repeats code for each of `$count` rows. A loop would keep vectors in memory.
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

/// 1.5 * 2^23: an integer of 22 bits that is added to its bits is added to the float.
const LARGE: f32 = 12_582_912.0;

/// Codes of a panel for 32 inputs as a tile has them, less their offset, and the panel's scales.
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

/// Whether [`add_tile_products`] is for this weight and these tiles of rows.
pub(crate) fn takes(isa: Isa, weight: &QuantizedWeight, tiles: &[RowTile]) -> bool {
    let many = match weight.kind().offset() {
        Offset::OfBlock(_) => MANY_ROWS[0],
        Offset::OfHalves(_) => MANY_ROWS[1],
    };
    isa == Isa::Amx
        && Build::at(isa) == Build::Vnni
        && tiles.iter().map(|tile| tile.width).sum::<usize>() >= many
}

/// Adds to `sums`, `[panels, rows of the tiles]`, the products of the tiles' rows with these panels. Only for what
/// [`takes`] is for.
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
        let mut found = Box::new([[Line([0; WIDTH]); TOGETHER * ROWS]; 2]);
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
                        let shapes = shapes(tile.width, BLOCK / S::EACH);
                        set_up = Some((tile.width, Tiles::of_shapes(&shapes)));
                    }
                    let begin = tile.blocks.start + first * tile.width;
                    let rows = self.blocks.part(begin..begin + count * tile.width);
                    let (even, odd) = unpacked.split_at(chunk);
                    let product = Product {
                        panels: [&even[..count], &odd[..count]],
                        rows,
                        sums,
                        places: [first_row, num_rows + first_row],
                        found: &mut found,
                        next,
                        panel_bytes,
                        ahead,
                    };
                    // SAFETY: the machine has the instructions, as whoever calls has them.
                    unsafe {
                        match (S::EACH, S::HAS_MINIMUM, S::ARE_LONG) {
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
    scales: &PanelScales<'_>,
    first: usize,
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
        let large = <__m512 as Vector<16>>::splat(-LARGE);
        for at in 0..S::EACH {
            scales[at].store(&mut block.scales[at]);
            scales[at].multiply(large).store(&mut block.starts[at]);
        }
        minimum.store(&mut block.minimum);
    }
}

/// Some blocks of one panel or two, and a tile of rows.
struct Product<'a> {
    panels: [&'a [Block]; PAIR],
    /// `[blocks, width]`.
    rows: RowBlocks<'a>,
    sums: &'a mut [[f32; WIDTH]],
    /// Where the rows of each panel begin there.
    places: [usize; PAIR],
    found: &'a mut [Found; 2],
    /// What is asked for meanwhile, of as many panels; the bytes of a panel; and how many lines of each.
    next: *const u8,
    panel_bytes: usize,
    ahead: usize,
}

impl Product<'_> {
    /// Adds the products of the rows. A block has `EACH` scales; they may be long, as [`Scales::ARE_LONG`] has it.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add<const EACH: usize, const HAS_MINIMUM: bool, const ARE_LONG: bool>(
        self,
        num_panels: usize,
        width: usize,
    ) {
        match (num_panels, width) {
            (1, 8) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 1, 8>(),
            (1, 12) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 1, 12>(),
            (1, 16) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 1, 16>(),
            (2, 8) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 2, 8>(),
            (2, 12) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 2, 12>(),
            (2, 16) => self.add_rows::<EACH, HAS_MINIMUM, ARE_LONG, 2, 16>(),
            _ => unreachable!("there are no such tiles"),
        }
    }

    /// Adds the products of `R` rows with `P` panels: while tiles multiply some blocks, vectors add those before to the
    /// sums.
    #[inline(always)]
    fn add_rows<
        const EACH: usize,
        const HAS_MINIMUM: bool,
        const ARE_LONG: bool,
        const P: usize,
        const R: usize,
    >(
        self,
    ) {
        let (numbers, factors) = self.rows.by_rows::<R>();
        let mut pairs = Pairs::<EACH, P, R> {
            panels: self.panels,
            numbers,
            found: self.found,
            count: (numbers.len() * EACH * P).div_ceil(2),
            next: 0,
        };
        let each = TOGETHER / P / EACH;
        let num_steps = numbers.len().div_ceil(each);
        let lines = self.ahead.div_ceil(num_steps);
        pairs.multiply_to(PAIRS + LATER);
        for step in 0..num_steps {
            let part = step * each..numbers.len().min((step + 1) * each);
            let end = (step + 2) * PAIRS + LATER;
            for panel in 0..P {
                let sums_of_panel = &mut self.sums[self.places[panel]..][..R];
                let mut sums = [<__m512 as Vector<16>>::splat(0.0); R];
                each_row!(R, row => { sums[row] = __m512::load(&sums_of_panel[row]); });
                for (number, (rows, weights)) in factors[part.clone()]
                    .iter()
                    .zip(&self.panels[panel][part.clone()])
                    .enumerate()
                {
                    if (number * EACH).is_multiple_of(2) {
                        pairs.multiply_to(end.min(pairs.next + 1));
                    }
                    let place = (panel * each + number) * EACH * ROWS;
                    let products = &pairs.found[step % 2][place..][..EACH * ROWS];
                    scale::<EACH, HAS_MINIMUM, ARE_LONG, R>(weights, rows, products, &mut sums);
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

/// Pairs of products of tiles: of a block with two panels, or of two blocks with one, or of the halves of blocks. A pair is
/// stored [`LATER`], when its products are there.
struct Pairs<'a, const EACH: usize, const P: usize, const R: usize> {
    panels: [&'a [Block]; PAIR],
    numbers: &'a [[Numbers; R]],
    /// Of even and of odd steps, `[panels, blocks, halves]`.
    found: &'a mut [Found; 2],
    count: usize,
    /// The number of the next pair.
    next: usize,
}

impl<const EACH: usize, const P: usize, const R: usize> Pairs<'_, EACH, P, R> {
    /// Multiplies pairs before the one of this number, and stores those that are due.
    #[inline(always)]
    fn multiply_to(&mut self, end: usize) {
        for pair in self.next..end.min(self.count + LATER) {
            let stored = pair.wrapping_sub(LATER);
            let place = stored % PAIRS * ROWS;
            let found = &mut self.found[stored / PAIRS % 2];
            let [first, second] = match P {
                1 => [2 * place, 2 * place + ROWS],
                _ => [place, PAIRS * ROWS + place],
            };
            if pair % 2 == 0 {
                if pair >= LATER {
                    store!("tmm0", found[first..]);
                    store!("tmm1", found[second..]);
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
                if pair >= LATER {
                    store!("tmm2", found[first..]);
                    store!("tmm3", found[second..]);
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

    /// The block of a product of a pair. With one panel and an odd number of blocks, the last one is multiplied twice.
    #[inline(always)]
    fn block(&self, pair: usize, number: usize) -> usize {
        match P {
            1 => ((2 * pair + number) / EACH).min(self.numbers.len() - 1),
            _ => pair / EACH,
        }
    }

    /// The half of a block, where it has two scales.
    #[inline(always)]
    fn half(&self, pair: usize, number: usize) -> usize {
        match P {
            1 => number % EACH,
            _ => pair % EACH,
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
        let each = BLOCK / 4 / EACH;
        Rows::every(
            &block.codes[self.half(pair, number) * each..][..each],
            STRIDE,
        )
    }
}

/// Multiplies the sums of a block's products by their scales and adds them to the sums of all blocks. While tiles are at
/// work, half of the units for floats rest, not those for integers: so an addition of integers makes floats of the sums.
/// The multiplication that takes [`LARGE`] away again rounds once, as that of the sums would.
#[inline(always)]
fn scale<const EACH: usize, const HAS_MINIMUM: bool, const ARE_LONG: bool, const R: usize>(
    block: &Block,
    rows: &[Factors; R],
    products: &[Line<i32>],
    sums: &mut [__m512; R],
) {
    let (products, _) = products.as_chunks::<ROWS>();
    let products = &products[..EACH];
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
        for half in 0..EACH {
            // SAFETY: the machine has these instructions, as whoever calls has them; 64 bytes are read.
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
