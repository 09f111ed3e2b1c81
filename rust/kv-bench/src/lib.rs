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

/// All of them. A prompt's way is `sequence`, `begin_step`, `prefill`, `commit`, and its handle dropped.
pub const OPERATIONS: [Operation; 16] = [
    Operation {
        name: "cold-prefill-512",
        prepare: |world| world.receive_new(SHORT, 1),
        run: World::serve,
    },
    Operation {
        name: "cold-prefill-8192",
        prepare: |world| world.receive_new(LONG, 1),
        run: World::serve,
    },
    // Emits events for every block that is evicted and stored ...
    Operation {
        name: "told-prefill-8192",
        prepare: |world| {
            world.keep_events()?;
            world.take_events()?;
            world.receive_new(LONG, 1)
        },
        run: World::serve,
    },
    // ... and each is named when that is read.
    Operation {
        name: "take-events-8192",
        prepare: |world| {
            world.keep_events()?;
            world.take_events()?;
            world.receive_new(LONG, 1)?;
            world.serve()
        },
        run: World::take_events,
    },
    Operation {
        name: "hot-prefill-512",
        prepare: |world| world.receive_known(SHORT),
        run: World::serve,
    },
    Operation {
        name: "hot-prefill-8192",
        prepare: |world| world.receive_known(LONG),
        run: World::serve,
    },
    // Hits have nothing to explain ...
    Operation {
        name: "explained-hot-prefill-8192",
        prepare: |world| {
            world.explain()?;
            world.receive_known(LONG)
        },
        run: World::serve,
    },
    // ... and every block that is evicted is remembered.
    Operation {
        name: "explained-cold-prefill-8192",
        prepare: |world| {
            world.explain()?;
            world.receive_new(LONG, 1)
        },
        run: World::serve,
    },
    // In one step: the first computes, the others share.
    Operation {
        name: "identical-prompts-32x512",
        prepare: |world| world.receive_new(SHORT, GROUP),
        run: World::serve,
    },
    // `begin_step` and `decode`. A sixteenth of the sequences needs a block ...
    Operation {
        name: "decode-plan-256",
        prepare: |world| world.keep_running(SHORT, BATCH),
        run: World::plan_decodes,
    },
    // ... and as many fill one.
    Operation {
        name: "decode-commit-256",
        prepare: |world| {
            world.keep_running(SHORT, BATCH)?;
            world.plan_decodes()
        },
        run: World::commit,
    },
    Operation {
        name: "decode-fill-256",
        prepare: |world| {
            world.keep_running(SHORT, BATCH)?;
            world.plan_decodes()
        },
        run: World::fill,
    },
    Operation {
        name: "abort-32x512",
        prepare: |world| world.start(SHORT, GROUP),
        run: World::stop_all,
    },
    Operation {
        name: "fork-32x512",
        prepare: |world| world.start(SHORT + 8, 1),
        run: |world| world.fork(GROUP),
    },
    Operation {
        name: "pin-drop-8192",
        prepare: |world| world.take_pin(LONG),
        run: World::drop_pin,
    },
    Operation {
        name: "empty-step-x100",
        prepare: |_| Ok(()),
        run: |world| world.empty_steps(100),
    },
];
