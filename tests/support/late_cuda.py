"""CUDA streams over tensors of the CPU: queued work runs as late as it may.

A copy of blocks inside `torch.cuda.stream` is queued. It runs when the host, or work in another
stream, waits for a later event. A copy without such a wait is late, and a test sees it. With a
`random`, queued work sometimes runs earlier.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch


class LateStream:
    """A queue of work."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0

    def run_up_to(self, end: int) -> None:
        while self.num_done < end:
            work = self.queue[self.num_done]
            self.num_done += 1
            work()

    def wait_event(self, event: "LateEvent") -> None:
        self.queue.append(event.synchronize)


class LateEvent:
    """A place in a queue."""

    def __init__(self, cuda: "LateCuda", *, blocking: bool = False) -> None:
        self._cuda = cuda
        self.is_blocking = blocking
        self.stream: LateStream | None = None
        self.end = 0

    def record(self, stream: LateStream | None = None) -> None:
        self.stream = stream or self._cuda.current or self._cuda.steps
        self.end = len(self.stream.queue)

    def synchronize(self) -> None:
        assert self.stream is not None, "an event that was not recorded waits for nothing"
        self.stream.run_up_to(self.end)


class LateCuda:
    """The device: the stream of its steps, and those that were made."""

    def __init__(self, random: Random | None = None) -> None:
        self.steps = LateStream()
        self.streams = [self.steps]
        self._random = random
        self._local = threading.local()

    def stream_of(self, device: Any) -> LateStream:
        self.streams.append(LateStream(device))
        return self.streams[-1]

    @property
    def current(self) -> LateStream | None:
        return getattr(self._local, "stream", None)

    @contextmanager
    def using(self, stream: LateStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def queue(self, work: Callable[[], object]) -> None:
        """Run `work` in the current stream, or at once if there is none."""
        if self.current is None:
            work()
            return
        self.current.queue.append(work)
        if self._random is not None and self._random.random() < 0.3:
            stream = self._random.choice(self.streams)
            stream.run_up_to(self._random.randint(stream.num_done, len(stream.queue)))

    def install_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for streams and events of `torch.cuda`."""
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", self.stream_of)
        monkeypatch.setattr(cuda, "Event", partial(LateEvent, self))
        monkeypatch.setattr(cuda, "stream", self.using)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: self.current or self.steps)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the operators that copy blocks queued, too."""
        self.install_streams(monkeypatch)
        copy, gather, scatter = (
            getattr(torch.Tensor, name) for name in ("copy_", "index_select", "index_copy_")
        )

        def late_copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
            self.queue(lambda: copy(target, source))
            return target

        def late_gather(source: Any, dim: int, ids: Any) -> Any:
            assert dim == 0
            rows = source.new_full((len(ids), *source.shape[1:]), 77)
            self.queue(lambda: copy(rows, gather(source, 0, ids)))
            return rows

        def late_scatter(target: Any, dim: int, ids: Any, source: Any) -> Any:
            self.queue(lambda: scatter(target, dim, ids, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
        monkeypatch.setattr(torch.Tensor, "index_select", late_gather)
        monkeypatch.setattr(torch.Tensor, "index_copy_", late_scatter)
