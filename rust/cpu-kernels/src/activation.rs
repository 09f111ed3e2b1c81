//! Functions of single numbers: activations, and others that decoders apply to whole arrays.

use crate::lanes::exp2;

/// A function of gates, to a few units in the last place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activation {
    /// `x / (1 + e ^ -x)` (Elfwing et al., 2017, arXiv:1702.03118).
    Silu,
    /// `x * (1 + erf(x / sqrt(2))) / 2` (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
    Gelu,
    /// `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ^ 3))) / 2` (as above).
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0) ^ 2` (So et al., 2021, arXiv:2109.08668).
    Relu2,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Silu,
        Self::Gelu,
        Self::GeluTanh,
        Self::Relu,
        Self::Relu2,
    ];

    /// The name in PyTorch's terms.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Relu2 => "relu2",
        }
    }

    /// Multiplies each number by the activation of its gate; numbers without a gate stay.
    #[inline(always)]
    pub(crate) fn apply(self, numbers: &mut [f32], gates: &[f32]) {
        self.dispatch(Gates { numbers, gates });
    }

    /// Replaces each number by its activation.
    #[inline(always)]
    pub(crate) fn map(self, numbers: &mut [f32]) {
        self.dispatch(Numbers(numbers));
    }

    /// Runs `work` with the function: one loop for each of them.
    #[inline(always)]
    pub(crate) fn dispatch(self, work: impl WithFunction) {
        match self {
            Self::Silu => work.run(Silu),
            Self::Gelu => work.run(Gelu),
            Self::GeluTanh => work.run(GeluTanh),
            Self::Relu => work.run(Relu),
            Self::Relu2 => work.run(Relu2),
        }
    }
}

/// A function of a number. A type, since a closure is compiled without the instructions of the level.
pub(crate) trait Function: Copy {
    /// Its value; inlined.
    fn of(self, x: f32) -> f32;
}

/// A loop over a function.
pub(crate) trait WithFunction {
    /// Inlined, so that the loop takes the instructions of its caller.
    fn run(self, function: impl Function);
}

struct Gates<'a> {
    numbers: &'a mut [f32],
    gates: &'a [f32],
}

impl WithFunction for Gates<'_> {
    #[inline(always)]
    fn run(self, function: impl Function) {
        for (number, &gate) in self.numbers.iter_mut().zip(self.gates) {
            *number *= function.of(gate);
        }
    }
}

struct Numbers<'a>(&'a mut [f32]);

impl WithFunction for Numbers<'_> {
    #[inline(always)]
    fn run(self, function: impl Function) {
        for number in self.0 {
            *number = function.of(*number);
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        by_sigmoid(x, x)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

/// Uses `(1 + tanh(x)) / 2 = 1 / (1 + e ^ (-2 x))`.
impl Function for GeluTanh {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        const ROOT: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
        by_sigmoid(x, 2.0 * ROOT * (x + 0.044_715 * x * x * x))
    }
}

#[derive(Clone, Copy)]
struct Gelu;

/// The complement of erf is `t * e ^ (p(t) - y ^ 2)` with `t = 1 / (1 + y / 2)`, to 1.2e-7 of itself (Press et al.,
/// Numerical Recipes in C, 1992, 6.2).
impl Function for Gelu {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        let y = (x * std::f32::consts::FRAC_1_SQRT_2).abs();
        let t = 1.0 / 0.5f32.mul_add(y, 1.0);
        let mut p = 0.170_872_77f32;
        for coefficient in [
            -0.822_152_2,
            1.488_515_9,
            -1.135_204,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_7,
            -1.265_512_2,
        ] {
            p = p.mul_add(t, coefficient);
        }
        let rest = t * exp2((-y).mul_add(y, p) * std::f32::consts::LOG2_E);
        let half = 0.5 * x;
        if x < 0.0 {
            half * rest
        } else {
            half * (2.0 - rest)
        }
    }
}

#[derive(Clone, Copy)]
struct Relu;

impl Function for Relu {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }
}

#[derive(Clone, Copy)]
struct Relu2;

impl Function for Relu2 {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        let positive = Relu.of(x);
        positive * positive
    }
}

/// `1 / (1 + e ^ -x)`.
#[derive(Clone, Copy)]
pub(crate) struct Sigmoid;

impl Function for Sigmoid {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        by_sigmoid(1.0, x)
    }
}

/// Its number times `x`.
#[derive(Clone, Copy)]
pub(crate) struct Scale(pub(crate) f32);

impl Function for Scale {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        x * self.0
    }
}

/// `cap * tanh(x / cap)`, of its number.
#[derive(Clone, Copy)]
pub(crate) struct Cap(pub(crate) f32);

impl Function for Cap {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        self.0 * tanh(x / self.0)
    }
}

/// `(1 - e) / (1 + e)` with `e = e ^ (-2 |y|)`; by its series where that loses digits.
#[inline(always)]
fn tanh(y: f32) -> f32 {
    let size = y.abs();
    let e = exp2(size * (-2.0 * std::f32::consts::LOG2_E));
    let wide = (1.0 - e) / (1.0 + e);
    let square = y * y;
    let mut p = -0.053_968_254f32;
    for coefficient in [0.133_333_33, -0.333_333_33] {
        p = p.mul_add(square, coefficient);
    }
    let small = (p * square).mul_add(size, size);
    let magnitude = if size < 0.2 { small } else { wide };
    magnitude.copysign(y)
}

/// `x / (1 + e ^ -y)`.
#[inline(always)]
fn by_sigmoid(x: f32, y: f32) -> f32 {
    let exponent = y * -std::f32::consts::LOG2_E;
    let exponent = if exponent > 127.0 { 127.0 } else { exponent };
    x / (1.0 + exp2(exponent))
}
