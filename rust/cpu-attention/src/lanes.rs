//! What is done to all lanes of a vector, in plain Rust that the compiler turns into vector instructions.
//!
//! Every function is inlined into its caller and takes the instructions of that one. `mul_add` rounds
//! once on every machine, so all builds give the same bits; without an FMA instruction it is slow. Products have
//! vectors of their own ([`Vector`]): left to itself the compiler turns rows into columns there.

/// `f32::max` as one instruction: of a NaN and a number, the second.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// `e ^ x` of what is 0 or less, to about 2 units in the last place; what is below -87 counts as -87.
/// After Cephes' `expf` (Moshier, 1989): `2^n * e^r`, `e^r` by a polynomial. Without branches, so that
/// a loop of it becomes vector instructions.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low bits
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x); // ln 2 in two parts
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    let e = p.mul_add(r * r, r) + 1.0;
    let power = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127)
        << 23;
    e * f32::from_bits(power)
}

/// `L` floats that are multiplied and added at once.
pub(crate) trait Vector<const L: usize>: Copy {
    fn load(from: &[f32; L]) -> Self;
    fn store(self, to: &mut [f32; L]);
    fn splat(one: f32) -> Self;
    fn multiply(self, factor: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn multiply_add(self, factor: Self, addend: Self) -> Self;
    /// The lanes of `self` for which `weights` is not 0, the others from `instead`.
    fn where_it_weighs(self, weights: Self, instead: Self) -> Self;
}

/// In plain Rust.
impl Vector<8> for [f32; 8] {
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
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code)]
    use std::arch::x86_64::*;

    use super::Vector;

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
    }
}

/// Asks for memory to be brought into the processor's second cache.
#[inline(always)]
pub(crate) fn fetch<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in memory.chunks((64 / size_of::<T>()).max(1)) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has it, and it reads nothing.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = memory;
}

/// Floats that begin a line of the processor's cache: vectors of them do not cross two.
pub(crate) struct Scratch {
    memory: Vec<f32>,
    first: usize,
}

impl Scratch {
    /// So many zeros.
    #[inline(always)]
    pub(crate) fn zeros(count: usize) -> Self {
        const LINE: usize = 64;
        let memory = vec![0.0; count + LINE / size_of::<f32>()];
        let first = memory.as_ptr().align_offset(LINE);
        Self {
            first: first.min(LINE / size_of::<f32>()),
            memory,
        }
    }

    #[inline(always)]
    pub(crate) fn floats(&self) -> &[f32] {
        &self.memory[self.first..]
    }

    #[inline(always)]
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.first..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for step in 0..=870_000 {
            let x = step as f32 * -1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
        assert!(exp(f32::NAN).is_nan());
    }
}
