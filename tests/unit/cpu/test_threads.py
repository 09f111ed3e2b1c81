"""Compute threads: their number and its reason, their waits, and a warning if they starve."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.cpu import threads
from pyengine.cpu.threads import ComputeThreads, StepThreads, compute_threads, usable_threads
from pyengine.executor.model_runner import ForwardPass
from pyengine.utils.cpus import UsableCpus
from pyengine.utils.openmp import BRIEF_SPIN, openmp_runtime, torch_threads
from tests.support.checkpoints import save_tiny
from tests.support.processes import run_python

needs_libgomp = pytest.mark.skipif(openmp_runtime() is None, reason="torch brings no libgomp")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with torch_threads(2):
        yield


def in_a_new_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@pytest.mark.parametrize(
    ("cpus", "processes", "count"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (9, 1, 2)]
)
def test_threads_follow_from_usable_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int, processes: int, count: int
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: UsableCpus(cpus, "because"))
    chosen = compute_threads(None, processes)
    assert chosen.count == count
    assert ("because" in chosen.reason) == (cpus < 9)


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
    save_tiny(tmp_path)
    llm = LLM(
        tmp_path,
        dtype="float32",
        num_blocks=16,
        max_model_len=64,
        num_threads=1,
        async_scheduling=ahead,
    )
    seen: set[tuple[int, int]] = set()
    in_new_threads: set[int] = set()
    by_default = in_a_new_thread(torch.get_num_threads)
    forward = ForwardPass.__call__

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.add((usable_threads(), torch.get_num_threads()))
        in_new_threads.add(in_a_new_thread(torch.get_num_threads))
        return forward(*arguments, **named)

    monkeypatch.setattr(ForwardPass, "__call__", watched)
    llm.generate([[3, 9, 27]])
    assert seen == {(1, 1)}
    assert torch.get_num_threads() == 2
    assert in_new_threads == {by_default}
    about = llm.describe()
    assert (about["num_threads"], about["num_threads_reason"]) == (1, "asked for")
    assert "openmp_wait" in about


@pytest.mark.parametrize("ahead", [False, True])
def test_each_step_computes_with_the_threads_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """In whatever thread it runs: the number is set for each thread separately."""
    save_tiny(tmp_path)
    counts = iter([2, 2, 1, 1, 1, 2, 2, 1] * 9)
    seen: list[int] = []
    step, forward = StepThreads.step, ForwardPass.__call__

    def stepped(self: StepThreads) -> Any:
        self.count = next(counts)
        used.append(self.count)
        return step(self)

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(usable_threads())
        return forward(*arguments, **named)

    used: list[int] = []
    monkeypatch.setattr(threads, "usable_cpus", lambda: UsableCpus(2, "because"))
    llm = LLM(tmp_path, dtype="float32", num_blocks=16, max_model_len=64, async_scheduling=ahead)
    assert "fewer" in str(llm.describe()["num_threads_reason"])
    monkeypatch.setattr(StepThreads, "_adapt", lambda *_: None)
    monkeypatch.setattr(StepThreads, "step", stepped)
    monkeypatch.setattr(ForwardPass, "__call__", watched)
    llm.generate([[3, 9, 27]], SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False))
    assert len(seen) == 9
    if ahead:  # a call of `step` may enqueue two
        assert 1 < sum(before != after for before, after in pairwise(seen)) <= 9
    else:
        assert seen == used[:9]


class Clocks:
    """Seconds that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self.processor = self.waiting = 0.0
        self.idle: float | None = 0.0
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
    return run_python(code, env=plain | variables).stdout.splitlines()


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
    threads = ComputeThreads(count, "because", adapts=True)
    return StepThreads(threads, clocks.read, lambda: clocks.idle)


class Machine:
    """Steps of 10 ms on `processors`, beside `others` that are always busy."""

    def __init__(self, clocks: Clocks, governor: StepThreads, processors: int) -> None:
        self.clocks, self.governor, self.processors = clocks, governor, processors
        self.num_busy = 0
        self.counts: list[int] = []

    def run(self, seconds: float, *, step: float = 0.01) -> list[int]:
        """The threads of each of the steps."""
        counts = []
        for _ in range(round(seconds / step)):
            with self.governor.step():
                counts.append(self.governor.count)
                runnable = counts[-1] + self.num_busy
                lacking = max(0, runnable - self.processors)
                self.clocks.clock += step
                self.clocks.waiting += step * lacking * counts[-1] / runnable
                if self.clocks.idle is not None:
                    self.clocks.idle += step * max(0, self.processors - runnable)
        self.counts += counts
        return counts

    def rest(self, seconds: float) -> None:
        """No step."""
        self.clocks.clock += seconds
        if self.clocks.idle is not None:
            self.clocks.idle += seconds * max(0, self.processors - self.num_busy)


@pytest.fixture
def two(clocks: Clocks) -> Machine:
    return Machine(clocks, governed(clocks), 2)


def test_a_busy_process_is_noticed_within_a_tenth_of_a_second(two: Machine) -> None:
    two.run(1)
    two.num_busy = 1
    counts = two.run(1)
    assert set(counts[12:]) == {1}


