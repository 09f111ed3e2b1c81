"""Outputs on their way from the engine's thread to readers on event loops."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from pyengine.core.outputs import RequestOutput
from pyengine.engine.collector import OutputCollector
from pyengine.engine.engine import StepResult
from pyengine.engine.request import RequestState


class Mail:
    """Which readers have something new: each event loop is called once after a step."""

    def __init__(self) -> None:
        self._readers: dict[asyncio.AbstractEventLoop, dict[OutputStream, None]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, reader: "OutputStream") -> None:
        """Note, in the engine's thread, that a reader has something to read."""
        self._readers.setdefault(loop, {})[reader] = None

    def on_arrival(self, request: RequestState) -> None:
        """Nothing."""

    def on_finish(self, request: RequestState) -> None:
        """Nothing."""

    def on_step(self, result: StepResult) -> None:
        """The step is over."""
        self.deliver()

    def deliver(self) -> None:
        """Tell the event loops."""
        readers, self._readers = self._readers, {}
        for loop, several in readers.items():
            try:
                loop.call_soon_threadsafe(_wake_all, list(several))
            except RuntimeError:  # it was closed: nobody reads there any more
                continue


def _wake_all(readers: "list[OutputStream]") -> None:
    for reader in readers:
        reader.wake()


class OutputStream:
    """The outputs of requests that one caller has submitted together, of any of them as they come.

    For one task, which reads it with `async for`; `RequestOutput.index` says which request an item
    is of. It ends when all have ended. Raises the error of the first that fails. Whoever stops
    reading calls `close`.
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
        self._unread: dict[OutputCollector, None] = {}
        """Those who have something to read: one thread puts them in, one takes them out."""
        for place, request in enumerate(requests):
            request.place = place
            request.sink = OutputCollector(request.params.output_kind, self._notify)

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
        left = len(self._requests)
        while left:
            while not self._unread:
                self._future = self._loop.create_future()
                if not self._unread:  # a step may have ended just now
                    await self._future
            collector, _ = self._unread.popitem()
            item = collector.get()
            if item is not None:
                if collector.has_item:
                    self._unread[collector] = None
                left -= item.finished
                yield item

    def close(self) -> None:
        """End what has not ended. May be called more than once."""
        self._leave(self._requests)
