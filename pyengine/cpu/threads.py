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
from threading import local

from pyengine._cpu import CpuAttention, limit_threads
from pyengine.utils.cpus import usable_cpus
from pyengine.utils.openmp import (
    BRIEF_SPIN,
    how_threads_wait,
    num_torch_threads,
    openmp_runtime,
    set_own_torch_threads,
    set_torch_threads,
)

_log = logging.getLogger(__name__)

_VARIABLE = "OMP_NUM_THREADS"
_WINDOW = 10.0  # seconds of consecutive steps that are judged together
_PAUSE = 0.1  # seconds without a step after which another window begins
_MANY_TIMES = 3  # a step may take this many times its processor time
_MAX_WAITING = 0.5  # share of the time that threads may wait for a processor, all of them together
_LOOK = 0.05  # minimum seconds of steps between two reads of the waits of threads
_LOOK_SHARE = 0.01  # maximum share of the time for reading them
_CROWDED = 0.25
"""Share of the time for which threads may wait for a processor, all of them together."""
_TOLERATED = 0.03  # seconds of waits beyond that share, after which there is a thread too many
_FREE, _FREE_SPAN = 0.75, 0.1
"""Idle processors beside the steps, and for how many seconds, before a thread is added."""
_TRIAL = 0.5  # seconds of steps after which an added thread is not too many
_FIRST_PATIENCE, _LONGEST_PATIENCE = 0.25, 8.0
"""Seconds after which a thread that was too many is tried again, if a processor is free for it."""
_BLIND = 8
"""Factor on that time without an idle processor: programs of low priority leave none idle."""

_TASKS = "/proc/self/task"
_COPYING = {"pyengine-kv-load", "pyengine-kv-store", "pyengine-populate", "kv-store"}
"""Names of threads that copy beside the steps; the last is the store's."""

_OR_FEWER = "; fewer while other programs take them"


@cache
def kernel_threads(num_threads: int, *, beside_torch: bool = False) -> CpuAttention:
    """`num_threads` threads for the kernels, or fewer inside `thread_limit`.

    They spin between calls. `beside_torch`: torch computes between the calls, so its OpenMP threads
    are taken. Two pools would be in each other's way.
    """
    return CpuAttention(num_threads, openmp_runtime() if beside_torch else None)


if hasattr(os, "register_at_fork"):  # the threads are those of one process
    os.register_at_fork(after_in_child=kernel_threads.cache_clear)


_step = local()
"""Of the calling thread: `beside_torch`, whether torch computes in its step."""


@dataclass(frozen=True, slots=True)
class CallerThreads:
    """The threads of a step, which are set for each thread of Python separately.

    `limit` is that of the kernels (`limit_threads`), `of_torch` the number of torch's, None: it is
    not imported. `beside_torch`: torch computes in the step, too.
    """

    limit: int | None
    of_torch: int | None
    beside_torch: bool

    @classmethod
    def now(cls) -> "CallerThreads":
        """Those of the calling thread."""
        beside_torch = getattr(_step, "beside_torch", False)
        return cls(thread_limit(), num_torch_threads(), beside_torch)

    def use(self) -> None:
        """Let the calling thread have them, too."""
        limit_threads(self.limit)
        set_torch_threads(self.of_torch)
        _step.beside_torch = self.beside_torch


def step_threads() -> CpuAttention:
    """The kernels' threads in a step of the calling thread, outside of its model."""
    beside_torch = getattr(_step, "beside_torch", False)
    return kernel_threads(usable_threads(), beside_torch=beside_torch)


def thread_limit() -> int | None:
    """The limit of the calling thread (`limit_threads`); None without one."""
    limit = limit_threads(None)
    limit_threads(limit)
    return limit


def usable_threads() -> int:
    """Threads that the calling thread may divide work among: a step's; elsewhere one per CPU."""
    limit = thread_limit()
    return compute_threads(None).count if limit is None else limit


