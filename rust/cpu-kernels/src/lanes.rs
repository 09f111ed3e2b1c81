//! What is done to all lanes of a vector, in plain Rust that the compiler turns into vector instructions.
//!
//! Every function is inlined into its caller and takes the instructions of that one. `mul_add` rounds
//! once on every machine, so all builds give the same bits; without an FMA instruction it is slow. Products have
//! own vectors ([`Vector`]): left to itself the compiler turns rows into columns there.

/// `f32::max` as one instruction: of a NaN and a number, the second.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// `2 ^ x` for `x` below 128, to about 2 units in the last place; what is below -126 counts as -126. By a polynomial for
/// what lies beside the nearest integer (minimax in the relative error, exact for 0). Without branches, so that a loop
/// of it becomes vector instructions.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    const ROUND: f32 = 12_583_039.0; // 1.5 * 2^23 + 127: adding it leaves the integer's exponent in the low bits
    let x = if x < -126.0 { -126.0 } else { x };
    let shifted = x + ROUND;
    let r = x - (shifted - ROUND);
    let mut p = 1.326_472_7e-3_f32;
    for coefficient in [
        9.671_513e-3,
        5.550_733_6e-2,
        0.240_222_42,
        0.693_146_94,
        1.0,
    ] {
        p = p.mul_add(r, coefficient);
    }
    p * f32::from_bits(shifted.to_bits() << 23)
}

/// A finite E4M3's value: a sign, 4 bits of an exponent that is 7 larger than in the value, and 3 of a fraction.
#[inline(always)]
pub(crate) fn widen_byte(byte: u8) -> f32 {
    let (sign, rest) = (u32::from(byte & 0x80) << 24, u32::from(byte & 0x7f) << 20);
    f32::from_bits(sign | rest) * EXPONENTS
}

/// 2^120: E4M3's bits in their place of a float32 are smaller by that, as its exponents are.
const EXPONENTS: f32 = f32::from_bits((120 + 127) << 23);

/// `L` floats that are multiplied and added at once.
pub(crate) trait Vector<const L: usize>: Copy {
    /// Whether it is plain Rust, which is slow: it is compiled for few shapes of tiles.
    const IS_PLAIN: bool = false;

    fn load(from: &[f32; L]) -> Self;
    fn store(self, to: &mut [f32; L]);
    fn splat(one: f32) -> Self;
    fn multiply(self, factor: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn multiply_add(self, factor: Self, addend: Self) -> Self;
    /// The lanes of `self` for which `weights` is not 0, the others from `instead`.
    fn where_it_weighs(self, weights: Self, instead: Self) -> Self;
    /// Two bfloat16 in each lane: those in the lower halves, and those in the upper ones.
    fn widened(pairs: &[u32; L]) -> [Self; 2];
    /// Four finite E4M3 in each lane, those in the lowest bytes first.
    fn widened_bytes(fours: &[u32; L]) -> [Self; 4];

    /// Lane `a` of vector `b` becomes lane `b` of vector `a`.
    #[inline(always)]
    fn transposed(rows: [Self; L]) -> [Self; L] {
        let mut floats = [[0.0; L]; L];
        for (floats, row) in floats.iter_mut().zip(rows) {
            row.store(floats);
        }
        std::array::from_fn(|lane| Self::load(&floats.map(|row| row[lane])))
    }

    /// Element `a` of row `b` becomes lane `first + b` of column `a`.
    #[inline(always)]
    fn turn(rows: &[&[f32; 16]; L], columns: &mut [[f32; 16]; 16], first: usize) {
        for (at, column) in columns.iter_mut().enumerate() {
            for (row, lane) in rows.iter().zip(&mut column[first..]) {
                *lane = row[at];
            }
        }
    }
}

/// In plain Rust.
impl Vector<8> for [f32; 8] {
    const IS_PLAIN: bool = true;

    #[inline(always)]
    fn load(from: &[f32; 8]) -> Self {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 8]) {
        *to = self;
    }

