//! Sums of products of small integers: codes of weights, from 0 to 255, and numbers of rows, from -127 to 127.
//!
//! They are exact, so all builds give the same.

use crate::isa::Isa;
use crate::lanes::Vector;

/// Vectors of `L` floats with the integers that become them. Lines of bytes are those of 16 outputs: `half` says which
/// `L` of them are meant.
pub(crate) trait Dots<const L: usize>: Vector<L> {
    /// Rows whose sums stay in registers; plain Rust is compiled for few, because it is slow anyway.
    const MAX_ROWS: usize;

    /// Four codes each of `L` outputs.
    type Codes: Copy;

    /// Four bytes of each output, in a line.
    fn codes(line: &[u8; 64], half: usize) -> Self::Codes;

    /// The lower and the higher four bits of each byte.
    fn nibbles(bytes: Self::Codes) -> [Self::Codes; 2];

    /// `nibbles` with more bits above them: the bits of `plane` from bit `SHIFT` on that are in `MASK`.
    fn with_bits<const SHIFT: u32, const MASK: u8>(
        nibbles: Self::Codes,
        plane: Self::Codes,
    ) -> Self::Codes;

    /// `start` plus the products of `N` times four codes of at most `MAX_CODE` with as many numbers. With `MAX_CODE` 255,
    /// `start` must be -128 times the sum of the numbers.
    fn dot<const N: usize, const MAX_CODE: i32>(
        codes: &[Self::Codes],
        numbers: &[[i8; 4]],
        start: i32,
    ) -> Self;

    /// Half-precision floats.
    fn halves(line: &[u8; 32], half: usize) -> Self;

    /// Unsigned bytes.
    fn unsigned(line: &[u8; 16], half: usize) -> Self;

    /// Signed bytes.
    fn signed(line: &[u8; 16], half: usize) -> Self;

    /// Floats in memory, in the order of bytes of this machine.
    fn floats(line: &[u8; 64], half: usize) -> Self;

    /// Powers of two with these exponents, as [`power`] has them.
    fn powers(line: &[u8; 16], half: usize) -> Self;
}

/// 2 to the power of `exponent - 128`; 0 for the exponent 0, which would be 3e-39.
#[inline(always)]
pub(crate) fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23) * 0.5
}

/// A half-precision float's value.
pub(crate) fn widen_half(half: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13);
    let sign = u32::from(half & 0x8000) << 16;
    let float = match half & 0x7c00 {
        0x7c00 => f32::from_bits(magnitude.to_bits() | 0x7f80_0000),
        0 => f32::from(half & 0x3ff) * f32::from_bits(0x3380_0000), // 2^-24
        _ => f32::from_bits(magnitude.to_bits() + (112 << 23)),
    };
    f32::from_bits(float.to_bits() | sign)
}

/// In plain Rust.
impl Dots<8> for [f32; 8] {
    const MAX_ROWS: usize = 2;
    type Codes = [[u8; 4]; 8];

    #[inline(always)]
    fn codes(line: &[u8; 64], half: usize) -> Self::Codes {
        let (codes, _) = line.as_chunks::<4>();
        std::array::from_fn(|lane| codes[half * 8 + lane])
    }

    #[inline(always)]
    fn nibbles(bytes: Self::Codes) -> [Self::Codes; 2] {
        [
            bytes.map(|bytes| bytes.map(|byte| byte & 15)),
            bytes.map(|bytes| bytes.map(|byte| byte >> 4)),
        ]
    }

    #[inline(always)]
    fn with_bits<const SHIFT: u32, const MASK: u8>(
        nibbles: Self::Codes,
        plane: Self::Codes,
    ) -> Self::Codes {
        let code = |lane: usize, at: usize| {
            let bits = u32::from(plane[lane][at]) << 4 >> SHIFT;
            nibbles[lane][at] | bits as u8 & MASK
        };
        std::array::from_fn(|lane| std::array::from_fn(|at| code(lane, at)))
    }

    #[inline(always)]
    fn dot<const N: usize, const MAX_CODE: i32>(
        codes: &[Self::Codes],
        numbers: &[[i8; 4]],
        start: i32,
    ) -> Self {
        let mut sums = [start; 8];
        for (codes, numbers) in codes.iter().zip(numbers) {
            for (sum, codes) in sums.iter_mut().zip(codes) {
                for (&code, &number) in codes.iter().zip(numbers) {
                    *sum += i32::from(code) * i32::from(number);
                }
            }
        }
        sums.map(|sum| sum as f32)
    }

