"""The times of an engine over random weights in the shape of a real model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from time import perf_counter
from typing import Any

import torch

from benches.gpu.bench import (
    CHUNK,
    WINDOWS,
    Bench,
    add,
    decoding,
    out,
    seconds_to_generate,
    tokens_needed,
)
from benches.gpu.first_run.context import Context
from benches.gpu.first_run.sampling_kernels import KINDS
from benches.gpu.model import roofline_tokens_per_second
from benches.gpu.target import NotHere
from benches.gpu.watch import watched
from pyengine import LLM

Record = Callable[..., None]


@dataclass(frozen=True)
class Timed:
    """An engine, and where its figures go."""

    context: Context
    bench: Bench
    llm: LLM
    batch: int
    """Requests that decode at once, at most."""
    record: Record

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Positions before a decode, and steps of a window."""
        sizes: tuple[int, int] = self.context.either((512, 24), (32, 2))
        return sizes


def run(context: Context, shape_name: str, mode: str, *pieces: str) -> None:
    """The `pieces` of `PIECES` and `decode-BATCH`, in their order, over one engine.

    `mode` is `compiled`, which is the default, or `uncompiled`.
    """
    bench = context.bench(shape_name)
    batches = [int(piece.partition("-")[2]) for piece in pieces if piece.startswith("decode-")]
    batch, (positions, steps) = max(batches), context.either((512, 24), (32, 2))
    longest = tokens_needed(batch, positions, (WINDOWS + 2) * steps)
    start = perf_counter()
    llm = bench.llm(
        max_num_seqs=batch,
        max_model_len=max(longest, context.either(2048 + 64, 160)),
        max_num_batched_tokens=context.either(CHUNK, 256),
        compile=None if mode == "compiled" else False,
        **context.either({}, {"num_blocks": 256}),
    )
    about = llm.describe()
    name = {"shape": bench.shape_name, "compiled": bool(about["compile"])}
    context.record(
        **name,
        work="start",
        seconds=perf_counter() - start,
        backend=about["attention_backend"],
        asked=mode,
        blocks=about["num_blocks"],
        block_size=about["block_size"],
        graphs=str(about["cuda_graphs"])[-30:],
        ok=not context.on_cuda or bool(about["compile"]) == (mode == "compiled"),
    )
    timed = Timed(context, bench, llm, batch, partial(context.record, **name))
    for piece in pieces:
        kind, _, size = piece.partition("-")
        context.attempt(piece, PIECES[kind], timed, *([int(size)] if size else []))


def decode(timed: Timed, batch: int) -> None:
    """A step of decodes against the roofline, its graph alone, and the host's time."""
    bench, (positions, steps) = timed.bench, timed.sizes
    prompts = bench.prompts(batch, positions, Random(batch))
    with decoding(timed.llm, prompts, (WINDOWS + 1) * steps) as work:
        before = work.context
        seconds = work.seconds_per_step(steps)
        mean = (before + work.context) / 2
        with watched(work.engine) as watch:
            whole = work.steps(steps)
        host = {name: 1e6 * spent / steps for name, spent in watch.spent.items()}
        host["outputs"] = 1e6 * whole - sum(host.values())
        graph = _replay_seconds(timed, batch)
    bandwidth = timed.context.rates()[0]
    rate = roofline_tokens_per_second(bench.shape.size, batch, mean, bandwidth)
    timed.record(
        work="decode",
        batch=batch,
        context=round(mean),
        step_ms=1e3 * seconds,
        graph_ms=None if graph is None else 1e3 * graph,
        step_over_graph=None if graph is None else seconds / graph,
        floor_ms=1e3 * batch / rate,
        roofline_share=batch / seconds / rate,
        tokens_per_second=batch / seconds,
        host_us={name: round(value) for name, value in host.items()},
        host_without_wait_us=round(sum(host.values()) - host["wait"]),
    )


def _replay_seconds(timed: Timed, batch: int) -> float | None:
    """Seconds of the device for a replay of the step's graph; None: it has no graph."""
    graphs: Any = getattr(timed.llm._engine._executor.runner, "graphs", None)
    sizes = [size for size in getattr(graphs, "sizes", ()) if size >= batch]
    if not sizes:
        return None
    return timed.bench.seconds_of(graphs._graphs[min(sizes)].replay)


def prefill(timed: Timed) -> None:
    """Prompts against the throughput of a matrix product."""
    bench, (count, length) = timed.bench, timed.context.either((8, 2048), (2, 64))
    random = Random(length)
    times = [
        seconds_to_generate(timed.llm, bench.prompts(count, length, random), 1) for _ in range(3)
    ]
    best = min(times[1:])
    flops = count * bench.shape.size.prefill_flops(length)
    timed.record(
        work="prefill",
        prompts=f"{count} x {length}",
        seconds=best,
        first_seconds=times[0],
        tokens_per_second=count * length / best,
        matmul_share=flops / best / timed.context.rates()[1],
    )


