//! Attention by the instruction levels of this processor in turns, in bfloat16 and float32:
//!
//! `cargo run --release -p cpu-kernels --example attention [THREADS [LINES [LEVEL]]]`
//!
//! 9 query heads on 3 KV heads of 64 numbers, blocks of 16 that lie anywhere in the cache. A line is a step: the median of
//! its microseconds a layer at each level. Each layer has its own keys and values, which are read from memory.

use std::time::Instant;

use cpu_kernels::{
    Attend, Attention, CacheShape, Element, Isa, Options, Query, Rows, Sequences, Step,
};

/// Sequences, new tokens of each, tokens of each with the new ones.
const STEPS: [(usize, usize, usize); 8] = [
    (1, 1, 65),
    (1, 1, 4096),
    (8, 1, 512),
    (32, 1, 65),
    (32, 1, 500),
    (4, 4, 130),
    (1, 512, 512),
    (1, 512, 4096),
];
const HEADS: usize = 9;
const BLOCK_SIZE: usize = 16;
const LAYERS: usize = 30;
/// Numbers of all layers' caches at most.
const MAX_LAYER_BYTES: usize = 64 << 20;
const ROUNDS: usize = 7;

fn numbers<E: Element>(count: usize) -> Vec<E> {
    let float = |at: usize| (at * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count).map(|at| E::narrow(float(at))).collect()
}

fn main() {
    let threads = std::env::args()
        .nth(1)
        .map_or(1, |it| it.parse().expect("a number"));
    println!("{threads} threads; microseconds a layer");
    compare::<u16>("bfloat16", threads);
    compare::<f32>("float32", threads);
}

fn compare<E: Attend>(name: &str, threads: usize) {
    let levels = [Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
    let level = std::env::args().nth(3).unwrap_or_default();
    let kernels: Vec<(Isa, Attention)> = levels
        .into_iter()
        .filter(|isa| level.is_empty() || isa.name() == level)
        .filter_map(|isa| Some((isa, Attention::with_isa(threads, isa).ok()?)))
        .collect();
    let lines = std::env::args().nth(2).unwrap_or_default();
    for (count, new, len) in STEPS {
        let name = format!("{name:8} {count:2} x {new:3} of {len:4}");
        if !name.contains(&lines) {
            continue;
        }
        let width = len.div_ceil(BLOCK_SIZE);
        let shape = CacheShape {
            num_blocks: count * width,
            block_size: BLOCK_SIZE,
            kv_heads: 3,
            dim_k: 64,
            dim_v: 64,
        };
        let size = shape.num_blocks * BLOCK_SIZE * 3 * 64;
        let layers = (MAX_LAYER_BYTES / (2 * size)).clamp(1, LAYERS);
        let (keys, values) = (numbers::<E>(size * layers), numbers::<E>(size * layers));
        let tables: Vec<i32> = (0..shape.num_blocks)
            .map(|at| (at * 7919 % shape.num_blocks) as i32)
            .collect();
        let starts: Vec<i32> = (0..=count).map(|at| (at * new) as i32).collect();
        let sequences = Sequences {
            starts: &starts,
            lens: &vec![len as i32; count],
            tables: &tables,
            width,
        };
        let step = Step::new(&sequences, shape.num_blocks, BLOCK_SIZE).expect("it fits");
        let row = HEADS * shape.dim_k;
        let query = numbers::<E>(count * new * row);
        let options = Options {
            scaling: 0.125,
            window: None,
            first_key: 0,
            softcap: None,
            sinks: None,
        };
        let mut out = vec![E::narrow(0.0); query.len()];
        let mut times = vec![vec![]; kernels.len()];
        for _ in 0..ROUNDS {
            for ((_, kernel), times) in kernels.iter().zip(&mut times) {
                let start = Instant::now();
                for (keys, values) in keys.chunks(size).zip(values.chunks(size)) {
                    let query = Query {
                        rows: Rows::new(&query, count * new, row, row).expect("it fits"),
                        heads: HEADS,
                    };
                    kernel
                        .attend(&step, &shape, keys, values, query, &options, &mut out)
                        .expect("it fits");
                }
                times.push(start.elapsed().as_secs_f64() / layers as f64);
            }
        }
        print!("{name}:");
        for ((isa, _), times) in kernels.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            print!(" {} {:.1},", isa.name(), 1e6 * times[ROUNDS / 2]);
        }
        println!();
    }
}
