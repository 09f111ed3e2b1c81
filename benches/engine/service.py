"""A real engine around a model that is none: the one place where benchmarks touch its API.

Manager, scheduler, input arrays, sampler, text and outputs are the engine's own. The runner fills
the inputs as the real one does and returns logits that were there before.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.config import EngineSettings
from pyengine.engine.core import Engine
from pyengine.engine.input_processor import InputProcessor
from pyengine.engine.model_limits import ModelLimits
from pyengine.engine.pinning import Pinning
from pyengine.executor import executor as executor_module
from pyengine.executor.executor import Executor
from pyengine.executor.input_buffers import InputBuffers, RunnerLimits
from pyengine.executor.model_runner import Forward, StepLogits
from pyengine.kv_cache import BlockManager
from pyengine.outputs import RequestOutput
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompts import parse_prompt
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from pyengine.utils.devices import CPU

NUM_BLOCKS, BLOCK = 65_536, 16
NUM_ANSWERS = 64
"""Rows of logits beyond one for each request: what a row sees moves on by one in each step."""
Ids = npt.NDArray[np.int64] | list[int]


@dataclass(frozen=True, kw_only=True)
class Size:
    """`count` slots, sequences of `longest` tokens at most, a vocabulary, a tokenizer or none."""

    count: int
    longest: int
    vocab_size: int
    tokenizer: Any = None


@cache
def prepared_logits(count: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Random ones, [count + NUM_ANSWERS, vocab_size]."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((count + NUM_ANSWERS, vocab_size), np.float32)


class StubRunner:
    """Fills the inputs as the real runner does, and says what was prepared."""

    def __init__(self, limits: RunnerLimits, vocab_size: int) -> None:
        self.buffers = InputBuffers(limits, BLOCK, CPU)
        self.logits = prepared_logits(limits.max_num_seqs, vocab_size)
        self.turn = 0

    def prepare(
        self,
        plan: Any,
        *,
        extra_rows: Any = None,
        hidden_rows: Any = None,
        mtp: Any = None,
        states: Any = None,
        adapters: Any = None,
    ) -> Forward:
        """Logits of a step, without a model."""
        plan.copies()
        count = len(self.buffers.fill(plan).upload().logits_indices)
        self.turn = (self.turn + 1) % NUM_ANSWERS
        rows = self.logits[self.turn : self.turn + count]
        return lambda _: StepLogits(rows, rows[:0])


def full_pool() -> BlockManager:
    """A pool in which every block is cached and unused: each new block evicts one."""
    manager = BlockManager(NUM_BLOCKS, BLOCK)
    rng = np.random.default_rng(0)
    for _ in range(NUM_BLOCKS * BLOCK // 8192):
        sequence = manager.sequence(rng.integers(0, 2**31, 8192))
        plan = manager.begin_step(8192)
        plan.prefill(sequence, 8192)
        plan.commit([0])
        sequence.free()
    return manager


class Reader:
    """A streaming reader: reads the new output after each step."""

    streams = True

    def __init__(self, states: dict[str, Request]) -> None:
        self._states = states

    def put(self, output: RequestOutput) -> None:
        """What is new; a request that has ended is forgotten."""
        self.last = output.outputs[0].text
        if output.finished:
            self._states.pop(output.request_id, None)

    def fail(self, error: Exception) -> None:
        """Nothing here fails."""
        raise error


class Service:
    """An engine, and what its callers do."""

    def __init__(self, size: Size) -> None:
        limits = SchedulerLimits(
            max_num_batched_tokens=65_536,
            max_num_seqs=size.count,
            max_overtakes=EngineSettings().max_overtakes,
        )
        manager = full_pool()
        self._scheduler = Scheduler(manager, limits)
        runner_limits = RunnerLimits(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=size.count,
            max_blocks_per_seq=-(-size.longest // BLOCK),
        )
        model_limits = ModelLimits(
            vocab_size=size.vocab_size,
            eos_token_ids=frozenset({2}),
            max_model_len=size.longest,
            limited_by="the benchmark",
            max_num_seqs=size.count,
        )
        self._runner = StubRunner(runner_limits, size.vocab_size)
        self._executor = Executor(self._runner)
        self._tokenizer = size.tokenizer
        self._states: dict[str, Request] = {}
        pinning = Pinning(manager, self._scheduler.pins)
        self._engine = Engine(manager, self._scheduler, self._executor, [pinning])
        kept = PromptEntryCache(manager.num_blocks, manager.block_size)
        self._processor = InputProcessor(model_limits, kept, tokenizer=size.tokenizer)

    def take_in(
        self, name: str, prompt: Ids, params: SamplingParams, *, streams: bool = False
    ) -> None:
        """A request, from what a caller brings to the queue; with `streams` he reads each step."""
        parsed = parse_prompt(prompt, self._tokenizer)
        sink = Reader(self._states) if streams else None
        request = self._processor.request(name, parsed, params)
        request.sink = sink
        self._engine.add(request)
        self._states[name] = request

    def step(self) -> None:
        """One step; outputs go to whoever reads them."""
        self._engine.step()

    def look_at(self, names: Iterable[str]) -> None:
        """What is asked for at the end of an answer: all of it."""
        self._engine._output.flush()
        for name in names:
            _ = self._states[name].output().outputs[0].text

    def abort(self, names: Iterable[str]) -> None:
        """Ends requests."""
        self._engine.abort([self._states.pop(name) for name in names])

    @property
    def num_running(self) -> int:
        """Running requests."""
        return self._engine.stats().num_running

    def parts(self, timed: Callable[[str, Any], Any]) -> None:
        """Puts `timed(part, call)` in the place of the parts of a step."""
        for owner, name, part in (
            (self._scheduler, "schedule", "schedule"),
            (self._runner, "prepare", "fill"),
            (executor_module, "sample", "sample"),
            (self._scheduler, "commit", "commit"),
        ):
            setattr(owner, name, timed(part, getattr(owner, name)))
