"""A cache's events on their way out: numbered, in order, to any number of followers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol
from uuid import uuid4

from pyengine.cluster.messages import Events, Load, Snapshot

SAYS_NOTHING_FOR = 1.0
"""Seconds after which a follower hears that nothing is new, and how much there is to do."""
_MOST_UNREAD = 1 << 20
"""Events that wait for a follower; one that is so far behind begins again with a snapshot."""


class EventSource(Protocol):
    """What keeps events: a `BlockManager`, or an engine that has one."""

    def take_packed_events(self) -> tuple[bytes, bytes]:
        """See `BlockManager.take_packed_events`."""
        ...

    def cached_hashes(self) -> Sequence[bytes]:
        """See `BlockManager.cached_hashes`."""
        ...


class EventLog:
    """Numbers the events of one cache. `take` and `snapshot` are for the thread that changes it."""

    def __init__(self, source: EventSource) -> None:
        self.life = uuid4().hex
        self._source = source
        self._next = 0

    def take(self, load: Load) -> Events:
        """What is new since the last call."""
        kinds, names = self._source.take_packed_events()
        events = Events(self.life, self._next, kinds, names, load)
        self._next = events.end
        return events

    def snapshot(self, load: Load) -> Snapshot:
        """Everything that is held now. What is new must have been taken just before."""
        return Snapshot(self.life, self._next, b"".join(self._source.cached_hashes()), load)


class EventFeed:
    """Hands on what became of a cache after each step.

    `push` is called in the engine's thread; each follower's event loop is called at most once for
    it, and a follower that reads slowly finds what has come meanwhile as one batch.
    """

    def __init__(self, source: EventSource, load: Callable[[], Load]) -> None:
        self._log = EventLog(source)
        self._load = load
        self._followers: list[_Follower] = []
        self._lock = Lock()

    def push(self) -> None:
        """Tell the followers what is new."""
        events = self._log.take(self._load())
        with self._lock:
            followers = list(self._followers)
        for one in followers:
            one.put(events)

    def _begin(self, follower: "_Follower") -> Snapshot:
        """In the engine's thread, between two steps: nothing falls between picture and events."""
        self.push()
        with self._lock:
            self._followers.append(follower)
        return self._log.snapshot(self._load())

    async def follow(
        self, between_steps: Callable[[Callable[[], Snapshot]], Awaitable[Snapshot]]
    ) -> AsyncGenerator[Snapshot | Events]:
        """A snapshot, then all events behind it, as they come, for as long as it is read.

        `between_steps` has the engine's thread call a function between two steps. It ends where
        the reader is too far behind.
        """
        follower = _Follower(asyncio.get_running_loop())
        try:
            snapshot = await between_steps(lambda: self._begin(follower))
            yield snapshot
            end = snapshot.next
            while True:
                events = await follower.next(SAYS_NOTHING_FOR)
                if follower.is_lost:
                    return
                yield events or Events(snapshot.life, end, b"", b"", self._load())
                end = events.end if events is not None else end
        finally:
            with self._lock, suppress(ValueError):
                self._followers.remove(follower)


class _Follower:
    """Somebody who reads, on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._unread: list[Events] = []
        self._num_unread = 0
        self._wake = asyncio.Event()
        self.is_lost = False

    def put(self, events: Events) -> None:
        """Called in the engine's thread."""
        with self._lock:
            self._num_unread += len(events.kinds)
            self.is_lost = self.is_lost or self._num_unread > _MOST_UNREAD
            if self.is_lost:
                self._unread.clear()
            else:
                self._unread.append(events)
            is_first = len(self._unread) <= 1
        if is_first:
            with suppress(RuntimeError):  # the loop was closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._wake.set)

    async def next(self, timeout: float) -> Events | None:
        """All that has come, as one batch; None after `timeout` seconds without."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)
        self._wake.clear()
        with self._lock:
            unread, self._unread, self._num_unread = self._unread, [], 0
        return merged(unread) if unread else None


def merged(batches: Sequence[Events]) -> Events:
    """Batches that follow each other as one."""
    first, last = batches[0], batches[-1]
    return Events(
        first.life,
        first.first,
        b"".join([one.kinds for one in batches]),
        b"".join([one.names for one in batches]),
        last.load,
    )