    #[inline(always)]
    fn splat(one: f32) -> Self {
        [one; 8]
    }

    #[inline(always)]
    fn multiply(self, factor: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * factor[lane])
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        std::array::from_fn(|lane| self[lane].mul_add(factor[lane], addend[lane]))
    }

    #[inline(always)]
    fn where_it_weighs(self, weights: Self, instead: Self) -> Self {
        let pick = |lane| match weights[lane] == 0.0 {
            true => instead[lane],
            false => self[lane],
        };
        std::array::from_fn(pick)
    }

    #[inline(always)]
    fn widened(pairs: &[u32; 8]) -> [Self; 2] {
        [
            pairs.map(|pair| f32::from_bits(pair << 16)),
            pairs.map(|pair| f32::from_bits(pair & 0xffff_0000)),
        ]
    }

    #[inline(always)]
    fn widened_bytes(fours: &[u32; 8]) -> [Self; 4] {
        std::array::from_fn(|byte| fours.map(|four| widen_byte((four >> (8 * byte)) as u8)))
    }
}

/// 16 lanes of two vectors.
impl<V: Vector<8>> Vector<16> for [V; 2] {
    const IS_PLAIN: bool = V::IS_PLAIN;

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        let [low, high] = halves(from);
        [V::load(low), V::load(high)]
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        let (halves, _) = to.as_chunks_mut::<8>();
        for (half, vector) in halves.iter_mut().zip(self) {
            vector.store(half);
        }
    }

    #[inline(always)]
    fn splat(one: f32) -> Self {
        [V::splat(one); 2]
    }

    #[inline(always)]
    fn multiply(self, factor: Self) -> Self {
        let ([a, b], [c, d]) = (self, factor);
        [a.multiply(c), b.multiply(d)]
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        let ([a, b], [c, d], [e, f]) = (self, factor, addend);
        [a.multiply_add(c, e), b.multiply_add(d, f)]
    }

    #[inline(always)]
    fn where_it_weighs(self, weights: Self, instead: Self) -> Self {
        let ([a, b], [c, d], [e, f]) = (self, weights, instead);
        [a.where_it_weighs(c, e), b.where_it_weighs(d, f)]
    }

    #[inline(always)]
    fn widened(pairs: &[u32; 16]) -> [Self; 2] {
        let [low, high] = halves(pairs);
        let ([a, b], [c, d]) = (V::widened(low), V::widened(high));
        [[a, c], [b, d]]
    }

    #[inline(always)]
    fn widened_bytes(fours: &[u32; 16]) -> [Self; 4] {
        let [low, high] = halves(fours);
        let ([a, b, c, d], [e, f, g, h]) = (V::widened_bytes(low), V::widened_bytes(high));
        [[a, e], [b, f], [c, g], [d, h]]
    }

    #[inline(always)]
    fn turn(rows: &[&[f32; 16]; 16], columns: &mut [[f32; 16]; 16], _: usize) {
        for first in [0, 8] {
            let rows = rows[first..].first_chunk().expect("there are 16");
            V::turn(rows, columns, first);
        }
    }
}

/// The lower and the upper lanes.
#[inline(always)]
fn halves<T>(lanes: &[T; 16]) -> [&[T; 8]; 2] {
    let (halves, _) = lanes.as_chunks::<8>();
    [&halves[0], &halves[1]]
}

#[cfg(target_arch = "aarch64")]
mod arm {
    #![allow(unsafe_code)]
    use std::arch::aarch64::*;

    use super::{EXPONENTS, Vector};

    /// Every target of this architecture has NEON: that is what makes the calls below safe.
    impl Vector<8> for [float32x4_t; 2] {
        #[inline(always)]
        fn load(from: &[f32; 8]) -> Self {
            // SAFETY: see above; eight floats are read.
            unsafe { [vld1q_f32(from.as_ptr()), vld1q_f32(from[4..].as_ptr())] }
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 8]) {
            // SAFETY: see above; eight floats are written.
            unsafe {
                vst1q_f32(to.as_mut_ptr(), self[0]);
                vst1q_f32(to[4..].as_mut_ptr(), self[1]);
            }
        }

