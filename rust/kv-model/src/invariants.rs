//! The contract of the block manager, for the checker: conditions that hold in every state.

use stateright::{Model, Property};

use crate::life::{Action, BlockLife};
use crate::pool::BlockId;
use crate::state::State;

/// A condition with its name.
type Invariant = (&'static str, fn(&BlockLife, &State) -> bool);

/// Conditions that hold in every state.
const INVARIANTS: &[Invariant] = &[
    (
        "every block is free, evictable, active, pinned or loading",
        states_add_up,
    ),
    (
        "references are those of tables, steps, the pin and the transfer",
        references_are_counted,
    ),
    (
        "the queue has the blocks without references, once",
        queue_is_exact,
    ),
    ("no prefix has two cached blocks", prefixes_are_unique),
    (
        "a cached block has the KV of its prefix",
        cached_kv_is_right,
    ),
    ("a step reads the KV of its tokens", |_, state| {
        !state.misread
    }),
    ("blocks of open steps are held", steps_hold_their_blocks),
    (
        "a block that is being computed has an open step",
        computing_has_a_step,
    ),
    (
        "registered blocks are cached under the sequence's tokens",
        registered_is_cached,
    ),
    ("the parent of a cached block is cached", parents_are_cached),
];

impl Model for BlockLife {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self.bounds.num_blocks)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // With a bug, a state that breaks an invariant leads nowhere: anything may follow.
        let holds = |(_, holds): &(_, fn(&Self, &State) -> bool)| holds(self, state);
        if self.flaw.is_none() || INVARIANTS.iter().all(holds) {
            self.enabled(state, actions);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let (next, answer) = self.apply(state, action);
        (!answer.is_refusal()).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let always = INVARIANTS
            .iter()
            .map(|&(name, holds)| Property::always(name, holds));
        always.collect()
    }
}

fn ids(state: &State) -> impl Iterator<Item = BlockId> {
    0..state.pool.blocks.len() as BlockId
}

/// How often a block occurs.
fn count<'a>(block: BlockId, blocks: impl IntoIterator<Item = &'a BlockId>) -> usize {
    blocks.into_iter().filter(|&&other| other == block).count()
}

/// `free + evictable + active + pinned + loading == num_blocks`, by the table of states.
fn states_add_up(_: &BlockLife, state: &State) -> bool {
    let is = |block: BlockId| {
        let free = state.pool.free.contains(&block);
        let evictable = state.pool.evictable.contains(&block);
        let block = state.pool.block(block);
        let is_cached = block.cached.is_some();
        match (block.refs(), block.seq_refs) {
            (1, 0) if block.is_loading => is_cached && !free && !evictable,
            _ if block.is_loading => false,
            (0, 0) => (free, evictable) == (!is_cached, is_cached),
            (refs, seq_refs) => refs >= seq_refs && !free && !evictable,
        }
    };
    let mut blocks = ids(state);
    blocks.all(is)
}

fn references_are_counted(_: &BlockLife, state: &State) -> bool {
    let tables = || state.live().flat_map(|(_, sequence)| &sequence.table);
    let transfer = || state.transfer.iter();
    let moved = || transfer().flat_map(|transfer| transfer.held.iter().chain(&transfer.blocks));
    let pinned = || state.steps.iter().flat_map(|step| &step.pinned);
    let steps = || pinned().chain(moved());
    let pin = || state.pin.iter().flat_map(|pin| &pin.blocks);
    ids(state).all(|id| {
        let block = state.pool.block(id);
        usize::from(block.seq_refs) == count(id, tables())
            && usize::from(block.step_pins) == count(id, steps())
            && usize::from(block.pin_refs) == count(id, pin())
    })
}

fn queue_is_exact(_: &BlockLife, state: &State) -> bool {
    let queued = || state.pool.free.iter().chain(&state.pool.evictable);
    ids(state).all(|id| count(id, queued()) == usize::from(state.pool.block(id).refs() == 0))
}

fn prefixes_are_unique(_: &BlockLife, state: &State) -> bool {
    let cached: Vec<_> = state
        .pool
        .blocks
        .iter()
        .filter_map(|of| of.cached)
        .collect();
    let mut unique = cached.clone();
    unique.sort_unstable();
    unique.dedup();
    unique.len() == cached.len()
}

/// A hit has equal tokens and an equal parent: its KV is that of the whole prefix.
fn cached_kv_is_right(life: &BlockLife, state: &State) -> bool {
    let block_size = life.bounds.block_size;
    state.pool.blocks.iter().all(|block| {
        let Some(prefix) = block.cached.filter(|_| block.is_ready()) else {
            return true;
        };
        let start = prefix.len() - block_size;
        let mut offsets = 0..block_size;
        offsets.all(|offset| block.kv[offset] == Some(prefix.first(start + offset + 1)))
    })
}

/// Blocks that an open step reads or writes are not in the queue, so no allocation takes them.
fn steps_hold_their_blocks(_: &BlockLife, state: &State) -> bool {
    let entries = state.steps.iter().flat_map(|step| &step.entries);
    let mut blocks = entries.flat_map(|entry| &entry.table);
    blocks.all(|&block| state.pool.block(block).refs() > 0 && !state.pool.is_queued(block))
}

/// A rolled-back step leaves no prefix, a committed one none that is not computed.
fn computing_has_a_step(_: &BlockLife, state: &State) -> bool {
    ids(state).all(|id| {
        let block = state.pool.block(id);
        let Some(step) = block.computed_in else {
            return true;
        };
        let Some(step) = state.steps.get(usize::from(step)) else {
            return false;
        };
        let writes =
            |entry: &crate::state::Entry| entry.table.contains(&id) && entry.preregistered > 0;
        block.cached.is_some() && step.entries.iter().any(writes)
    })
}

fn registered_is_cached(life: &BlockLife, state: &State) -> bool {
    state.live().all(|(_, sequence)| {
        let mut indices = 0..sequence.registered;
        indices.all(|index| {
            let prefix = sequence.tokens.first((index + 1) * life.bounds.block_size);
            state.pool.block(sequence.table[index]).cached == Some(prefix)
        })
    })
}

/// Blocks are released last first, so prefixes outlive what follows them.
fn parents_are_cached(life: &BlockLife, state: &State) -> bool {
    let block_size = life.bounds.block_size;
    state.pool.blocks.iter().all(|block| match block.cached {
        Some(prefix) if prefix.len() > block_size => {
            let parent = prefix.first(prefix.len() - block_size);
            state.pool.find(|cached| cached == parent).is_some()
        }
        _ => true,
    })
}
