//! Activations in f64.

use cpu_kernels::Activation;

/// erf to about 1e-15: its series, and far out the continued fraction of its complement.
fn erf(x: f64) -> f64 {
    let root = std::f64::consts::PI.sqrt();
    if x.abs() > 3.0 {
        let size = x.abs();
        let rest = (1..=60)
            .rev()
            .fold(size, |rest, k| size + f64::from(k) / 2.0 / rest);
        return (1.0 - (-x * x).exp() / rest / root).copysign(x);
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..60 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / root
}

/// By its definition.
pub(crate) fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Relu2 => x.max(0.0).powi(2),
    }
}