        #[inline(always)]
        fn splat(one: f32) -> Self {
            // SAFETY: see above.
            unsafe { [vdupq_n_f32(one); 2] }
        }

        #[inline(always)]
        fn multiply(self, factor: Self) -> Self {
            // SAFETY: see above.
            unsafe { [vmulq_f32(self[0], factor[0]), vmulq_f32(self[1], factor[1])] }
        }

        #[inline(always)]
        fn multiply_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: see above.
            unsafe {
                [
                    vfmaq_f32(addend[0], self[0], factor[0]),
                    vfmaq_f32(addend[1], self[1], factor[1]),
                ]
            }
        }

        #[inline(always)]
        fn where_it_weighs(self, weights: Self, instead: Self) -> Self {
            let pick = |at: usize| {
                // SAFETY: see above.
                unsafe { vbslq_f32(vceqzq_f32(weights[at]), instead[at], self[at]) }
            };
            [pick(0), pick(1)]
        }

        #[inline(always)]
        fn widened(pairs: &[u32; 8]) -> [Self; 2] {
            // SAFETY: see above; eight numbers are read.
            unsafe {
                let pairs = [vld1q_u32(pairs.as_ptr()), vld1q_u32(pairs[4..].as_ptr())];
                let low = pairs.map(|pair| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pair)));
                let upper = vdupq_n_u32(0xffff_0000);
                [
                    low,
                    pairs.map(|pair| vreinterpretq_f32_u32(vandq_u32(pair, upper))),
                ]
            }
        }

        #[inline(always)]
        fn widened_bytes(fours: &[u32; 8]) -> [Self; 4] {
            // SAFETY: see above; eight numbers are read.
            unsafe {
                let fours = [vld1q_u32(fours.as_ptr()), vld1q_u32(fours[4..].as_ptr())];
                let widen = |high: uint32x4_t| {
                    let sign = vandq_u32(high, vdupq_n_u32(0x8000_0000));
                    let rest = vshrq_n_u32::<4>(vandq_u32(high, vdupq_n_u32(0x7f00_0000)));
                    let bits = vreinterpretq_f32_u32(vorrq_u32(sign, rest));
                    vmulq_f32(bits, vdupq_n_f32(EXPONENTS))
                };
                [
                    fours.map(|four| widen(vshlq_n_u32::<24>(four))),
                    fours.map(|four| widen(vshlq_n_u32::<16>(four))),
                    fours.map(|four| widen(vshlq_n_u32::<8>(four))),
                    fours.map(|four| widen(four)),
                ]
            }
        }

        #[inline(always)]
        fn turn(rows: &[&[f32; 16]; 8], columns: &mut [[f32; 16]; 16], first: usize) {
            for at in (0..16).step_by(4) {
                for row in [0, 4] {
                    let mut square = [Self::splat(0.0)[0]; 4];
                    for next in 0..4 {
                        let four = &rows[row + next][at..at + 4];
                        // SAFETY: see above; four floats are read.
                        square[next] = unsafe { vld1q_f32(four.as_ptr()) };
                    }
                    let square = transpose_4(square);
                    for (column, lanes) in columns[at..].iter_mut().zip(square) {
                        let target = &mut column[first + row..][..4];
                        // SAFETY: see above; four floats are written.
                        unsafe { vst1q_f32(target.as_mut_ptr(), lanes) };
                    }
                }
            }
        }
    }

    /// Rows of four numbers become columns.
    #[inline(always)]
    fn transpose_4([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: every target of this architecture has NEON; bits stay what they are.
        unsafe {
            let wide = |vector| vreinterpretq_f64_f32(vector);
            let (low_ab, high_ab) = (wide(vtrn1q_f32(a, b)), wide(vtrn2q_f32(a, b)));
            let (low_cd, high_cd) = (wide(vtrn1q_f32(c, d)), wide(vtrn2q_f32(c, d)));
            [
                vtrn1q_f64(low_ab, low_cd),
                vtrn1q_f64(high_ab, high_cd),
                vtrn2q_f64(low_ab, low_cd),
                vtrn2q_f64(high_ab, high_cd),
            ]
            .map(|column| vreinterpretq_f32_f64(column))
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::transpose_16;

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code)]
    use std::arch::x86_64::*;

    use super::{EXPONENTS, Vector};

    /// To be used only where the machine has AVX2 and FMA, as `isa` sees to it: that is what makes the calls below
    /// safe.
    impl Vector<8> for __m256 {
        #[inline(always)]
        fn load(from: &[f32; 8]) -> Self {
            // SAFETY: see above; eight floats are read.
            unsafe { _mm256_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 8]) {
            // SAFETY: see above; eight floats are written.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self) }
        }

        #[inline(always)]
        fn splat(one: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_set1_ps(one) }
        }

        #[inline(always)]
        fn multiply(self, factor: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_mul_ps(self, factor) }
        }

        #[inline(always)]
        fn multiply_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_fmadd_ps(self, factor, addend) }
        }

        #[inline(always)]
        fn where_it_weighs(self, weights: Self, instead: Self) -> Self {
            // SAFETY: see above.
            unsafe {
                let weighs = _mm256_cmp_ps::<_CMP_NEQ_UQ>(weights, _mm256_setzero_ps());
                _mm256_blendv_ps(instead, self, weighs)
            }
        }

        #[inline(always)]
        fn widened(pairs: &[u32; 8]) -> [Self; 2] {
            // SAFETY: see above; eight numbers are read.
            unsafe {
                let pairs = _mm256_loadu_si256(pairs.as_ptr().cast());
                let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                    _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)),
                ]
            }
        }

        #[inline(always)]
        fn widened_bytes(fours: &[u32; 8]) -> [Self; 4] {
            // SAFETY: see above; eight numbers are read.
            unsafe {
                let fours = _mm256_loadu_si256(fours.as_ptr().cast());
                let signs = _mm256_set1_epi32(0x8000_0000_u32.cast_signed());
                let rests = _mm256_set1_epi32(0x07f0_0000);
                [
                    _mm256_slli_epi32::<24>(fours),
                    _mm256_slli_epi32::<16>(fours),
                    _mm256_slli_epi32::<8>(fours),
                    fours,
                ]
                .map(|high| {
                    let sign = _mm256_and_si256(high, signs);
                    let rest = _mm256_and_si256(_mm256_srli_epi32::<4>(high), rests);
                    let bits = _mm256_castsi256_ps(_mm256_or_si256(sign, rest));
                    _mm256_mul_ps(bits, _mm256_set1_ps(EXPONENTS))
                })
            }
        }

        #[inline(always)]
        fn turn(rows: &[&[f32; 16]; 8], columns: &mut [[f32; 16]; 16], first: usize) {
            for at in (0..16).step_by(4) {
                // SAFETY: see above; four floats are read at a time.
                let columns_of_4 = unsafe {
                    // Rows that are 4 apart share a vector: the rest stays within 128 bits.
                    let mut fours = [_mm256_setzero_ps(); 4];
                    for row in 0..4 {
                        let four_at = |row: usize| rows[row][at..at + 4].as_ptr();
                        let low = _mm256_castps128_ps256(_mm_loadu_ps(four_at(row)));
                        fours[row] = _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(four_at(row + 4)));
                    }
                    let [a, b, c, d] = fours;
                    let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                    let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                    [
                        _mm256_shuffle_ps::<0x44>(low_ab, low_cd),
                        _mm256_shuffle_ps::<0xee>(low_ab, low_cd),
                        _mm256_shuffle_ps::<0x44>(high_ab, high_cd),
                        _mm256_shuffle_ps::<0xee>(high_ab, high_cd),
                    ]
                };
                for (column, lanes) in columns[at..].iter_mut().zip(columns_of_4) {
                    lanes.store(column[first..].first_chunk_mut().expect("there are 16"));
                }
            }
        }
    }

    /// To be used only where the machine has AVX-512, as above.
    impl Vector<16> for __m512 {
        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            // SAFETY: see above; 16 floats are read.
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            // SAFETY: see above; 16 floats are written.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self) }
        }

        #[inline(always)]
        fn splat(one: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_set1_ps(one) }
        }

        #[inline(always)]
        fn multiply(self, factor: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_mul_ps(self, factor) }
        }

        #[inline(always)]
        fn multiply_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(self, factor, addend) }
        }

        #[inline(always)]
        fn where_it_weighs(self, weights: Self, instead: Self) -> Self {
            // SAFETY: see above.
            unsafe {
                let weighs = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(weights, _mm512_setzero_ps());
                _mm512_mask_blend_ps(weighs, instead, self)
            }
        }

        #[inline(always)]
        fn widened(pairs: &[u32; 16]) -> [Self; 2] {
            // SAFETY: see above; 16 numbers are read.
            unsafe {
                let pairs = _mm512_loadu_si512(pairs.as_ptr().cast());
                let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                [
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
                    _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)),
                ]
            }
        }

        #[inline(always)]
        fn widened_bytes(fours: &[u32; 16]) -> [Self; 4] {
            // SAFETY: see above; 16 numbers are read.
            unsafe {
                let fours = _mm512_loadu_si512(fours.as_ptr().cast());
                let signs = _mm512_set1_epi32(0x8000_0000_u32.cast_signed());
                let rests = _mm512_set1_epi32(0x07f0_0000);
                [
                    _mm512_slli_epi32::<24>(fours),
                    _mm512_slli_epi32::<16>(fours),
                    _mm512_slli_epi32::<8>(fours),
                    fours,
                ]
                .map(|high| {
                    let sign = _mm512_and_si512(high, signs);
                    let rest = _mm512_and_si512(_mm512_srli_epi32::<4>(high), rests);
                    let bits = _mm512_castsi512_ps(_mm512_or_si512(sign, rest));
                    _mm512_mul_ps(bits, _mm512_set1_ps(EXPONENTS))
                })
            }
        }

        #[inline(always)]
        fn turn(rows: &[&[f32; 16]; 16], columns: &mut [[f32; 16]; 16], _: usize) {
            // Rows that are 4 apart share a vector: the rest stays within 128 bits.
            let mut fours = [[Self::splat(0.0); 4]; 4];
            for at in 0..4 {
                for row in 0..4 {
                    let four_at = |row: usize| rows[row][4 * at..][..4].as_ptr();
                    // SAFETY: see above; four floats are read at a time.
                    fours[at][row] = unsafe {
                        let four = _mm512_castps128_ps512(_mm_loadu_ps(four_at(row)));
                        let four = _mm512_insertf32x4::<1>(four, _mm_loadu_ps(four_at(row + 4)));
                        let four = _mm512_insertf32x4::<2>(four, _mm_loadu_ps(four_at(row + 8)));
                        _mm512_insertf32x4::<3>(four, _mm_loadu_ps(four_at(row + 12)))
                    };
                }
            }
            let columns = columns.as_chunks_mut::<4>().0;
            for ([a, b, c, d], columns) in fours.into_iter().zip(columns) {
                // SAFETY: see above.
                let turned = unsafe {
                    let (low_ab, high_ab) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                    let (low_cd, high_cd) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                    [
                        _mm512_shuffle_ps::<0x44>(low_ab, low_cd),
                        _mm512_shuffle_ps::<0xee>(low_ab, low_cd),
                        _mm512_shuffle_ps::<0x44>(high_ab, high_cd),
                        _mm512_shuffle_ps::<0xee>(high_ab, high_cd),
                    ]
                };
                for (column, lanes) in columns.iter_mut().zip(turned) {
                    lanes.store(column);
                }
            }
        }

        #[inline(always)]
        fn transposed(rows: [Self; 16]) -> [Self; 16] {
            // SAFETY: see above; bits stay what they are.
            unsafe {
                transpose_16(rows.map(|row| _mm512_castps_si512(row)))
                    .map(|row| _mm512_castsi512_ps(row))
            }
        }
    }

    /// Rows of 16 numbers become columns.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn transpose_16(rows: [__m512i; 16]) -> [__m512i; 16] {
        let mut twos = rows;
        for at in (0..16).step_by(2) {
            twos[at] = _mm512_unpacklo_epi32(rows[at], rows[at + 1]);
            twos[at + 1] = _mm512_unpackhi_epi32(rows[at], rows[at + 1]);
        }
        let mut fours = twos;
        for at in (0..16).step_by(4) {
            fours[at] = _mm512_unpacklo_epi64(twos[at], twos[at + 2]);
            fours[at + 1] = _mm512_unpackhi_epi64(twos[at], twos[at + 2]);
            fours[at + 2] = _mm512_unpacklo_epi64(twos[at + 1], twos[at + 3]);
            fours[at + 3] = _mm512_unpackhi_epi64(twos[at + 1], twos[at + 3]);
        }
        let mut columns = fours;
        for at in 0..4 {
            let [a, b, c, d] = [fours[at], fours[4 + at], fours[8 + at], fours[12 + at]];
            let (even_low, even_high) = (
                _mm512_shuffle_i32x4::<0x88>(a, b),
                _mm512_shuffle_i32x4::<0x88>(c, d),
            );
            let (odd_low, odd_high) = (
                _mm512_shuffle_i32x4::<0xdd>(a, b),
                _mm512_shuffle_i32x4::<0xdd>(c, d),
            );
            columns[at] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
            columns[8 + at] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
            columns[4 + at] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
            columns[12 + at] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
        }
        columns
    }
}

