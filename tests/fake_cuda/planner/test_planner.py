"""Our workspaces against flashinfer's planner, which is C++ and needs no GPU.

`make gpu-planner` brings nvcc. The planner raises an error if a workspace is too small, in the
middle of a step.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from pyengine.attention.flashinfer import (
    _INT_WORKSPACE,
    _Kind,
    _max_prefixes,
    workspace_bytes,
)
from tests.fake_cuda.releases import NEWEST
from tests.support.processes import run_program

HERE = Path(__file__).parent
CUDA = Path(sys.prefix) / "cuda" / "nvidia" / "cu13"
RELEASES = {"oldest": Path(sysconfig.get_path("purelib")), "newest": NEWEST}
PROCESSORS = (46, 84, 108, 132, 148)
HEADS = (
    *[(8, 2), (8, 4), (2, 7), (4, 8), (8, 5), (1, 16), (8, 8)],
    *[(4, 16), (16, 1), (32, 1), (1, 71), (2, 16), (8, 12)],
)
"""KV heads, and query heads of each."""
LENGTHS = (1, 20, 570, 100_000)
STEP = 16_384
"""Rows of a step."""
PLANS = 160
"""For each number of processors."""


@pytest.fixture(scope="module", params=RELEASES)
def planner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    sources = RELEASES[request.param] / "flashinfer" / "data" / "include"
    assert sources.is_dir(), f"no {sources}"
    includes = [f"-I{path}" for path in (sources, CUDA / "include", CUDA / "include" / "cccl")]
    plan, program = folder / "plan.o", folder / "planner"
    nvcc = [CUDA / "bin" / "nvcc", "-std=c++17", "-arch=sm_80", "-c", HERE / "plan.cu", "-o", plan]
    run_program([*nvcc, *includes], env={**os.environ, "CUDA_HOME": str(CUDA)})
    run_program(["g++", plan, HERE / "cuda.cpp", "-o", program])
    return program


class Planner:
    """A running planner, for a GPU of some processors."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None and process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    def plan(self, *numbers: int) -> tuple[int, int]:
        self._requests.write(" ".join(map(str, numbers)) + "\n")
        self._requests.flush()
        floats, ints = self._answers.readline().split()
        return int(floats), int(ints)


@contextmanager
def running(program: Path, processors: int) -> Iterator[Planner]:
    environment = {**os.environ, "PROCESSORS": str(processors)}
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Planner(process)


def lengths_of(random: Random, batch: int, is_decode: bool) -> list[tuple[int, int]]:
    """Rows and keys of each sequence."""
    keys = [random.choice([*LENGTHS, random.randint(1, 20_000)]) for _ in range(batch)]
    most_rows = 1 if is_decode else STEP // batch
    return [(random.randint(1, min(most_rows, own)), own) for own in keys]


@pytest.mark.parametrize("processors", PROCESSORS)
def test_no_plan_takes_more_than_its_workspaces(planner: Path, processors: int) -> None:
    random, tight = Random(processors), 0.0
    with running(planner, processors) as gpu:
        for _ in range(PLANS):
            kv_heads, group = random.choice(HEADS)
            dim, page = random.choice([64, 128, 256]), random.choice([16, 32, 64, 256])
            window, in_graph = random.choice([-1, -1, 47, 1023]), random.random() < 0.5
            batch = random.choice([1, 2, 3, 8, 16, 33, 64, 128, 256])
            lengths = lengths_of(random, batch, in_graph or random.random() < 0.3)
            shape = (kv_heads * group, kv_heads, dim)
            numbers = [number for pair in lengths for number in pair]
            taken, ints = gpu.plan(int(in_graph), batch, *shape, page, window, *numbers)
            kind = _Kind(0, *shape, torch.bfloat16, None, None, 0.1)
            given = workspace_bytes(kind, processors, batch if in_graph else 0)
            assert taken <= given, (in_graph, batch, shape, page, window)
            assert ints <= _INT_WORKSPACE, (in_graph, batch, shape, page, lengths)
            tight = max(tight, taken / given)
    assert tight > 0.5, "the planner splits keys, else this says nothing"


@pytest.mark.parametrize("processors", PROCESSORS)
def test_nor_do_plans_of_shared_prefixes(planner: Path, processors: int) -> None:
    """In a graph: some prefixes are not used, the last has the rest of the rows and one page."""
    random, tight = Random(processors), 0.0
    with running(planner, processors) as gpu:
        for _ in range(PLANS):
            kv_heads, group = random.choice(HEADS)
            dim, page = random.choice([64, 128, 256]), random.choice([16, 32, 64, 256])
            rows = random.choice([2, 3, 8, 16, 33, 64, 128, 256, 512])
            used = random.randint(0, min(_max_prefixes(rows), 6))
            counts = [2 + random.randint(0, rows // used - 2) for _ in range(used)]
            lengths = [(own, page * random.choice([1, 8, 500, 6_000])) for own in counts]
            size = _max_prefixes(rows) + 1
            lengths += [(0, 0)] * (size - 1 - used) + [(rows - sum(counts), page)]
            shape = (kv_heads * group, kv_heads, dim)
            numbers = [number for pair in lengths for number in pair]
            taken, ints = gpu.plan(1, size, *shape, page, -1, *numbers)
            kind = _Kind(0, *shape, torch.bfloat16, None, None, 0.1)
            given = workspace_bytes(kind, processors, rows, size)
            assert taken <= given, (rows, shape, page, lengths)
            assert ints <= _INT_WORKSPACE, (rows, shape, page, lengths)
            tight = max(tight, taken / given)
    assert tight > 0.5, "the planner splits keys, else this says nothing"
