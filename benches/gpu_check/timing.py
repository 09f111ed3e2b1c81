"""An engine over a large random model, and what it does in a given time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benches.gpu_check.models import SHAPES, Shape
from benches.gpu_check.rows import Setup
from pyengine import LLM, SamplingParams
from pyengine.engine import Engine, Prompt, RequestState
from pyengine.models import LoadedModel

_WINDOWS = 3
_WARM_STEPS = 4
_MOST_SECONDS = 8.0


def shape_of(setup: Setup) -> Shape:
    """The shape that the section was given."""
    return SHAPES[setup.options["shape"]]


def build(setup: Setup, loaded: LoadedModel, **settings: Any) -> LLM:
    """An engine over a model that is in memory already."""
    with patch("pyengine.engine.builder.load_model", lambda *_, **__: loaded):
        return LLM("random", device=setup.device, dtype="bfloat16", **settings)


def load(setup: Setup) -> LoadedModel:
    """The section's model, on the device."""
    return shape_of(setup).load(torch.device(setup.device))


def release(setup: Setup) -> None:
    """Give back memory of what is not referred to any more."""
    gc.collect()
    if setup.on_cuda:
        torch.cuda.empty_cache()


def random_prompts(shape: Shape, count: int, length: int, random: Random) -> list[list[int]]:
    """Prompts that have nothing in common."""
    vocabulary = range(3, shape.config.vocab_size)
    return [random.choices(vocabulary, k=length) for _ in range(count)]


def out(max_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def seconds_to_generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """How long all of them take."""
    start = perf_counter()
    llm.generate(prompts, out(max_tokens), use_tqdm=False)
    return perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """`count` prompts of `context` tokens that decode together for `steps` steps.

    `chunk` is the engine's `max_num_batched_tokens`.
    """

    count: int
    context: int
    chunk: int
    steps: int


@dataclass(frozen=True)
class Decoding:
    """Requests in the middle of their answers."""

    engine: Engine
    states: list[RequestState]

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has by now, prompt and answer."""
        outputs = [self.engine.output(one) for one in self.states]
        lengths = [len(one.prompt_token_ids) + len(one.outputs[0].token_ids) for one in outputs]
        return sum(lengths) / len(lengths)


@contextmanager
def decoding(llm: LLM, shape: Shape, work: DecodeWork) -> Iterator[Decoding]:
    """Random prompts that decode at once, for `work.steps` steps; none is left behind."""
    engine = llm._engine
    prompts = random_prompts(shape, work.count, work.context, Random(work.count + work.context))
    named = {f"timed {number}": prompt for number, prompt in enumerate(prompts)}
    params = out(tokens_needed(work) - work.context)
    states: list[RequestState] = []
    try:
        for name, prompt in named.items():
            states.append(engine.add_request(name, Prompt(token_ids=prompt), params))
        while engine.step().num_new_tokens < len(prompts):
            if not engine.has_work:
                raise RuntimeError(f"{len(prompts)} sequences never decoded at the same time")
        for _ in range(_WARM_STEPS):
            engine.step()
        yield Decoding(engine, states)
    finally:
        engine.abort(states)


def seconds_per_step(engine: Engine, steps: int) -> float:
    """Of `_WINDOWS` windows of `steps` steps the median; fewer if they take long."""
    found: list[float] = []
    begun = perf_counter()
    while len(found) < _WINDOWS and (not found or perf_counter() - begun < _MOST_SECONDS):
        start = perf_counter()
        for _ in range(steps):
            engine.step()
        found.append((perf_counter() - start) / steps)
    return median(found)


def tokens_needed(work: DecodeWork) -> int:
    """How many tokens each request must be allowed, prompt and answer.

    The first decode while the others are prefilled, in steps of `chunk` tokens together.
    """
    prefill_steps = -(-work.count * work.context // (work.chunk - work.count)) + 1
    return work.context + prefill_steps + _WARM_STEPS + work.steps + 4


def steps_needed(steps: int) -> int:
    """How many steps `seconds_per_step` may run."""
    return _WINDOWS * steps
