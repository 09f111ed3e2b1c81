//! Operations that the fuzzer chooses, on the manager and on the model of it, as in the property
//! test: after each one they must agree.

#![no_main]

#[path = "../../kv-core/tests/model/mod.rs"]
mod model;

use arbitrary::{Result, Unstructured};
use kv_core::{Config, PrefillRequest};
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
    let mut ops = Vec::new();
    let mut world = World::new(Config {
        prefix_caching: flags & 7 != 0, // mostly on
        in_flight_sharing: flags & 56 != 0,
        hash_bits,
        ..Config::new(num_blocks, block_size)
    });
    for _ in 0..MAX_OPS {
        if u.is_empty() {
            break;
        }
        let op = op(u)?;
        ops.push(op.clone());
        let done = world.apply(&op).and_then(|()| world.compare());
        done.unwrap_or_else(|difference| panic!("{difference}\nafter {ops:?}"));
    }
    world
        .end()
        .unwrap_or_else(|difference| panic!("at the end: {difference}\nafter {ops:?}"));
    Ok(())
}

/// One operation of few bytes, within the ranges of the property test.
fn op(u: &mut Unstructured) -> Result<Op> {
    let at = |u: &mut Unstructured| u.arbitrary::<u8>().map(usize::from);
    Ok(match u.int_in_range(0..=31_u8)? {
        0 | 1 => Op::New {
            namespace: u.int_in_range(0..=1)?,
            pattern: u.int_in_range(0..=3)?,
            len: u.int_in_range(1..=13)?,
            read_cache: u.ratio(7, 8)?,
        },
        2 => Op::Drop(at(u)?),
        3 => Op::Free(at(u)?, u.int_in_range(0..=31_usize)?.checked_sub(16)),
        4 => Op::Reset(at(u)?),
        5 => Op::Match {
            namespace: u.int_in_range(0..=1)?,
            pattern: u.int_in_range(0..=3)?,
            len: u.int_in_range(1..=13)?,
        },
        6 => Op::Pin(at(u)?),
        7 => Op::Attach(at(u)?, at(u)?),
        8 => Op::Fork(at(u)?, at(u)?),
        9 => Op::Append(at(u)?, u.arbitrary()?),
        10 => Op::DropPin(at(u)?),
        11 | 12 => Op::Begin(u.int_in_range(0..=64)?),
        13 | 14 => Op::Prefill(
            at(u)?,
            PrefillRequest {
                max_tokens: u.int_in_range(0..=64)?,
                spare_blocks: u.int_in_range(0..=7_usize)?.checked_sub(4),
                replay: u.int_in_range(0..=11_usize)?.saturating_sub(8),
            },
        ),
        15 | 16 => Op::Decode(
            u.arbitrary()?,
            u.int_in_range(0..=11_usize)?.saturating_sub(6),
        ),
        17 => match u.arbitrary()? {
            true => Op::Speculate(at(u)?, u.int_in_range(0..=4)?),
            false => Op::Draft(u.arbitrary()?, u.int_in_range(0..=4)?),
        },
        18 => Op::Trim(at(u)?, u.int_in_range(0..=5)?),
        19 => Op::Cancel(at(u)?),
        20 => match u.ratio(7, 8)? {
            true => Op::Commit(u.arbitrary()?),
            false => Op::Decoding(u.arbitrary()?),
        },
        21 => Op::WrongCommit,
        22 => Op::Rollback,
        23 => match u.int_in_range(0..=2)? {
            0 => Op::EvictAll,
            oldest => Op::DropPlan(oldest == 1),
        },
        24 => Op::Launch,
        25 => Op::Reuse(at(u)?),
        26 => Op::Extend(at(u)?, u.int_in_range(0..=11)?),
        27 => Op::Publish(at(u)?, u.arbitrary()?),
        28 | 29 => Op::Reserve(at(u)?, at(u)?),
        30 => Op::Complete(at(u)?, u.arbitrary()?),
        _ => match u.int_in_range(0..=7)? {
            0 => Op::DropTransfer(at(u)?),
            1 => Op::Abandon(at(u)?),
            count => Op::Evict(count - 2),
        },
    })
}
