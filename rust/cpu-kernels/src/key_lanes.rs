//! Attention over a part with keys as lanes: the few rows of a decode fill the vectors as well as the many of a prefill.
//!
//! Keys of a tile are turned into lanes once, for all rows. A part is scored as a whole before its first value is read.

use std::ops::Range;

use crate::cache_tiles::Tiles;
use crate::job::{HEADER, state_len};
use crate::kernel::{Bounds, How};
use crate::step::{PART, TILE};

/// Lanes of a vector; rows of a group of them, too.
pub(crate) const LANES: usize = 16;
/// Vectors of keys in a tile.
pub(crate) const HALVES: usize = TILE / LANES;
/// Tiles of a part, for which each row has memory.
pub(crate) const PER_ROW: usize = PART / TILE;
/// Rows multiplied per load of the registers.
#[cfg(target_arch = "x86_64")]
pub(crate) const TOGETHER: usize = 4;

/// The products, and the memory between them. Rows and tiles are counted in the vector and in the part.
pub(crate) trait KeyLanes<E> {
    /// For vectors of this number of rows.
    fn make_room(&mut self, max_rows: usize);

    /// Turns the keys of a tile.
    fn take_keys(&mut self, tiles: &Tiles<'_, E>, tile: usize);

    /// Scores of this number of rows of a vector with a loaded tile.
    fn score(&mut self, vector: usize, num_rows: usize, tile: usize);

    /// Scores of these tiles become weights; the header what they are measured against and their sum. The part begins
    /// at `start`. Sums begin with 0.
    fn soften(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<LANES>,
        tiles: Range<usize>,
        header: &mut [[f32; LANES]],
    );

    /// Turns the values of a tile, or widens them, unless they are read where they lie.
    fn take_values(&mut self, tiles: &Tiles<'_, E>, tile: usize);

    /// Adds the values of a tile that is there, weighted, to the sums of a vector's rows.
    fn weigh(&mut self, tiles: &Tiles<'_, E>, bounds: &Bounds<LANES>, tile: usize);

    /// The sums of a row.
    fn give(&self, row: usize, sums: &mut [f32]);
}

/// [`crate::kernel::Arithmetic::attend`] by these products.
#[inline(always)]
pub(crate) fn attend<E>(
    products: &mut impl KeyLanes<E>,
    how: How,
    tiles: &Tiles<'_, E>,
    vectors: &[Bounds<LANES>],
    states: &mut [[f32; LANES]],
) {
    let (max_rows, num_tiles) = (vectors[0].num_rows, tiles.len());
    products.make_room(max_rows);
    for tile in 0..num_tiles {
        tiles.fetch_after(tile);
        products.take_keys(tiles, tile);
        products.score(0, max_rows, tile);
    }
    let size = states.len() / vectors.len();
    let dim_v = size - state_len(0);
    let vectors = vectors.iter().zip(states.chunks_exact_mut(size));
    for (number, (bounds, state)) in vectors.enumerate() {
        let near = |tile: &usize| !bounds.near(tiles.start_of(*tile)).is_empty();
        let begin = (0..num_tiles).find(near).unwrap_or(0);
        let end = (begin..num_tiles)
            .rfind(near)
            .map_or(begin, |last| last + 1);
        if number > 0 {
            for tile in begin..end {
                products.score(number, bounds.num_rows, tile);
            }
        }
        let (header, sums) = state.split_at_mut(HEADER);
        products.soften(how, tiles.start, bounds, begin..end, header);
        for tile in 0..num_tiles {
            if number == 0 {
                products.take_values(tiles, tile);
            }
            if (begin..end).contains(&tile) {
                products.weigh(tiles, bounds, tile);
            }
        }
        let rows = sums.as_flattened_mut().chunks_exact_mut(dim_v);
        for (row, sums) in rows.take(bounds.num_rows).enumerate() {
            products.give(row, sums);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{is_factor, largest, make_room, measure, seen};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::f32::consts::LOG2_E;

    use super::{HALVES, LANES};
    use crate::kernel::{Bounds, How};
    use crate::lanes::Vector;
    use crate::softmax::capped;
    use crate::step::TILE;
    use crate::tiles::Line;

    /// The largest of a row's scores, which begin with tile `first` of the part from `start` on, capped. Those with keys that
    /// the row, a lane of `bounds`, does not see become minus infinity.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn largest(
        how: How,
        scores: &mut [Line<f32>],
        start: usize,
        first: usize,
        bounds: &Bounds<LANES>,
        lane: usize,
    ) -> f32 {
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut largest = nothing;
        for (at, score) in scores.iter_mut().enumerate() {
            if !is_factor(how) {
                capped(how, &mut score.0);
            }
            let mut scores = __m512::load(&score.0);
            if !bounds.is_whole(start + (first + at / HALVES) * TILE) {
                let position = first * TILE + at * LANES;
                let is_seen = seen(start + position, bounds, lane);
                scores = _mm512_mask_blend_ps(is_seen, nothing, scores);
                scores.store(&mut score.0);
            }
            largest = _mm512_max_ps(scores, largest);
        }
        _mm512_reduce_max_ps(largest)
    }

    /// The keys, of 16 from `position` on, that a lane of `bounds` sees.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn seen(position: usize, bounds: &Bounds<LANES>, lane: usize) -> __mmask16 {
        let positions = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        let [low, high] =
            [bounds.lows, bounds.highs].map(|ends| _mm512_set1_epi32(ends[lane] - position as i32));
        let is_seen = _mm512_cmple_epi32_mask(low, positions);
        _mm512_mask_cmplt_epi32_mask(is_seen, positions, high)
    }

    /// Whether scores are to be multiplied only, which powers of 2 do on their way.
    pub(crate) fn is_factor(how: How) -> bool {
        matches!(how, (scaling, None) if scaling > 0.0)
    }

    /// The factor on scores, for powers of 2, and the reference that is subtracted from them.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn measure(how: How, largest: f32) -> (__m512, __m512) {
        let factor = if is_factor(how) { how.0 * LOG2_E } else { 1.0 };
        (_mm512_set1_ps(factor), _mm512_set1_ps(largest * factor))
    }

    /// Room for `count`, at least.
    pub(crate) fn make_room<T: Copy>(memory: &mut Vec<T>, count: usize, nothing: T) {
        if memory.len() < count {
            memory.resize(count, nothing);
        }
    }
}