def compute_alone() -> None:
    """Let kernels and torch compute with the calling thread alone, in calls of this thread."""
    limit_threads(1)
    set_own_torch_threads(1)


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """A number of threads, and the reason for it."""

    count: int
    reason: str
    adapts: bool = False
    """True if steps may use fewer while other programs take the processors."""
    torch_is_alone: bool = False
    """True if torch's operations have one thread in a step, since our kernels compute all that is
    large. Torch's other threads would only take processors: they spin after each operation."""

    def begin(self) -> None:
        """To be called first in a thread that computes steps."""
        if self.torch_is_alone:
            set_own_torch_threads(1)

    def describe(self) -> dict[str, object]:
        """For `describe()` and `pyengine info`."""
        return {
            "num_threads": self.count,
            "num_threads_reason": self.reason + (_OR_FEWER if self.adapts else ""),
            "openmp_wait": how_threads_wait(),
        }


def compute_threads(requested: int | None, num_processes: int = 1) -> ComputeThreads:
    """The threads of each process: as requested, else by `OMP_NUM_THREADS`, else by CPUs.

    CPUs are those that the process may use (`utils/cpus.py`); torch may be set to use fewer.
    """
    if requested is not None:
        return ComputeThreads(requested, "asked for")
    by_torch, by_variable = num_torch_threads(), os.environ.get(_VARIABLE, "").split(",")[0]
    if by_variable.isdecimal() and int(by_variable):
        return ComputeThreads(by_torch or int(by_variable), _VARIABLE)
    cpus = usable_cpus()
    share = max(1, cpus.count // num_processes)
    if by_torch is not None and by_torch < share:
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
    if sys.platform != "linux":
        return 0.0
    nanoseconds = 0
    copying = {str(copier.native_id) for copier in enumerate_threads() if copier.name in _COPYING}
    for thread in os.listdir(_TASKS):
        try:
            if thread in copying or _line(f"{_TASKS}/{thread}/comm").strip() in _COPYING:
                continue
            nanoseconds += int(_line(f"{_TASKS}/{thread}/schedstat").split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended; another format
            continue
    return nanoseconds / 1e9


def _line(path: str) -> str:
    """The short text of a file of the system: several times as fast as `read_text`."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 128).decode()
    finally:
        os.close(file)


def _idle_seconds() -> float | None:
    """Seconds that the processors of this process were idle, in total; None if unknown."""
    if sys.platform != "linux":
        return None
    ours, ticks, num_counted = os.sched_getaffinity(0), 0, 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in ours:
                ticks += int(numbers[3]) + int(numbers[4])  # idle, and idle with files under way
                num_counted += 1
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if num_counted == len(ours) else None


@dataclass(frozen=True, slots=True)
class _Idle:
    """Seconds: of the clock; of steps; of idle processors, if known."""

    clock: float
    steps: float
    idle: float | None


class StepThreads:
    """Runs steps with as many threads as get processors, and warns once if steps get none.

    All threads of a step wait for the slowest one, hundreds of times, so one that shares its
    processor slows all of them down. A thread is left out once threads have waited for a processor
    for 0.03 s more than a quarter of the time: beside a program that is always busy, after a tenth
    of a second. It is tried again soon if a processor is idle beside the steps, else after two
    seconds; twice as late each time that it fails. Only if `ComputeThreads.adapts`: the number must
    not change results.

    The warning is logged if ten seconds of steps take many times their processor time. `now` and
    `idle` read the clocks.
    """

    def __init__(
        self,
        threads: ComputeThreads,
        now: Callable[[], _Times] = _now,
        idle: Callable[[], float | None] = _idle_seconds,
    ) -> None:
        self._threads = threads
        self._now, self._idle = now, idle
        self.count = threads.count
        """The threads of the next step."""
        self.has_warned = False
        self._look_start: _Times | None = None
        self._look_length = _LOOK
        self._window_start: _Times | None = None
        self._last_end = 0.0
        self._step_seconds = 0.0
        self._excess = 0.0
        """Seconds that threads waited beyond `_CROWDED` of the time."""
        self._patience = _FIRST_PATIENCE
        self._dropped_at = self._trial_end = 0.0
        self._idle_start: _Idle | None = None

    def begin(self) -> None:
        """See `ComputeThreads.begin`."""
        self._threads.begin()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, kernels and torch use `count` threads in calls of this thread."""
        adapts, is_judged = self._threads.adapts, self._threads.adapts or not self.has_warned
        start = time.perf_counter()
        is_first = start - self._last_end > _PAUSE
        if is_judged and (is_first or self._look_start is None):
            if adapts and self.count < self._threads.count:
                self._add(start)
            self._look_start = self._window_start = self._now()
        limit_before, before = limit_threads(self.count), num_torch_threads()
        _step.beside_torch = before is not None and not self._threads.torch_is_alone
        if not self._threads.torch_is_alone:
            set_torch_threads(self.count)
        try:
            yield
        finally:
            limit_threads(limit_before)
            if before is not None:
                set_torch_threads(before)
            _step.beside_torch = False
            self._last_end = time.perf_counter()
            self._step_seconds += self._last_end - start
            since, length = self._look_start, self._look_length if adapts else _WINDOW
            if is_judged and since is not None and self._last_end - since.clock >= length:
                self._judge(since)

    def _judge(self, start: _Times) -> None:
        """Judge the steps since `start`; those that follow are judged together again."""
        now = self._look_start = self._now()
        if self._threads.adapts:
            self._adapt(start, now)
            seconds = time.perf_counter() - self._last_end
            self._look_length = max(_LOOK, seconds / _LOOK_SHARE)
        window = self._window_start
        if window is not None and now.clock - window.clock >= _WINDOW and not self.has_warned:
            self._warn(window, now)
            self._window_start = now

    def _adapt(self, start: _Times, end: _Times) -> None:
        waiting, length = end.waiting - start.waiting, end.clock - start.clock
        self._excess = max(0.0, self._excess + waiting - _CROWDED * length)
        if self._excess > _TOLERATED and self.count > 1:
            has_failed = start.clock < self._trial_end
            self._patience = (
                min(2 * self._patience, _LONGEST_PATIENCE) if has_failed else _FIRST_PATIENCE
            )
            self._dropped_at = end.clock
            self._change(max(1, self.count - max(1, int(waiting / length))), end.clock)
        elif self.count < self._threads.count:
            self._add(end.clock)

    def _add(self, now: float) -> None:
        """Add threads if processors are free for them, or one if that was not tried for long."""
        start, end = self._idle_start, _Idle(now, self._step_seconds, self._idle())
        if start is None or now - start.clock < _FREE_SPAN:
            return
        self._idle_start = end
        free, patience = 0.0, self._patience
        if start.idle is not None and end.idle is not None:
            length = now - start.clock
            pauses = length - (end.steps - start.steps)  # then our processors are idle, too
            free = (end.idle - start.idle - self.count * pauses) / length
        if free < _FREE:
            patience *= _BLIND
        if now - self._dropped_at >= patience:
            self._trial_end = now + _TRIAL
            self._change(min(self._threads.count, self.count + max(1, int(free))), now)

    def _change(self, count: int, now: float) -> None:
        _log.debug("steps are computed with %d threads (%d before)", count, self.count)
        self.count, self._excess = count, 0.0
        is_less = count < self._threads.count
        self._idle_start = _Idle(now, self._step_seconds, self._idle()) if is_less else None

    def _warn(self, start: _Times, end: _Times) -> None:
        """Log the warning, if these steps took many times their processor time."""
        clock = end.clock - start.clock
        processor = end.processor - start.processor
        waiting = end.waiting - start.waiting
        if clock <= _MANY_TIMES * processor and waiting <= _MAX_WAITING * clock:
            return
        self.has_warned = True
        _log.warning(
            "steps are slow: other programs use the CPUs, or a CPU quota is used up. %.1f s of "
            "steps had %.1f s of processor time, and their threads waited %.1f s for a processor. "
            "num_threads is %d (%s). %s%sSee docs/guides/slow.md",
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
