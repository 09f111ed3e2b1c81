"""The same requests through transformers' own continuous batching."""

from collections.abc import Iterator
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

import torch

from benches.gpu_check.goals import OURS, THEIRS
from benches.gpu_check.models import Shape
from benches.gpu_check.rows import Part, Row, Setup, rounded
from benches.gpu_check.timing import (
    build,
    load,
    random_prompts,
    release,
    seconds_to_generate,
    shape_of,
)

_FULL, _TINY = (256, 512, 128), (4, 16, 8)
"""Requests, tokens in, tokens out."""


def parts(setup: Setup) -> list[Part]:
    """See `Part`."""
    return [(OURS, partial(_ours, setup)), (THEIRS, partial(_theirs, setup))]


def _work(setup: Setup) -> tuple[int, int, int]:
    return _FULL if setup.on_cuda else _TINY


def _rounds(setup: Setup) -> Iterator[tuple[list[list[int]], int]]:
    """Prompts and tokens out, twice: a small round to warm up, and the one that counts."""
    count, length, max_tokens = _work(setup)
    random = Random(9)
    yield random_prompts(shape_of(setup), -(-count // 16), length, random), 4
    yield random_prompts(shape_of(setup), count, length, random), max_tokens


def _row(setup: Setup, engine: str, seconds: float, **more: Any) -> Row:
    count, length, max_tokens = _work(setup)
    numbers = {
        "engine": engine,
        "shape": shape_of(setup).name,
        "work": f"{count} x ({length} in, {max_tokens} out)",
        "tokens_per_second": rounded(count * max_tokens / seconds),
        "seconds": rounded(seconds),
        **more,
    }
    return Row(f"continuous batching, {engine}", "info", numbers)


def _ours(setup: Setup) -> Iterator[Row]:
    count, length, max_tokens = _work(setup)
    llm = build(
        setup,
        load(setup),
        max_num_seqs=count,
        max_model_len=length + max_tokens,
        max_num_batched_tokens=8192,
    )
    for prompts, asked in _rounds(setup):
        seconds = seconds_to_generate(llm, prompts, asked)
    yield _row(setup, OURS, seconds, attention=llm.describe()["attention_backend"])


def _theirs(setup: Setup) -> Iterator[Row]:
    """With its defaults: the flash attention that it finds, its own choice of CUDA graphs."""
    release(setup)
    model, settings = _their_model(shape_of(setup), setup)
    with model.continuous_batching_context_manager(**settings) as manager:
        for prompts, asked in _rounds(setup):
            start = perf_counter()
            manager.add_requests(inputs=prompts, max_new_tokens=asked)
            lengths = [len(_next(manager).generated_tokens) for _ in prompts]
            seconds = perf_counter() - start
            if lengths != [asked] * len(prompts):
                raise RuntimeError(f"transformers gave {lengths} tokens, {asked} were asked for")
        attention = model.config._attn_implementation
    yield _row(setup, THEIRS, seconds, attention=attention)


def _their_model(shape: Shape, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """Their model, and the settings of their manager."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = shape.model(torch.device(setup.device))
    model.set_attn_implementation("sdpa")
    make: Any = GenerationConfig  # it carries no types
    config = make(max_new_tokens=_work(setup)[2], do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = {"generation_config": config}
    if not setup.on_cuda:  # else it takes nearly all of the memory that there is
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        settings["continuous_batching_config"] = small
    return model, settings


def _next(manager: Any) -> Any:
    """The next request that is through."""
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            return result
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread ended")
