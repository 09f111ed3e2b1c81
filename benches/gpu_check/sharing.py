"""What sharing saves: prompts that begin alike, and prompts that are alike, in the same step."""

from collections.abc import Iterator
from functools import cache, partial
from random import Random
from time import perf_counter
from typing import Any

from benches.gpu_check.goals import DUPLICATES
from benches.gpu_check.rows import Part, Row, Setup, rounded
from benches.gpu_check.timing import (
    build,
    load,
    out,
    random_prompts,
    release,
    seconds_to_generate,
    shape_of,
)
from pyengine import LLM
from pyengine.engine import Prompt
from pyengine.models import LoadedModel

_FULL, _TINY = (256, 1024, 32, 32), (4, 64, 8, 4)
"""Requests, shared tokens, own tokens, tokens out."""
_ROUNDS = 5


def parts(setup: Setup) -> list[Part]:
    """The model is made once, an engine for each part."""
    model = cache(partial(load, setup))
    return [
        ("sharing off", lambda: _prefix(setup, model(), shares=False)),
        ("sharing on", lambda: _prefix(setup, model(), shares=True)),
        (DUPLICATES, lambda: _duplicates(setup, model())),
    ]


def _engine(setup: Setup, loaded: LoadedModel, longest: int, **settings: Any) -> LLM:
    release(setup)
    count, *_ = _FULL if setup.on_cuda else _TINY
    return build(setup, loaded, max_num_seqs=count, max_model_len=longest, **settings)


def _prefix(setup: Setup, loaded: LoadedModel, *, shares: bool) -> Iterator[Row]:
    count, shared, own, max_tokens = _FULL if setup.on_cuda else _TINY
    llm = _engine(
        setup,
        loaded,
        shared + own + max_tokens,
        max_num_batched_tokens=8192,
        enable_prefix_caching=shares,
        in_flight_sharing=shares,
    )
    random = Random(2)
    for _ in range(2):  # the first to warm up
        (prefix,) = random_prompts(shape_of(setup), 1, shared, random)
        prompts = [prefix + rest for rest in random_prompts(shape_of(setup), count, own, random)]
        before = llm.stats().counters["computed_tokens"]
        seconds = seconds_to_generate(llm, prompts, max_tokens)
    numbers = {
        "shape": shape_of(setup).name,
        "work": f"{count} x ({shared} shared + {own} own in, {max_tokens} out)",
        "shares": shares,
        "seconds": rounded(seconds),
        "computed_tokens": llm.stats().counters["computed_tokens"] - before,
    }
    yield Row(f"shared prefix, sharing {'on' if shares else 'off'}", "info", numbers)


def _seconds_of_steps(llm: LLM, prompts: list[list[int]]) -> float:
    """How long the steps take that give each prompt a token; taking them in is not counted."""
    engine = llm._engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"timed {number}", Prompt(token_ids=prompt), out(1))
    start = perf_counter()
    while engine.has_work:
        engine.step()
    return perf_counter() - start


def _duplicates(setup: Setup, loaded: LoadedModel) -> Iterator[Row]:
    """The least time of a step for one prompt, and for many that are the same."""
    count, length = (32, 2048) if setup.on_cuda else (4, 64)
    llm = _engine(setup, loaded, length + 1, max_num_batched_tokens=length + count)
    random, best = Random(3), [float("inf"), float("inf")]
    for _ in range(_ROUNDS):
        for at, copies in enumerate((1, count)):
            prompts = random_prompts(shape_of(setup), 1, length, random) * copies
            best[at] = min(best[at], _seconds_of_steps(llm, prompts))
    numbers = {
        "shape": shape_of(setup).name,
        "work": f"{count} x the same {length} tokens in one step, against one",
        "one_ms": rounded(1000 * best[0]),
        "all_ms": rounded(1000 * best[1]),
        "ratio": rounded(best[1] / best[0]),
    }
    yield Row(DUPLICATES, "info", numbers)
