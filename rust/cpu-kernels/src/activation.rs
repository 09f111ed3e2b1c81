//! Activations of gates.

use crate::lanes::exp2;

/// A function of gates, to a few units in the last place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activation {
    /// `x / (1 + e ^ -x)` (Elfwing et al., 2017, arXiv:1702.03118).
    Silu,
    /// `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ^ 3))) / 2` (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
    GeluTanh,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Silu, Self::GeluTanh];

    /// The name in PyTorch's terms.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
        }
    }

    /// Multiplies each number with the activation of its gate; numbers without a gate stay.
    #[inline(always)]
    pub(crate) fn apply(self, numbers: &mut [f32], gates: &[f32]) {
        // Loops, since a closure is compiled without the instructions of the level.
        let pairs = numbers.iter_mut().zip(gates);
        match self {
            Self::Silu => {
                for (number, &gate) in pairs {
                    *number *= silu(gate);
                }
            }
            Self::GeluTanh => {
                for (number, &gate) in pairs {
                    *number *= gelu_tanh(gate);
                }
            }
        }
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    by_sigmoid(x, x)
}

/// Uses `(1 + tanh(x)) / 2 = 1 / (1 + e ^ (-2 x))`.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    by_sigmoid(x, 2.0 * ROOT * (x + 0.044_715 * x * x * x))
}

/// `x / (1 + e ^ -y)`.
#[inline(always)]
fn by_sigmoid(x: f32, y: f32) -> f32 {
    let exponent = y * -std::f32::consts::LOG2_E;
    let exponent = if exponent > 127.0 { 127.0 } else { exponent };
    x / (1.0 + exp2(exponent))
}
