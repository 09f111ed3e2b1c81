//! What is timed and counted: the hot operations, on a pool that is full of other prompts, so that
//! every new block evicts one. Through the public API alone.

mod world;

use kv_core::Error;

pub use world::{Outcome, World};

/// An operation. Only `run` is measured; `prepare` comes before each run, and tidies up after the last.
pub struct Operation {
    /// What, and how much of it.
    pub name: &'static str,
    /// Prepares the run.
    pub prepare: fn(&mut World) -> Outcome,
    /// The calls of the manager.
    pub run: fn(&mut World) -> Outcome,
}

/// Tokens of a long prompt, and of a short one.
const LONG: usize = 8_192;
const SHORT: usize = 512;
/// Sequences of a decode step.
const BATCH: usize = 256;
/// Prompts of a group: samples of one request, or a burst that a client cancels.
const GROUP: usize = 32;

/// The pool they work on.
pub fn world() -> Result<World, Error> {
    World::full(LONG)
}

const fn operation(
    name: &'static str,
    prepare: fn(&mut World) -> Outcome,
    run: fn(&mut World) -> Outcome,
) -> Operation {
    Operation { name, prepare, run }
}

/// An operation that serves the received prompts.
const fn served(name: &'static str, prepare: fn(&mut World) -> Outcome) -> Operation {
    operation(name, prepare, World::serve)
}

/// All of them. A prompt's way is `sequence`, `begin_step`, `prefill`, `commit`, and its handle dropped.
pub const OPERATIONS: [Operation; 16] = [
    served("cold-prefill-512", |world| world.receive_new(SHORT, 1)),
    served("cold-prefill-8192", |world| world.receive_new(LONG, 1)),
    // Emits events for every block that is evicted and stored ...
    served("told-prefill-8192", |world| world.receive_with_events(LONG)),
    // ... and each is named when that is read.
    operation(
        "take-events-8192",
        |world| {
            world.receive_with_events(LONG)?;
            world.serve()
        },
        World::take_events,
    ),
    served("hot-prefill-512", |world| world.receive_known(SHORT)),
    served("hot-prefill-8192", |world| world.receive_known(LONG)),
    // Hits have nothing to explain ...
    operation(
        "explained-hot-prefill-8192",
        |world| {
            world.explain()?;
            world.receive_known(LONG)
        },
        World::serve,
    ),
    // ... and every block that is evicted is remembered.
    operation(
        "explained-cold-prefill-8192",
        |world| {
            world.explain()?;
            world.receive_new(LONG, 1)
        },
        World::serve,
    ),
    // In one step: the first computes, the others share.
    served("identical-prompts-32x512", |world| {
        world.receive_new(SHORT, GROUP)
    }),
    // `begin_step` and `decode`. A sixteenth of the sequences needs a block ...
    operation(
        "decode-plan-256",
        |world| world.keep_running(SHORT, BATCH),
        World::plan_decodes,
    ),
    // ... and as many fill one.
    operation(
        "decode-commit-256",
        |world| {
            world.keep_running(SHORT, BATCH)?;
            world.plan_decodes()
        },
        World::commit,
    ),
    operation(
        "decode-fill-256",
        |world| {
            world.keep_running(SHORT, BATCH)?;
            world.plan_decodes()
        },
        World::fill,
    ),
    operation(
        "abort-32x512",
        |world| world.start(SHORT, GROUP),
        World::stop_all,
    ),
    operation(
        "fork-32x512",
        |world| world.start(SHORT + 8, 1),
        |world| world.fork(GROUP),
    ),
    operation(
        "pin-drop-8192",
        |world| world.take_pin(LONG),
        World::drop_pin,
    ),
    operation(
        "empty-step-x100",
        |_| Ok(()),
        |world| world.empty_steps(100),
    ),
];