/// Asks for memory to be brought into the processor's second cache.
#[inline(always)]
pub(crate) fn fetch<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..memory.len()).step_by((64 / size_of::<T>()).max(1)) {
        fetch_line_later(memory.as_ptr().wrapping_add(at));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = memory;
}

/// Asks for the line of memory there to be brought into the processor's first cache, if there is any memory.
#[inline(always)]
pub(crate) fn fetch_line<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has it; it reads nothing, and takes any address.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Asks for the line of memory there to be brought into the processor's second cache, if there is any memory.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn fetch_line_later<T>(address: *const T) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: every x86-64 has it; it reads nothing, and takes any address.
    #[allow(unsafe_code)]
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
}

/// Numbers of four bytes that begin a line of the processor's cache: vectors of them do not cross two.
#[derive(Debug, Default)]
pub(crate) struct Scratch<T = f32> {
    memory: Vec<T>,
    first: usize,
}

impl<T: Copy + Default> Scratch<T> {
    /// So many zeros.
    #[inline(always)]
    pub(crate) fn zeros(count: usize) -> Self {
        const LINE: usize = 64;
        let memory = vec![T::default(); count + LINE / size_of::<T>()];
        let first = memory.as_ptr().align_offset(LINE);
        Self {
            first: first.min(LINE / size_of::<T>()),
            memory,
        }
    }
}

impl<T> Scratch<T> {
    #[inline(always)]
    pub(crate) fn elements(&self) -> &[T] {
        &self.memory[self.first..]
    }

    #[inline(always)]
    pub(crate) fn elements_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.first..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_within_two_units_in_the_last_place() {
        for step in 0..=1_400_000 {
            let x = 14.0 + step as f32 * -1e-4;
            let exact = f64::from(x).exp2();
            let error = (f64::from(exp2(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "2 ^ {x} is off by {error:e}");
        }
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY), f32::MIN_POSITIVE);
        assert!(exp2(f32::NAN).is_nan());
        assert!(exp2(f32::from_bits(0x7f80_0001)).is_nan());
    }
}
