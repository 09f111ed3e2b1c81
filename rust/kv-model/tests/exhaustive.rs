//! The checker explores every state of the model. With `MODEL=full` its worlds are larger, and take two minutes.

use std::time::Instant;

use kv_model::{Action, BlockLife, Bounds, Event, Flaw};
use stateright::{Checker, HasDiscoveries, Model};

/// Blocks, tokens of a block, most tokens of a sequence, open steps, transfers.
const QUICK: &[Bounds] = &[
    bounds(3, 1, 3, 2, false),
    bounds(4, 1, 3, 1, false),
    bounds(3, 1, 3, 1, true),
];
const FULL: &[Bounds] = &[
    bounds(3, 1, 4, 2, false),
    bounds(3, 2, 4, 2, false),
    bounds(4, 1, 3, 2, false),
    bounds(3, 1, 3, 2, true),
];

const fn bounds(
    num_blocks: usize,
    block_size: usize,
    max_tokens: usize,
    max_steps: usize,
    transfers: bool,
) -> Bounds {
    Bounds {
        num_blocks,
        block_size,
        max_tokens,
        max_steps,
        transfers,
    }
}

/// Explores all states; returns how often each event was seen.
fn explore(bounds: Bounds) -> Vec<u64> {
    let start = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = BlockLife::new(bounds)
        .checker()
        .threads(threads)
        .spawn_bfs()
        .join();
    println!(
        "{bounds:?}: {} states, {} transitions, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64(),
    );
    if let Some((name, path)) = checker.discoveries().into_iter().next() {
        panic!("not so: {name}\n{:#?}", path.into_actions());
    }
    let life = checker.model();
    Event::ALL.map(|event| life.count(event)).to_vec()
}

#[test]
fn every_state_satisfies_the_invariants() {
    let mut seen = vec![0; Event::ALL.len()];
    let is_full = std::env::var_os("MODEL").is_some_and(|size| size == "full");
    for bounds in if is_full { FULL } else { QUICK } {
        for (total, count) in seen.iter_mut().zip(explore(*bounds)) {
            *total += count;
        }
    }
    for (event, count) in Event::ALL.iter().zip(&seen) {
        println!("{event:?}: {count}");
        assert!(*count > 0, "{event:?} was never reached");
    }
}

/// The shortest path to a state that breaks an invariant, and the names of those it breaks.
fn counterexample(flaw: Flaw) -> (Vec<&'static str>, Vec<Action>) {
    let checker = BlockLife::with_flaw(bounds(3, 1, 4, 2, true), flaw)
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let discoveries = checker.discoveries();
    let names = discoveries.keys().copied().collect();
    let paths = discoveries.into_values().map(|path| path.into_actions());
    let shortest = paths.min_by_key(Vec::len);
    (names, shortest.unwrap_or_default())
}

#[test]
fn seeded_bugs_are_found() {
    for flaw in Flaw::ALL {
        let (names, actions) = counterexample(flaw);
        assert!(!names.is_empty(), "{flaw:?} was not found");
        println!("{flaw:?}: {} actions break {names:?}", actions.len());
        for action in actions {
            println!("    {action:?}");
        }
    }
}
