//! Activation rows as 8-bit integers, in the order in which products with quantised weights read them.

use std::ops::Range;

use crate::builds::{InEachBuild, best_build};
use crate::element::Element;
use crate::isa::Isa;
use crate::quantized_format::{BLOCK, Offset};

/// Numbers of rows that a tile may have; other numbers are padded with rows of zeros.
const TILE_ROWS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// A block whose absolute values are all smaller is quantised to zeros.
const TINY: f32 = 1e-35;

/// 32 numbers of a row: integers from -127 to 127, within one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Numbers(pub(crate) [[i8; 4]; BLOCK / 4]);

/// The scale and sums of [`Numbers`].
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(crate) struct Factors {
    /// Initial values of sums of products: minus the codes' offset times the sum of the block's or each half's integers.
    pub(crate) starts: [i32; 2],
    pub(crate) scale: f32,
    /// The sum of the integers, times the scale.
    pub(crate) sum: f32,
}

impl Numbers {
    const ZERO: Self = Self([[0; 4]; BLOCK / 4]);

    /// Rounds floats to the nearest integers, with a scale of a 127th of the largest absolute value. NaN and infinities
    /// make the scale not finite. The compiler vectorises the arrays of 16.
    #[inline(always)]
    fn set(&mut self, floats: &[f32; BLOCK], offset: Offset) -> Factors {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low bits
        const HALF: usize = BLOCK / 2;
        let mut magnitudes = [0; HALF];
        for (at, magnitude) in magnitudes.iter_mut().enumerate() {
            let [first, second] = [floats[at].to_bits(), floats[HALF + at].to_bits()];
            *magnitude = (first & 0x7fff_ffff).max(second & 0x7fff_ffff);
        }
        let largest = f32::from_bits(magnitudes.into_iter().fold(0, u32::max));
        let factor = if largest < TINY { 0.0 } else { 127.0 / largest };
        let (halves, _) = self.0.as_flattened_mut().as_chunks_mut::<HALF>();
        let mut sums = [0; 2];
        for half in 0..2 {
            let mut integers = [0; HALF];
            for at in 0..HALF {
                let rounded = floats[half * HALF + at] * factor + ROUND;
                integers[at] = rounded.to_bits().cast_signed() << 24 >> 24;
            }
            for at in 0..HALF {
                halves[half][at] = integers[at] as i8;
            }
            sums[half] = integers.into_iter().sum();
        }
        let [first, second] = sums;
        let scale = largest / 127.0;
        Factors {
            starts: match offset {
                Offset::OfBlock(offset) => [-offset * (first + second), 0],
                Offset::OfHalves(offset) => [-offset * first, -offset * second],
            },
            scale,
            sum: (first + second) as f32 * scale,
        }
    }
}

impl Factors {
    const ZERO: Self = Self {
        starts: [0; 2],
        scale: 0.0,
        sum: 0.0,
    };
}

/// Buffers for the blocks of rows.
#[derive(Debug, Default)]
pub(crate) struct RowMemory {
    numbers: Vec<Numbers>,
    factors: Vec<Factors>,
}

impl RowMemory {
    /// Buffers for `size` blocks, not initialised.
    pub(crate) fn buffers(&mut self, size: usize) -> (&mut [Numbers], &mut [Factors]) {
        if self.numbers.len() < size {
            self.numbers = vec![Numbers::ZERO; size];
            self.factors = vec![Factors::ZERO; size];
        }
        (&mut self.numbers[..size], &mut self.factors[..size])
    }

    pub(crate) fn size(&self) -> usize {
        size_of_val(&self.numbers[..]) + size_of_val(&self.factors[..])
    }

    /// The blocks in the buffers.
    pub(crate) fn blocks(&self) -> RowBlocks<'_> {
        RowBlocks {
            numbers: &self.numbers,
            factors: &self.factors,
        }
    }
}

/// Blocks of rows. Numbers and factors are separate, so a tile of numbers takes half as many cache lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowBlocks<'a> {
    pub(crate) numbers: &'a [Numbers],
    pub(crate) factors: &'a [Factors],
}

impl<'a> RowBlocks<'a> {
    pub(crate) const BYTES: usize = size_of::<Numbers>() + size_of::<Factors>();

    #[inline(always)]
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        Self {
            numbers: &self.numbers[range.clone()],
            factors: &self.factors[range],
        }
    }

    /// By blocks of `R` rows.
    #[inline(always)]
    pub(crate) fn by_rows<const R: usize>(self) -> (&'a [[Numbers; R]], &'a [[Factors; R]]) {
        (self.numbers.as_chunks().0, self.factors.as_chunks().0)
    }
}

/// Rows that are multiplied together: `[blocks, width]` of [`RowBlocks`].
#[derive(Clone, Debug)]
pub(crate) struct RowTile {
    /// Rows of the input.
    pub(crate) rows: Range<usize>,
    /// Rows with padding.
    pub(crate) width: usize,
    /// Range of the blocks.
    pub(crate) blocks: Range<usize>,
}

/// Divides `count` rows of `num_blocks` blocks into tiles of at most `max_rows` rows.
pub(crate) fn tiles(count: usize, num_blocks: usize, max_rows: usize) -> Vec<RowTile> {
    let num_tiles = count.div_ceil(max_rows);
    let mut first = 0;
    let tile = |number: usize| {
        let rows = number * count / num_tiles..(number + 1) * count / num_tiles;
        let fits = |&width: &usize| width >= rows.len();
        let width = TILE_ROWS.into_iter().find(fits).unwrap_or(rows.len());
        let blocks = first..first + width * num_blocks;
        first = blocks.end;
        RowTile {
            rows,
            width,
            blocks,
        }
    };
    (0..num_tiles).map(tile).collect()
}

/// Quantises the rows of a tile.
pub(crate) struct Quantize<'a, E> {
    /// `[rows, in_features]`.
    pub(crate) rows: &'a [E],
    pub(crate) in_features: usize,
    pub(crate) offset: Offset,
    pub(crate) width: usize,
    pub(crate) numbers: &'a mut [Numbers],
    pub(crate) factors: &'a mut [Factors],
}

impl<E: Element> Quantize<'_, E> {
    pub(crate) fn run_at(self, isa: Isa) {
        best_build(isa, self);
    }
}

impl<E: Element> InEachBuild for Quantize<'_, E> {
    #[inline(always)]
    fn run(self) {
        let count = self.rows.len() / self.in_features;
        let mut scratch = vec![];
        for (number, row) in self.rows.chunks_exact(self.in_features).enumerate() {
            let floats = E::floats(row, &mut scratch);
            let numbers = self.numbers[number..].iter_mut().step_by(self.width);
            let factors = self.factors[number..].iter_mut().step_by(self.width);
            for ((numbers, factors), floats) in numbers.zip(factors).zip(floats.as_chunks().0) {
                *factors = numbers.set(floats, self.offset);
            }
        }
        for number in count..self.width {
            let numbers = self.numbers[number..].iter_mut().step_by(self.width);
            numbers.for_each(|numbers| *numbers = Numbers::ZERO);
            let factors = self.factors[number..].iter_mut().step_by(self.width);
            factors.for_each(|factors| *factors = Factors::ZERO);
        }
    }
}
