"""Outputs on their way from the engine's thread to readers on event loops."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from threading import Event
from time import monotonic
from weakref import ref

from pyengine.engine.output_collector import OutputCollector
from pyengine.engine.request import RequestState
from pyengine.outputs import RequestOutput

_TURN = 0.005
"""Seconds that the engine's thread waits at most for event loops, after a step."""


class Mail:
    """Which readers have something new: each event loop is called once after a step.

    Whoever observes the engine has seen the step by then: what an answer's reader looks up next, in
    metrics or in a router's picture of the cache, has the step in it. Then the loop has its turn,
    unless a step `is_running` already: beside each other, loop and step would take the
    interpreter's lock from one another several times a step, which costs both more time than the
    turn takes. If a loop did not end its turn in time, none is waited for until it has.
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._readers: dict[asyncio.AbstractEventLoop, dict[OutputStream, None]] = {}
        self._turns: list[Event] = []
        """Of the loops that were called last; set at the end of each."""

    def add(self, loop: asyncio.AbstractEventLoop, reader: "OutputStream") -> None:
        """Note, in the engine's thread, that a reader has something to read."""
        self._readers.setdefault(loop, {})[reader] = None

    def hand_on(self) -> None:
        """Tell the event loops what there is after a step, and let them hand it on."""
        are_late = not all([turn.is_set() for turn in self._turns])
        self.deliver()
        if are_late or self._is_running():
            return
        end = monotonic() + _TURN
        for turn in self._turns:
            turn.wait(max(0.0, end - monotonic()))

    def deliver(self) -> None:
        """Tell the event loops."""
        readers, self._readers = self._readers, {}
        self._turns = []
        for loop, several in readers.items():
            turn = Event()
            try:
                loop.call_soon_threadsafe(_wake_all, loop, list(several), turn)
            except RuntimeError:  # it was closed: nobody reads there any more
                continue
            self._turns.append(turn)


def _wake_all(loop: asyncio.AbstractEventLoop, readers: "list[OutputStream]", turn: Event) -> None:
    for reader in readers:
        reader.wake()
    # Behind the readers, which the loop calls next, and what they have put off to the end of that.
    loop.call_soon(loop.call_soon, turn.set)


class OutputStream:
    """The outputs of requests that one caller has submitted together, of any of them as they come.

    For one task, which reads it with `async for`; `RequestOutput.index` says which request an item
    is of. Of requests with unread items, the one that has waited longest is read first. It ends
    when all have ended, and needs no `close` then. Raises the error of the first that fails. Call
    `close` to stop reading before the end.
    """

    def __init__(
        self,
        requests: Sequence[RequestState],
        mail: Mail,
        leave: Callable[[Sequence[RequestState]], object],
    ) -> None:
        self._requests = requests
        self._mail = mail
        self._leave = leave
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None
        self._unread: OrderedDict[OutputCollector, None] = OrderedDict()
        """Those who have something to read, first in, first out: one thread puts them in, one takes
        them out, each in one call of C."""
        self._num_left = len(requests)
        """Requests whose last item, or whose error, was not read yet."""
        notify = _of(self)
        for place, request in enumerate(requests):
            request.place = place
            request.sink = OutputCollector(request.params.output_kind, notify)

    def _notify(self, collector: OutputCollector) -> None:
        """There is something to read. Called in the engine's thread."""
        self._unread[collector] = None
        if self._loop is not None:  # else nobody waits yet, and will look before
            self._mail.add(self._loop, self)

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


def _of(stream: OutputStream) -> Callable[[OutputCollector], None]:
    """Return its `_notify`, without a reference to the stream.

    A stream holds its `AsyncEngine`, whose thread holds the requests and these their collectors.
    """
    held = ref(stream)

    def notify(collector: OutputCollector) -> None:
        there = held()
        if there is not None:
            there._notify(collector)

    return notify
