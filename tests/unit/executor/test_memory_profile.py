"""Memory of the largest step, estimated and run; freed memory is used again."""

import gc
import os
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pyengine.attention.gather import GatherBackend
from pyengine.errors import ConfigurationError
from pyengine.executor.input_buffers import InputBuffers, RunnerLimits
from pyengine.executor.kv_cache_config import cache_specs
from pyengine.executor.memory_profile import (
    LargestStep,
    activation_bytes,
    graph_bytes,
)
from pyengine.executor.model_runner import ModelRunner
from pyengine.kv_cache import memory
from pyengine.kv_cache.pool import KVPool
from pyengine.models.loaded import LoadedModel
from tests.support.graphs import record_eagerly
from tests.support.models import as_loaded
from tests.support.processes import run_python
from tests.support.static_attention import StaticBackend
from tests.unit.executor.hand_made import random_model

LIMITS = RunnerLimits(max_num_batched_tokens=50, max_num_seqs=8, max_blocks_per_seq=4)


class CountingMeter:
    """Counts the bytes of the largest tensor that torch makes meanwhile."""

    def __init__(self) -> None:
        self.runs = 0

    def peak(self, run: Callable[[], object]) -> int:
        self.runs += 1
        with torch.profiler.profile(profile_memory=True) as profile:
            run()
        return max(event.cpu_memory_usage for event in profile.events())


def loaded_model() -> LoadedModel:
    return as_loaded(random_model("llama"))


def test_the_step_is_as_large_as_a_step_may_be() -> None:
    buffers = InputBuffers(LIMITS, 16, torch.device("cpu"))
    step = LargestStep(LIMITS, buffers.arrays, null_block=9)
    inputs = buffers.fill(step).upload()
    assert (step.num_tokens, step.num_sequences, step.num_samples) == (50, 8, 8)
    assert np.diff(inputs.query_start_loc).tolist() == inputs.seq_lens.tolist() == [7, 7, *[6] * 6]
    assert inputs.positions[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert inputs.logits_indices.tolist() == [6, 13, 19, 25, 31, 37, 43, 49]
    assert (inputs.slot_mapping == -1).all()
    assert (inputs.block_tables == 9).all()


def test_it_is_run_and_leaves_the_pool_as_it_was() -> None:
    loaded, meter = loaded_model(), CountingMeter()
    pool = KVPool(cache_specs(loaded, "float32"), 1, 16, loaded.device)
    runner = ModelRunner(loaded, pool, GatherBackend(pool), LIMITS)
    taken = activation_bytes(runner, LIMITS, pool.num_blocks, 97, meter)
    assert meter.runs == 1
    assert taken >= 50 * 96 * 4  # the widest layer's activations, float32
    assert not pool.keys[0][0].any(), "only the null block may be written"


class Counting:
    """Counts graphs: the first of a kind keeps 1,000, each further one 7."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def peak(self, run: Callable[[], object]) -> int:
        raise AssertionError(run)

    def kept(self, run: Callable[[], object]) -> int:
        kinds = (self.runner.graphs, self.runner.piecewise)
        before = [len(kind.sizes) if kind else 0 for kind in kinds]
        run()
        kinds = (self.runner.graphs, self.runner.piecewise)
        sizes = [len(kind.sizes) if kind else 0 for kind in kinds]
        made = [count for size, count in zip(sizes, before, strict=True) if size > count]
        return sum(1000 if count == 0 else 7 for count in made)


@pytest.mark.parametrize(
    ("most", "expected"), [(8, 1000 + 3 * 7), (1, 1000), (None, 0)]
)  # graphs of 1, 2, 4, 8
def test_graphs_are_reckoned_by_two_of_them(most: int | None, expected: int) -> None:
    loaded = loaded_model()
    pool = KVPool(cache_specs(loaded, "float32"), 1, 16, loaded.device)
    limits = RunnerLimits(max_num_batched_tokens=50, max_num_seqs=most or 8, max_blocks_per_seq=4)
    recorder = record_eagerly if most else None
    runner = ModelRunner(loaded, pool, StaticBackend(pool), limits, record=recorder)
    assert graph_bytes(runner, Counting(runner)) == expected
    assert runner.graphs is None or len(runner.graphs.sizes) <= 2


@pytest.mark.parametrize(("most", "expected"), [(50, 1000 + 2 * 7), (9, 1000)])
def test_steps_in_pieces_are_reckoned_as_well(most: int, expected: int) -> None:
    """Of 16, 32 and 50 tokens, or of 9."""
    loaded = loaded_model()
    pool = KVPool(cache_specs(loaded, "float32"), 1, 16, loaded.device)
    limits = RunnerLimits(max_num_batched_tokens=most, max_num_seqs=1, max_blocks_per_seq=4)
    runner = ModelRunner(loaded, pool, StaticBackend(pool), limits, record=record_eagerly)
    taken = graph_bytes(runner, Counting(runner), record_eagerly.pieces)
    assert taken == 1000 + expected
    assert runner.piecewise.sizes == runner.piecewise_sizes[-2:]


def test_a_runner_with_graphs_is_freed_as_soon_as_it_is_dropped() -> None:
    """Its memory is needed for the pool; a reference cycle would wait for the collector."""
    loaded = loaded_model()
    pool = KVPool(cache_specs(loaded, "float32"), 1, 16, loaded.device)
    backend = StaticBackend(pool)
    runner = ModelRunner(loaded, pool, backend, LIMITS, record=recorded_apart)
    runner.capture()
    runner.capture_piecewise(record_eagerly.pieces)
    assert runner.graphs.sizes and runner.piecewise.sizes
    dropped = [weakref.ref(each) for each in (runner, pool, backend)]
    gc.collect()
    gc.disable()
    try:
        del runner, pool, backend
        assert [each() for each in dropped] == [None] * 3
    finally:
        gc.enable()


def recorded_apart(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A replay that, like a CUDA graph's, keeps the result and not the launches."""
    result = compute()
    return lambda: result


class FullDevice:
    def peak(self, run: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_largest_step_that_runs_out_of_memory_is_named() -> None:
    loaded = loaded_model()
    pool = KVPool(cache_specs(loaded, "float32"), 1, 16, loaded.device)
    runner = ModelRunner(loaded, pool, GatherBackend(pool), LIMITS)
    with pytest.raises(ConfigurationError, match=r"max_num_batched_tokens=50.*out of memory"):
        activation_bytes(runner, LIMITS, pool.num_blocks, 97, FullDevice())


COUNT = """
import resource, sys
import torch
from pyengine.kv_cache.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    for _ in range(20):
        parts = [torch.ones(1 << 20) for _ in range(10)]  # 4 MiB each
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(faults() - before)
"""


@pytest.mark.skipif(memory.platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_not_returned_to_the_system():
    def faults(how: str) -> int:
        eager = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is larger goes at once
        return int(run_python(COUNT, how, env=eager).stdout)

    assert faults("kept") < 100 < faults("default")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not memory.keep_freed_memory()
