//! `log(1 + e ^ x)`, of time steps.

use crate::activation::Function;
use crate::lanes::exp2;

/// `log(1 + e ^ x)`, to a few units in the last place.
#[derive(Clone, Copy)]
pub(crate) struct Softplus;

/// It is `max(x, 0) + log(1 + y)` with `y = e ^ -|x|`, and that logarithm `2 atanh(y / (2 + y))`, by its series.
impl Function for Softplus {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        let y = exp2(x.abs() * -std::f32::consts::LOG2_E);
        let s = y / (2.0 + y); // at most a third
        let square = s * s;
        let mut p = 1.0 / 15.0f32;
        for coefficient in [
            1.0 / 13.0,
            1.0 / 11.0,
            1.0 / 9.0,
            1.0 / 7.0,
            1.0 / 5.0,
            1.0 / 3.0,
            1.0,
        ] {
            p = p.mul_add(square, coefficient);
        }
        let positive = if x < 0.0 { 0.0 } else { x };
        (2.0 * s).mul_add(p, positive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_is_within_a_few_units_in_the_last_place() {
        for step in -800_000..=1_000_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp().ln_1p();
            let error = (f64::from(Softplus.of(x)) - exact).abs() / exact;
            let unit = 4e-7 * f64::from(x.abs()).max(1.0); // of the exponent
            assert!(error < unit, "softplus({x}) is off by {error:e}");
        }
        assert_eq!(Softplus.of(1e30), 1e30);
        assert!(Softplus.of(f32::NAN).is_nan());
    }
}