def equal_prompts(timed: Timed) -> None:
    """A prompt alone, and the same one many times: it is computed once."""
    count, length = timed.context.either((32, 2048), (3, 64))
    random, best = Random(3), dict.fromkeys((1, count), float("inf"))
    for _ in range(4):
        for copies in best:
            (prompt,) = timed.bench.prompts(1, length, random)
            seconds = seconds_to_generate(timed.llm, [prompt] * copies, 1)
            best[copies] = min(best[copies], seconds)
    timed.record(
        work="equal prompts",
        requests=f"{count} x the same {length}, 1 out",
        one_ms=1e3 * best[1],
        all_ms=1e3 * best[count],
        ratio=best[count] / best[1],
    )


def mixed(timed: Timed) -> None:
    """Steps with a prompt beside decodes: what the prompt costs them."""
    positions, _ = timed.sizes
    count, length, steps, rounds = timed.context.either((128, 2048, 4, 6), (2, 64, 2, 1))
    random = Random(11)
    prompts = timed.bench.prompts(min(count, timed.batch - 1), positions // 2, random)
    alone = min(
        seconds_to_generate(timed.llm, timed.bench.prompts(1, length, random), 1) for _ in range(3)
    )
    without, beside = [], []
    with decoding(timed.llm, prompts, 3 * steps * (rounds + 1)) as work:
        for number in range(rounds + 1):
            without.append(steps * work.steps(steps))
            (prompt,) = timed.bench.prompts(1, length, random)
            add(timed.llm, f"beside {number}", prompt, out(1))
            beside.append(steps * work.steps(steps))
            work.steps(2)
    plain, both = (sorted(times[1:])[rounds // 2] for times in (without, beside))
    timed.record(
        work="mixed",
        decodes=len(prompts),
        prompt=length,
        steps=steps,
        decodes_ms=1e3 * plain,
        with_prompt_ms=1e3 * both,
        prompt_alone_ms=1e3 * alone,
        cost_over_alone=(both - plain) / alone,
    )


def sampling(timed: Timed) -> None:
    """A step of each kind of parameters, beside a greedy one."""
    _, steps = timed.sizes
    greedy = None
    for number, (kind, fields) in enumerate(KINDS.items()):
        prompts = timed.bench.prompts(timed.batch, 16, Random(number))
        with decoding(timed.llm, prompts, WINDOWS * steps, seed=1, **fields) as work:
            seconds = work.seconds_per_step(steps)
        greedy = greedy or seconds
        timed.record(
            work="sampling",
            kind=kind,
            batch=timed.batch,
            step_ms=1e3 * seconds,
            more_ms=1e3 * (seconds - greedy),
        )


def batching(timed: Timed) -> None:
    """Throughput of many requests at once; `peers` has the same for transformers."""
    count, length, tokens = timed.context.either((256, 512, 128), (4, 16, 4))
    random = Random(9)
    seconds_to_generate(timed.llm, timed.bench.prompts(-(-count // 16), length, random), 4)
    prompts = timed.bench.prompts(count, length, random)
    seconds = seconds_to_generate(timed.llm, prompts, tokens)
    timed.record(
        work="batching",
        engine="pyengine",
        requests=f"{count} x ({length} in, {tokens} out)",
        tokens_per_second=count * tokens / seconds,
    )


def shared_prefix(timed: Timed) -> None:
    """Prompts that begin alike: how many tokens are computed, and how long it takes."""
    count, shared, own, tokens = timed.context.either((256, 1024, 32, 32), (3, 64, 8, 4))
    random, llm = Random(2), timed.llm
    for _ in range(2):  # the first to warm up
        (prefix,) = timed.bench.prompts(1, shared, random)
        prompts = [prefix + rest for rest in timed.bench.prompts(count, own, random)]
        before = llm.stats().counters["computed_tokens"]
        seconds = seconds_to_generate(llm, prompts, tokens)
    timed.record(
        work="shared prefix",
        requests=f"{count} x ({shared} shared + {own} own in, {tokens} out)",
        seconds=seconds,
        computed_tokens=llm.stats().counters["computed_tokens"] - before,
        all_tokens=count * (shared + own + tokens - 1),
    )


def profile(timed: Timed) -> None:
    """Where the time of a decode step goes, kernel by kernel."""
    steps, cuda = 5, timed.context.on_cuda
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    prompts = timed.bench.prompts(timed.batch, timed.sizes[0], Random(5))
    with (
        decoding(timed.llm, prompts, 20) as work,
        torch.profiler.profile(activities=activities) as seen,
    ):
        work.steps(steps)
        timed.bench.synchronize()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -float(getattr(event, order)))
    rows = [
        [event.key[:100], event.count / steps, round(getattr(event, order) / steps, 1)]
        for event in events[:25]
    ]
    if not rows:
        raise NotHere("the profiler saw nothing")
    timed.record(work="profile", batch=timed.batch, table=rows)


PIECES: dict[str, Callable[..., None]] = {
    "decode": decode,
    "prefill": prefill,
    "equal_prompts": equal_prompts,
    "mixed": mixed,
    "sampling": sampling,
    "batching": batching,
    "shared_prefix": shared_prefix,
    "profile": profile,
}
