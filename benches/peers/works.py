"""What is timed: each work is a stream of operations on one manager.

All managers get the same tokens, drawn from a vocabulary of 151,643, and pools of the same size. In
the steady state the pool is full of other prompts and every new block evicts one; "empty" begins
with a new pool. Tokens are made, and brought into the form that a manager takes, before the clock
starts.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter_ns as clock
from typing import Any
from zlib import crc32

import numpy as np

from benches.peers.adapters.base import (
    ABORT,
    DECODE,
    FILL,
    FORK,
    PIN,
    PREFILL,
    STEPS,
    Manager,
    Tokens,
)
from benches.peers.adapters.ours import timed_release
from benches.peers.sampling import Stream

VOCABULARY = 151_643
POOL_TOKENS = 65_536 * 16
LONG, PROMPT = 8_192, 512
STEPS_PER_OPERATION, STEPS_PER_START = 16, 128
AGENTS, TURNS, SHARED, REQUEST = 9, 18, 0.96, 90_000


class World:
    """A manager with a full pool, and prompts for it."""

    def __init__(self, kind: type[Manager], num_blocks: int, block_size: int) -> None:
        self.kind, self.num_blocks, self.block_size = kind, num_blocks, block_size
        self.manager = self.empty()
        self.seed("pool")
        for index in range(-(-num_blocks * block_size // LONG)):
            self.manager.cold(self.manager.prompt(self.nth(index)))
            self.manager.evict_excess()

    def empty(self) -> Manager:
        """Another pool of the same size."""
        return self.kind(self.num_blocks, self.block_size)

    def seed(self, name: str) -> None:
        """The tokens of a work depend on its name alone."""
        self.rng = np.random.default_rng(crc32(name.encode()))

    def tokens(self, count: int) -> Tokens:
        """New ones."""
        return self.rng.integers(0, VOCABULARY, count)

    def prompt(self, count: int) -> Any:
        """New ones, as the manager takes them."""
        return self.manager.prompt(self.tokens(count))

    @staticmethod
    def nth(index: int) -> Tokens:
        """The n-th of the prompts that fill the pool."""
        return np.random.default_rng((7, index)).integers(0, VOCABULARY, LONG)


Timed = Callable[[World], Stream]


@dataclass(frozen=True)
class Work:
    """One line of the report."""

    key: str
    needs: str
    parts: tuple[str, ...]
    stream: Timed
    block_size: int = 16
    quick: bool = True

    def of(self, world: World) -> Stream:
        """The stream of this work on a manager."""
        world.seed(self.key)
        return self.stream(world)


def cold(count: int) -> Timed:
    """A prompt of which nothing is cached, begun and freed in a full pool."""

    def stream(world: World) -> Stream:
        manager = world.manager
        while True:
            prompt = world.prompt(count)
            start = clock()
            manager.cold(prompt)
            took = clock() - start
            manager.evict_excess()
            yield (took,)

    return stream


def cold_empty(world: World) -> Stream:
    """The same in a pool where no block was used before; a new pool when it is half full."""
    per_pool = world.num_blocks * world.block_size // LONG // 2
    while True:
        manager = world.empty()
        for _ in range(per_pool):
            prompt = manager.prompt(world.tokens(LONG))
            start = clock()
            manager.cold(prompt)
            yield (clock() - start,)


def hot(count: int) -> Timed:
    """The same prompt again and again; all of it is cached."""

    def stream(world: World) -> Stream:
        manager, tokens = world.manager, world.tokens(count)
        manager.cold(manager.prompt(tokens))
        manager.evict_excess()
        must_be_cached(manager, manager.prompt(tokens), world.block_size)
        prompt = manager.prompt(tokens)
        while True:
            start = clock()
            manager.hot(prompt)
            yield (clock() - start,)

    return stream


def must_be_cached(manager: Manager, prompt: Any, block_size: int) -> None:
    """At most one block of it is computed; asked of those that can say so."""
    if STEPS not in manager.works:
        return
    request = manager.submit(prompt)
    manager.open_step(len(prompt))
    computed = manager.admit(request, len(prompt))
    manager.close_step([request])
    manager.release([request])
    if computed is None or computed > block_size:
        raise AssertionError(f"{manager.name} computes {computed} tokens of a cached prompt")


def running(world: World, count: int) -> Iterator[Any]:
    """Sampled tokens, step by step, for `count` sequences that are started again in time.

    They begin at 512 tokens and some, so that the same share of them takes a block in each step.
    """
    manager = world.manager
    while True:
        lengths = [PROMPT + index % world.block_size for index in range(count)]
        manager.start([world.prompt(length) for length in lengths])
        try:
            for _ in range(STEPS_PER_START):
                yield manager.sampled(world.tokens(count))
        finally:
            manager.stop()


def decode(count: int) -> Timed:
    """A step of `count` sequences. One operation is the mean of 16 steps: a block for each."""

    def stream(world: World) -> Stream:
        manager, steps = world.manager, running(world, count)
        while True:
            planned = committed = 0
            for _ in range(STEPS_PER_OPERATION):
                sampled = next(steps)
                start = clock()
                manager.plan()
                between = clock()
                manager.commit(sampled)
                end = clock()
                planned += between - start
                committed += end - between
            times = (planned, committed, planned + committed)
            yield tuple(time / STEPS_PER_OPERATION for time in times)

    return stream


def fill(count: int) -> Timed:
    """The inputs of such a step, between its plan and its commit."""

    def stream(world: World) -> Stream:
        manager, steps = world.manager, running(world, count)
        while True:
            filled = 0
            for _ in range(STEPS_PER_OPERATION):
                sampled = next(steps)
                manager.plan()
                start = clock()
                manager.fill()
                filled += clock() - start
                manager.commit(sampled)
            yield (filled / STEPS_PER_OPERATION,)

    return stream


def identical(world: World) -> Stream:
    """32 equal prompts of 512 tokens in one step: requests made, planned, committed, freed."""
    manager, budget = world.manager, 32 * PROMPT
    while True:
        tokens = world.tokens(PROMPT)
        prompts = [manager.prompt(tokens) for _ in range(32)]
        start = clock()
        requests = [manager.submit(prompt) for prompt in prompts]
        manager.open_step(budget)
        for request in requests:
            if manager.admit(request, budget) is None:
                raise MemoryError(f"{manager.name}: 32 prompts of 512 tokens do not fit")
        manager.close_step(requests)
        manager.release(requests)
        yield (clock() - start,)


class Agent:
    """A conversation that is asked again and again, each time with all that was said and 4 % more.

    `TURNS` requests of `REQUEST` tokens in the mean (62,000 to 125,000); then it starts anew.
    """

    def __init__(self, world: World, turn: int) -> None:
        self.world, self.turn = world, turn
        growth = [SHARED**-turn for turn in range(TURNS + 1)]
        scale = REQUEST * TURNS / sum(growth[1:])
        self.lengths = [round(factor * scale) for factor in growth]
        self.begin()

    def begin(self) -> None:
        """A new conversation, its first request computed: that one is not timed."""
        self.tokens = self.world.tokens(self.lengths[-1])
        self.world.manager.cold(self.prompt())

    def prompt(self) -> Any:
        """The prompt of this turn."""
        return self.world.manager.prompt(self.tokens[: self.lengths[self.turn]])

    def new(self) -> int:
        """Tokens of that which its last request did not have."""
        return self.lengths[self.turn] - self.lengths[self.turn - 1]

    def next(self) -> Any:
        """The prompt of its next request."""
        if self.turn == TURNS:
            self.turn = 0
            self.begin()
        self.turn += 1
        return self.prompt()


def agents(world: World) -> Stream:
    """A request of each of nine agents, one after the other; the mean of a request.

    They are at turns evenly apart, so that each operation has the same lengths. Their conversations
    fit the pool; the rest of it is what others left.
    """
    manager = world.manager
    running = [Agent(world, turn=index * TURNS // AGENTS) for index in range(AGENTS)]
    while True:
        took = 0
        for agent in running:
            prompt = agent.next()
            budget = agent.lengths[agent.turn]
            start = clock()
            request = manager.submit(prompt)
            manager.open_step(budget)
            computed = manager.admit(request, budget)
            manager.close_step([request])
            manager.release([request])
            took += clock() - start
            if computed is None or computed > agent.new() + world.block_size:
                raise AssertionError(f"{manager.name} computes {computed} of {agent.new()} tokens")
        yield (took / AGENTS,)


def abort(world: World) -> Stream:
    """The end of a running sequence of 8,192 tokens: its 512 blocks go back."""
    manager: Any = world.manager
    while True:
        sequence = manager.held(world.prompt(LONG))
        start = clock()
        manager.abort(sequence)
        yield (clock() - start,)


def fork(world: World) -> Stream:
    """A second sequence on the blocks of one of 8,192 tokens."""
    manager: Any = world.manager
    parent = manager.held(world.prompt(LONG))
    while True:
        start = clock()
        child = parent.fork(LONG)
        took = clock() - start
        child.free()
        yield (took,)


def pin(world: World) -> Stream:
    """The last pin on 512 blocks is released on another thread; then the next call of any kind,
    which takes the blocks back."""
    manager: Any = world.manager
    with ThreadPoolExecutor(1) as thread:
        while True:
            held = manager.pin(world.prompt(LONG))
            released = thread.submit(timed_release, held).result()
            start = clock()
            manager.manager.usage()
            yield released, clock() - start


def works() -> list[Work]:
    """All of them, in the order of the report."""
    took = ("us",)
    lengths = (512, LONG, 131_072)
    listed = [
        Work(f"{name}-{count}", PREFILL, took, timed(count), quick=count <= LONG)
        for name, timed in (("cold", cold), ("hot", hot))
        for count in lengths
    ]
    listed.append(Work(f"cold-{LONG}-empty", PREFILL, took, cold_empty))
    listed += [
        Work(f"{name}-{LONG}-block-{block}", PREFILL, took, timed(LONG), block, quick=False)
        for block in (64, 256)
        for name, timed in (("cold", cold), ("hot", hot))
    ]
    step = ("plan", "commit", "step")
    listed += [Work(f"decode-{count}", DECODE, step, decode(count)) for count in (1, 32, 256, 1024)]
    listed += [
        Work(f"decode-256-block-{block}", DECODE, step, decode(256), block, quick=False)
        for block in (64, 256)
    ]
    listed += [Work(f"fill-{count}", FILL, took, fill(count)) for count in (1, 32, 256, 1024)]
    return [
        *listed,
        Work("identical-32x512", STEPS, took, identical),
        Work(f"agents-{REQUEST}", STEPS, took, agents),
        Work(f"abort-{LONG}", ABORT, took, abort),
        Work(f"fork-{LONG}", FORK, took, fork),
        Work(f"pin-drop-{LONG}", PIN, ("release", "next call"), pin),
    ]
