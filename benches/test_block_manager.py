"""The time of every call of the block manager from Python: `pytest benches --benchmark-only`.

Medians of single calls, the way into Rust and back included. A pool of 16,384 blocks of 16 tokens,
of which 256 running sequences of 512 tokens hold half. Figures: docs/benchmarks/block-manager.md.
 Whole operations are timed by `make bench-rust`, against other managers by `make bench`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import devnull
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.kv_cache import BlockManager, Pin, Sequence, StepBuffers, StepPlan

pytest.importorskip("pytest_benchmark")

NUM_BLOCKS, BLOCK = 16_384, 16
RUNNING, LENGTH, PROMPT = 256, 512, 1024
BUDGET = 2 * PROMPT
ROUNDS = 100


class World:
    """A manager with running sequences; each case has its own."""

    def __init__(self, **settings: Any) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK, **settings)
        self.rng = np.random.default_rng(0)
        self.running = [self.computed(self.tokens(LENGTH)) for _ in range(RUNNING)]

    def tokens(self, count: int) -> npt.NDArray[np.int64]:
        """Random ids: no two prompts share a block."""
        return self.rng.integers(0, 2**32, count)

    def computed(self, tokens: npt.NDArray[np.int64]) -> Sequence:
        """A sequence whose tokens are all computed, and one sampled."""
        sequence = self.manager.sequence(tokens)
        plan = self.manager.begin_step(len(tokens))
        plan.prefill(sequence, len(tokens))
        plan.commit([0])
        return sequence

    def decoding(self) -> StepPlan:
        """An open plan that decodes every running sequence."""
        plan = self.manager.begin_step(BUDGET)
        plan.decode(self.running)
        return plan

    def prefilling(self, *prompts: npt.NDArray[np.int64]) -> tuple[StepPlan, list[Sequence]]:
        """An open plan of whole prompts, and their sequences."""
        plan = self.manager.begin_step(BUDGET)
        sequences = [self.manager.sequence(prompt) for prompt in prompts]
        for sequence in sequences:
            plan.prefill(sequence, PROMPT)
        return plan, sequences

    @cached_property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The prompt of `owner`."""
        return self.tokens(PROMPT)

    @cached_property
    def owner(self) -> Sequence:
        """A sequence whose prompt is computed and stays so."""
        return self.computed(self.prompt)

    @cached_property
    def retained(self) -> Pin:
        """A pin on the same prompt."""
        return self.owner.pin()

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """The step buffers of a model runner."""
        shapes = {"query_start_loc": RUNNING + 1, "seq_lens": RUNNING}
        flat = ("input_ids", "positions", "slot_mapping", "logits_indices")
        shapes |= dict.fromkeys(flat, BUDGET)
        arrays = {name: np.zeros(size, np.int64) for name, size in shapes.items()}
        return arrays | {"block_tables": np.zeros((RUNNING, 128), np.int64)}

    @cached_property
    def buffers(self) -> StepBuffers:
        """The same, as `fill` takes it."""
        return StepBuffers(**self.arrays)


Timed = Callable[[], object]
Steps = Callable[[World], Iterator[Timed]]


@dataclass(frozen=True)
class Case:
    """A call to time: prepares, yields the call, cleans up; one that `changes` nothing stays."""

    call: str
    cost: str
    of: str
    steps: Steps
    changes: bool = True
    settings: Mapping[str, bool] = field(default_factory=dict)


CASES: list[Case] = []


def case(call: str, cost: str, of: str, **settings: bool) -> Callable[[Steps], Steps]:
    """Enters a case into the table; `settings` are the manager's."""

    def add(steps: Steps) -> Steps:
        CASES.append(Case(call, cost, of, steps, settings=settings))
        return steps

    return add


def look(call: str, cost: str, of: str, timed: Callable[[World], object]) -> None:
    """A call that changes nothing: prepared once."""

    def steps(world: World) -> Iterator[Timed]:
        timed(world)
        yield lambda: timed(world)

    CASES.append(Case(call, cost, of, steps, changes=False))


@case("BlockManager()", "blocks", "16,384 blocks")
def _(world: World) -> Iterator[Timed]:
    yield lambda: BlockManager(NUM_BLOCKS, BLOCK)


@case("BlockManager.sequence", "tokens", "1,024 in an int64 array")
def _(world: World) -> Iterator[Timed]:
    tokens = world.tokens(PROMPT)
    yield lambda: world.manager.sequence(tokens)


@case("BlockManager.sequence", "tokens", "1,024 in a list")
def _(world: World) -> Iterator[Timed]:
    tokens = world.tokens(PROMPT).tolist()
    yield lambda: world.manager.sequence(tokens)


