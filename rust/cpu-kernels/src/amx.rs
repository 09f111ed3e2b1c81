//! Products of bfloat16 by AMX, Intel's matrix instructions: 16 rows of one side by 16 of the other at once, 32 products
//! each.
//!
//! A part is scored as a whole before its first value is read, so sums stay in the tiles and nothing fades. Weights are
//! rounded to bfloat16 before they meet the values, as in torch and flash-attn. A tile's sum adds up the products of even
//! and of odd places apart, 32 at a time, whichever side lies in which tile: a row's bits are its own here too.
//!
//! Few rows, as in a decode, are multiplied with keys where these lie, and the scores are turned. For many rows, keys are
//! turned once for all of them.

use std::arch::x86_64::*;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::take;
use std::ops::Range;

use crate::cache_tiles;
use crate::job::HEADER;
use crate::kernel::{Arithmetic, Bounds, How};
use crate::key_lanes::{HALVES, is_factor, make_room, measure, seen};
use crate::lanes::{Vector, transpose_16};
use crate::softmax::capped;
use crate::step::{CacheShape, TILE};
use crate::tiles::{
    Line, ROWS, Rows, STRIDE, Shape, TILES, Tiles, WIDTH, load, multiply_add, store, zero,
};

/// Tiles of sums in [`Amx::weigh`].
const SUMS: usize = 4;

/// Rows whose scores are turned together where there are no more.
const FEW: usize = 4;

/// Queries and a part as the instructions want them.
pub(crate) struct Amx {
    dim_k: usize,
    dim_v: usize,
    /// True if there is a single vector of rows.
    is_alone: bool,
    memory: Memory,
    _tiles: Tiles,
}

/// Buffers, large enough for the part or larger.
#[derive(Default)]
struct Memory {
    /// Of a single vector `[dim_k / 2]` of rows, two neighbouring dimensions each; of several `[vectors, dim_k / 32, rows]`
    /// of 32 dimensions.
    queries: Vec<Line<u32>>,
    /// `[tiles, halves, dim_k / 2]` of keys, two neighbouring dimensions each; for a single vector `[tiles, halves, 16,
    /// dim_k / 32]` of those that do not lie at equal distances.
    keys: Vec<Line<u32>>,
    /// `[tiles, places, 16]` of elements, two neighbouring positions each: see [`turn_values`].
    values: Vec<Line<u32>>,
    /// `[tiles, halves, rows]` of keys.
    scores: Vec<Line<f32>>,
    /// `[tiles, rows]` of keys, two neighbouring ones each.
    weights: Vec<Line<u32>>,
    /// `[places, rows]` of elements.
    sums: Vec<Line<f32>>,
}

thread_local! {
    /// From task to task of a thread: fresh memory costs as much as the work of a short one.
    static KEPT: Cell<Memory> = Cell::default();
}

impl Drop for Amx {
    fn drop(&mut self) {
        KEPT.set(take(&mut self.memory));
    }
}

impl Amx {
    /// Whether it is for a cache of this shape.
    pub(crate) fn takes(shape: &CacheShape) -> bool {
        shape.dim_k.is_multiple_of(WIDTH) && shape.dim_v.is_multiple_of(ROWS)
    }

    /// Lines of a half of a tile's keys.
    fn per_half(&self) -> usize {
        self.dim_k / 2
    }

    /// Tiles of 16 elements of a value, an even number.
    fn num_columns(&self) -> usize {
        2 * self.dim_v.div_ceil(WIDTH)
    }
}

/// Tiles 0 to 3 are sums of `num_rows` rows and 4 is these rows; the others are whole.
fn shapes(num_rows: usize) -> [Shape; TILES] {
    let rows = Shape {
        rows: num_rows,
        bytes: STRIDE,
    };
    let whole = Shape::WHOLE;
    [rows, rows, rows, rows, rows, whole, whole, whole]
}

impl Arithmetic<u16, ROWS> for Amx {
    type Lanes = __m512;

    #[inline(always)]
    fn is_narrow(_: usize) -> bool {
        true
    }