    #[inline(always)]
    fn halves(line: &[u8; 32], half: usize) -> Self {
        let (halves, _) = line.as_chunks::<2>();
        std::array::from_fn(|lane| widen_half(u16::from_le_bytes(halves[half * 8 + lane])))
    }

    #[inline(always)]
    fn unsigned(line: &[u8; 16], half: usize) -> Self {
        std::array::from_fn(|lane| f32::from(line[half * 8 + lane]))
    }

    #[inline(always)]
    fn signed(line: &[u8; 16], half: usize) -> Self {
        std::array::from_fn(|lane| f32::from(line[half * 8 + lane] as i8))
    }

    #[inline(always)]
    fn floats(line: &[u8; 64], half: usize) -> Self {
        let (floats, _) = line.as_chunks::<4>();
        std::array::from_fn(|lane| f32::from_ne_bytes(floats[half * 8 + lane]))
    }

    #[inline(always)]
    fn powers(line: &[u8; 16], half: usize) -> Self {
        std::array::from_fn(|lane| power(line[half * 8 + lane]))
    }
}

/// What is compiled for the integers of each set of instructions.
pub(crate) trait InIntegers {
    /// Inlined, so that it takes the instructions of its caller.
    fn run<V: Dots<L>, const L: usize>(self);
}

/// The instructions by which integers are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AVX2 with F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with its products of bytes.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    Plain,
}

