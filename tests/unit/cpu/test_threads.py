"""Threads that compute: how many and why, how they wait, and a warning where they get nothing."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine import LLM
from pyengine.cpu import threads
from pyengine.cpu.threads import ComputeThreads, StepThreads, compute_threads
from pyengine.executor.model_runner import ForwardPass
from pyengine.utils.cpus import UsableCpus
from pyengine.utils.openmp import BRIEF_SPIN, openmp_runtime, torch_threads
from tests.unit.models.tiny import save_tiny_model

needs_libgomp = pytest.mark.skipif(openmp_runtime() is None, reason="torch brings no libgomp")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with torch_threads(2):
        yield


@pytest.mark.parametrize(
    ("cpus", "processes", "count"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (9, 1, 2)]
)
def test_threads_follow_from_usable_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int, processes: int, count: int
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: UsableCpus(cpus, "because"))
    found = compute_threads(None, processes)
    assert found.count == count
    assert ("because" in found.reason) == (cpus < 9)


def test_what_is_asked_for_goes_before_the_variable_and_that_before_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: UsableCpus(1, "because"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert compute_threads(None) == ComputeThreads(2, "OMP_NUM_THREADS")
    assert compute_threads(5) == ComputeThreads(5, "asked for")


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_computes_with_its_threads_and_leaves_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    save_tiny_model(tmp_path)
    llm = LLM(
        tmp_path,
        dtype="float32",
        num_blocks=16,
        max_model_len=64,
        num_threads=1,
        async_scheduling=ahead,
    )
    seen: set[int] = set()
    forward = ForwardPass.__call__

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.add(torch.get_num_threads())
        return forward(*arguments, **named)

    monkeypatch.setattr(ForwardPass, "__call__", watched)
    llm.generate([[3, 9, 27]])
    assert seen == {1}
    assert torch.get_num_threads() == 2
    about = llm.describe()
    assert (about["num_threads"], about["num_threads_reason"]) == (1, "asked for")
    assert "openmp_wait" in about


class Clocks:
    """Seconds that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self.processor = self.waiting = 0.0
        self.num_reads = 0
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.clock)

    def read(self) -> threads._Times:
        self.num_reads += 1
        return threads._Times(self.clock, self.processor, self.waiting)

    def run(self, used: StepThreads, steps: int, *, processor: float, waiting: float) -> None:
        """Steps of a second each."""
        for _ in range(steps):
            with used.step():
                assert torch.get_num_threads() == used.count
                self.clock += 1
                self.processor += processor
                self.waiting += waiting


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.mark.parametrize(
    ("processor", "waiting", "warns"),
    [
        (1.9, 0.02, False),  # alone
        (1.0, 0.1, False),  # one of two threads sleeps at barriers
        (0.2, 0.0, True),  # a fifth: a quota is used up, or memory is swapped
        (1.6, 0.8, True),  # threads spin while another one waits for a processor
    ],
)
def test_a_warning_where_steps_take_many_times_their_processor_time(
    clocks: Clocks,
    caplog: pytest.LogCaptureFixture,
    processor: float,
    waiting: float,
    warns: bool,
) -> None:
    watch = StepThreads(ComputeThreads(2, "because"), clocks.read)
    with caplog.at_level(logging.WARNING):
        clocks.run(watch, 9, processor=processor, waiting=waiting)
        assert not caplog.records
        clocks.run(watch, 40, processor=processor, waiting=waiting)
    assert watch.has_warned is warns
    assert len(caplog.records) == warns
    if warns:
        for part in (
            "10.0 s of steps",
            "num_threads is 2 (because)",
            "--threads 1",
            "docs/guides/slow.md",
        ):
            assert part in caplog.text


