//! Rounds of one operation, for callgrind to count: `make guard`. Without an operation: their names.

use std::hint::black_box;

use kv_bench::{OPERATIONS, Operation, Outcome, World};
use kv_core::Error;

/// Rounds until vectors have grown and lists have gone round once.
const WARM_UP: usize = 4;
/// Rounds counted; printed at the end. They fill eight blocks, so that work of some rounds only is counted, too.
const ROUNDS: usize = 128;

/// What `--toggle-collect` names.
#[inline(never)]
fn counted(operation: &Operation, world: &mut World) -> Outcome {
    black_box((operation.run)(black_box(world)))
}

fn main() -> Result<(), Error> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let Some(operation) = OPERATIONS.iter().find(|it| it.name == wanted) else {
        OPERATIONS.iter().for_each(|it| println!("{}", it.name));
        return Ok(());
    };
    let mut world = kv_bench::world()?;
    for round in 0..WARM_UP + ROUNDS {
        (operation.prepare)(&mut world)?;
        match round {
            ..WARM_UP => (operation.run)(&mut world)?,
            _ => counted(operation, &mut world)?,
        }
    }
    println!("{ROUNDS}");
    Ok(())
}
