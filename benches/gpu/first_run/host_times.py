"""The host's time: of the block manager in a decode step, and what overlap hides of it."""

from random import Random
from statistics import median
from time import perf_counter

import numpy as np
import torch

from benches.gpu.bench import CHUNK, WINDOWS, decoding, tokens_needed
from benches.gpu.first_run.context import Context
from benches.gpu.watch import watched
from pyengine.executor.input_buffers import InputBuffers, RunnerLimits
from pyengine.kv_cache import BlockManager

LENGTH, BLOCK, STEPS = 570, 16, 60


def blocks(context: Context) -> None:
    """Microseconds of a decode step in the block manager: plan, inputs, commit."""
    for rows in context.either((1, 32, 256, 1024), (1, 32)):
        manager = BlockManager(rows * 60, BLOCK)
        limits = RunnerLimits(
            max_num_batched_tokens=max(rows, 1024), max_num_seqs=rows, max_blocks_per_seq=263
        )
        buffers = InputBuffers(limits, BLOCK, torch.device("cpu"))
        sequences = [manager.sequence(np.arange(LENGTH) + 600 * row) for row in range(rows)]
        for sequence in sequences:
            plan = manager.begin_step(LENGTH)
            plan.prefill(sequence, LENGTH)
            plan.commit([1])
        times = []
        for _ in range(STEPS):
            start = perf_counter()
            plan = manager.begin_step(rows)
            plan.decode(sequences)
            planned = perf_counter()
            plan.fill(buffers.step_buffers)
            filled = perf_counter()
            plan.commit(np.ones(rows, dtype=np.int64))
            times.append((planned - start, filled - planned, perf_counter() - filled))
        names = ("plan_us", "fill_us", "commit_us")
        times = [1e6 * median(times) for times in zip(*times, strict=True)]
        together = dict(zip(names, times, strict=True))
        context.record(rows=rows, **together, all_us=sum(times))


def overlap(context: Context, shape_name: str) -> None:
    """A decode step without and with overlap: the share of the host's time that it hides."""
    bench = context.bench(shape_name)
    count, positions, steps = context.either((256, 512, 32), (4, 32, 2))
    steps_ms, host_us = {}, {}
    for ahead in (False, True):
        llm = bench.llm(
            max_num_seqs=count,
            max_model_len=tokens_needed(count, positions, (WINDOWS + 1) * steps),
            max_num_batched_tokens=CHUNK,
            async_scheduling=ahead,
            compile=False,
            **context.either({}, {"num_blocks": 256}),
        )
        prompts = bench.prompts(count, positions, Random(count))
        with decoding(llm, prompts, (WINDOWS + 1) * steps) as work:
            seconds = work.seconds_per_step(steps)
            with watched(work.engine) as watch:
                whole = work.steps(steps)
        waits = watch.spent["wait"] + watch.spent["launch"]
        steps_ms[ahead], host_us[ahead] = 1e3 * seconds, 1e6 * (whole - waits / steps)
        del llm
    hidden = 1e3 * (steps_ms[False] - steps_ms[True]) / host_us[False]
    context.record(
        work="overlap",
        requests=f"{count} decode, {positions} positions",
        step_ms=steps_ms[False],
        overlapped_step_ms=steps_ms[True],
        host_us=host_us[False],
        hidden_share=hidden,
    )
