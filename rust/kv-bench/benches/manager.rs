//! How long the hot operations take: `make bench-rust`, or `cargo bench -p kv-bench`.
//!
//! Each round is timed alone, its preparation is not. Reading the clock adds about 40 ns to it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use kv_bench::{Operation, World};
use kv_core::Error;

fn time(operation: &Operation, world: &mut World, rounds: u64) -> Result<Duration, Error> {
    let mut total = Duration::ZERO;
    for _ in 0..rounds {
        (operation.prepare)(world)?;
        let start = Instant::now();
        (operation.run)(black_box(world))?;
        total += start.elapsed();
    }
    Ok(total)
}

fn manager(criterion: &mut Criterion) {
    for operation in &kv_bench::OPERATIONS {
        criterion.bench_function(operation.name, |bencher| {
            let mut world = kv_bench::world().expect("a pool");
            bencher.iter_custom(|rounds| {
                time(operation, &mut world, rounds).expect("the operation is allowed")
            });
        });
    }
}

criterion_group!(benches, manager);
criterion_main!(benches);
