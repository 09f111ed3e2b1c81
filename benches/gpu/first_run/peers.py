"""transformers on the same machine: continuous batching, and generation of equal prompts."""

from random import Random
from time import perf_counter
from typing import Any

import torch

from benches.gpu.bench import Bench
from benches.gpu.first_run.context import Context
from benches.gpu.first_run.results import read


def run(context: Context, shape_name: str) -> None:
    """Both, with random weights."""
    bench = context.bench(shape_name)
    context.attempt("continuous batching", continuous, context, bench)
    bench.release()
    context.attempt("generate", generate, context, bench)


def continuous(context: Context, bench: Bench) -> None:
    """The requests of `engine_times.batching`, with transformers' defaults."""
    count, length, tokens = context.either((256, 512, 128), (4, 16, 4))
    random = Random(9)
    rounds = [  # one to warm up, and the one that counts
        (bench.prompts(-(-count // 16), length, random), 4),
        (bench.prompts(count, length, random), tokens),
    ]
    model, settings = _model(bench, tokens)
    with model.continuous_batching_context_manager(**settings) as manager:
        for prompts, max_tokens in rounds:
            start = perf_counter()
            manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
            lengths = [len(_next(manager).generated_tokens) for _ in prompts]
            seconds = perf_counter() - start
            if lengths != [max_tokens] * len(prompts):
                raise RuntimeError(f"transformers gave {lengths} tokens instead of {max_tokens}")
    rate = count * tokens / seconds
    context.record(
        work="batching",
        engine="transformers",
        shape=bench.shape_name,
        requests=f"{count} x ({length} in, {tokens} out)",
        tokens_per_second=rate,
        attention=str(model.config._attn_implementation),
    )
    ours = [
        line["tokens_per_second"]
        for line in read(context.out / "results.jsonl")
        if line.get("engine") == "pyengine" and line.get("shape") == bench.shape_name
    ]
    if ours:
        context.record(work="batching", engine="ratio", ratio=ours[-1] / rate)


def _model(bench: Bench, max_tokens: int) -> tuple[Any, dict[str, Any]]:
    """transformers' model, and the settings of its manager."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = bench.shape.model(bench.device)
    model.set_attn_implementation("sdpa")
    make: Any = GenerationConfig  # it has no types
    config = make(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings: dict[str, Any] = {"generation_config": config}
    if not bench.on_cuda:  # else it takes nearly all of the memory
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        settings["continuous_batching_config"] = small
    return model, settings


def _next(manager: Any) -> Any:
    """The next request that has all of its tokens."""
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            return result
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread ended")


def generate(context: Context, bench: Bench) -> None:
    """Equal prompts, each of which transformers computes."""
    copies, length, tokens = context.either((32, 2048, 32), (3, 64, 4))
    model = bench.shape.model(bench.device)
    ids = torch.tensor(bench.prompts(1, length, Random(1)) * copies, device=bench.device)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    times = []
    for _ in range(2):
        bench.synchronize()
        start = perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        bench.synchronize()
        times.append(perf_counter() - start)
    context.record(
        work="equal prompts",
        engine="transformers generate",
        shape=bench.shape_name,
        requests=f"{copies} x the same {length}, {tokens} out",
        seconds=min(times),
    )
