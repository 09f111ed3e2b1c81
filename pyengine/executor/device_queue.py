"""What runs the steps: one after the other, in the order in which they were submitted."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

from pyengine.attention.paged import on_device

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """Something that was submitted, and what has come of it."""

    def result(self) -> T_co:
        """Wait; return what the work returned or raise what it raised."""
        ...

    def wait(self) -> None:
        """Wait until it is over, however it ended."""
        ...


class DoneWork(Generic[T]):
    """Work that is over."""

    __slots__ = ("_error", "_result")

    def __init__(self, work: Callable[[], T]) -> None:
        """Do the work."""
        self._error: BaseException | None = None
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """See `Work.result`."""
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """See `Work.wait`."""


class ThreadWork(Generic[T]):
    """Work that a thread does."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def result(self) -> T:
        """See `Work.result`."""
        return self._future.result()

    def wait(self) -> None:
        """See `Work.wait`."""
        self._future.exception()


class DeviceQueue(Protocol):
    """A device as the engine sees it."""

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Run `work` after everything that was submitted before. What it raises is kept."""
        ...


class InlineQueue:
    """Runs work at once, in the caller's thread.

    For the CPU without overlap, and for CUDA, where to run it is to put it into the stream of
    `device`: that is the current one of the thread meanwhile, whichever thread it is.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """See `DeviceQueue.submit`."""
        with on_device(self._device):
            return DoneWork(work)


class ThreadQueue:
    """Runs work in a thread of its own: the CPU computes while the caller plans the next step."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pyengine-device")

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """See `DeviceQueue.submit`."""
        return ThreadWork(self._executor.submit(work))
