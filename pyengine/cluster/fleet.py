"""The replicas that there are, and what is known of each: follows them all, and routes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Protocol

from pyengine.cluster.calls import RemoteRequest
from pyengine.cluster.messages import Events, ReplicaInfo, Snapshot
from pyengine.cluster.prefix_router import PrefixRouter, Taken, Ticket
from pyengine.core.errors import ConfigurationError, NoReplicaError

_log = logging.getLogger(__name__)

_TRIES_AGAIN_AFTER = 0.2
"""Seconds between the end of a replica's feed and the next try."""

News = ReplicaInfo | Snapshot | Events


class Followed(Protocol):
    """A replica as its followers reach it."""

    def follow(self) -> AsyncGenerator[News]:
        """Who it is, a snapshot, then events. It ends or raises when the connection does."""
        ...


class Fleet:
    """Replicas and the router over them. For one event loop, but for `router`.

    The first replica that says who it is decides of which kind all must be.
    """

    def __init__(self, *, imbalance: float = 1.25, slack: int = 2) -> None:
        self._imbalance, self._slack = imbalance, slack
        self.router: PrefixRouter | None = None
        self.refused: dict[str, str] = {}
        """Replicas that were not let in, and why."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tickets: dict[str, Ticket] = {}
        """Of requests that were sent and have not ended."""

    def update(self, replicas: Mapping[str, Followed]) -> None:
        """These are the replicas from now on: new ones are followed, missing ones forgotten."""
        for name in [name for name in self._tasks if name not in replicas]:
            self.forget(name)
        for name, replica in replicas.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._follow(name, replica))

    def forget(self, name: str) -> None:
        """This replica is gone."""
        self.refused.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
        if self.router is not None:
            self.router.leave(name)

    def close(self) -> None:
        """Follow nobody any more."""
        self.update({})

    def route(self, request: RemoteRequest, among: Collection[str]) -> str:
        """Choose a replica and count the request as sent there, until `ended`.

        Raises `NoReplicaError` if none of these has joined yet.
        """
        if self.router is None:
            raise NoReplicaError("no replica has joined yet: try again later")
        choice = self.router.choose(request.token_ids, request.namespace, among=among)
        self._keep(request.key, self.router.begin(choice))
        return choice.replica

    def moved(self, key: str, name: str) -> None:
        """The request went to another replica than it was to."""
        ticket = self._tickets.get(key)
        if self.router is not None and ticket is not None and ticket.choice.replica != name:
            self._keep(key, self.router.begin(ticket.choice, name))

    def _keep(self, key: str, ticket: Ticket | None) -> None:
        self.ended(key)
        if ticket is not None:
            self._tickets[key] = ticket

    def begun(self, key: str, num_prompt: int, num_cached: int) -> None:
        """The first of a request's answer has come. Any thread may call this, and `ended`."""
        ticket = self._tickets.get(key)
        if self.router is not None and ticket is not None:
            self.router.begun(ticket, num_prompt, num_cached)

    def ended(self, key: str) -> None:
        """Nothing more comes of a request; nothing, if it was never sent."""
        ticket = self._tickets.pop(key, None)
        if self.router is not None and ticket is not None:
            self.router.end(ticket)

    async def _follow(self, name: str, replica: Followed) -> None:
        while name not in self.refused:
            try:
                async with aclosing(replica.follow()) as several:
                    async for news in several:
                        if self._take(name, news) is Taken.GAP:
                            break  # to follow anew begins with a snapshot
            except ConfigurationError as error:
                self.refused[name] = str(error)
                _log.error("%s", error)
            except Exception as error:  # whether it is gone for good is for others to say
                _log.warning("the events of replica %s ended: %r", name, error)
            await asyncio.sleep(_TRIES_AGAIN_AFTER)

    def _take(self, name: str, news: News) -> Taken:
        if isinstance(news, ReplicaInfo):
            self._admit(name, news)
            return Taken.APPLIED
        assert self.router is not None
        if isinstance(news, Snapshot):
            return self.router.restore(name, news)
        return self.router.apply(name, news)

    def _admit(self, name: str, info: ReplicaInfo) -> None:
        if self.router is None:
            self.router = PrefixRouter(info.kind, imbalance=self._imbalance, slack=self._slack)
        if all(replica.name != name for replica in self.router.replicas()):
            self.router.join(info)
