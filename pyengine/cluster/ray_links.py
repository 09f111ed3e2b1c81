"""Direct calls of single replicas on Ray, and the registry of routers."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Protocol
from uuid import uuid4

from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RunningReplica

from pyengine.cluster.fleet import Fleet, ReplicaUpdate


class LinkedRouter(Protocol):
    """The part of a Serve request router that an ingress uses."""

    fleet: Fleet
    _event_loop: asyncio.AbstractEventLoop

    def links(self) -> "dict[str, ReplicaLink]":
        """Links to all current replicas, by name."""


routers: dict[DeploymentID, LinkedRouter] = {}
"""Routers of this process by deployment. Serve creates one per deployment at the first call and
gives no access to it."""


def register(deployment: DeploymentID, router: LinkedRouter) -> None:
    """Add the router of a deployment to `routers`."""
    routers[deployment] = router


class ReplicaLink:
    """Calls one replica, bypassing the router."""

    def __init__(self, replica: RunningReplica) -> None:
        self._replica = replica

    def _call(self, method: str, args: tuple[Any, ...], *, streams: bool) -> ReplicaResult:
        metadata = RequestMetadata(
            request_id=uuid4().hex,
            internal_request_id=uuid4().hex,
            call_method=method,
            is_streaming=streams,
        )
        request = PendingRequest(args=list(args), kwargs={}, metadata=metadata)
        return self._replica.try_send_request(request, with_rejection=False)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the replica."""
        return await self._call(method, args, streams=False).get_async()

    async def follow(self) -> AsyncGenerator[ReplicaUpdate]:
        """See `Replica.follow`."""
        result = self._call("follow", (), streams=True)
        try:
            while True:
                try:
                    yield await result.__anext__()
                except StopAsyncIteration:
                    return
        finally:
            result.cancel()
