"""How fast is it? Random weights in the shape of Qwen3-0.6B, in bfloat16."""

from functools import partial
from random import Random
from time import perf_counter
from typing import Any

import torch

from benches.gpu.model import roofline_tokens_per_second
from benches.gpu.part_runs import _flashinfer
from benches.gpu.steps import Found, NotHere, Step, Target
from benches.gpu.works import (
    CHUNK,
    WARM_STEPS,
    WINDOWS,
    Bench,
    decoding,
    machine,
    tokens_needed,
)
from pyengine import SamplingParams


def _bench(target: Target) -> Bench:
    return Bench(target.device, target.either("Qwen3-0.6B", "tiny"))


def rates(target: Target) -> Found:
    """Of a copy and of a matrix product: what the others are measured by."""
    (found,) = machine(_bench(target))
    return {key: found[key] for key in ("device", "bytes_per_second", "flops_per_second")}


def decode(target: Target, batch: int, compiles: bool) -> Found:
    """A step of decodes at a context of 512, in graphs."""
    bench = _bench(target)
    batch, context, steps = target.either((batch, 512, 24), (min(batch, 4), 32, 2))
    (rate,) = machine(bench)
    llm = bench.llm(
        max_num_seqs=batch,
        max_model_len=tokens_needed(batch, context, WINDOWS * steps),
        max_num_batched_tokens=CHUNK,
        compile=compiles,
    )
    with decoding(llm, bench.prompts(batch, context, Random(batch)), WINDOWS * steps) as work:
        before = work.context
        seconds = work.seconds_per_step(steps)
        mean = (before + work.context) / 2
    best = roofline_tokens_per_second(bench.shape.size, batch, mean, rate["bytes_per_second"])
    described = llm.describe()
    return {
        "batch": batch,
        "step_ms": 1000 * seconds,
        "tokens_per_second": batch / seconds,
        "roofline_share": batch / seconds / best,
        "backend": described["attention_backend"],
        "graphs": str(described["cuda_graphs"])[:24],
    }


def profile(target: Target, batch: int, compiles: bool) -> Found:
    """Where the time of ten steps goes, kernel by kernel."""
    bench = _bench(target)
    batch, context = target.either((batch, 512), (4, 32))
    llm = bench.llm(
        max_num_seqs=batch,
        max_model_len=tokens_needed(batch, context, 20),
        max_num_batched_tokens=CHUNK,
        compile=compiles,
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    if target.on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        decoding(llm, bench.prompts(batch, context, Random(1)), 20) as work,
        torch.profiler.profile(activities=activities) as seen,
    ):
        seconds = work.steps(10)
        bench.synchronize()
    order = "self_device_time_total" if target.on_cuda else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda average: -float(getattr(average, order)))[:25]
    lines = ["| kernel | calls a step | us a step |", "|---|---:|---:|"]
    lines += [
        f"| {event.key[:90]} | {event.count / 10:.1f} | {getattr(event, order) / 10:.1f} |"
        for event in events
    ]
    return {"step_ms": 1000 * seconds, "table": "\n".join(lines)}


def attention(target: Target, batch: int, page: int) -> Found:
    """The decode kernel alone, over 570 tokens a sequence: tensor cores on and off."""
    if not target.on_cuda:
        raise NotHere("flashinfer's kernels are for CUDA")
    bench, library, device = _bench(target), _flashinfer(), torch.device(target.device)
    length, heads, kv_heads, dim = 570, 16, 8, 128
    pages = -(-length // page)
    cache = tuple(
        torch.randn(batch * pages, page, kv_heads, dim, device=device).bfloat16() for _ in range(2)
    )
    query = torch.randn(batch, heads, dim, device=device).bfloat16()
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
    starts = torch.arange(batch + 1, dtype=torch.int32) * pages
    last = torch.full((batch,), length - (pages - 1) * page, dtype=torch.int32)
    found: Found = {}
    for cores in (True, False):
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=cores
        )
        indices = order.to(torch.int32).to(device)
        wrapper.plan(starts, indices, last, heads, kv_heads, dim, page, q_data_type=torch.bfloat16)
        seconds = bench.seconds_of(partial(wrapper.run, query, cache), 50)
        read = 2 * batch * length * kv_heads * dim * 2
        found[f"{'with' if cores else 'without'} tensor cores, us"] = 1e6 * seconds
        found[f"{'with' if cores else 'without'}, TB/s"] = read / seconds / 1e12
    return found


def sampled(target: Target, batch: int) -> Found:
    """A step of greedy requests, and of drawn ones with top-p 0.9."""
    bench = _bench(target)
    batch, context, steps = target.either((batch, 512, 24), (4, 32, 2))
    llm = bench.llm(
        max_num_seqs=batch,
        max_model_len=tokens_needed(batch, context, WINDOWS * steps),
        max_num_batched_tokens=CHUNK,
    )
    found: Found = {"batch": batch}
    for name, temperature, top_p in (("greedy", 0, 1.0), ("top-p 0.9", 1, 0.9)):
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=WARM_STEPS + 2 * steps,
            ignore_eos=True,
            detokenize=False,
        )
        prompts: Any = bench.prompts(batch, 16, Random(2))
        llm.generate(prompts, params, use_tqdm=False)
        begin = perf_counter()
        llm.generate(bench.prompts(batch, 16, Random(3)), params, use_tqdm=False)
        found[f"{name}, ms a step"] = 1000 * (perf_counter() - begin) / (WARM_STEPS + 2 * steps)
    return found


def as_it_comes(target: Target) -> Found:
    """Without max_model_len: what is chosen, how long the start takes, that it answers."""
    bench = _bench(target)
    begin = perf_counter()
    llm = bench.llm(
        max_num_seqs=target.either(256, 4), compile=None, **target.either({}, {"num_blocks": 64})
    )
    start = perf_counter() - begin
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm.generate(bench.prompts(4, 32, Random(1)), params, use_tqdm=False)
    described = llm.describe()
    names = ("max_model_len", "num_blocks", "block_size", "attention_backend", "async_scheduling")
    return {
        "start_s": start,
        **{name: described[name] for name in names},
        "compile": described["compile"],
    }


STEPS = [
    Step("rates", rates, seconds=60),
    Step("decode 256 x 512, graphs", decode, (256, False), 90),
    Step("decode 256 x 512, graphs, compiled", decode, (256, True), 150),
    Step("profile 256 x 512, graphs", profile, (256, False), 90),
    Step("the decode kernel, 256, pages of 16", attention, (256, 16), 100),
    Step("the decode kernel, 256, pages of 64", attention, (256, 64), 60),
    Step("greedy and drawn, 256", sampled, (256,), 90),
    Step("decode 32 x 512, graphs", decode, (32, False), 60),
    Step("decode 1 x 512, graphs", decode, (1, False), 60),
    Step("decode 32 x 512, graphs, compiled", decode, (32, True), 120),
    Step("decode 1 x 512, graphs, compiled", decode, (1, True), 120),
    Step("as it comes", as_it_comes, (), 150),
]
