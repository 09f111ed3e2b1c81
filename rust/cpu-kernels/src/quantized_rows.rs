//! Rows of floats as small integers, in the order in which products with quantised weights read them.

use std::ops::Range;

use crate::builds::{InEachBuild, best_build};
use crate::element::{Element, widen};
use crate::isa::Isa;
use crate::quantized_format::{BLOCK, Offset};

/// Rows of a tile: fewer are filled up with rows of zeros.
const TILE_ROWS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// A largest number below which a block counts as zeros.
const TINY: f32 = 1e-35;

/// 32 numbers of a row: integers from -127 to 127, times the scale.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(crate) struct RowBlock {
    pub(crate) numbers: [[i8; 4]; BLOCK / 4],
    /// The start of sums with codes: minus their offset, times the integers of the block or of each half.
    pub(crate) starts: [i32; 2],
    pub(crate) scale: f32,
    /// The sum of the integers, times the scale.
    pub(crate) sum: f32,
}

impl RowBlock {
    pub(crate) const ZERO: Self = Self {
        numbers: [[0; 4]; BLOCK / 4],
        starts: [0; 2],
        scale: 0.0,
        sum: 0.0,
    };

    /// The nearest integers; with `scale` a 127th of the largest absolute value. A number that is not finite makes the scale
    /// so.
    #[inline(always)]
    fn new(floats: &[f32; BLOCK], offset: Offset) -> Self {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low bits
        let magnitude = |float: &f32| float.to_bits() & 0x7fff_ffff;
        let largest = floats.iter().map(magnitude).fold(0, u32::max);
        let largest = f32::from_bits(largest);
        let factor = if largest < TINY { 0.0 } else { 127.0 / largest };
        let numbers = floats.map(|float| (float * factor + ROUND).to_bits() as u8 as i8);
        let (halves, _) = numbers.as_chunks::<{ BLOCK / 2 }>();
        let sum = |half: usize| halves[half].iter().map(|&number| i32::from(number)).sum();
        let [first, second]: [i32; 2] = std::array::from_fn(sum);
        let scale = largest / 127.0;
        let (fours, _) = numbers.as_chunks();
        Self {
            numbers: std::array::from_fn(|at| fours[at]),
            starts: match offset {
                Offset::OfBlock(offset) => [-offset * (first + second), 0],
                Offset::OfHalves(offset) => [-offset * first, -offset * second],
            },
            scale,
            sum: (first + second) as f32 * scale,
        }
    }
}

/// Rows that are multiplied together: `[blocks, width]` of [`RowBlock`].
#[derive(Clone, Debug)]
pub(crate) struct RowTile {
    /// Of the rows.
    pub(crate) rows: Range<usize>,
    /// Rows with those that fill it up.
    pub(crate) width: usize,
    /// Of the blocks.
    pub(crate) blocks: Range<usize>,
}

/// So many rows of so many blocks, in tiles of at most `most` rows.
pub(crate) fn tiles(count: usize, num_blocks: usize, most: usize) -> Vec<RowTile> {
    let num_tiles = count.div_ceil(most);
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

/// Makes the blocks of a tile.
pub(crate) struct Quantize<'a, E> {
    /// `[rows, in_features]`.
    pub(crate) rows: &'a [E],
    pub(crate) in_features: usize,
    pub(crate) offset: Offset,
    pub(crate) width: usize,
    pub(crate) blocks: &'a mut [RowBlock],
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
        for (number, row) in self.rows.chunks_exact(self.in_features).enumerate() {
            let blocks = self.blocks[number..].iter_mut().step_by(self.width);
            for (block, elements) in blocks.zip(row.as_chunks::<BLOCK>().0) {
                let mut floats = [0.0; BLOCK];
                widen(elements, &mut floats);
                *block = RowBlock::new(&floats, self.offset);
            }
        }
        for number in count..self.width {
            for block in self.blocks[number..].iter_mut().step_by(self.width) {
                *block = RowBlock::ZERO;
            }
        }
    }
}
