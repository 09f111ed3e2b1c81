"""Microbenchmarks of the block manager through Python: `pytest benches --benchmark-only`.

A pool of 16,384 blocks of 16 tokens, full of other prompts, so that every new block evicts one.
Each round prepares in `setup`, which is not timed. Ratios to other managers: `benches/peers`.
"""
# ruff: noqa: D103 (the names say what is timed)

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine import BlockManager, StepBuffers
from pyengine.cache import Sequence, StepPlan

pytest.importorskip("pytest_benchmark")

NUM_BLOCKS, BLOCK = 16_384, 16
PROMPT, LENGTH, WIDTH = 8_192, 512, 64
ROUNDS = 200

Tokens = npt.NDArray[np.int64]
Benchmark = Any


class World:
    """A full pool, and what the benchmarks need of it."""

    def __init__(self) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK)
        self.rng = np.random.default_rng(0)
        while self.manager.ledger().free:
            self.computed(PROMPT).free()

    def tokens(self, count: int) -> Tokens:
        """Ids that no other prompt has."""
        return self.rng.integers(0, 2**32, count)

    def computed(self, count: int) -> Sequence:
        """A running sequence."""
        sequence = self.manager.sequence(self.tokens(count))
        plan = self.manager.begin_step(count)
        plan.prefill(sequence, count)
        plan.commit([1])
        return sequence

    def prefill(self, tokens: Tokens | list[int]) -> None:
        """A prompt from its tokens to its end."""
        sequence = self.manager.sequence(tokens)
        plan = self.manager.begin_step(len(tokens))
        plan.prefill(sequence, len(tokens))
        plan.commit([1])
        sequence.free()

    def running(self, count: int) -> list[Sequence]:
        """Sequences of which some need a block in each step."""
        return [self.computed(LENGTH + index % BLOCK) for index in range(count)]

    def decoding(self, running: list[Sequence]) -> StepPlan:
        """An open plan of all of them."""
        plan = self.manager.begin_step(len(running))
        plan.decode(running)
        return plan

    def buffers(self, rows: int) -> StepBuffers:
        """Arrays for so many decodes."""
        shapes: dict[str, Any] = dict.fromkeys(
            ("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices"), rows
        )
        shapes |= {"query_start_loc": rows + 1, "block_tables": (rows, WIDTH)}
        return StepBuffers(**{name: np.zeros(shape, np.int64) for name, shape in shapes.items()})


@pytest.fixture
def world() -> World:
    """One for each benchmark."""
    return World()


def timed(benchmark: Benchmark, call: Callable[..., object], setup: Callable[[], Any]) -> None:
    """Times `call` on what `setup` has prepared; a call is one round."""
    benchmark.pedantic(call, setup=lambda: ((setup(),), {}), rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize("count", [512, PROMPT])
def test_cold_prefill_of_an_array(benchmark: Benchmark, world: World, count: int) -> None:
    timed(benchmark, world.prefill, lambda: world.tokens(count))


def test_cold_prefill_of_a_list(benchmark: Benchmark, world: World) -> None:
    timed(benchmark, world.prefill, lambda: world.tokens(PROMPT).tolist())


@pytest.mark.parametrize("count", [512, PROMPT])
def test_hot_prefill_of_an_array(benchmark: Benchmark, world: World, count: int) -> None:
    prompt = world.tokens(count)
    world.prefill(prompt)
    timed(benchmark, world.prefill, lambda: prompt)


def test_hot_prefill_of_a_list(benchmark: Benchmark, world: World) -> None:
    prompt = world.tokens(PROMPT).tolist()
    world.prefill(prompt)
    timed(benchmark, world.prefill, lambda: prompt)


@pytest.mark.parametrize("count", [1, 32, 256])
def test_decode_step(benchmark: Benchmark, world: World, count: int) -> None:
    running = world.running(count)
    timed(benchmark, lambda sampled: world.decoding(running).commit(sampled), lambda: [7] * count)


def test_inputs_of_256_decodes(benchmark: Benchmark, world: World) -> None:
    running, buffers = world.running(256), world.buffers(256)
    plans: list[StepPlan] = []

    def next_step() -> StepPlan:
        if plans:
            plans.pop().commit([7] * len(running))
        plans.append(world.decoding(running))
        return plans[0]

    timed(benchmark, lambda plan: plan.fill(buffers), next_step)


def test_32_identical_prompts_in_one_step(benchmark: Benchmark, world: World) -> None:
    def step(tokens: Tokens) -> None:
        sequences = [world.manager.sequence(tokens) for _ in range(32)]
        plan = world.manager.begin_step(2 * LENGTH)
        for sequence in sequences:
            plan.prefill(sequence, LENGTH)
        plan.commit([7] * 32)
        for sequence in sequences:
            sequence.free()

    timed(benchmark, step, lambda: world.tokens(LENGTH))


def test_match_of_a_cached_prefix(benchmark: Benchmark, world: World) -> None:
    prompt = world.tokens(PROMPT)
    world.prefill(prompt)
    timed(benchmark, world.manager.match_prefix, lambda: prompt)


def test_abort(benchmark: Benchmark, world: World) -> None:
    timed(benchmark, lambda sequence: sequence.free(), lambda: world.computed(PROMPT))


def test_fork(benchmark: Benchmark, world: World) -> None:
    parent = world.computed(PROMPT)
    timed(benchmark, parent.fork, lambda: PROMPT)


def test_release_of_the_last_lease(benchmark: Benchmark, world: World) -> None:
    def last_lease() -> Any:
        sequence = world.computed(PROMPT)
        lease = sequence.lease()
        sequence.free()
        return lease

    timed(benchmark, lambda lease: lease.release(), last_lease)
