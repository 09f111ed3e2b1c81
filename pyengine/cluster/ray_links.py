"""Replicas on Ray that are called themselves, and the routers that know them."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RunningReplica

from pyengine.cluster.fleet import News

if TYPE_CHECKING:
    from pyengine.cluster.ray_router import PrefixRequestRouter

routers: "dict[DeploymentID, PrefixRequestRouter]" = {}
"""Those of this process's handles, by deployment. Serve makes them at the first call, one for all
handles, and keeps them to itself."""


def register(deployment: DeploymentID, router: "PrefixRequestRouter") -> None:
    """Let the router of a deployment be found."""
    routers[deployment] = router


class ReplicaLink:
    """One replica, to be called itself and not through the router."""

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
        """What a method of the replica gives."""
        return await self._call(method, args, streams=False).get_async()

    async def follow(self) -> AsyncGenerator[News]:
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
