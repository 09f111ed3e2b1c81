//! Linear layers by tiles and by vectors in turns, at each instruction level of this processor:
//!
//! `cargo run --release -p cpu-kernels --example tiles [THREADS]`
//!
//! A line is a weight and a number of rows: the median of the microseconds of a product at each level, and GFLOP/s at the
//! last one. Weights are read from memory: copies of them are larger than most caches.

use std::time::Instant;

use cpu_kernels::{Attention, Element, Isa, PackedWeight, QuantizedFormat, QuantizedWeight};

const SHAPES: [(usize, usize); 4] = [(576, 1536), (1536, 576), (576, 49152), (4096, 4096)];
const ROWS: [usize; 8] = [1, 4, 8, 16, 32, 96, 128, 512];
const FORMATS: [QuantizedFormat; 3] = [
    QuantizedFormat::Q4_0,
    QuantizedFormat::Q4K,
    QuantizedFormat::Q8_0,
];
/// Bytes of weights that a round reads.
const READ: usize = 64 << 20;
const ROUNDS: usize = 7;

fn numbers(count: usize) -> Vec<u16> {
    let float = |at: usize| (at * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(|at| u16::narrow(float(at))).collect()
}

/// Blocks of any codes with small scales.
fn blocks(format: QuantizedFormat, count: usize) -> Vec<u8> {
    let bytes = format.block_bytes();
    let mut data: Vec<u8> = (0..count * bytes).map(|at| (at * 31 % 251) as u8).collect();
    for block in data.chunks_mut(bytes) {
        (block[1], block[3]) = (0x1c, 0x1c);
    }
    data
}

fn main() {
    let threads = std::env::args()
        .nth(1)
        .map_or(1, |it| it.parse().expect("a number"));
    let levels = [Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
    let kernels: Vec<(Isa, Attention)> = levels
        .into_iter()
        .filter_map(|isa| Some((isa, Attention::with_isa(threads, isa).ok()?)))
        .collect();
    for (in_features, out_features) in SHAPES {
        let shape = (in_features, out_features);
        let copies = (READ / (2 * in_features * out_features)).max(1);
        let weight = numbers(in_features * out_features);
        let pack = || PackedWeight::pack(&weight, in_features, out_features).expect("it fits");
        let weights: Vec<_> = (0..copies).map(|_| pack()).collect();
        compare(
            "bfloat16",
            shape,
            &kernels,
            &weights,
            |kernel, rows, weight, out| {
                kernel.linear(rows, weight, None, out).expect("it fits");
            },
        );
        for format in FORMATS {
            if !in_features.is_multiple_of(format.block_size()) {
                continue;
            }
            let data = blocks(format, in_features * out_features / format.block_size());
            let copies = (READ / data.len()).max(1);
            let pack = || QuantizedWeight::pack(format, &data, in_features, out_features);
            let weights: Vec<_> = (0..copies).map(|_| pack().expect("it fits")).collect();
            compare(
                format.name(),
                shape,
                &kernels,
                &weights,
                |kernel, rows, weight, out| {
                    kernel
                        .quantized_linear(rows, weight, None, out)
                        .expect("it fits");
                },
            );
        }
    }
}

fn compare<W>(
    name: &str,
    (in_features, out_features): (usize, usize),
    kernels: &[(Isa, Attention)],
    weights: &[W],
    multiply: impl Fn(&Attention, &[u16], &W, &mut [u16]),
) {
    for count in ROWS {
        let rows = numbers(count * in_features);
        let mut out = vec![0; count * out_features];
        let products = 2.0 * (count * in_features * out_features) as f64;
        let weights = &weights[..weights.len().min((2e9 / products) as usize).max(1)];
        let mut times = vec![vec![]; kernels.len()];
        for _ in 0..ROUNDS {
            for ((_, kernel), times) in kernels.iter().zip(&mut times) {
                let start = Instant::now();
                for weight in weights {
                    multiply(kernel, &rows, weight, &mut out);
                }
                times.push(start.elapsed().as_secs_f64() / weights.len() as f64);
            }
        }
        print!("{name:8} {out_features:5} x {in_features:4}, {count:3} rows:");
        let mut last = f64::NAN;
        for ((isa, _), times) in kernels.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            last = times[ROUNDS / 2];
            let modelled = if isa.is_modelled() { " (modelled)" } else { "" };
            print!(" {}{modelled} {:.1} us,", isa.name(), 1e6 * last);
        }
        println!(" {:.0} GFLOP/s", 1e-9 * products / last);
    }
}