impl Build {
    /// The best one of this machine at a level that it has.
    pub(crate) fn at(isa: Isa) -> Self {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
            return Self::Vnni;
        } else if isa >= Isa::Avx2 && is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        #[cfg(target_arch = "aarch64")]
        if isa == Isa::Neon && std::arch::is_aarch64_feature_detected!("dotprod") {
            return Self::NeonDot;
        }
        let _ = isa;
        Self::Plain
    }

    /// [`Dots::MAX_ROWS`].
    pub(crate) fn max_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Vnni => <std::arch::x86_64::__m512 as Dots<16>>::MAX_ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => <std::arch::x86_64::__m256 as Dots<8>>::MAX_ROWS,
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => <[std::arch::aarch64::float32x4_t; 2] as Dots<8>>::MAX_ROWS,
            Self::Plain => <[f32; 8] as Dots<8>>::MAX_ROWS,
        }
    }

    /// Runs it with these instructions.
    pub(crate) fn run(self, work: impl InIntegers) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m256, __m512};
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(work: impl InIntegers) {
                work.run::<__m256, 8>();
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            fn vnni(work: impl InIntegers) {
                work.run::<__m512, 16>();
            }
            #[allow(unsafe_code)]
            match self {
                // SAFETY: the machine has these instructions, as `at` looked up.
                Self::Vnni => return unsafe { vnni(work) },
                // SAFETY: as above.
                Self::Avx2 => return unsafe { avx2(work) },
                Self::Plain => {}
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            #[target_feature(enable = "neon,dotprod")]
            fn neon(work: impl InIntegers) {
                work.run::<[std::arch::aarch64::float32x4_t; 2], 8>();
            }
            #[allow(unsafe_code)]
            if self == Self::NeonDot {
                // SAFETY: the machine has these instructions, as `at` looked up.
                return unsafe { neon(work) };
            }
        }
        work.run::<[f32; 8], 8>();
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    #![allow(unsafe_code)]
    use std::arch::aarch64::*;
    use std::arch::asm;

    use super::Dots;

    /// Four sums of four products each. Rust has no stable name for the instruction.
    ///
    /// # Safety
    ///
    /// The machine has it.
    #[inline(always)]
    unsafe fn dot_four(mut sums: int32x4_t, codes: uint8x16_t, numbers: int32x4_t) -> int32x4_t {
        // SAFETY: as above; registers only.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sums:v}.4s, {codes:v}.16b, {numbers:v}.16b",
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                numbers = in(vreg) numbers,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }

    /// Four half-precision floats in 8 bytes.
    #[inline(always)]
    fn widen_halves(bytes: &[u8]) -> float32x4_t {
        let floats;
        // SAFETY: every target of this architecture has NEON; 8 bytes are read.
        unsafe {
            let halves = vld1_u8(bytes[..8].as_ptr());
            asm!(
                "fcvtl {floats:v}.4s, {halves:v}.4h",
                floats = out(vreg) floats,
                halves = in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        floats
    }

    /// To be used only where the machine has products of bytes, as `Build` sees to it: that is what makes the calls below
    /// safe.
    impl Dots<8> for [float32x4_t; 2] {
        const MAX_ROWS: usize = 4;
        type Codes = [uint8x16_t; 2];

        #[inline(always)]
        fn codes(line: &[u8; 64], half: usize) -> [uint8x16_t; 2] {
            let bytes = &line[32 * half..][..32];
            // SAFETY: see above; 32 bytes are read.
            unsafe { [vld1q_u8(bytes.as_ptr()), vld1q_u8(bytes[16..].as_ptr())] }
        }

        #[inline(always)]
        fn nibbles(bytes: [uint8x16_t; 2]) -> [[uint8x16_t; 2]; 2] {
            // SAFETY: see above.
            unsafe {
                let mask = vdupq_n_u8(15);
                [
                    [vandq_u8(bytes[0], mask), vandq_u8(bytes[1], mask)],
                    [vshrq_n_u8::<4>(bytes[0]), vshrq_n_u8::<4>(bytes[1])],
                ]
            }
        }

        #[inline(always)]
        fn with_bits<const SHIFT: u32, const MASK: u8>(
            mut nibbles: [uint8x16_t; 2],
            plane: [uint8x16_t; 2],
        ) -> [uint8x16_t; 2] {
            for at in 0..2 {
                // SAFETY: see above.
                unsafe {
                    let shift = vdupq_n_s8(4 - SHIFT as i8);
                    let bits = vandq_u8(vshlq_u8(plane[at], shift), vdupq_n_u8(MASK));
                    nibbles[at] = vorrq_u8(nibbles[at], bits);
                }
            }
            nibbles
        }

        #[inline(always)]
        fn dot<const N: usize, const MAX_CODE: i32>(
            codes: &[[uint8x16_t; 2]],
            numbers: &[[i8; 4]],
            start: i32,
        ) -> Self {
            // SAFETY: see above.
            unsafe {
                let mut sums = [vdupq_n_s32(if MAX_CODE == 255 { 0 } else { start }); 2];
                for at in 0..N {
                    let four = numbers[at].map(|number| number as u8);
                    let four = vdupq_n_s32(i32::from_ne_bytes(four));
                    for half in 0..2 {
                        let codes = match MAX_CODE {
                            255 => veorq_u8(codes[at][half], vdupq_n_u8(0x80)), // signed: they need no start
                            _ => codes[at][half],
                        };
                        sums[half] = dot_four(sums[half], codes, four);
                    }
                }
                [vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(sums[1])]
            }
        }

        #[inline(always)]
        fn halves(line: &[u8; 32], half: usize) -> Self {
            let bytes = &line[16 * half..][..16];
            [widen_halves(bytes), widen_halves(&bytes[8..])]
        }

        #[inline(always)]
        fn unsigned(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let wide = vmovl_u8(vld1_u8(line[8 * half..][..8].as_ptr()));
                [
                    vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                    vcvtq_f32_u32(vmovl_high_u16(wide)),
                ]
            }
        }

        #[inline(always)]
        fn signed(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let wide = vmovl_s8(vld1_s8(line[8 * half..][..8].as_ptr().cast()));
                [
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
                    vcvtq_f32_s32(vmovl_high_s16(wide)),
                ]
            }
        }

        #[inline(always)]
        fn floats(line: &[u8; 64], half: usize) -> Self {
            let bytes = &line[32 * half..][..32];
            // SAFETY: see above; 32 bytes are read, and such loads need no alignment.
            unsafe {
                [
                    vreinterpretq_f32_u8(vld1q_u8(bytes.as_ptr())),
                    vreinterpretq_f32_u8(vld1q_u8(bytes[16..].as_ptr())),
                ]
            }
        }

        #[inline(always)]
        fn powers(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let wide = vmovl_u8(vld1_u8(line[8 * half..][..8].as_ptr()));
                [vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)].map(|exponents| {
                    let powers = vreinterpretq_f32_u32(vshlq_n_u32::<23>(exponents));
                    vmulq_f32(powers, vdupq_n_f32(0.5))
                })
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code)]
    use std::arch::x86_64::*;

    use super::Dots;

    /// Four numbers as one that is put into all lanes.
    #[inline(always)]
    fn four(numbers: [i8; 4]) -> i32 {
        i32::from_ne_bytes(numbers.map(|number| number as u8))
    }

    /// To be used only where the machine has AVX2 and F16C, as `Build` sees to it: that is what makes the calls below
    /// safe.
    impl Dots<8> for __m256 {
        const MAX_ROWS: usize = 4;
        type Codes = __m256i;

        #[inline(always)]
        fn codes(line: &[u8; 64], half: usize) -> __m256i {
            // SAFETY: see above; 32 bytes are read.
            unsafe { _mm256_loadu_si256(line[32 * half..][..32].as_ptr().cast()) }
        }

        #[inline(always)]
        fn nibbles(bytes: __m256i) -> [__m256i; 2] {
            // SAFETY: see above.
            unsafe {
                let mask = _mm256_set1_epi8(15);
                let high = _mm256_srli_epi16::<4>(bytes);
                [_mm256_and_si256(bytes, mask), _mm256_and_si256(high, mask)]
            }
        }

        #[inline(always)]
        fn with_bits<const SHIFT: u32, const MASK: u8>(
            nibbles: __m256i,
            plane: __m256i,
        ) -> __m256i {
            // SAFETY: see above.
            unsafe {
                let bits = match SHIFT {
                    0 => _mm256_slli_epi16::<4>(plane),
                    1 => _mm256_slli_epi16::<3>(plane),
                    2 => _mm256_slli_epi16::<2>(plane),
                    3 => _mm256_slli_epi16::<1>(plane),
                    4 => plane,
                    5 => _mm256_srli_epi16::<1>(plane),
                    6 => _mm256_srli_epi16::<2>(plane),
                    _ => _mm256_srli_epi16::<3>(plane),
                };
                let bits = _mm256_and_si256(bits, _mm256_set1_epi8(MASK as i8));
                _mm256_or_si256(nibbles, bits)
            }
        }

        #[inline(always)]
        fn dot<const N: usize, const MAX_CODE: i32>(
            codes: &[__m256i],
            numbers: &[[i8; 4]],
            start: i32,
        ) -> Self {
            // SAFETY: see above.
            unsafe {
                let ones = _mm256_set1_epi16(1);
                if MAX_CODE == 255 {
                    // Pairs of such products do not fit 16 bits: signed codes do, and need no start.
                    let mut sums = _mm256_setzero_si256();
                    for at in 0..N {
                        let signed = _mm256_xor_si256(codes[at], _mm256_set1_epi8(-128));
                        let numbers =
                            _mm256_sign_epi8(_mm256_set1_epi32(four(numbers[at])), signed);
                        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), numbers);
                        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
                    }
                    return _mm256_cvtepi32_ps(sums);
                }
                let together = const { (32767 / (2 * 127 * MAX_CODE)) as usize };
                let mut sums = _mm256_set1_epi32(start);
                let mut first = 0;
                while first < N {
                    let mut pairs =
                        _mm256_maddubs_epi16(codes[first], _mm256_set1_epi32(four(numbers[first])));
                    for at in first + 1..N.min(first + together) {
                        let more =
                            _mm256_maddubs_epi16(codes[at], _mm256_set1_epi32(four(numbers[at])));
                        pairs = _mm256_add_epi16(pairs, more);
                    }
                    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
                    first += together;
                }
                _mm256_cvtepi32_ps(sums)
            }
        }

        #[inline(always)]
        fn halves(line: &[u8; 32], half: usize) -> Self {
            // SAFETY: see above; 16 bytes are read.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(line[16 * half..][..16].as_ptr().cast())) }
        }

        #[inline(always)]
        fn unsigned(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let bytes = _mm_loadl_epi64(line[8 * half..][..8].as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
            }
        }

        #[inline(always)]
        fn signed(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let bytes = _mm_loadl_epi64(line[8 * half..][..8].as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
            }
        }

        #[inline(always)]
        fn floats(line: &[u8; 64], half: usize) -> Self {
            // SAFETY: see above; 32 bytes are read.
            unsafe { _mm256_loadu_ps(line[32 * half..][..32].as_ptr().cast()) }
        }

        #[inline(always)]
        fn powers(line: &[u8; 16], half: usize) -> Self {
            // SAFETY: see above; 8 bytes are read.
            unsafe {
                let bytes = _mm_loadl_epi64(line[8 * half..][..8].as_ptr().cast());
                let powers = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(bytes));
                _mm256_mul_ps(_mm256_castsi256_ps(powers), _mm256_set1_ps(0.5))
            }
        }
    }

    /// To be used only where the machine has AVX-512 with VNNI, as above.
    impl Dots<16> for __m512 {
        const MAX_ROWS: usize = 16;
        type Codes = __m512i;

        #[inline(always)]
        fn codes(line: &[u8; 64], _: usize) -> __m512i {
            // SAFETY: see above; 64 bytes are read.
            unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
        }

        #[inline(always)]
        fn nibbles(bytes: __m512i) -> [__m512i; 2] {
            // SAFETY: see above.
            unsafe {
                let mask = _mm512_set1_epi8(15);
                let high = _mm512_srli_epi16::<4>(bytes);
                [_mm512_and_si512(bytes, mask), _mm512_and_si512(high, mask)]
            }
        }

        #[inline(always)]
        fn with_bits<const SHIFT: u32, const MASK: u8>(
            nibbles: __m512i,
            plane: __m512i,
        ) -> __m512i {
            // SAFETY: see above.
            unsafe {
                let bits = match SHIFT {
                    0 => _mm512_slli_epi16::<4>(plane),
                    1 => _mm512_slli_epi16::<3>(plane),
                    2 => _mm512_slli_epi16::<2>(plane),
                    3 => _mm512_slli_epi16::<1>(plane),
                    4 => plane,
                    5 => _mm512_srli_epi16::<1>(plane),
                    6 => _mm512_srli_epi16::<2>(plane),
                    _ => _mm512_srli_epi16::<3>(plane),
                };
                let mask = _mm512_set1_epi8(MASK as i8);
                _mm512_ternarylogic_epi32::<0xf8>(nibbles, bits, mask) // nibbles | bits & mask
            }
        }

        #[inline(always)]
        fn dot<const N: usize, const MAX_CODE: i32>(
            codes: &[__m512i],
            numbers: &[[i8; 4]],
            start: i32,
        ) -> Self {
            // SAFETY: see above.
            unsafe {
                let mut sums = _mm512_set1_epi32(start);
                for at in 0..N {
                    let numbers = _mm512_set1_epi32(four(numbers[at]));
                    sums = _mm512_dpbusd_epi32(sums, codes[at], numbers);
                }
                _mm512_cvtepi32_ps(sums)
            }
        }

        #[inline(always)]
        fn halves(line: &[u8; 32], _: usize) -> Self {
            // SAFETY: see above; 32 bytes are read.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(line.as_ptr().cast())) }
        }

        #[inline(always)]
        fn unsigned(line: &[u8; 16], _: usize) -> Self {
            // SAFETY: see above; 16 bytes are read.
            unsafe {
                let bytes = _mm_loadu_si128(line.as_ptr().cast());
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
            }
        }

        #[inline(always)]
        fn signed(line: &[u8; 16], _: usize) -> Self {
            // SAFETY: see above; 16 bytes are read.
            unsafe {
                let bytes = _mm_loadu_si128(line.as_ptr().cast());
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
            }
        }

        #[inline(always)]
        fn floats(line: &[u8; 64], _: usize) -> Self {
            // SAFETY: see above; 64 bytes are read.
            unsafe { _mm512_loadu_ps(line.as_ptr().cast()) }
        }

        #[inline(always)]
        fn powers(line: &[u8; 16], _: usize) -> Self {
            // SAFETY: see above; 16 bytes are read.
            unsafe {
                let bytes = _mm_loadu_si128(line.as_ptr().cast());
                let powers = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(bytes));
                _mm512_mul_ps(_mm512_castsi512_ps(powers), _mm512_set1_ps(0.5))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_have_the_value_that_the_standard_gives_them() {
        for half in 0..=u16::MAX {
            let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 0x3ff));
            let magnitude = match exponent {
                0 => fraction * 2f64.powi(-24),
                31 if fraction == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
            };
            let expected = if half >> 15 == 1 {
                -magnitude
            } else {
                magnitude
            };
            let wide = widen_half(half);
            assert_eq!(wide.is_nan(), expected.is_nan());
            assert!(wide.is_nan() || f64::from(wide) == expected, "{half:#x}");
            assert!(wide.is_nan() || wide.is_sign_negative() == (half >> 15 == 1));
        }
    }
}
