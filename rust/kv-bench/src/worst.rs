//! The worst case of every call, beside its median: `worst BLOCKS STEPS ROUNDS`.
//!
//! A million steps of a steady load on a pool that fills and then evicts: a new prompt each step, sixteen
//! sequences that decode, some forks and pins, events taken now and then. The load is the same in every
//! round, so each call has its least time over the rounds: what the machine did beside is not in it, and
//! what the call itself does, such as to grow a table, is.

use std::collections::VecDeque;
use std::time::Instant;

use kv_core::{BlockManager, Config, Error, SeqHandle, SeqKey};

const BLOCK_SIZE: usize = 16;
/// Sequences that decode.
const RUNNING: usize = 16;
/// Different first blocks of prompts.
const HEADS: u32 = 64;
const KINDS: [&str; 11] = [
    "sequence",
    "begin_step",
    "prefill",
    "decode",
    "commit",
    "drop",
    "match_prefix",
    "fork",
    "take_events",
    "stats",
    "usage",
];

/// The times of each kind of call, in order, and the call that is next.
#[derive(Default)]
struct Times {
    best: [Vec<u32>; KINDS.len()],
    next: [usize; KINDS.len()],
}

impl Times {
    fn timed<R>(&mut self, kind: usize, call: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let answer = call();
        let took = u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX);
        let (times, next) = (&mut self.best[kind], &mut self.next[kind]);
        match times.get_mut(*next) {
            Some(best) => *best = (*best).min(took),
            None => times.push(took),
        }
        *next += 1;
        answer
    }
}

/// Tokens of a prompt: a block that many have, a block that no other has, and half of one.
fn prompt(step: u32) -> Vec<u32> {
    let head = step.wrapping_mul(2_654_435_761) % HEADS;
    let head = (0..BLOCK_SIZE as u32).map(|at| head * 1_000 + at);
    let own = (0..24).map(|at| 1_000_000 + step.wrapping_mul(24) + at);
    let mut tokens = Vec::with_capacity(128);
    tokens.extend(head.chain(own));
    tokens
}

fn round(blocks: usize, steps: u32, times: &mut Times) -> Result<(), Error> {
    let mut config = Config::new(blocks, BLOCK_SIZE);
    (config.hash_seed, config.events) = (Some(1), true);
    let mut manager = BlockManager::new(config)?;
    let mut running: VecDeque<SeqHandle> = VecDeque::new();
    let sampled = [7; RUNNING + 2];
    for step in 0..steps {
        let tokens = prompt(step);
        let sequence = times.timed(0, || manager.sequence(tokens, b"", true))?;
        let plan = times.timed(1, || manager.begin_step(1_024))?;
        let keys: Vec<SeqKey> = running.iter().map(SeqHandle::key).collect();
        times.timed(3, || manager.decode(plan.key(), &keys, 0))?;
        times.timed(2, || {
            manager.prefill(plan.key(), sequence.key(), 1_024, None)
        })?;
        manager.copies(plan.key())?;
        times.timed(4, || manager.commit(plan.key(), &sampled[..keys.len() + 1]))?;
        drop(plan);
        if step % 16 == 0 {
            let fork = times.timed(7, || manager.fork(sequence.key(), 20))?;
            drop(fork);
        }
        running.push_back(sequence);
        if running.len() > RUNNING {
            let oldest = running.pop_front();
            // With the manager's next call, which takes the blocks back.
            times.timed(5, || {
                drop(oldest);
                manager.drain_deferred();
            });
        }
        if step % 16 == 8 {
            let known = prompt(step / 2);
            drop(times.timed(6, || manager.match_prefix(&known, b""))?);
        }
        if step % 64 == 32 {
            drop(times.timed(8, || manager.take_events()));
            times.timed(9, || manager.stats());
        }
        times.timed(10, || manager.usage());
    }
    times.next = Default::default();
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |usual| {
        let given = arguments.next().and_then(|text| text.parse().ok());
        given.unwrap_or(usual)
    };
    let (blocks, steps, rounds) = (number(1_000_000), number(1_000_000), number(3));
    let mut times = Times::default();
    for _ in 0..rounds {
        round(blocks, steps as u32, &mut times)?;
    }
    println!("{blocks} blocks, {steps} steps, microseconds:");
    println!(
        "{:14}{:>10}{:>10}{:>10}{:>10}",
        "", "calls", "median", "p99.99", "maximum"
    );
    for (kind, best) in KINDS.iter().zip(&mut times.best) {
        best.sort_unstable();
        let count = best.len();
        let at = |share: f64| {
            let index = ((count as f64 * share) as usize).min(count.saturating_sub(1));
            best.get(index).map_or(0.0, |&time| f64::from(time) / 1e3)
        };
        let (median, rare, slowest) = (at(0.5), at(0.9999), at(1.0));
        println!("{kind:14}{count:>10}{median:>10.2}{rare:>10.2}{slowest:>10.2}");
    }
    Ok(())
}
