//! The block manager follows the model: after the same actions it has the same blocks, counters, queue, tables and
//! cached prefixes, and has given the same answers.

mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_model::{Action, BlockLife, Bounds, Event, State};
use stateright::{Checker, Model, Path};
use world::World;

/// Takes the manager through a path of the model, and compares after each action from number `from` on.
fn follow(life: &BlockLife, actions: &[Action], from: usize) {
    let mut world = World::new(life.bounds);
    let mut state = life.init_states().remove(0);
    world.compare(&state, life).expect("equal when new");
    for (at, &action) in actions.iter().enumerate() {
        let (next, answer) = life.apply(&state, action);
        state = next;
        let mut followed = world.apply(action, &answer);
        if followed.is_ok() && at + 1 >= from {
            followed = world.compare(&state, life);
        }
        if let Err(difference) = followed {
            panic!("{difference}\nafter {:#?}", &actions[..=at]);
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *seed;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)) as usize >> 1
}

fn is_of_step(action: &Action) -> bool {
    use Action::{BeginStep, Commit, Decode, Prefill};
    matches!(
        action,
        BeginStep | Prefill { .. } | Decode { .. } | Commit { .. }
    )
}

/// A random path. Refused actions are on it, too.
fn walk(life: &BlockLife, len: usize, seed: &mut u64) -> Vec<Action> {
    let mut state = life.init_states().remove(0);
    let (mut path, mut enabled) = (Vec::new(), Vec::new());
    while path.len() < len {
        enabled.clear();
        life.enabled(&state, &mut enabled);
        // Every second action is one of a step, and every second prompt that of another sequence: two sequences that
        // live long enough to compute the same blocks are rare by chance.
        if random(seed).is_multiple_of(2) && enabled.iter().any(is_of_step) {
            enabled.retain(is_of_step);
        }
        let repeats = |action: &Action| match action {
            Action::Create { prompt, .. } => state.live().any(|(_, other)| other.tokens == *prompt),
            _ => true,
        };
        if random(seed).is_multiple_of(2) && enabled.iter().any(repeats) {
            enabled.retain(repeats);
        }
        // Of each kind alike: there are more prompts than anything else.
        let kind = |action: &Action| std::mem::discriminant(action);
        let mut kinds: Vec<_> = enabled.iter().map(kind).collect();
        kinds.dedup();
        let chosen = kinds[random(seed) % kinds.len()];
        let alike: Vec<_> = enabled.iter().filter(|of| kind(of) == chosen).collect();
        let action = *alike[random(seed) % alike.len()];
        path.push(action);
        state = life.apply(&state, action).0;
    }
    path
}

#[test]
fn random_paths() {
    let is_full = std::env::var_os("MODEL").is_some_and(|size| size == "full");
    let (paths, len) = (if is_full { 10_000 } else { 600 }, 60);
    let mut seen = [0; Event::ALL.len()];
    for (seed, (num_blocks, block_size, max_tokens)) in [(3, 1, 4), (2, 2, 5), (3, 2, 6), (5, 1, 5)]
        .into_iter()
        .enumerate()
    {
        let life = BlockLife::new(Bounds {
            num_blocks,
            block_size,
            max_tokens,
            max_steps: 2,
            transfers: true,
        });
        let mut seed = seed as u64;
        for _ in 0..paths {
            follow(&life, &walk(&life, len, &mut seed), 0);
        }
        for (total, event) in seen.iter_mut().zip(Event::ALL) {
            *total += life.count(event);
        }
    }
    println!("{} random actions, 0 differences", 4 * paths * len);
    for (event, count) in Event::ALL.iter().zip(seen) {
        assert!(count > 0, "{event:?} was never reached");
    }
}

#[test]
fn every_state_of_a_small_world() {
    let bounds = Bounds {
        num_blocks: 2,
        block_size: 1,
        max_tokens: 3,
        max_steps: 2,
        transfers: true,
    };
    let followed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&followed);
    let checker = BlockLife::new(bounds)
        .checker()
        .threads(std::thread::available_parallelism().map_or(1, usize::from))
        .visitor(move |path: Path<State, Action>| {
            let actions = path.into_actions();
            // The beginning of a path is the path of another state.
            follow(&BlockLife::new(bounds), &actions, actions.len());
            count.fetch_add(1, Ordering::Relaxed);
        })
        .spawn_bfs()
        .join();
    let followed = followed.load(Ordering::Relaxed);
    println!("{followed} states, each reached by the manager, 0 differences");
    assert_eq!(followed, checker.unique_state_count());
}
