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

    /// The largest lane.
    #[inline(always)]
    pub(crate) fn max(self) -> f32 {
        let mut half = [0.0; 4];
        for lane in 0..4 {
            half[lane] = larger(self.0[lane], self.0[lane + 4]);
        }
        larger(larger(half[0], half[2]), larger(half[1], half[3]))
    }

    /// The sum of the lanes.
    #[inline(always)]
    pub(crate) fn sum(self) -> f32 {
        let a = self.0;
        ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
    }

    /// `e ^ lane` of lanes that are 0 or less, to about 2 units in the last place; what is below -87
    /// counts as -87. After Cephes' `expf` (Moshier, 1989): `2^n * e^r`, `e^r` by a polynomial.
    #[inline(always)]
    pub(crate) fn exp(mut self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = exp(self.0[lane]);
        }
        self
    }
}

/// `f32::max` as one instruction: of a NaN and a number, the second.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// See [`Lanes::exp`].
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
pub(crate) fn dot8(query: &[f32], keys: [&[f32]; LANES]) -> Lanes {
    let (chunks, tail) = query.as_chunks::<LANES>();
    let mut sums = [Lanes::splat(0.0); LANES];
    let rows = keys.map(|key| &key.as_chunks::<LANES>().0[..chunks.len()]);
    for (at, part) in chunks.iter().enumerate() {
        for key in 0..LANES {
            sums[key] = Lanes(*part).mul_add(&rows[key][at], sums[key]);
        }
    }
    let mut dots = sum_each(sums);
    for (key, row) in keys.iter().enumerate() {
        let rest = &row[row.len() - tail.len()..];
        for (&a, &b) in tail.iter().zip(rest) {
            dots.0[key] = a.mul_add(b, dots.0[key]);
        }
    }
    dots
}

/// The sums of eight times eight lanes.
#[inline(always)]
fn sum_each(sums: [Lanes; LANES]) -> Lanes {
    let mut found = [0.0; LANES];
    for (sum, lanes) in found.iter_mut().zip(sums) {
        *sum = lanes.sum();
    }
    Lanes(found)
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
            let dots = dot8(&query, std::array::from_fn(|key| &keys[key][..]));
            for (key, dot) in keys.iter().zip(dots.0) {
                let exact: f32 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                assert_eq!(dot, exact, "integers are exact");
            }
        }
    }

    #[test]
    fn sums_and_maxima() {
        let lanes = Lanes([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0]);
        assert_eq!((lanes.sum(), lanes.max()), (19.0, 9.0));
        for at in 0..LANES {
            let mut one = Lanes::splat(f32::NEG_INFINITY);
            one.0[at] = -3.0;
            assert_eq!(one.max(), -3.0);
        }
    }
}
