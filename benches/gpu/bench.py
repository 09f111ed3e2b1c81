"""Engines over random weights in the shapes of real models, and their decode steps.

On CUDA in full size; elsewhere tiny, to show that everything runs.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benches.gpu.model import SHAPES, Shape
from benches.gpu.target import Target
from pyengine import LLM, SamplingParams
from pyengine.engine.core import Engine
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request

WINDOWS, WARM_STEPS, MAX_SECONDS = 3, 4, 8.0
CHUNK = 8192
"""Tokens of a step."""


@dataclass(frozen=True)
class Bench(Target):
    """A device, and the shape of the model; off CUDA, the shape is tiny."""

    shape_name: str = "tiny"

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return SHAPES[self.either(self.shape_name, "tiny")]

    def llm(self, **settings: Any) -> LLM:
        """An engine over random weights; unreferenced memory is released first."""
        self.release()
        folder = Path(self.folder) / self.shape.name
        self.shape.config.save_pretrained(folder)
        settings = {"load_format": "dummy", "dtype": "bfloat16", **settings}
        return LLM(folder, device=self.device, **settings)

    def release(self) -> None:
        """Return unreferenced memory to the device."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int, random: Random) -> list[list[int]]:
        """Random prompts without a common prefix."""
        vocabulary = range(3, self.shape.config.vocab_size)
        return [random.choices(vocabulary, k=length) for _ in range(count)]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, work: Callable[[], object], repeat: int = 20, warm: int = 3) -> float:
        """The median time of a call, by the device's clock; off CUDA, by the host's."""
        for _ in range(warm):
            work()
        self.synchronize()
        timer = self._device_seconds if self.on_cuda else _host_seconds
        return median(timer(work) for _ in range(repeat))

    def _device_seconds(self, work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _host_seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def out(max_tokens: int, **changes: Any) -> SamplingParams:
    """Greedy parameters for exactly `max_tokens` tokens, with `changes`."""
    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, **changes}
    return SamplingParams(max_tokens=max_tokens, **settings)


def seconds_to_generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds until all prompts have their tokens."""
    start = perf_counter()
    llm.generate(prompts, out(max_tokens), use_tqdm=False)
    return perf_counter() - start


@dataclass
class Decoding:
    """`count` requests that decode, and the mean number of tokens of each."""

    engine: Engine
    count: int
    context: float

    def steps(self, count: int) -> float:
        """Run `count` steps; return the seconds of one."""
        start = perf_counter()
        emitted = sum(self.engine.step().num_new_tokens for _ in range(count))
        self.context += emitted / self.count
        return (perf_counter() - start) / count

    def seconds_per_step(self, count: int) -> float:
        """The median over `WINDOWS` windows of `count` steps; fewer windows if they are slow."""
        windows: list[float] = []
        begin = perf_counter()
        while len(windows) < WINDOWS and (not windows or perf_counter() - begin < MAX_SECONDS):
            windows.append(self.steps(count))
        return median(windows)


def tokens_needed(count: int, context: int, steps: int) -> int:
    """The tokens that a request may need: the first ones decode while others are prefilled."""
    prefill_steps = -(-count * context // (CHUNK - count)) + 1
    return context + prefill_steps + WARM_STEPS + steps + 4


@contextmanager
def decoding(llm: LLM, prompts: list[list[int]], steps: int, **sampling: Any) -> Iterator[Decoding]:
    """Prompts of equal length that all decode for `steps` steps; aborted at the end.

    `sampling` are fields of `SamplingParams`; the default is greedy.
    """
    engine, count, context = llm._engine, len(prompts), len(prompts[0])
    states: list[Request] = []
    params = out(tokens_needed(count, context, steps) - context, **sampling)
    work, emitted = Decoding(engine, count, context), 0
    try:
        for number, prompt in enumerate(prompts):
            states.append(add(llm, f"timed {number}", prompt, params))
        while (new := engine.step().num_new_tokens) < count:
            emitted += new
            if not engine.has_work:
                raise RuntimeError(f"{count} sequences never decoded at the same time")
        work.context += (emitted + new) / count
        work.steps(WARM_STEPS)
        yield work
    finally:
        engine.abort(states)


def add(llm: LLM, name: str, prompt: list[int], params: SamplingParams) -> Request:
    """Add a request to an engine that nothing else drives."""
    request = llm._input_processor.request(name, Prompt(token_ids=prompt), params)
    llm._engine.add(request)
    return request