    #[inline(always)]
    fn new(shape: &CacheShape, num_rows: usize, num_tiles: usize) -> Self {
        let num_vectors = num_rows.div_ceil(ROWS);
        let mut memory = KEPT.take();
        let pairs = shape.dim_k / 2;
        let num_columns = 2 * shape.dim_v.div_ceil(WIDTH);
        make_room(&mut memory.queries, num_vectors * pairs, Line([0; ROWS]));
        make_room(
            &mut memory.keys,
            num_tiles * HALVES * pairs,
            Line([0; ROWS]),
        );
        make_room(
            &mut memory.values,
            num_tiles * num_columns * ROWS,
            Line([0; ROWS]),
        );
        make_room(&mut memory.scores, num_tiles * TILE, Line([0.0; ROWS]));
        make_room(&mut memory.weights, num_tiles * ROWS, Line([0; ROWS]));
        make_room(&mut memory.sums, num_columns * ROWS, Line([0.0; ROWS]));
        Self {
            dim_k: shape.dim_k,
            dim_v: shape.dim_v,
            is_alone: num_vectors == 1,
            memory,
            _tiles: Tiles::of_shapes(&shapes(num_rows.min(ROWS))),
        }
    }

    #[inline(always)]
    fn take_queries<'q>(&mut self, number: usize, queries: impl Iterator<Item = &'q [u16]>) {
        let mut rows: [&[u16]; ROWS] = [&[]; ROWS];
        for (row, query) in rows.iter_mut().zip(queries) {
            *row = query;
        }
        let lines = &mut self.memory.queries[number * self.dim_k / 2..][..self.dim_k / 2];
        for (at, lines) in lines.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            // SAFETY: the machine has AVX-512, as every one with AMX.
            unsafe {
                let rows = loaded(&rows, at * WIDTH);
                let query_tile = if self.is_alone {
                    transpose_16(rows)
                } else {
                    rows
                };
                keep(&query_tile, lines);
            }
        }
    }

    #[inline(always)]
    fn attend(
        &mut self,
        how: How,
        tiles: &cache_tiles::Tiles<'_, u16>,
        vectors: &[Bounds<ROWS>],
        states: &mut [[f32; ROWS]],
    ) {
        let num_tiles = tiles.len();
        let size = states.len() / vectors.len();
        for tile in 0..num_tiles {
            tiles.fetch_after(tile);
            match self.is_alone {
                true => self.score_in_place(tiles, tile),
                false => self.take_keys(tiles, tile),
            }
            self.take_values(tiles, tile);
        }
        for (number, (bounds, state)) in vectors
            .iter()
            .zip(states.chunks_exact_mut(size))
            .enumerate()
        {
            let near = |tile: &usize| !bounds.near(tiles.start_of(*tile)).is_empty();
            let begin = (0..num_tiles).find(near).unwrap_or(0);
            let end = (begin..num_tiles)
                .rfind(near)
                .map_or(begin, |last| last + 1);
            let (header, sums) = state.split_at_mut(HEADER);
            let sums = sums.as_flattened_mut();
            // SAFETY: the machine has these instructions, as every one with AMX.
            unsafe {
                match self.is_alone {
                    true => self.turn_scores(bounds.num_rows, begin..end),
                    false => self.score(number, begin..end),
                }
                self.soften(how, tiles.start, bounds, begin..end, header);
                self.weigh(begin..end);
                self.give(bounds.num_rows, sums);
            }
        }
    }
}

impl Amx {
    /// Scores of the single vector with the keys of a tile where they lie: `[halves, keys]` of rows.
    #[inline(always)]
    fn score_in_place(&mut self, tiles: &cache_tiles::Tiles<'_, u16>, tile: usize) {
        let per_half = self.per_half();
        let memory = &mut self.memory;
        let queries = &memory.queries[..per_half];
        let keys = tiles.keys(tile).into_computed();
        for (half, keys) in keys.as_chunks::<ROWS>().0.iter().enumerate() {
            let at = tile * HALVES + half;
            let keys = Rows::spread(keys)
                .unwrap_or_else(|| copied(keys, &mut memory.keys[at * per_half..][..per_half]));
            zero!("tmm5");
            for (at, query) in queries.as_chunks::<ROWS>().0.iter().enumerate() {
                load!("tmm6", Rows::of(query), 0);
                load!("tmm7", keys, at * STRIDE);
                multiply_add!("tmm5", "tmm7", "tmm6");
            }
            store!("tmm5", memory.scores[at * ROWS..]);
        }
    }

