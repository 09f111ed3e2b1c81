//! Eight floats at a time, in plain Rust that the compiler turns into vector instructions.
//!
//! Every function is inlined into its caller and takes the instructions of that one. `mul_add` rounds
//! once on every machine, so all builds give the same bits; without an FMA instruction it is slow.

/// How many floats are worked on at once.
pub(crate) const LANES: usize = 8;

/// Eight floats.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Lanes(pub(crate) [f32; LANES]);

impl Lanes {
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    /// `self * factor + addend`, rounded once.
    #[inline(always)]
    pub(crate) fn mul_add(mut self, factor: &[f32; LANES], addend: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = self.0[lane].mul_add(factor[lane], addend.0[lane]);
        }
        self
    }

    #[inline(always)]
    pub(crate) fn scale(mut self, factor: f32) -> Self {
        for lane in 0..LANES {
            self.0[lane] *= factor;
        }
        self
    }

    #[inline(always)]
    pub(crate) fn add(mut self, other: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] += other.0[lane];
        }
        self
    }
}

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

/// The dot products of `query` with eight keys, all of one length.
#[inline(always)]
pub(crate) fn dot8<S: Shuffles>(query: &[f32], keys: &[&[f32]; LANES]) -> Lanes {
    let (chunks, tail) = query.as_chunks::<LANES>();
    let mut sums = [Lanes::splat(0.0); LANES];
    let rows = keys.map(|key| &key.as_chunks::<LANES>().0[..chunks.len()]);
    for (at, part) in chunks.iter().enumerate() {
        for key in 0..LANES {
            sums[key] = Lanes(*part).mul_add(&rows[key][at], sums[key]);
        }
    }
    let mut dots = S::sum_each(sums);
    for (key, row) in keys.iter().enumerate() {
        let rest = &row[row.len() - tail.len()..];
        for (&a, &b) in tail.iter().zip(rest) {
            dots.0[key] = a.mul_add(b, dots.0[key]);
        }
    }
    dots
}

/// What the compiler does not find by itself: a shuffle of many vectors at once.
pub(crate) trait Shuffles {
    /// The sums of eight times eight lanes, each `((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7))`.
    fn sum_each(sums: [Lanes; LANES]) -> Lanes;
}

/// In plain Rust.
pub(crate) struct Plain;

impl Shuffles for Plain {
    #[inline(always)]
    fn sum_each(sums: [Lanes; LANES]) -> Lanes {
        let mut found = [0.0; LANES];
        for (sum, Lanes(a)) in found.iter_mut().zip(sums) {
            *sum = ((a[0] + a[2]) + (a[1] + a[3])) + ((a[4] + a[6]) + (a[5] + a[7]));
        }
        Lanes(found)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{LANES, Lanes, Shuffles};

    /// With AVX2: to be used only where the machine has it.
    pub(crate) struct Avx2;

    impl Shuffles for Avx2 {
        #[inline(always)]
        #[allow(unsafe_code)]
        fn sum_each(sums: [Lanes; LANES]) -> Lanes {
            // SAFETY: `kernel::attend` looks for AVX2 before it chooses this type.
            unsafe { sum_each(sums) }
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    #[allow(unsafe_code)]
    fn sum_each(sums: [Lanes; LANES]) -> Lanes {
        // SAFETY: eight floats, aligned alike, are a vector of eight floats.
        let s: [__m256; LANES] = unsafe { transmute(sums) };
        let pairs = |a, b| _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let fours = |a, b| {
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high))
        };
        let first = fours(pairs(s[0], s[1]), pairs(s[2], s[3]));
        let last = fours(pairs(s[4], s[5]), pairs(s[6], s[7]));
        let low = _mm256_permute2f128_ps::<0x20>(first, last);
        let high = _mm256_permute2f128_ps::<0x31>(first, last);
        // SAFETY: as above.
        unsafe { transmute(_mm256_add_ps(low, high)) }
    }

    #[cfg(test)]
    mod tests {
        use super::super::Plain;
        use super::*;

        #[test]
        fn sums_have_the_same_bits() {
            if !is_x86_feature_detected!("avx2") {
                return;
            }
            let lanes = |row: usize| std::array::from_fn(|at| (row * 8 + at) as f32 * 0.37 - 11.1);
            let sums = std::array::from_fn(|row| Lanes(lanes(row)));
            let bits = |Lanes(found): Lanes| found.map(f32::to_bits);
            assert_eq!(bits(Avx2::sum_each(sums)), bits(Plain::sum_each(sums)));
        }
    }
}

/// The largest of a multiple of eight floats, or negative infinity.
#[inline(always)]
pub(crate) fn largest(floats: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for eight in floats.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            lanes[lane] = larger(eight[lane], lanes[lane]);
        }
    }
    for half in [4, 2, 1] {
        for lane in 0..half {
            lanes[lane] = larger(lanes[lane + half], lanes[lane]);
        }
    }
    lanes[0]
}

/// The sum of a multiple of eight floats: lane by lane, then of the lanes.
#[inline(always)]
pub(crate) fn sum_all(floats: &[f32]) -> f32 {
    let mut lanes = Lanes::splat(0.0);
    for eight in floats.as_chunks::<LANES>().0 {
        lanes = lanes.add(Lanes(*eight));
    }
    let a = lanes.0;
    ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
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

    #[test]
    fn dots_of_every_length() {
        for length in 0..40 {
            let row = |seed: usize| -> Vec<f32> {
                (0..length)
                    .map(|at| ((at * 7 + seed * 13) % 11) as f32 - 5.0)
                    .collect()
            };
            let (query, keys): (_, Vec<_>) = (row(99), (0..LANES).map(row).collect());
            let dots = dot8::<Plain>(&query, &std::array::from_fn(|key| &keys[key][..]));
            for (key, dot) in keys.iter().zip(dots.0) {
                let exact: f32 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                assert_eq!(dot, exact, "integers are exact");
            }
        }
    }

    #[test]
    fn sums_of_many() {
        let floats: Vec<f32> = (0..32).map(|at| (at * at) as f32).collect();
        assert_eq!(sum_all(&floats), 10_416.0);
        assert_eq!(sum_all(&[]), 0.0);
        for at in 0..32 {
            let mut floats = [-7.0; 32];
            floats[at] = -3.0;
            assert_eq!(largest(&floats), -3.0);
        }
        assert_eq!(largest(&[]), f32::NEG_INFINITY);
    }
}
