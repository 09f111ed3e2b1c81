"""Follows the cache events of all replicas and routes requests among them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Protocol

from pyengine.cluster.calls import RemoteRequest
from pyengine.cluster.messages import Events, ReplicaInfo, Snapshot
from pyengine.cluster.prefix_router import PrefixRouter, Ticket, UpdateResult
from pyengine.errors import ConfigurationError, NoReplicaError

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
"""Seconds between the end of a replica's feed and the next attempt."""

ReplicaUpdate = ReplicaInfo | Snapshot | Events


class FollowedReplica(Protocol):
    """A connection to a replica."""

    def follow(self) -> AsyncGenerator[ReplicaUpdate]:
        """Its identity, a snapshot, then events. Ends or raises if the connection is lost."""


class Fleet:
    """Replicas and their router. For one event loop, except `router`, which is thread-safe.

    The first replica determines the cache format; others must have the same.
    """

    def __init__(self, *, imbalance: float = 1.25, slack: int = 2) -> None:
        self._imbalance, self._slack = imbalance, slack
        self.router: PrefixRouter | None = None
        self.refused: dict[str, str] = {}
        """Refused replicas, with the reason."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tickets: dict[str, Ticket] = {}
        """Tickets of requests in progress, by key."""

    def update(self, replicas: Mapping[str, FollowedReplica]) -> None:
        """Set the replicas: follow new ones, remove missing ones."""
        for name in [name for name in self._tasks if name not in replicas]:
            self.forget(name)
        for name, replica in replicas.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._follow(name, replica))

    def forget(self, name: str) -> None:
        """Remove a replica."""
        self.refused.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
        if self.router is not None:
            self.router.leave(name)

    def close(self) -> None:
        """Stop following all replicas."""
        self.update({})

    def route(self, request: RemoteRequest, among: Collection[str]) -> str:
        """Choose a replica and count the request there until `ended`.

        Raises `NoReplicaError` if none of the given replicas has joined yet.
        """
        if self.router is None:
            raise NoReplicaError("no replica has joined yet: try again later")
        choice = self.router.choose(request.token_ids, request.namespace, among=among)
        self._keep(request.key, self.router.begin(choice))
        return choice.replica

    def moved(self, key: str, name: str) -> None:
        """Correct the replica of a request: it was sent to another one than chosen."""
        ticket = self._tickets.get(key)
        if self.router is not None and ticket is not None and ticket.choice.replica != name:
            self._keep(key, self.router.begin(ticket.choice, name))

    def _keep(self, key: str, ticket: Ticket | None) -> None:
        self.ended(key)
        if ticket is not None:
            self._tickets[key] = ticket

    def begun(self, key: str, num_prompt: int, num_cached: int) -> None:
        """Record the first output of a request. Thread-safe, as is `ended`."""
        ticket = self._tickets.get(key)
        if self.router is not None and ticket is not None:
            self.router.begun(ticket, num_prompt, num_cached)

    def ended(self, key: str) -> None:
        """Record the end of a request. Does nothing for an unknown one."""
        ticket = self._tickets.pop(key, None)
        if self.router is not None and ticket is not None:
            self.router.end(ticket)

    async def _follow(self, name: str, replica: FollowedReplica) -> None:
        while name not in self.refused:
            try:
                async with aclosing(replica.follow()) as updates:
                    async for update in updates:
                        if self._take(name, update) is UpdateResult.GAP:
                            break  # follow again, which begins with a snapshot
            except ConfigurationError as error:
                self.refused[name] = str(error)
                _log.error("%s", error)
            except Exception as error:  # Ray decides whether the replica is gone
                _log.warning("lost the events of replica %s: %r", name, error)
            await asyncio.sleep(_RETRY_SECONDS)

    def _take(self, name: str, update: ReplicaUpdate) -> UpdateResult:
        if isinstance(update, ReplicaInfo):
            self._admit(name, update)
            return UpdateResult.APPLIED
        assert self.router is not None
        if isinstance(update, Snapshot):
            return self.router.restore(name, update)
        return self.router.apply(name, update)

    def _admit(self, name: str, info: ReplicaInfo) -> None:
        if self.router is None:
            self.router = PrefixRouter(info.kind, imbalance=self._imbalance, slack=self._slack)
        if all(replica.name != name for replica in self.router.replicas()):
            self.router.join(info)