    /// These scores become `[halves, rows]` of keys.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn turn_scores(&mut self, num_rows: usize, tiles: Range<usize>) {
        let scores = &mut self.memory.scores[tiles.start * TILE..tiles.end * TILE];
        for half in scores.as_chunks_mut::<ROWS>().0 {
            match num_rows {
                ..=FEW => turn_few(half),
                _ => turn(half),
            }
        }
    }

    /// Turns the keys of a tile.
    #[inline(always)]
    fn take_keys(&mut self, tiles: &cache_tiles::Tiles<'_, u16>, tile: usize) {
        let per_half = self.per_half();
        let keys = tiles.keys(tile).into_computed();
        let lines = &mut self.memory.keys[tile * HALVES * per_half..][..HALVES * per_half];
        for (keys, lines) in keys
            .as_chunks::<ROWS>()
            .0
            .iter()
            .zip(lines.chunks_exact_mut(per_half))
        {
            for (at, lines) in lines.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                // SAFETY: the machine has AVX-512, as every one with AMX.
                unsafe { keep(&transpose_16(loaded(keys, at * WIDTH)), lines) };
            }
        }
    }

    /// Scores of vector `number` with the keys of these tiles.
    #[inline(always)]
    fn score(&mut self, number: usize, tiles: Range<usize>) {
        let per_half = self.per_half();
        let memory = &mut self.memory;
        let queries = &memory.queries[number * per_half..][..per_half];
        for tile in tiles.step_by(2) {
            // The second tile may be beyond the last one: its scores are not read.
            let keys = |half: usize, at: usize| {
                let first = (tile * HALVES + half) * per_half + at * ROWS;
                Rows::of(&memory.keys[first.min(memory.keys.len() - ROWS)..])
            };
            zero!("tmm0", "tmm1", "tmm2", "tmm3");
            for (at, query) in queries.as_chunks::<ROWS>().0.iter().enumerate() {
                load!("tmm4", Rows::of(query), 0);
                load!("tmm5", keys(0, at), 0);
                multiply_add!("tmm0", "tmm4", "tmm5");
                load!("tmm6", keys(1, at), 0);
                multiply_add!("tmm1", "tmm4", "tmm6");
                load!("tmm7", keys(2, at), 0);
                multiply_add!("tmm2", "tmm4", "tmm7");
                load!("tmm5", keys(3, at), 0);
                multiply_add!("tmm3", "tmm4", "tmm5");
            }
            let scores = &mut memory.scores[tile * TILE..];
            store!("tmm0", scores);
            store!("tmm1", scores[ROWS..]);
            if scores.len() > TILE {
                store!("tmm2", scores[TILE..]);
                store!("tmm3", scores[TILE + ROWS..]);
            }
        }
    }

    /// Scores with the keys of these tiles become weights, rounded; the header what they are measured against and their
    /// sum. The part begins at `start`.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn soften(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<ROWS>,
        tiles: Range<usize>,
        header: &mut [[f32; ROWS]],
    ) {
        for row in 0..bounds.num_rows {
            let largest = self.largest(how, start, bounds, tiles.clone(), row);
            let (factor, reference) = measure(how, largest);
            let mut total = _mm512_setzero_ps();
            for tile in tiles.clone() {
                let scores = &self.memory.scores[tile * TILE..][..TILE];
                let [low, high] = [row, ROWS + row]
                    .map(|at| weight(__m512::load(&scores[at].0), factor, reference));
                total = _mm512_add_ps(_mm512_add_ps(total, low), high);
                // SAFETY: both are 64 bytes.
                let pairs: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) };
                let weights = &mut self.memory.weights[tile * ROWS + row];
                // SAFETY: 64 bytes are written.
                unsafe { _mm512_store_si512(weights.0.as_mut_ptr().cast(), pairs) };
            }
            header[0][row] = _mm512_cvtss_f32(reference);
            header[1][row] = _mm512_reduce_add_ps(total);
        }
    }

    /// The largest score of a row, which are capped. Those with keys that it does not see become minus infinity.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn largest(
        &mut self,
        how: How,
        start: usize,
        bounds: &Bounds<ROWS>,
        tiles: Range<usize>,
        row: usize,
    ) -> f32 {
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut largest = nothing;
        for tile in tiles {
            let start = start + tile * TILE;
            let is_whole = bounds.is_whole(start);
            for half in 0..HALVES {
                let score = &mut self.memory.scores[tile * TILE + half * ROWS + row];
                if !is_factor(how) {
                    capped(how, &mut score.0);
                }
                let mut scores = __m512::load(&score.0);
                if !is_whole {
                    let is_seen = seen(start + half * ROWS, bounds, row);
                    scores = _mm512_mask_blend_ps(is_seen, nothing, scores);
                    scores.store(&mut score.0);
                }
                largest = _mm512_max_ps(scores, largest);
            }
        }
        _mm512_reduce_max_ps(largest)
    }

    /// Turns the values of a tile.
    #[inline(always)]
    fn take_values(&mut self, tiles: &cache_tiles::Tiles<'_, u16>, tile: usize) {
        let size = self.num_columns() * ROWS;
        let values = tiles.values(tile).into_computed();
        let lines = &mut self.memory.values[tile * size..][..size];
        // SAFETY: the machine has AVX-512, as every one with AMX.
        unsafe { turn_values(&values, lines) };
    }

    /// The values of these tiles, weighted, become sums.
    #[inline(always)]
    fn weigh(&mut self, tiles: Range<usize>) {
        let num_columns = self.num_columns();
        let memory = &mut self.memory;
        for column in (0..num_columns).step_by(SUMS) {
            let values = |tile: usize, at: usize| {
                Rows::of(&memory.values[(tile * num_columns + column + at) * ROWS..])
            };
            let is_whole = column + SUMS <= num_columns;
            zero!("tmm0", "tmm1", "tmm2", "tmm3");
            for tile in tiles.clone() {
                load!("tmm4", Rows::of(&memory.weights[tile * ROWS..]), 0);
                load!("tmm5", values(tile, 0), 0);
                multiply_add!("tmm0", "tmm4", "tmm5");
                load!("tmm6", values(tile, 1), 0);
                multiply_add!("tmm1", "tmm4", "tmm6");
                if is_whole {
                    load!("tmm7", values(tile, 2), 0);
                    multiply_add!("tmm2", "tmm4", "tmm7");
                    load!("tmm5", values(tile, 3), 0);
                    multiply_add!("tmm3", "tmm4", "tmm5");
                }
            }
            let sums = &mut memory.sums[column * ROWS..];
            store!("tmm0", sums);
            store!("tmm1", sums[ROWS..]);
            if is_whole {
                store!("tmm2", sums[2 * ROWS..]);
                store!("tmm3", sums[3 * ROWS..]);
            }
        }
    }

    /// The sums as `[rows, dim_v]`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn give(&self, num_rows: usize, sums: &mut [f32]) {
        let pairs = self.memory.sums.as_chunks::<{ 2 * ROWS }>().0;
        for (row, sums) in sums.chunks_exact_mut(self.dim_v).take(num_rows).enumerate() {
            for (sums, products) in sums.chunks_mut(WIDTH).zip(pairs) {
                let (low, high) = (
                    __m512::load(&products[row].0),
                    __m512::load(&products[ROWS + row].0),
                );
                let elements = in_order(low, high);
                for (sums, elements) in sums.as_chunks_mut().0.iter_mut().zip(elements) {
                    elements.store(sums);
                }
            }
        }
    }
}

