"""Outputs on their way from the engine to readers, merged where a reader is slower."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Lock
from time import monotonic
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from pyengine.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.request.request import Request
from pyengine.sampling_params import RequestOutputKind


class OutputCollector:
    """Outputs of one request that its reader has not taken. See `OutputSink`.

    The engine's thread puts, another one may get. With `DELTA` an item holds what is new since the
    item before, with `CUMULATIVE` everything so far; with `FINAL_ONLY` there is one item, at the
    end. Unread outputs are merged into one item. `on_item` is called, by the thread that puts, when
    there may be one.
    """

    def __init__(
        self, kind: RequestOutputKind, on_item: Callable[["OutputCollector"], object] | None = None
    ) -> None:
        self.streams = kind is not RequestOutputKind.FINAL_ONLY
        self._kind = kind
        self._on_item = on_item
        self._lock = Lock()
        self._unread: RequestOutput | _Sum | None = None
        self._so_far: _Sum | None = None
        self._error: Exception | None = None

    @property
    def has_item(self) -> bool:
        """Whether `get` gives something now."""
        return self._unread is not None or self._error is not None

    def put(self, output: RequestOutput) -> None:
        """See `OutputSink.put`."""
        with self._lock:
            unread = self._unread
            if unread is None:
                self._unread = output
            elif isinstance(unread, _Sum):
                unread.add(output)
            else:
                self._unread = _Sum()
                self._unread.add(unread)
                self._unread.add(output)
        if self._on_item is not None:
            self._on_item(self)

    def fail(self, error: Exception) -> None:
        """See `OutputSink.fail`: earlier outputs can still be read."""
        self._error = error
        if self._on_item is not None:
            self._on_item(self)

    def get(self) -> RequestOutput | None:
        """Everything that has come, as one item; None if nothing has.

        Raises the error that the request ended with, once all else was read.
        """
        with self._lock:
            unread, self._unread = self._unread, None
        if unread is None:
            if self._error is not None:
                raise self._error
            return None
        item = unread.snapshot() if isinstance(unread, _Sum) else unread
        if self._kind is not RequestOutputKind.CUMULATIVE:
            return item
        self._so_far = self._so_far or _Sum()
        self._so_far.add(item)
        return self._so_far.snapshot()


class _Sum:
    """Several deltas as one."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._parts: dict[int, _SoFar] = {}

    def add(self, item: RequestOutput) -> None:
        self._last = item
        for output in item.outputs:
            self._parts.setdefault(output.index, _SoFar()).add(output)

    def snapshot(self) -> RequestOutput:
        assert self._last is not None
        outputs = [self._parts[index].snapshot() for index in sorted(self._parts)]
        return replace(self._last, outputs=outputs)


@dataclass(slots=True)
class _SoFar:
    """The part of a completion that was read."""

    last: CompletionOutput | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    hidden: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        self.last = delta
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.hidden_states is not None:
            self.hidden.append(delta.hidden_states)

    def snapshot(self) -> CompletionOutput:
        assert self.last is not None
        return replace(
            self.last,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=None if self.last.logprobs is None else list(self.logprobs),
            hidden_states=np.concatenate(self.hidden) if self.hidden else None,
        )


_TURN = 0.005  # seconds that the engine's thread waits at most for event loops, after a step


class OutputNotifier:
    """Readers with a new output: calls each event loop once per step, after the observers.

    Then it waits for the loops, unless a step `is_running` already: loop and step would compete for
    the interpreter's lock. It does not wait for a loop that is late from the step before.
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._readers: dict[asyncio.AbstractEventLoop, dict[OutputStream, None]] = {}
        self._unread: list[tuple[SimpleQueue[OutputCollector], OutputCollector]] = []
        self._turns: list[Event] = []  # of the loops that were called last; set at the end of each

    def add(self, loop: asyncio.AbstractEventLoop, reader: "OutputStream") -> None:
        """Note, in the engine's thread, that a reader has something to read."""
        self._readers.setdefault(loop, {})[reader] = None

    def add_unread(self, queue: "SimpleQueue[OutputCollector]", collector: OutputCollector) -> None:
        """Note that a thread has something to read: its queue gets the collector after the step."""
        self._unread.append((queue, collector))

    def hand_on(self) -> None:
        """Wake the readers after a step, and let their event loops run."""
        are_late = not all([turn.is_set() for turn in self._turns])
        self.deliver()
        if not self._turns or are_late or self._is_running():
            return
        end = monotonic() + _TURN
        for turn in self._turns:
            turn.wait(max(0.0, end - monotonic()))

    def deliver(self) -> None:
        """Wake the reading threads and event loops."""
        unread, self._unread = self._unread, []
        for queue, collector in unread:
            queue.put(collector)
        readers, self._readers = self._readers, {}
        self._turns = []
        for loop, several in readers.items():
            turn = Event()
            try:
                loop.call_soon_threadsafe(_wake_all, loop, list(several), turn)
            except RuntimeError:  # it was closed: it has no reader
                continue
            self._turns.append(turn)


def _wake_all(loop: asyncio.AbstractEventLoop, readers: "list[OutputStream]", turn: Event) -> None:
    for reader in readers:
        reader.wake()
    # After the readers, which the loop calls next, and the callbacks that they add.
    loop.call_soon(loop.call_soon, turn.set)


class OutputStream:
    """The outputs of requests that one caller has submitted together, as they come.

    For one task, which reads it with `async for`; `RequestOutput.index` is the position of the
    request. The request that has waited longest is read first. It ends when all have ended, and
    raises the error of the first that fails. Call `close` to stop reading before the end.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        notifier: OutputNotifier,
        leave: Callable[[Sequence[Request]], object],
    ) -> None:
        self._requests = requests
        self._notifier = notifier
        self._leave = leave
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None
        self._unread: OrderedDict[OutputCollector, None] = OrderedDict()
        """Collectors with unread outputs, first in, first out: one thread adds, one removes, each
        in one call of C."""
        self._num_left = len(requests)  # requests whose last item, or whose error, was not read yet
        # A stream holds its `AsyncEngine`, whose thread holds the requests and their collectors.
        weak = WeakMethod(self._notify)

        def notify(collector: OutputCollector) -> None:
            method = weak()
            if method is not None:
                method(collector)

        for index, request in enumerate(requests):
            request.send_to(OutputCollector(request.params.output_kind, notify), index)

    def _notify(self, collector: OutputCollector) -> None:
        """There is something to read. Called in the engine's thread."""
        self._unread[collector] = None
        if self._loop is not None:  # else no reader waits yet
            self._notifier.add(self._loop, self)

    def wake(self) -> None:
        """Called on the event loop."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """See the class."""
        self._loop = asyncio.get_running_loop()
        while self._num_left:
            while not self._unread:
                self._future = self._loop.create_future()
                if not self._unread:  # a step may have ended just now
                    await self._future
            collector, _ = self._unread.popitem(last=False)
            try:
                item = collector.get()
            except Exception:
                self._count_end()
                raise
            if item is not None:
                if collector.has_item:
                    self._unread[collector] = None
                if item.finished:
                    self._count_end()
                yield item

    def _count_end(self) -> None:
        """Note that a request's last item was read; with the last request's, leave."""
        self._num_left -= 1
        if not self._num_left:
            self.close()

    def close(self) -> None:
        """End what has not ended. May be called more than once."""
        self._leave(self._requests)
