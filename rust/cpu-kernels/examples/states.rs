//! Recurrent layers by the instruction levels of this processor in turns:
//!
//! `cargo run --release -p cpu-kernels --example states [THREADS [LINES [LEVEL]]]`
//!
//! A line is a kernel in a step: the least of its microseconds a layer at each level, and the bytes of states that it reads
//! and writes a second. Each layer has its own states, which are read from memory. The first line copies as many.

use std::time::Instant;

use cpu_kernels::{
    Activation, Attention, ConvRows, DeltaLayer, DeltaRows, DeltaShape, Isa, KeySharing,
    Mamba2Shape, MambaRows, MambaWeights, Rows, ShortConv, StateStep,
};

/// Sequences, and new tokens of each.
const STEPS: [(usize, usize); 4] = [(1, 1), (8, 1), (32, 1), (1, 512)];
const MAX_LAYERS: usize = 8;
/// Numbers of all layers' states at most.
const MAX_NUMBERS: usize = 1 << 28;
const ROUNDS: usize = 7;

fn numbers(count: usize) -> Vec<f32> {
    let float = |at: usize| (at * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(float).collect()
}

/// Heads of keys and values of 128, as in Qwen3-Next.
const DELTA: DeltaShape = DeltaShape {
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    sharing: KeySharing::Consecutive,
};

/// As in Granite 4.
const MAMBA2: Mamba2Shape = Mamba2Shape {
    heads: 48,
    head_dim: 64,
    groups: 1,
    state_size: 128,
};

const CHANNELS: usize = 8192;

fn main() {
    let threads = std::env::args()
        .nth(1)
        .map_or(1, |it| it.parse().expect("a number"));
    let level = std::env::args().nth(3).unwrap_or_default();
    let kernels: Vec<(Isa, Attention)> = [Isa::Avx2, Isa::Avx512]
        .into_iter()
        .filter(|isa| level.is_empty() || isa.name() == level)
        .filter_map(|isa| Some((isa, Attention::with_isa(threads, isa).ok()?)))
        .collect();
    println!("{threads} threads; microseconds a layer, GB/s of states");
    for (count, new) in STEPS {
        let name = |kernel: &str| format!("{kernel:12} {count:2} x {new:3}");
        let tokens = count * new;
        let x = numbers(tokens * CHANNELS);
        let row =
            |width: usize| Rows::new(&x[..tokens * width], tokens, width, width).expect("it fits");
        let mut out = vec![0.0; tokens * CHANNELS];
        let weights = numbers(4 * CHANNELS);
        let rates: Vec<f32> = numbers(16 * CHANNELS).iter().map(|it| it - 1.5).collect();
        measure(
            &name("copy"),
            &kernels,
            (count, 32 * 128 * 128),
            |_, _, states| {
                let (first, second) = states.split_at_mut(states.len() / 2);
                second.copy_from_slice(first);
                first.copy_from_slice(second);
            },
        );
        measure(
            &name("gated_delta"),
            &kernels,
            (count, 32 * 128 * 128),
            |kernel, step, states| {
                let rows = DeltaRows {
                    query: row(16 * 128),
                    key: row(16 * 128),
                    value: row(32 * 128),
                    beta_gate: row(32),
                    decay_gate: row(32),
                };
                let layer = DeltaLayer {
                    rate: &rates[..32],
                    dt_bias: &weights[..32],
                    beta_scale: 1.0,
                    scaling: 0.1,
                    epsilon: Some(1e-6),
                };
                let out = &mut out[..tokens * 32 * 128];
                kernel
                    .gated_delta(&step.of(new), &DELTA, &rows, &layer, states, out)
                    .expect("it fits");
            },
        );
        measure(
            &name("mamba2"),
            &kernels,
            (count, 48 * 64 * 128),
            |kernel, step, states| {
                let rows = MambaRows {
                    x: row(48 * 64),
                    dt: row(48),
                    b: row(128),
                    c: row(128),
                    gate: None,
                };
                let weights = MambaWeights {
                    a: &rates[..48],
                    dt_bias: &weights[..48],
                    d: &weights[..48],
                    dt_limits: (0.0, f32::INFINITY),
                };
                let out = &mut out[..tokens * 48 * 64];
                kernel
                    .mamba2(&step.of(new), &MAMBA2, &rows, &weights, states, out)
                    .expect("it fits");
            },
        );
        measure(
            &name("mamba"),
            &kernels,
            (count, 16 * CHANNELS),
            |kernel, step, states| {
                let rows = MambaRows {
                    x: row(CHANNELS),
                    dt: row(CHANNELS),
                    b: row(16),
                    c: row(16),
                    gate: None,
                };
                let weights = MambaWeights {
                    a: &rates,
                    dt_bias: &weights[..CHANNELS],
                    d: &weights[..CHANNELS],
                    dt_limits: (0.0, f32::INFINITY),
                };
                kernel
                    .mamba(&step.of(new), &rows, &weights, states, &mut out)
                    .expect("it fits");
            },
        );
        measure(
            &name("short_conv"),
            &kernels,
            (count, 3 * CHANNELS),
            |kernel, step, states| {
                let conv = ShortConv {
                    weight: &weights,
                    kernel_size: 4,
                    bias: None,
                    activation: Some(Activation::Silu),
                };
                let rows = ConvRows {
                    x: row(CHANNELS),
                    gates: None,
                };
                kernel
                    .short_conv(&step.of(new), &conv, &rows, states, &mut out)
                    .expect("it fits");
            },
        );
    }
}

/// The number of sequences, each in a slot of its own.
struct Sequences(usize);

impl Sequences {
    fn of(&self, new: usize) -> StateStep {
        let starts: Vec<i32> = (0..=self.0).map(|at| (at * new) as i32).collect();
        let slots: Vec<i64> = (0..self.0 as i64).collect();
        StateStep::new(&starts, &slots, &slots).expect("it fits")
    }
}

/// `size`: numbers of a sequence's state in a layer.
fn measure(
    name: &str,
    kernels: &[(Isa, Attention)],
    (count, size): (usize, usize),
    mut layer: impl FnMut(&Attention, &Sequences, &mut [f32]),
) {
    let lines = std::env::args().nth(2).unwrap_or_default();
    if !name.contains(&lines) {
        return;
    }
    let layers = (MAX_NUMBERS / (count * size)).clamp(1, MAX_LAYERS);
    let mut memory = vec![0.1f32; layers * count * size + 16];
    let first = memory.as_ptr().align_offset(64);
    let states = &mut memory[first..][..layers * count * size];
    let mut times = vec![vec![]; kernels.len()];
    for _ in 0..ROUNDS {
        for ((_, kernel), times) in kernels.iter().zip(&mut times) {
            let start = Instant::now();
            for states in states.chunks_mut(count * size) {
                layer(kernel, &Sequences(count), states);
            }
            times.push(start.elapsed().as_secs_f64() / layers as f64);
        }
    }
    print!("{name}:");
    for ((isa, _), times) in kernels.iter().zip(&times) {
        let time = times.iter().copied().fold(f64::INFINITY, f64::min);
        let rate = (8 * count * size) as f64 / time / 1e9;
        print!(" {} {:.1} ({rate:.1}),", isa.name(), 1e6 * time);
    }
    println!();
}