/// Keys, copied to where they lie at equal distances.
#[inline(always)]
fn copied<'t>(keys: &[&[u16]; ROWS], memory: &'t mut [Line<u32>]) -> Rows<'t> {
    let dim = keys[0].len();
    // SAFETY: a line is 32 elements, and every bit pattern is one.
    let (_, elements, _) = unsafe { memory.align_to_mut::<u16>() };
    for (copy, key) in elements.chunks_exact_mut(dim).zip(keys) {
        copy.copy_from_slice(key);
    }
    Rows {
        first: elements[..ROWS * dim].as_ptr().cast(),
        stride: size_of_val(keys[0]),
        borrowed: PhantomData,
    }
}

/// `2 ^ (score * factor - reference)`; 0 for hidden keys, whose score is minus infinity.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn weight(score: __m512, factor: __m512, reference: __m512) -> __m512 {
    let is_seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score, _mm512_set1_ps(f32::NEG_INFINITY));
    let (power, scale) = exp2(_mm512_fmsub_ps(score, factor, reference));
    _mm512_maskz_mul_ps(is_seen, power, scale)
}

/// `2 ^ x` for `x` of at most 0, as [`crate::lanes::exp2`] has it but to 1e-4, a twentieth of what rounding to bfloat16
/// costs: two factors.
#[target_feature(enable = "avx512f")]
#[inline]
fn exp2(x: __m512) -> (__m512, __m512) {
    let round = _mm512_set1_ps(12_583_039.0);
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let shifted = _mm512_add_ps(x, round);
    let r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, round));
    let mut power = _mm512_set1_ps(5.500_893e-2);
    for coefficient in [0.242_210_96, 0.693_282_9, 1.0] {
        power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(coefficient));
    }
    (
        power,
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))),
    )
}