@pytest.mark.parametrize("knows_idle", [True, False])
def test_beside_a_busy_process_few_steps_have_a_thread_too_many(
    two: Machine, knows_idle: bool
) -> None:
    two.clocks.idle = 0.0 if knows_idle else None
    two.num_busy = 1
    counts = two.run(60)
    assert 1 < sum(before < after for before, after in pairwise(counts)) <= 6
    assert counts.count(2) < 0.015 * len(counts)


@pytest.mark.parametrize("pause", [0.0, 5.0])
def test_all_threads_are_back_soon_after_a_processor_is_idle(two: Machine, pause: float) -> None:
    two.num_busy = 1
    two.run(1)
    two.num_busy = 0
    if pause:
        two.rest(pause)
    counts = two.run(1)
    assert counts.index(2) <= (0 if pause else 25)
    assert set(counts[25:]) == {2}


def test_a_pause_beside_a_busy_process_adds_no_thread(two: Machine) -> None:
    two.num_busy = 1
    two.run(1)
    for _ in range(2):
        two.rest(0.4)
        assert set(two.run(0.05)) == {1}


def test_requests_shorter_than_a_look_are_judged_together(two: Machine) -> None:
    two.num_busy = 1
    for _ in range(8):
        two.run(0.06)
        two.rest(1)
    assert two.governor.count == 1


def test_a_neighbour_that_comes_and_goes_is_followed(two: Machine) -> None:
    for second in range(40):
        two.num_busy = second % 2
        counts = two.run(1)
        assert counts.count(1 if two.num_busy else 2) >= 70


def test_where_programs_of_lower_priority_leave_nothing_idle_threads_are_tried(
    two: Machine,
) -> None:
    """They yield to the steps, so that no thread waits."""
    two.num_busy = 1
    two.run(1)
    two.num_busy = 0
    two.clocks.idle = None
    assert 2 in two.run(3)


def test_a_quota_that_leaves_processors_idle_is_not_tried_for_ever(two: Machine) -> None:
    two.num_busy = 1
    for _ in range(6000):
        two.run(0.01)
        assert two.clocks.idle is not None
        two.clocks.idle += 0.01
    counts = two.counts[-2000:]
    assert counts.count(2) < 0.02 * len(counts)


@pytest.mark.parametrize("step", [0.01, 3.0])
def test_long_steps_are_tried_as_seldom_as_short_ones(two: Machine, step: float) -> None:
    two.num_busy = 1
    counts = two.run(300, step=step)
    assert sum(before < after for before, after in pairwise(counts)) <= 10


def test_many_processes_are_noticed_at_once(clocks: Clocks) -> None:
    machine = Machine(clocks, governed(clocks, 16), 16)
    machine.num_busy = 8
    assert machine.run(0.5)[-1] == 8
    machine.num_busy = 0
    assert machine.run(1)[-1] == 16


@pytest.mark.parametrize("burst", [0.02, 0.03])
def test_a_short_burst_takes_no_thread(two: Machine, burst: float) -> None:
    for _ in range(20):
        two.num_busy = 1
        two.run(burst)
        two.num_busy = 0
        two.run(0.2)
    assert set(two.counts) == {2}


def test_reading_the_clocks_takes_a_hundredth_of_the_time(two: Machine) -> None:
    """Where a process has thousands of threads, for example."""
    read = two.clocks.read

    def slow() -> threads._Times:
        two.clocks.clock += 0.005
        return read()

    two.governor._now = slow
    start = two.clocks.clock
    two.run(20)
    share = 0.005 * two.clocks.num_reads / (two.clocks.clock - start)
    assert 0.005 < share < 0.012


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="not counted here")
def test_idle_processors_are_counted() -> None:
    before = threads._idle_seconds()
    assert before is not None and before > 0


@pytest.mark.parametrize("waiting", [0, 0.2])
def test_a_machine_that_is_ours_computes_with_all_threads(clocks: Clocks, waiting: float) -> None:
    governor = governed(clocks)
    clocks.run(governor, 40, processor=2, waiting=waiting)
    assert governor.count == 2


def test_threads_that_were_asked_for_stay(clocks: Clocks) -> None:
    governor = StepThreads(ComputeThreads(2, "asked for"), clocks.read)
    clocks.run(governor, 40, processor=1, waiting=2)
    assert governor.count == 2


def test_the_pool_has_no_more_threads_than_the_caller_is_limited_to() -> None:
    code = """
import os, numpy as np
from pyengine.cpu import ConfigError, CpuAttention, limit_threads

def busy(kernel):  # threads that ran meanwhile
    def seconds():
        tasks = os.listdir("/proc/self/task")
        return {t: open(f"/proc/self/task/{t}/schedstat").read().split()[0] for t in tasks}
    rows = np.ones((64, 4096), np.float32)
    before = seconds()
    for _ in range(200):
        kernel.rms_norm(rows, np.ones(4096, np.float32), np.empty_like(rows), 1e-6)
    after = seconds()
    return sum(before.get(task) != ran for task, ran in after.items())

import time
before = limit_threads(1)
kernel = CpuAttention(3)
time.sleep(0.1)  # its threads spin at first
alone = busy(kernel)
assert limit_threads(None) == 1
try:
    limit_threads(0)
except ConfigError as error:
    refused = "count=0" in str(error)
print(before, alone, busy(kernel), refused)
"""
    assert run_python(code).stdout.split() == ["None", "1", "3", "True"]


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
    assert run_python(code).stdout.split() == ["0", "1"]