def test_the_time_between_requests_is_not_judged(
    clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    watch = StepThreads(ComputeThreads(2, "because"), clocks.read)
    for _ in range(30):
        clocks.run(watch, 1, processor=1, waiting=0)
        clocks.clock += 60
    assert not caplog.records


def test_clocks_of_the_system_are_read_once_in_ten_seconds(clocks: Clocks) -> None:
    watch = StepThreads(ComputeThreads(2, "because"), clocks.read)
    clocks.run(watch, 100, processor=1, waiting=0)
    assert clocks.num_reads == 11


@needs_libgomp
def test_the_warning_names_the_variable_where_torch_was_imported_first(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyengine.utils.openmp._was_late", True)
    watch = StepThreads(ComputeThreads(2, "because"), clocks.read)
    clocks.run(watch, 10, processor=0.1, waiting=1)
    assert f"GOMP_SPINCOUNT={BRIEF_SPIN}" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="not counted here")
@pytest.mark.parametrize("is_system", [True, False])
def test_the_waits_of_threads_that_copy_kv_are_not_counted(
    is_system: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that Python or the system has for the thread."""
    waits, may_end = threading.Event(), threading.Event()

    def copy() -> None:
        if is_system:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("kv-store")
        waited = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while int(waited.read_text().split()[1]) < 300_000_000:
            pass
        waits.set()
        may_end.wait(60)

    name = None if is_system else "pyengine-kv-store"
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    spinning = "while True: pass"
    other = subprocess.Popen([sys.executable, "-c", spinning])
    thread = threading.Thread(target=copy, name=name, daemon=True)
    thread.start()
    try:
        assert waits.wait(60)
        counted = threads._waiting_seconds()
        monkeypatch.setattr(threads, "_COPYING", frozenset())
        of_all_threads = threads._waiting_seconds()
        may_end.set()
        thread.join()
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert of_all_threads - counted >= 0.3


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="not counted here")
def test_a_thread_that_waits_for_a_processor_is_seen() -> None:
    before = threads._waiting_seconds()
    assert before >= 0
    spinning = "import os; os.sched_setaffinity(0, {CPU})\nwhile True: pass"
    [cpu, *_] = sorted(os.sched_getaffinity(0))
    allowed = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", spinning.replace("CPU", str(cpu))])
    try:
        os.sched_setaffinity(0, {cpu})
        end = threads.time.perf_counter() + 20
        while threads._waiting_seconds() - before < 0.05 and threads.time.perf_counter() < end:
            pass
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert threads._waiting_seconds() - before >= 0.05


def printed(code: str, **variables: str) -> list[str]:
    """The output of a new Python, without variables of OpenMP except these."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=plain | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


_SPIN = "\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))"
_WAIT = "\nfrom pyengine.utils.openmp import how_threads_wait; print(how_threads_wait())"


@needs_libgomp
def test_the_library_sets_what_the_command_line_sets() -> None:
    assert printed("from pyengine import LLM" + _SPIN + _WAIT) == [
        BRIEF_SPIN,
        f"GOMP_SPINCOUNT={BRIEF_SPIN}",
    ]
    assert printed("import pyengine.engine" + _SPIN) == [BRIEF_SPIN]
    assert printed("from pyengine import LLM" + _SPIN, GOMP_SPINCOUNT="7") == ["7"]
    assert printed("from pyengine import LLM" + _SPIN, OMP_WAIT_POLICY="ACTIVE") == ["None"]
    assert printed("from pyengine import BlockManager" + _SPIN) == ["None"]


@needs_libgomp
def test_an_engine_says_that_torch_was_imported_before() -> None:
    spin, wait = printed("import torch\nfrom pyengine import LLM" + _SPIN + _WAIT)
    assert spin == "None"
    assert "torch was imported before pyengine, without GOMP_SPINCOUNT" in wait


def governed(clocks: Clocks, count: int = 2) -> StepThreads:
    return StepThreads(ComputeThreads(count, "because", adapts=True), clocks.read)


def test_threads_that_wait_for_processors_are_left_out_and_tried_again(clocks: Clocks) -> None:
    governor, counts = governed(clocks, 4), []
    for _ in range(60):  # two of four processors are taken
        too_many = max(0, governor.count - 2)
        clocks.run(governor, 1, processor=2, waiting=0.5 * too_many)
        counts.append(governor.count)
    assert counts[:2] == [3, 2]
    trials = [at for at, (before, after) in enumerate(pairwise(counts)) if after > before]
    assert len(trials) > 2 and set(counts) == {2, 3}
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert pauses == sorted(pauses) and pauses[-1] > 2 * pauses[0]  # less and less often


def test_all_threads_are_back_when_the_processors_are_free(clocks: Clocks) -> None:
    governor = governed(clocks, 3)
    clocks.run(governor, 40, processor=1, waiting=2)
    assert governor.count == 1
    clocks.run(governor, 70, processor=1, waiting=0)
    assert governor.count == 3


@pytest.mark.parametrize("waiting", [0, 0.2])
def test_a_machine_that_is_ours_computes_with_all_threads(clocks: Clocks, waiting: float) -> None:
    governor = governed(clocks)
    clocks.run(governor, 40, processor=2, waiting=waiting)
    assert governor.count == 2


def test_threads_that_were_asked_for_stay(clocks: Clocks) -> None:
    governor = StepThreads(ComputeThreads(2, "asked for"), clocks.read)
    clocks.run(governor, 40, processor=1, waiting=2)
    assert governor.count == 2


def test_the_kernel_uses_no_more_threads_than_the_caller_does() -> None:
    """A step that leaves a thread out must not wait for it in attention."""
    code = """
import os, sys, torch, numpy as np
from pyengine.cpu import CpuAttention
from pyengine.utils.openmp import openmp_runtime

def tasks():
    return len(os.listdir("/proc/self/task"))

kernel = CpuAttention(2, str(openmp_runtime()))
rows = np.ones((64, 4096), np.float32)
torch.set_num_threads(1)
before = tasks()
kernel.rms_norm(rows, np.ones(4096, np.float32), np.empty_like(rows), 1e-6)
alone = tasks() - before
torch.set_num_threads(2)
kernel.rms_norm(rows, np.ones(4096, np.float32), np.empty_like(rows), 1e-6)
print(alone, tasks() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
