"""pyengine's `BlockManager`, through its Python API, every check switched on."""

# ruff: noqa: D102 (base.py says what each method does)

from time import perf_counter_ns
from typing import Any

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
from pyengine import BlockManager, Prefilled, StepBuffers, _kv
from pyengine.kv_cache import Pin, Sequence, StepPlan

VERSION = _kv.__version__
MAX_BLOCKS_PER_SEQUENCE = 1024


def buffers(rows: int) -> StepBuffers:
    """Arrays for a step of `rows` decodes, as wide as nano-vllm's."""
    wide = {name: np.zeros(rows, np.int64) for name in ("input_ids", "positions", "logits_indices")}
    narrow = {name: np.zeros(rows + 1, np.int32) for name in ("query_start_loc", "seq_lens")}
    narrow["slot_mapping"] = np.zeros(rows, np.int32)
    narrow["block_tables"] = np.zeros((rows, MAX_BLOCKS_PER_SEQUENCE), np.int32)
    return StepBuffers(**wide, **narrow)


class Ours(Manager):
    """Tokens from an int64 array, as a tokenizer or a sampler gives them."""

    name = "pyengine"
    works = frozenset({PREFILL, DECODE, FILL, STEPS, ABORT, FORK, PIN})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, partial_reuse=False)
        self.running: list[Sequence] = []
        self.step: StepPlan | None = None

    def prompt(self, tokens: Tokens) -> Any:
        return tokens

    def cold(self, prompt: Any) -> None:
        """sequence, begin_step, prefill, commit, free: five calls."""
        manager, count = self.manager, len(prompt)
        sequence = manager.sequence(prompt)
        plan = manager.begin_step(count)
        plan.prefill(sequence, count)
        plan.commit([1])
        sequence.free()

    def held(self, prompt: Any) -> Sequence:
        """A computed prompt, running."""
        sequence = self.manager.sequence(prompt)
        plan = self.manager.begin_step(len(prompt))
        plan.prefill(sequence, len(prompt))
        plan.commit([1])
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Frees a running sequence."""
        sequence.free()

    def start(self, prompts: list[Any]) -> None:
        self.running = [self.held(prompt) for prompt in prompts]
        self.arrays = buffers(len(prompts))

    def sampled(self, tokens: Tokens) -> Any:
        return tokens

    def plan(self) -> None:
        """begin_step and decode: two calls whatever the batch."""
        running = self.running
        self.step = self.manager.begin_step(len(running))
        self.step.decode(running)

    def fill(self) -> None:
        assert self.step is not None
        self.step.fill(self.arrays)

    def commit(self, sampled: Any) -> None:
        assert self.step is not None
        self.step.commit(sampled)

    def stop(self) -> None:
        for sequence in self.running:
            sequence.free()
        self.running = []

    def submit(self, prompt: Any) -> Sequence:
        return self.manager.sequence(prompt)

    def open_step(self, budget: int) -> None:
        self.step = self.manager.begin_step(budget)

    def admit(self, request: Sequence, budget: int) -> int | None:
        """The step knows its budget; a chunk is put back, because whole prompts are asked for."""
        assert self.step is not None
        answer = self.step.prefill(request, budget, spare_blocks=0)
        if not isinstance(answer, Prefilled):
            return None
        if not answer.samples:
            self.step.cancel(request)
            return None
        return answer.num_tokens

    def close_step(self, requests: list[Sequence]) -> None:
        assert self.step is not None
        self.step.commit([1] * len(requests))

    def release(self, requests: list[Sequence]) -> None:
        for request in requests:
            request.free()

    def blocks(self, request: Sequence) -> list[int]:
        return request.block_table

    # What the others do not have.

    def pin(self, prompt: Any) -> Pin:
        """The last sequence with a computed prompt's blocks."""
        sequence = self.held(prompt)
        pin = sequence.pin()
        sequence.free()
        return pin


def timed_release(pin: Pin) -> int:
    """Nanoseconds of a release, for another thread to take."""
    start = perf_counter_ns()
    pin.release()
    return perf_counter_ns() - start


class OursFromList(Ours):
    """Tokens from a Python list."""

    name = "pyengine, list"
    works = frozenset({PREFILL})

    def prompt(self, tokens: Tokens) -> Any:
        return tokens.tolist()


MANAGERS = [Ours, OursFromList]
