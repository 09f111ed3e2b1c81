//! The exponential in float64, for the weights of tokens.

/// Numbers below this have the exponential 0.
const LOWEST: f64 = -760.0;

/// Adding it to a number leaves the nearest integer's exponent in the low bits: 1.5 * 2^52 + 1023.
const ROUND: f64 = 6_755_399_441_055_744.0 + 1023.0;

/// ln 2 in two parts; the product of the first with an exponent is exact (as in FreeBSD's `e_exp.c`).
const LN2: [f64; 2] = [6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10];

/// 1 / n! from 13 down to 2: what is left of the series is below 2^-57 for half of ln 2.
const SERIES: [f64; 12] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
];

/// `e ^ x` for `x` up to 0, to one unit in the last place; NaN of NaN.
///
/// Products and sums are rounded one by one, so that all builds give the same bits, and quickly so without an instruction
/// for both. Without branches, so that a loop of it becomes vector instructions.
#[inline(always)]
pub(crate) fn exp(x: f64) -> f64 {
    let x = if x < LOWEST { LOWEST } else { x };
    let exponent = (x * std::f64::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - exponent * LN2[0]) - exponent * LN2[1];
    let mut series = SERIES[0];
    for coefficient in &SERIES[1..] {
        series = series * r + coefficient;
    }
    let power = 1.0 + (r + r * r * series);
    // Two factors: the lowest exponents are below those of normal numbers.
    let half = exponent * 0.5 + ROUND;
    let rest = (exponent - (half - ROUND)) + ROUND;
    power * f64::from_bits(half.to_bits() << 52) * f64::from_bits(rest.to_bits() << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(x: f64) -> f64 {
        let (actual, expected) = (exp(x), x.exp());
        let unit = expected.next_up() - expected;
        (actual - expected).abs() / unit
    }

    #[test]
    fn exponentials_are_within_one_unit_in_the_last_place_of_those_of_the_c_library() {
        let mut largest = 0.0f64;
        for step in 0..=3_000_000 {
            largest = largest.max(units(f64::from(step) * -2.5e-4));
        }
        for power in -60..10 {
            largest = largest.max(units(-(2f64.powi(power))));
        }
        assert!(largest > 0.0, "the last bits differ somewhere");
        assert!(largest <= 1.0, "off by {largest} units");
    }

    #[test]
    fn exponentials_of_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-745.0), 5e-324);
        assert_eq!(exp(-746.0), 0.0);
        assert_eq!(exp(-1e308), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert!(exp(f64::NAN).is_nan());
    }
}
