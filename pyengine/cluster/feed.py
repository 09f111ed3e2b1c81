"""Publishes the events of a cache: numbered, in order, to any number of followers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

from pyengine.cluster.messages import Events, Load, Snapshot

if TYPE_CHECKING:
    from pyengine.async_engine import AsyncEngine
    from pyengine.kv_cache import BlockManager

HEARTBEAT_SECONDS = 1.0
"""Interval at which a follower gets the load if there are no events."""
_MAX_UNREAD = 1 << 20
"""Unread events of a follower. Above this, it must start again with a snapshot."""


EventSource: TypeAlias = "BlockManager | AsyncEngine"
"""A cache that keeps events, or an engine with one."""


class EventLog:
    """Numbers the events of one cache. Call `take` and `snapshot` on the thread that changes it."""

    def __init__(self, source: EventSource) -> None:
        self.epoch = uuid4().hex
        self._source = source
        self._next = 0

    def take(self, load: Load) -> Events:
        """Events since the last call."""
        kinds, hashes = self._source.take_packed_events()
        events = Events(self.epoch, self._next, kinds, hashes, load)
        self._next = events.end
        return events

    def snapshot(self, load: Load) -> Snapshot:
        """All cached blocks. Call `take` just before."""
        return Snapshot(self.epoch, self._next, b"".join(self._source.cached_hashes()), load)


class EventFeed:
    """Publishes the events of each step.

    The engine's thread calls `push`, which calls the event loop of each follower at most once. A
    slow follower gets several steps as one batch.
    """

    def __init__(self, source: EventSource, load: Callable[[], Load]) -> None:
        self._log = EventLog(source)
        self._load = load
        self._followers: list[_Follower] = []
        self._lock = Lock()

    def push(self) -> None:
        """Send new events to the followers."""
        events = self._log.take(self._load())
        with self._lock:
            followers = list(self._followers)
        for follower in followers:
            follower.put(events)

    def _begin(self, follower: "_Follower") -> Snapshot:
        """Add a follower on the engine's thread, so no event is lost after its snapshot."""
        self.push()
        with self._lock:
            self._followers.append(follower)
        return self._log.snapshot(self._load())

    async def follow(
        self, between_steps: Callable[[Callable[[], Snapshot]], Awaitable[Snapshot]]
    ) -> AsyncGenerator[Snapshot | Events]:
        """A snapshot, then all events after it. Ends if the reader falls too far behind.

        `between_steps` runs a function on the engine's thread between two steps.
        """
        follower = _Follower(asyncio.get_running_loop())
        try:
            snapshot = await between_steps(lambda: self._begin(follower))
            yield snapshot
            end = snapshot.next
            while True:
                events = await follower.next(HEARTBEAT_SECONDS)
                if follower.is_lost:
                    return
                yield events or Events(snapshot.epoch, end, b"", b"", self._load())
                end = events.end if events is not None else end
        finally:
            with self._lock, suppress(ValueError):
                self._followers.remove(follower)


class _Follower:
    """A reader on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._unread: list[Events] = []
        self._num_unread = 0
        self._wake = asyncio.Event()
        self.is_lost = False

    def put(self, events: Events) -> None:
        """Add events. Called on the engine's thread."""
        with self._lock:
            self._num_unread += len(events.kinds)
            self.is_lost = self.is_lost or self._num_unread > _MAX_UNREAD
            if self.is_lost:
                self._unread.clear()
            else:
                self._unread.append(events)
            is_first = len(self._unread) <= 1
        if is_first:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    async def next(self, timeout: float) -> Events | None:
        """Wait for events and return them as one batch; None after `timeout` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)
        self._wake.clear()
        with self._lock:
            unread, self._unread, self._num_unread = self._unread, [], 0
        return merged(unread) if unread else None


def merged(batches: Sequence[Events]) -> Events:
    """Consecutive batches as one."""
    first, last = batches[0], batches[-1]
    return Events(
        first.epoch,
        first.first,
        b"".join([batch.kinds for batch in batches]),
        b"".join([batch.hashes for batch in batches]),
        last.load,
    )
