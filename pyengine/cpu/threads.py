"""Compute threads on the CPU: their number, how they wait, and whether they get processors."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import enumerate as enumerate_threads

from pyengine._cpu import CpuAttention
from pyengine.utils.cpus import usable_cpus
from pyengine.utils.openmp import BRIEF_SPIN, how_threads_wait, openmp_runtime

_log = logging.getLogger(__name__)

_VARIABLE = "OMP_NUM_THREADS"
_WINDOW = 10.0  # seconds of consecutive steps that are judged together
_PAUSE = 0.1  # seconds without a step after which another window begins
_MANY_TIMES = 3  # the most times its processor time that a step may take
_MOST_WAITING = 0.5  # share of the time that threads may wait for a processor, all of them together
_TRIAL = 0.5  # seconds of steps after which the number of threads may change
_CROWDED = 0.25
"""Share of the time that threads wait for a processor, beyond which one of them is too many."""
_FIRST_PATIENCE, _LONGEST_PATIENCE = 2.0, 64.0
"""Seconds after which a thread that was too many is tried again."""

_COPYING = {"pyengine-kv-load", "pyengine-kv-store", "pyengine-populate", "kv-store"}
"""Names of threads that copy beside the steps; the last is one of the store's own."""

_OR_FEWER = "; fewer while other programs take them"


@cache
def kernel_threads(num_threads: int) -> CpuAttention:
    """Threads of torch's pool for the kernels: as many, or fewer where torch has been told so."""
    return CpuAttention(num_threads, openmp_runtime())


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """A number of threads, and the reason for it."""

    count: int
    reason: str
    adapts: bool = False
    """True if steps may use fewer while other programs take the processors."""

    def describe(self) -> dict[str, object]:
        """For `describe()` and `pyengine info`."""
        return {
            "num_threads": self.count,
            "num_threads_reason": self.reason + (_OR_FEWER if self.adapts else ""),
            "openmp_wait": how_threads_wait(),
        }


def compute_threads(asked: int | None, num_processes: int = 1) -> ComputeThreads:
    """The threads of each of `num_processes`: as asked, else by `OMP_NUM_THREADS`, else by CPUs.

    CPUs are those that the process may use (`utils/cpus.py`); torch may be set to use fewer.
    """
    if asked is not None:
        return ComputeThreads(asked, "asked for")
    import torch

    by_torch = torch.get_num_threads()
    if _VARIABLE in os.environ:
        return ComputeThreads(by_torch, _VARIABLE)
    cpus = usable_cpus()
    share = max(1, cpus.count // num_processes)
    if by_torch < share:
        return ComputeThreads(by_torch, "as many as torch uses", adapts=by_torch > 1)
    divided = f", divided by {num_processes} processes" if num_processes > 1 else ""
    return ComputeThreads(share, cpus.reason + divided, adapts=share > 1)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds: of the clock; of this process on processors; of its threads waiting for one."""

    clock: float
    processor: float
    waiting: float


def _now() -> _Times:
    return _Times(time.perf_counter(), time.process_time(), _waiting_seconds())


def _waiting_seconds() -> float:
    """Seconds that threads waited for a processor; 0 if the system does not count them.

    Threads that copy KV wait while others compute, and take little: they are not counted.
    """
    nanoseconds = 0
    if sys.platform == "linux":
        copying = {str(each.native_id) for each in enumerate_threads() if each.name in _COPYING}
        for folder in Path("/proc/self/task").iterdir():
            try:
                if folder.name in copying or (folder / "comm").read_text().strip() in _COPYING:
                    continue
                nanoseconds += int((folder / "schedstat").read_text().split()[1])
            except (OSError, ValueError, IndexError):  # the thread has ended; another format
                continue
    return nanoseconds / 1e9


class StepThreads:
    """Runs steps with as many threads as get processors, and warns once if steps get none.

    All threads of a step wait for the slowest one, hundreds of times, so one that shares its
    processor slows all of them down. After half a second of steps whose threads waited for a
    processor for a quarter of the time, one thread less computes. It is tried again after two
    seconds, and twice as late each time that it fails. Only if `ComputeThreads.adapts`: the number
    must not change results.

    The warning is logged if ten seconds of steps take many times their processor time. `now` reads
    the clocks.
    """

    def __init__(self, threads: ComputeThreads, now: Callable[[], _Times] = _now) -> None:
        self._threads = threads
        self._now = now
        self.count = threads.count
        """The threads of the next step."""
        self.has_warned = False
        self._trial_start: _Times | None = None
        self._window_start: _Times | None = None
        self._last_end = 0.0
        self._is_trial = False
        self._patience = _FIRST_PATIENCE
        self._raise_at = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, torch uses `count` threads in calls of this thread."""
        import torch

        adapts, is_judged = self._threads.adapts, self._threads.adapts or not self.has_warned
        is_first = time.perf_counter() - self._last_end > _PAUSE
        if is_judged and (is_first or self._trial_start is None):
            self._trial_start = self._window_start = self._now()
        count, before = self.count, torch.get_num_threads()
        if count != before:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if count != before:
                torch.set_num_threads(before)
            self._last_end = time.perf_counter()
            start, length = self._trial_start, _TRIAL if adapts else _WINDOW
            if is_judged and start is not None and self._last_end - start.clock >= length:
                self._judge(start)

    def _judge(self, start: _Times) -> None:
        """Judge the steps since `start`; those that follow are judged together again."""
        now = self._trial_start = self._now()
        if self._threads.adapts:
            self._adapt(now.clock, start, now)
        window = self._window_start
        if window is not None and now.clock - window.clock >= _WINDOW and not self.has_warned:
            self._warn(window, now)
            self._window_start = now

    def _adapt(self, now: float, start: _Times, end: _Times) -> None:
        is_crowded = end.waiting - start.waiting > _CROWDED * (end.clock - start.clock)
        if is_crowded and self.count > 1:
            if self._is_trial:
                self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
            self._change(self.count - 1, is_trial=False)
            self._raise_at = now + self._patience
            return
        if self._is_trial:  # it went well
            self._is_trial, self._patience = False, _FIRST_PATIENCE
        if self.count < self._threads.count and now >= self._raise_at:
            self._change(self.count + 1, is_trial=True)

    def _change(self, count: int, *, is_trial: bool) -> None:
        _log.debug("steps are computed with %d threads (%d before)", count, self.count)
        self.count, self._is_trial = count, is_trial

    def _warn(self, start: _Times, end: _Times) -> None:
        """Log the warning, if these steps took many times their processor time."""
        clock = end.clock - start.clock
        processor = end.processor - start.processor
        waiting = end.waiting - start.waiting
        if clock <= _MANY_TIMES * processor and waiting <= _MOST_WAITING * clock:
            return
        self.has_warned = True
        _log.warning(
            "steps are slow because processors are taken: %.1f s of steps had %.1f s of processor "
            "time, and their threads waited %.1f s for a processor. Other programs use the CPUs, "
            "or a quota is used up. num_threads is %d (%s). %s%sSee docs/guides/slow.md",
            clock,
            processor,
            waiting,
            self._threads.count,
            self._threads.reason,
            _FEWER if self._threads.count > 1 else "",
            _spin_advice(),
        )


_FEWER = "Fewer may be faster: num_threads=1, or --threads 1. "


def _spin_advice() -> str:
    wait = how_threads_wait()
    if "before pyengine" not in wait:
        return ""
    return (
        f"OpenMP: {wait}. Import pyengine before torch, or set GOMP_SPINCOUNT={BRIEF_SPIN} "
        "before Python starts. "
    )