@case("BlockManager.match_prefix", "tokens", "1,024, all cached")
def _(world: World) -> Iterator[Timed]:
    _ = world.owner
    yield lambda: world.manager.match_prefix(world.prompt)


@case("BlockManager.match_prefix", "tokens", "1,024, none cached")
def _(world: World) -> Iterator[Timed]:
    tokens = world.tokens(PROMPT)
    yield lambda: world.manager.match_prefix(tokens)


@case("BlockManager.explain", "tokens + sequences", "1,024, all cached")
def _(world: World) -> Iterator[Timed]:
    _ = world.owner
    yield lambda: world.manager.explain(world.prompt)


@case("BlockManager.explain", "tokens + sequences", "1,024, half of them cached")
def _(world: World) -> Iterator[Timed]:
    _ = world.owner
    tokens = np.concatenate([world.prompt[: PROMPT // 2], world.tokens(PROMPT // 2)])
    yield lambda: world.manager.explain(tokens)


@case("BlockManager.begin_step", "1", "")
def _(world: World) -> Iterator[Timed]:
    plans: list[StepPlan] = []
    yield lambda: plans.append(world.manager.begin_step(BUDGET))
    plans.pop().rollback()


@case("StepPlan.decode", "sequences + new blocks", "256 sequences")
def _(world: World) -> Iterator[Timed]:
    plan = world.manager.begin_step(BUDGET)
    yield lambda: plan.decode(world.running)
    plan.rollback()


@case("StepPlan.prefill", "tokens", "1,024, none cached")
def _(world: World) -> Iterator[Timed]:
    plan, sequence = world.manager.begin_step(BUDGET), world.manager.sequence(world.tokens(PROMPT))
    yield lambda: plan.prefill(sequence, PROMPT)
    plan.rollback()


@case("StepPlan.prefill", "tokens", "1,024, all cached")
def _(world: World) -> Iterator[Timed]:
    _ = world.owner
    plan, sequence = world.manager.begin_step(BUDGET), world.manager.sequence(world.prompt)
    yield lambda: plan.prefill(sequence, PROMPT)
    plan.rollback()


@case("StepPlan.speculate", "drafts + new blocks", "4 drafts")
def _(world: World) -> Iterator[Timed]:
    plan = world.manager.begin_step(BUDGET)
    yield lambda: plan.speculate(world.running[0], [1, 2, 3, 4])
    plan.rollback()


@case("StepPlan.draft", "entries + drafts + new blocks", "4 drafts for each of 256 decodes")
def _(world: World) -> Iterator[Timed]:
    plan = world.decoding()
    drafts, counts = np.tile(np.arange(4), len(world.running)), [4] * len(world.running)
    yield lambda: plan.draft(world.running, drafts, counts)
    plan.rollback()


@case("StepPlan.cancel", "entries + their blocks", "1 of 256 decodes")
def _(world: World) -> Iterator[Timed]:
    plan = world.decoding()
    yield lambda: plan.cancel(world.running[128])
    plan.rollback()


look("StepPlan.copies", "copies", "none", lambda world: step_of(world).copies())


def with_states(world: World) -> tuple[BlockManager, StepPlan]:
    """A manager of a model with states, and an open plan: a prompt from its first token on."""
    manager = BlockManager(NUM_BLOCKS, BLOCK, state_blocks=8)
    plan = manager.begin_step(BUDGET)
    plan.prefill(manager.sequence(world.tokens(PROMPT)), PROMPT)
    return manager, plan


@case("StepPlan.state_loads", "sequences with one", "1 of no token")
def _(world: World) -> Iterator[Timed]:
    _manager, plan = with_states(world)
    yield plan.state_loads


@case("StepPlan.state_saves", "sequences with one + their blocks", "1 of 8 blocks")
def _(world: World) -> Iterator[Timed]:
    _manager, plan = with_states(world)
    yield plan.state_saves


@case("StepPlan.fill", "tokens + sequences + changed table entries", "256 decodes")
def _(world: World) -> Iterator[Timed]:
    plan = world.decoding()
    yield lambda: plan.fill(world.buffers)
    plan.commit([0] * RUNNING)


@case("StepPlan.fill", "tokens + sequences + changed table entries", "1,024 tokens of one prompt")
def _(world: World) -> Iterator[Timed]:
    plan, _ = world.prefilling(world.tokens(PROMPT))
    yield lambda: plan.fill(world.buffers)
    plan.rollback()


@case("StepPlan.commit", "sequences + full blocks", "256 decodes, no block full")
def _(world: World) -> Iterator[Timed]:
    plan, tokens = world.decoding(), world.tokens(RUNNING)
    yield lambda: plan.commit(tokens)


@case("StepPlan.commit", "sequences + full blocks", "256 decodes, 256 blocks full")
def _(world: World) -> Iterator[Timed]:
    forks = [sequence.fork(LENGTH - 1) for sequence in world.running]
    for fork, token in zip(forks, world.tokens(RUNNING).tolist(), strict=True):
        fork.append([token])
    plan, tokens = world.manager.begin_step(BUDGET), world.tokens(RUNNING)
    plan.decode(forks)
    plan.copies()
    yield lambda: plan.commit(tokens)


@case("StepPlan.commit", "sequences + full blocks", "a prompt of 64 blocks")
def _(world: World) -> Iterator[Timed]:
    plan, _sequences = world.prefilling(world.tokens(PROMPT))
    yield lambda: plan.commit([0])


@case(
    "StepPlan.commit",
    "sequences + full blocks",
    "two equal prompts, 64 merges",
    in_flight_sharing=False,
)
def _(world: World) -> Iterator[Timed]:
    prompt = world.tokens(PROMPT)
    plan, _sequences = world.prefilling(prompt, prompt)
    yield lambda: plan.commit([0, 0])


@case("StepPlan.rollback", "entries + their blocks", "256 decodes")
def _(world: World) -> Iterator[Timed]:
    yield world.decoding().rollback


@case("Sequence.explain", "1", "a hit")
def _(world: World) -> Iterator[Timed]:
    yield world.owner.explain


@case("Sequence.attach", "blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    pin, sequence = world.retained, world.manager.sequence(world.prompt)
    yield lambda: sequence.attach(pin)


@case("Sequence.reuse_cached", "tokens", "1,024, all cached")
def _(world: World) -> Iterator[Timed]:
    _ = world.owner
    yield world.manager.sequence(world.prompt).reuse_cached


@case("Sequence.reserve", "tokens + blocks", "1,024, none cached")
def _(world: World) -> Iterator[Timed]:
    sequence = world.manager.sequence(world.tokens(PROMPT))
    yield lambda: sequence.reserve(PROMPT)


@case("Sequence.extend", "new blocks", "1 block")
def _(world: World) -> Iterator[Timed]:
    sequence = world.manager.sequence([1])
    yield lambda: sequence.extend(1)


@case("Sequence.publish", "tokens + full blocks", "the 16 tokens of a block")
def _(world: World) -> Iterator[Timed]:
    sequence, tokens = world.manager.sequence(world.tokens(1)), world.tokens(BLOCK - 1).tolist()
    sequence.extend(BLOCK)
    yield lambda: sequence.publish(BLOCK, tokens)


@case("Sequence.pin", "blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    yield world.owner.pin


@case("Sequence.fork", "tokens + blocks", "1,024 tokens")
def _(world: World) -> Iterator[Timed]:
    owner = world.owner
    yield lambda: owner.fork(PROMPT)


@case("Sequence.want_snapshots", "positions", "1 position")
def _(world: World) -> Iterator[Timed]:
    manager, _plan = with_states(world)
    sequence = manager.sequence(world.prompt)
    yield lambda: sequence.want_snapshots([PROMPT // 2])


@case("Sequence.keep_snapshot", "blocks of a snapshot", "8 blocks")
def _(world: World) -> Iterator[Timed]:
    sequence = BlockManager(NUM_BLOCKS, BLOCK, state_blocks=8).sequence(world.prompt)
    sequence.extend(PROMPT)
    sequence.publish(PROMPT)
    yield sequence.keep_snapshot


@case("Sequence.append", "tokens", "1 token")
def _(world: World) -> Iterator[Timed]:
    sequence = world.manager.sequence(world.prompt)
    yield lambda: sequence.append([7])


@case("Sequence.trim", "blocks released", "1 block")
def _(world: World) -> Iterator[Timed]:
    sequence = world.running[0]
    plan = world.manager.begin_step(BUDGET)
    plan.decode([sequence], lookahead=BLOCK)
    plan.commit([0])
    yield lambda: sequence.trim(sequence.num_tokens)


@case("Sequence.reset", "blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    yield world.computed(world.tokens(PROMPT)).reset


@case("Sequence.free", "blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    yield world.computed(world.tokens(PROMPT)).free


look("Sequence.tokens", "tokens", "1,024 tokens", lambda world: world.owner.tokens())
look("Sequence.block_table", "blocks", "64 blocks", lambda world: world.owner.block_table)


@case("Pin.release", "blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    yield world.owner.pin().release


look("BlockManager.usage", "1", "", lambda world: world.manager.usage())


@case("BlockManager.snapshot_positions", "tokens", "1,024, all cached")
def _(world: World) -> Iterator[Timed]:
    manager, plan = with_states(world)
    plan.rollback()
    sequence = manager.sequence(world.prompt)
    samples = False
    while not samples:
        plan = manager.begin_step(BUDGET)
        samples = getattr(plan.prefill(sequence, PROMPT), "samples", True)
        plan.commit([0] if samples else [])
    yield lambda: manager.snapshot_positions(world.prompt)


@case("BlockManager.state_usage", "snapshots", "1 snapshot")
def _(world: World) -> Iterator[Timed]:
    manager, plan = with_states(world)
    plan.commit([])
    yield manager.state_usage


look("BlockManager.stats", "1", "", lambda world: world.manager.stats())
look(
    "BlockManager.preview", "blocks", "64 blocks", lambda world: world.manager.preview(world.owner)
)
look("BlockManager.blocks_for", "1", "", lambda world: world.manager.blocks_for(8_192, 2_048))
look("BlockManager.refs", "1", "", lambda world: world.manager.refs(0))
look("BlockManager.seq_refs", "1", "", lambda world: world.manager.seq_refs(0))
look("BlockManager.state", "1", "", lambda world: world.manager.state(0))
look(
    "BlockManager.snapshot",
    "blocks + cached blocks",
    "16,384 blocks",
    lambda world: world.manager.snapshot(),
)


@case("BlockManager.advance_weights_version", "cached blocks", "64 cached, 8,128 free")
def _(world: World) -> Iterator[Timed]:
    world.computed(world.tokens(PROMPT)).free()
    yield world.manager.advance_weights_version


@case("BlockManager.evict_all", "evictable blocks", "64 evictable, 8,128 free")
def _(world: World) -> Iterator[Timed]:
    world.computed(world.tokens(PROMPT)).free()
    yield world.manager.evict_all


@case("BlockManager.evict", "evicted blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    world.computed(world.tokens(PROMPT)).free()
    yield lambda: world.manager.evict(PROMPT // BLOCK)


@case("BlockManager.take_evicted", "evicted blocks", "64 blocks")
def _(world: World) -> Iterator[Timed]:
    manager = BlockManager(PROMPT // BLOCK, BLOCK, keep_evicted=True)
    sequence = manager.sequence(world.tokens(PROMPT))
    sequence.extend(PROMPT)
    sequence.publish(PROMPT)
    sequence.free()
    taker = manager.sequence(world.tokens(PROMPT))
    taker.extend(PROMPT)
    yield manager.take_evicted


@case("BlockManager.take_events", "events", "64 stored", events=True)
def _(world: World) -> Iterator[Timed]:
    world.manager.take_events()
    world.computed(world.tokens(PROMPT)).free()
    yield world.manager.take_events


@case("BlockManager.take_packed_events", "events", "64 stored", events=True)
def _(world: World) -> Iterator[Timed]:
    world.manager.take_events()
    world.computed(world.tokens(PROMPT)).free()
    yield world.manager.take_packed_events


@case("BlockManager.cached_hashes", "cached blocks", "8,192 cached blocks")
def _(world: World) -> Iterator[Timed]:
    yield world.manager.cached_hashes


@case("BlockManager.record", "1", "a new manager, to /dev/null")
def _(world: World) -> Iterator[Timed]:
    manager = BlockManager(1, BLOCK)
    yield lambda: manager.record(devnull)
    manager.stop_recording()


@case("BlockManager.stop_recording", "1", "to /dev/null")
def _(world: World) -> Iterator[Timed]:
    manager = BlockManager(1, BLOCK)
    manager.record(devnull)
    yield manager.stop_recording


@case("BlockManager.check", "blocks + tokens", "16,384 blocks, 256 sequences")
def _(world: World) -> Iterator[Timed]:
    yield world.manager.check


@case("StepBuffers()", "1", "seven arrays")
def _(world: World) -> Iterator[Timed]:
    arrays = world.arrays
    yield lambda: StepBuffers(**arrays)


def step_of(world: World) -> StepPlan:
    """An open plan of all running sequences, made once."""
    plan = world.__dict__.get("plan")
    if plan is None:
        plan = world.__dict__["plan"] = world.decoding()
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.call}, {case.of}".strip(", "))
def test_call(benchmark: Any, case: Case) -> None:
    """Each round prepares what its call needs, outside of the clock."""
    world, under_way = World(**case.settings), list[Iterator[Timed]]()

    def prepare() -> tuple[tuple[Timed], dict[str, Any]]:
        under_way.append(case.steps(world))
        return (next(under_way[0]),), {}

    def clean_up(_: Timed) -> None:
        next(under_way.pop(), None)

    if case.changes:
        run = {"setup": prepare, "teardown": clean_up, "rounds": ROUNDS, "warmup_rounds": 5}
        benchmark.pedantic(lambda timed: timed(), **run)
    else:
        benchmark(next(case.steps(world)))
