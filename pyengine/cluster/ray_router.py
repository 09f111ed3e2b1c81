"""Ray Serve's `RequestRouter` over the prefix router: Serve provides the set of replicas.

Serve pickles the class by value, including the globals of its module. So shared state is in
`ray_links`, behind a function.
"""

from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pyengine.cluster.calls import RemoteRequest
from pyengine.cluster.fleet import Fleet
from pyengine.cluster.ray_links import ReplicaLink, register
from pyengine.errors import NoReplicaError


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc] # Ray carries no types
    """Sends each request to the replica that `PrefixRouter` chooses."""

    def initialize_state(self, imbalance: float = 1.25, slack: int = 2) -> None:
        """See Ray Serve."""
        self.fleet = Fleet(imbalance=imbalance, slack=slack)
        register(self._deployment_id, self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See Ray Serve. Called on the router's event loop."""
        super().update_replicas(replicas)
        self.fleet.update(
            {replica.replica_id.unique_id: ReplicaLink(replica) for replica in replicas}
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See Ray Serve."""
        super().on_replica_actor_died(replica_id)
        self.fleet.forget(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See Ray Serve: the best replica, then the others. Other calls go to any replica."""
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        accepted = {
            name: replica for name, replica in candidates.items() if name not in self.fleet.refused
        }
        request = pending_request.args[0] if pending_request and pending_request.args else None
        if isinstance(request, RemoteRequest):
            try:
                best = accepted.pop(self.fleet.route(request, accepted))
            except NoReplicaError:  # no replica has joined yet: choose by load
                return [list(accepted.values())]
            return [[best], list(accepted.values())]
        return [list(accepted.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """See Ray Serve."""
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, RemoteRequest):
            self.fleet.moved(request.key, replica_id.unique_id)

    def links(self) -> dict[str, ReplicaLink]:
        """Links to all current replicas, by name."""
        return {
            replica.replica_id.unique_id: ReplicaLink(replica)
            for replica in list(self._replicas.values())
        }
