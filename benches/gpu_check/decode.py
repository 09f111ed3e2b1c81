"""Decode against the bandwidth roofline, prefill against the matrix units' peak."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from random import Random

from benches.gpu_check.machine import BANDWIDTH, MATMUL
from benches.gpu_check.roofline import roofline_tokens_per_second
from benches.gpu_check.rows import Part, Row, Setup, rounded
from benches.gpu_check.timing import (
    DecodeWork,
    build,
    decoding,
    load,
    random_prompts,
    seconds_per_step,
    seconds_to_generate,
    shape_of,
    steps_needed,
    tokens_needed,
)
from pyengine import LLM


@dataclass(frozen=True)
class _Sizes:
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]
    steps: int
    chunk: int


_FULL = _Sizes((1, 32, 256), (512, 4096), ((32, 512), (4, 4096)), 24, 8192)
_TINY = _Sizes((1, 4), (32,), ((2, 64),), 2, 256)


def parts(setup: Setup) -> list[Part]:
    """One engine for all parts; the first makes it."""
    sizes = _FULL if setup.on_cuda else _TINY
    llm = cache(partial(_engine, setup, sizes))
    decodes: list[Part] = [
        (f"batch {batch}, context {context}", partial(_decode, setup, llm, batch, context))
        for context in sizes.contexts
        for batch in sizes.batches
    ]
    prefills: list[Part] = [
        (f"prefill {count} x {length}", partial(_prefill, setup, llm, count, length))
        for count, length in sizes.prefills
    ]
    return decodes + prefills


def _engine(setup: Setup, sizes: _Sizes) -> LLM:
    most = max(sizes.batches)
    contexts = [tokens_needed(_work(sizes, most, context)) for context in sizes.contexts]
    return build(
        setup,
        load(setup),
        max_num_seqs=most,
        max_model_len=max(*contexts, *(length + 1 for _, length in sizes.prefills)),
        max_num_batched_tokens=sizes.chunk,
        gpu_memory_utilization=0.93,  # a batch of 256 over 4,096 positions barely fits
    )


def _work(sizes: _Sizes, batch: int, context: int) -> DecodeWork:
    steps = steps_needed(sizes.steps)
    return DecodeWork(count=batch, context=context, chunk=sizes.chunk, steps=steps)


def _decode(setup: Setup, llm: Callable[[], LLM], batch: int, context: int) -> Iterator[Row]:
    sizes, shape, engine = _FULL if setup.on_cuda else _TINY, shape_of(setup), llm()
    check = f"decode {shape.name}, batch {batch}, context {context}"
    told = engine.describe()
    held = int(str(told["num_blocks"])) * int(str(told["block_size"]))
    task = _work(sizes, batch, context)
    needed = batch * tokens_needed(task)
    if needed > held:
        gigabytes = needed * shape.size.kv_bytes_per_token / 1e9
        detail = f"needs {gigabytes:.0f} GB of KV cache, the pool holds {held} of {needed} tokens"
        yield Row(check, "skip", {}, detail)
        return
    with decoding(engine, shape, task) as work:
        before = work.mean_context
        seconds = seconds_per_step(work.engine, sizes.steps)
        mean = (before + work.mean_context) / 2
    bandwidth = setup.facts[BANDWIDTH]["bytes_per_second"]
    best = roofline_tokens_per_second(shape.size, batch, mean, bandwidth)
    numbers = {
        "shape": shape.name,
        "batch": batch,
        "context": context,
        "mean_context": rounded(mean),
        "step_ms": rounded(1000 * seconds),
        "tokens_per_second": rounded(batch / seconds),
        "roofline_tokens_per_second": rounded(best),
        "roofline_share": rounded(batch / seconds / best),
        "backend": told["attention_backend"],
        "cuda_graphs": told["cuda_graphs"] != "none",
    }
    yield Row(check, "info", numbers)


def _prefill(setup: Setup, llm: Callable[[], LLM], count: int, length: int) -> Iterator[Row]:
    shape, engine, random = shape_of(setup), llm(), Random(length)
    for _ in range(2):  # the first to warm up
        prompts = random_prompts(shape, count, length, random)
        seconds = seconds_to_generate(engine, prompts, 1)
    flops = count * shape.size.prefill_flops(length) / seconds
    numbers = {
        "shape": shape.name,
        "prompts": count,
        "length": length,
        "tokens_per_second": rounded(count * length / seconds),
        "matmul_share": rounded(flops / setup.facts[MATMUL]["flops_per_second"]),
    }
    yield Row(f"prefill {shape.name}, {count} x {length}", "info", numbers)
