"""A thread pool for calls of several tenants, which take turns."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any, TypeVar, cast

from pyengine.errors import QueueFullError
from pyengine.utils.turns import Turns

T = TypeVar("T")

_MAX_LAG = 10.0
"""Seconds of calls that a tenant may be behind the others."""


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


class FairPool:
    """Threads that run calls. The tenant whose calls took the least time so far goes next.

    A tenant has at most `at_once` of the threads, and `max_waiting` calls that wait. Thread-safe.
    """

    def __init__(self, num_threads: int, name: str, *, at_once: int, max_waiting: int) -> None:
        """`name` is that of the threads, and stands for the calls in errors."""
        self._num_threads, self._name = num_threads, name
        self._at_once, self._max_waiting = at_once, max_waiting
        self._threads = ThreadPoolExecutor(num_threads, f"pyengine-{name}")
        self._lock = Lock()
        """Guards the attributes below."""
        self._waiting: dict[bytes, deque[_Call]] = {}
        self._running: Counter[bytes] = Counter()
        self._turns = Turns(_MAX_LAG)
        self._num_workers = 0
        self._is_closed = False

    def submit(self, work: Callable[[], T], tenant: bytes = b"") -> Future[T]:
        """Run `work` when its tenant's turn comes. A future cancelled before that takes no turn.

        Raises `QueueFullError` if `max_waiting` calls of this tenant wait.
        """
        call = _Call(work)
        with self._lock:
            calls = self._waiting.get(tenant, deque())
            if len(calls) >= self._max_waiting:
                calls = self._without_cancelled(tenant)
            if len(calls) >= self._max_waiting:
                raise QueueFullError(
                    f"{len(calls)} other calls of this caller wait for the {self._name}, and the "
                    f"limit is {self._max_waiting}: try again later"
                )
            calls.append(call)
            self._waiting[tenant] = calls
            self._turns.enter(tenant)
            self._start_worker()
        return cast(Future[T], call.result)

    def hold(self, tenant: bytes, unfinished: Future[Any]) -> None:
        """Count work that a call has left behind as a running call of its tenant."""
        with self._lock:
            self._running[tenant] += 1
            self._turns.enter(tenant)
        unfinished.add_done_callback(lambda _: self._end(tenant))

    def close(self) -> None:
        """End the threads once their current calls return, and cancel the calls that wait."""
        with self._lock:
            calls = [call for calls in self._waiting.values() for call in calls]
            self._waiting.clear()
            self._is_closed = True
        for call in calls:
            call.result.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _without_cancelled(self, tenant: bytes) -> deque[_Call]:
        before = self._waiting[tenant]
        calls = deque([call for call in before if not call.result.cancelled()])
        for _ in range(len(before) - len(calls)):
            self._turns.leave(tenant)
        return calls

    def _start_worker(self) -> None:
        if self._num_workers < self._num_threads:
            self._num_workers += 1
            self._threads.submit(self._work)

    def _work(self) -> None:
        """Run calls until none is left for this thread."""
        while True:
            with self._lock:
                item = self._take()
                if item is None:
                    self._num_workers -= 1
                    return
            call, tenant = item
            start = monotonic()
            try:
                call.result.set_result(call.work())
            except BaseException as error:  # of a library in Rust, too
                call.result.set_exception(error)
            with self._lock:
                self._turns.charge(tenant, monotonic() - start)
            self._end(tenant)
            del call, item  # with its arguments and result

    def _take(self) -> tuple[_Call, bytes] | None:
        """The next call, which is running now, and its tenant."""
        for tenant in self._turns.in_order(list(self._waiting)):
            if self._running[tenant] >= self._at_once:
                continue
            calls = self._waiting[tenant]
            while calls:
                call = calls.popleft()
                if not calls:
                    del self._waiting[tenant]
                if call.result.set_running_or_notify_cancel():
                    self._running[tenant] += 1
                    return call, tenant
                self._turns.leave(tenant)
        return None

    def _end(self, tenant: bytes) -> None:
        """A call has ended, or what it has left behind."""
        with self._lock:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._turns.leave(tenant)
            if self._waiting and not self._is_closed:  # threads may have found none to run
                self._start_worker()
