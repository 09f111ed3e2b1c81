"""Observers of a cluster: `/metrics` of all replicas and the router, `/kv` of each replica."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pyengine.cluster.prefix_router import PrefixRouter
from pyengine.cluster.remote_engine import RemoteEngine, Replicas
from pyengine.errors import NoReplicaError
from pyengine.server.dashboard.page import FrameBroadcaster, page_router
from pyengine.server.histograms import family
from pyengine.server.metrics import Families, exposed
from pyengine.server.settings import ServerSettings

_COUNTERS = (
    ("routed", "num_routed", "Requests that were sent to a replica."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests whose answer has begun."),
    ("expected_hit_tokens", "expected_hits", "Of these, cached according to the router."),
    ("real_hit_tokens", "real_hits", "Of these, cached according to the replica."),
    ("events", "num_events", "Cache events of replicas that were applied."),
    ("repeated_batches", "num_duplicates", "Batches of events and snapshots received twice."),
    ("gaps", "num_gaps", "Gaps in the events of replicas."),
    ("snapshots", "num_snapshots", "Snapshots that were applied."),
    ("refused_replicas", "num_refused", "Replicas that were refused."),
    ("diverted", "num_diverted", "Requests not sent to the cheapest replica, due to its load."),
)
"""Counters of the router: name, field of `RouterStats`, help."""


def merged(replica_metrics: Iterable[Sequence[Metric]], model_name: str) -> list[Metric]:
    """Merge the metrics of several replicas, which differ in the label `engine`."""
    families: dict[str, Metric] = {}
    for metrics in replica_metrics:
        for metric in metrics:
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            family.samples += [
                sample._replace(labels={**sample.labels, "model_name": model_name})
                for sample in metric.samples
            ]
    return list(families.values())


def router_metrics(router: PrefixRouter, model_name: str) -> Iterator[Metric]:
    """Counters of a router, and gauges of each replica."""
    own = {"model_name": model_name}
    for name, field, help in _COUNTERS:
        count = getattr(router.stats, field)
        yield family(CounterMetricFamily, f"pyengine:router_{name}", help, [(own, count)])
    for name, help, value in (
        ("imbalance", "Requests of the busiest replica over the mean.", router.imbalance),
        ("cached_blocks", "Distinct cached blocks of all replicas.", router.num_hashes),
    ):
        yield family(GaugeMetricFamily, f"pyengine:router_{name}", help, [(own, value)])
    replicas = router.replicas()
    for name, field, help in (
        ("requests", "num_requests", "Requests of the replica in progress."),
        ("cached_blocks", "num_cached_blocks", "Cached blocks of the replica, by its events."),
        ("current", "is_current", "1 if no event is missing."),
        ("routed", "num_routed", "Requests sent to the replica."),
    ):
        samples = [
            ({**own, "engine": replica.name}, float(getattr(replica, field)))
            for replica in replicas
        ]
        yield family(GaugeMetricFamily, f"pyengine:router_replica_{name}", help, samples)


class ClusterObservers:
    """Metrics and dashboards of replicas, instead of `EngineObservers`."""

    def __init__(
        self,
        engine: RemoteEngine,
        settings: ServerSettings,
        model_name: str,
        is_over: Callable[[], bool],
    ) -> None:
        self._replicas = engine.replicas
        self._model_name = model_name
        self._is_over = is_over
        self._broadcasters: dict[str, ReplicaBroadcaster] = {}

    @property
    def routers(self) -> tuple[APIRouter, ...]:
        """Routers of /metrics and /kv."""
        router = APIRouter()

        @router.get("/metrics", include_in_schema=False)
        async def scrape(request: Request) -> Response:
            return exposed(request, await self._registry())

        return router, page_router(self._broadcaster)

    async def _registry(self) -> CollectorRegistry:
        answers = await self._replicas.ask_all("metrics")
        families = merged(answers.values(), self._model_name)
        if self._replicas.router is not None:
            families += router_metrics(self._replicas.router, self._model_name)
        return Families([*families, *ProcessCollector(registry=None).collect()])

    def _broadcaster(self, name: str | None) -> FrameBroadcaster:
        """The broadcaster of a replica, by default of the first one."""
        names = self._replicas.names()
        if name is None and names:
            name = names[0]
        if name not in names:
            raise NoReplicaError(f"unknown replica {name!r}; current replicas: {names}")
        for old_name in [name for name in self._broadcasters if name not in names]:
            del self._broadcasters[old_name]
        if name not in self._broadcasters:
            self._broadcasters[name] = ReplicaBroadcaster(self._replicas, name, self._is_over)
        return self._broadcasters[name]

    def open(self) -> None:
        """Does nothing: an ingress has no request log, only one of refusals."""

    async def close(self) -> None:
        """End the dashboard streams."""
        for broadcaster in self._broadcasters.values():
            await broadcaster.close()


class ReplicaBroadcaster(FrameBroadcaster):
    """Frames of one replica, with a row for each replica."""

    def __init__(self, replicas: Replicas, name: str, is_over: Callable[[], bool]) -> None:
        super().__init__(is_over=is_over)
        self._replicas = replicas
        self._name = name

    async def poll(self, is_needed: Callable[[], bool]) -> tuple[str | None, float]:
        """See `FrameBroadcaster`."""
        frame: str = await self._replicas.ask(self._name, "frame")
        more = {"replica": self._name, "replicas": _rows(self._replicas.router)}
        return f"{frame[:-1]},{json.dumps(more)[1:]}", 0.0


def _rows(router: PrefixRouter | None) -> list[dict[str, Any]]:
    """A row of the dashboard for each replica."""
    return [
        {
            "name": replica.name,
            "is_current": replica.is_current,
            "blocks": replica.num_blocks,
            "active": replica.load.num_active,
            "evictable": replica.load.num_evictable,
            "prompt_tokens": replica.load.prompt_tokens,
            "cached_tokens": replica.load.cached_tokens,
            "running": replica.load.num_running,
            "waiting": replica.load.num_waiting,
            "sent": replica.num_routed,
        }
        for replica in (router.replicas() if router is not None else ())
    ]