/// 32 dimensions of all rows, from `first` on; of rows that are empty, zeros.
#[target_feature(enable = "avx512f")]
#[inline]
fn loaded(rows: &[&[u16]; ROWS], first: usize) -> [__m512i; ROWS] {
    let mut vectors = [_mm512_setzero_si512(); ROWS];
    for (vectors, row) in vectors.iter_mut().zip(rows) {
        if let Some(row) = row.get(first..first + WIDTH) {
            // SAFETY: 32 elements are read.
            *vectors = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
        }
    }
    vectors
}

#[target_feature(enable = "avx512f")]
#[inline]
fn keep<T>(vectors: &[__m512i; ROWS], lines: &mut [Line<T>; ROWS]) {
    const { assert!(size_of::<Line<T>>() == STRIDE) };
    for (line, vectors) in lines.iter_mut().zip(vectors) {
        // SAFETY: 64 bytes are written.
        unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), *vectors) };
    }
}

/// 16 lines of 16 numbers become columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn turn(lines: &mut [Line<f32>; ROWS]) {
    let rows = lines
        .each_ref()
        .map(|line| _mm512_castps_si512(__m512::load(&line.0)));
    keep(&transpose_16(rows), lines);
}

/// The first [`FEW`] columns of 16 lines become the first lines.
#[target_feature(enable = "avx512f")]
#[inline]
fn turn_few(lines: &mut [Line<f32>; ROWS]) {
    let mut fours = [_mm512_setzero_ps(); FEW];
    for (at, four) in fours.iter_mut().enumerate() {
        for (column, mask) in [0x000f, 0x00f0, 0x0f00, 0xf000].into_iter().enumerate() {
            // SAFETY: four numbers are read of 16.
            let numbers = unsafe { _mm_load_ps(lines[FEW * column + at].0.as_ptr()) };
            *four = _mm512_mask_broadcast_f32x4(*four, mask, numbers);
        }
    }
    let [a, b, c, d] = fours;
    let (low, high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (low, high) = (
        [low, _mm512_unpacklo_ps(c, d)].map(|both| _mm512_castps_pd(both)),
        [high, _mm512_unpackhi_ps(c, d)].map(|both| _mm512_castps_pd(both)),
    );
    let columns = [
        _mm512_unpacklo_pd(low[0], low[1]),
        _mm512_unpackhi_pd(low[0], low[1]),
        _mm512_unpacklo_pd(high[0], high[1]),
        _mm512_unpackhi_pd(high[0], high[1]),
    ];
    for (line, column) in lines.iter_mut().zip(columns) {
        _mm512_castpd_ps(column).store(&mut line.0);
    }
}

/// `lines[column][pair]` becomes 16 elements of two neighbouring values: of each 32, the even column has 0 to 3, 8 to 11
/// and so on, as one instruction gives them, the odd one the others. [`in_order`] has their sums.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_values(values: &[&[u16]; TILE], lines: &mut [Line<u32>]) {
    for (at, lines) in lines.chunks_exact_mut(2 * ROWS).enumerate() {
        let (even, odd) = lines.split_at_mut(ROWS);
        let pairs = values
            .as_chunks::<2>()
            .0
            .iter()
            .zip(even.iter_mut().zip(odd));
        for (&[first, second], (even, odd)) in pairs {
            let [first, second] = [first, second].map(|value| {
                let elements = &value[at * WIDTH..];
                match elements.first_chunk::<WIDTH>() {
                    // SAFETY: 32 elements are read.
                    Some(elements) => unsafe { _mm512_loadu_si512(elements.as_ptr().cast()) },
                    // SAFETY: 16 elements are read, of at least as many.
                    None => unsafe {
                        _mm512_maskz_loadu_epi16(0xffff, elements[..ROWS].as_ptr().cast())
                    },
                }
            });
            // SAFETY: 64 bytes are written each.
            unsafe {
                let pair = _mm512_unpacklo_epi16(first, second);
                _mm512_store_si512(even.0.as_mut_ptr().cast(), pair);
                let pair = _mm512_unpackhi_epi16(first, second);
                _mm512_store_si512(odd.0.as_mut_ptr().cast(), pair);
            }
        }
    }
}

/// 32 elements in their order, of an even and an odd place.
#[target_feature(enable = "avx512f")]
#[inline]
fn in_order(even: __m512, odd: __m512) -> [__m512; 2] {
    let first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    let second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    [first, second].map(|order| _mm512_permutex2var_ps(even, order, odd))
}
