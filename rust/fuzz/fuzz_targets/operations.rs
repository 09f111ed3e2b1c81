//! Operations that the fuzzer chooses, on the manager and on the model of it, as in the property
//! test: after each one they must agree.

#![no_main]

#[path = "../../kv-core/tests/model/mod.rs"]
mod model;

use arbitrary::{Result, Unstructured};
use kv_core::{Config, StateConfig};
use libfuzzer_sys::fuzz_target;
use model::op::Op;
use model::world::World;

/// So that a case stays small enough to read, and the arrays of the simulated device hold every row.
const MAX_OPS: usize = 200;

fuzz_target!(|data: &[u8]| {
    // The bytes may end anywhere: the operations up to there count.
    let _ = play(&mut Unstructured::new(data));
});

fn play(u: &mut Unstructured) -> Result<()> {
    let (num_blocks, block_size) = (u.int_in_range(2..=23)?, u.int_in_range(1..=4)?);
    let flags: u8 = u.arbitrary()?;
    let hash_bits = [128, 128, 1, 3][usize::from(flags >> 6)];
    let states: u8 = u.arbitrary()?;
    let state = StateConfig {
        blocks: 1 + usize::from(states & 1),
        cadence: usize::from(states >> 1 & 7),
        min_tokens: usize::from(states >> 4 & 3),
    };
    let mut ops = Vec::new();
    let mut world = World::new(Config {
        prefix_caching: flags & 7 != 0, // mostly on
        in_flight_sharing: flags & 56 != 0,
        hash_bits,
        state: (states >= 64).then_some(state),
        ..Config::new(num_blocks, block_size)
    });
    for _ in 0..MAX_OPS {
        if u.is_empty() {
            break;
        }
        let op = Op::choose(&mut |bound| u.int_in_range(0..=bound - 1).unwrap_or(0));
        ops.push(op.clone());
        let done = world.apply(&op).and_then(|()| world.compare());
        done.unwrap_or_else(|difference| panic!("{difference}\nafter {ops:?}"));
    }
    world
        .end()
        .unwrap_or_else(|difference| panic!("at the end: {difference}\nafter {ops:?}"));
    Ok(())
}
