"""Who looks on at a cluster: `/metrics` of all replicas and of the router, `/kv` of each."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pyengine.cluster.prefix_router import PrefixRouter
from pyengine.cluster.remote_engine import RemoteEngine, Replicas
from pyengine.core.errors import NoReplicaError
from pyengine.core.server_settings import ServerSettings
from pyengine.server.dashboard.page import Watch, page_router
from pyengine.server.metrics import exposed

_COUNTERS = (
    ("routed", "num_routed", "Requests that were sent to a replica."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of those whose answer has begun."),
    ("expected_hit_tokens", "expected_hits", "Of these, cached by what the router knew."),
    ("real_hit_tokens", "real_hits", "Of these, cached by what the replica found."),
    ("events", "num_events", "Changes of replicas' caches that were applied."),
    ("repeated_batches", "num_known", "Batches of events, and snapshots, that were known."),
    ("gaps", "num_gaps", "Times that events were missing."),
    ("snapshots", "num_snapshots", "Whole pictures that were taken."),
    ("refused_replicas", "num_refused", "Replicas that were not let in."),
    ("diverted", "num_diverted", "Requests that went elsewhere because too many ran there."),
)
"""Of the router: name, field of `RouterStats`, help."""


def merged(several: Iterable[Sequence[Metric]], model_name: str) -> list[Metric]:
    """Families of several replicas as one each; their samples differ in the label `engine`."""
    families: dict[str, Metric] = {}
    for metrics in several:
        for metric in metrics:
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            family.samples += [
                one._replace(labels={**one.labels, "model_name": model_name})
                for one in metric.samples
            ]
    return list(families.values())


def router_metrics(router: PrefixRouter, model_name: str) -> Iterator[Metric]:
    """What a router has counted, and what it knows of each replica."""
    for name, field, help in _COUNTERS:
        counter = CounterMetricFamily(f"pyengine:router_{name}", help, labels=["model_name"])
        counter.add_metric([model_name], getattr(router.stats, field))
        yield counter
    for name, help, value in (
        ("imbalance", "Most requests that run on a replica over their mean.", router.imbalance),
        ("contents", "Different contents that are known.", router.num_contents),
    ):
        gauge = GaugeMetricFamily(f"pyengine:router_{name}", help, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    replicas = router.replicas()
    for name, field, help in (
        ("requests", "num_requests", "Requests that were sent there and have not ended."),
        ("contents", "num_held", "Contents that it holds, by its events."),
        ("current", "is_current", "1 where no event is missing."),
        ("routed", "num_routed", "Requests that were sent there."),
    ):
        labels = ["model_name", "engine"]
        gauge = GaugeMetricFamily(f"pyengine:router_replica_{name}", help, labels=labels)
        for one in replicas:
            gauge.add_metric([model_name, one.name], float(getattr(one, field)))
        yield gauge


class _Families:
    """Metrics that were collected already, for a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class ClusterObservation:
    """What a server shows of its replicas. See `Observation`, whose place it takes."""

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
        self._watches: dict[str, ReplicaWatch] = {}

    @property
    def routers(self) -> tuple[APIRouter, ...]:
        """/metrics and /kv."""
        router = APIRouter()

        @router.get("/metrics", include_in_schema=False)
        async def scrape(request: Request) -> Response:
            return exposed(request, await self._registry())

        return router, page_router(self._watch)

    async def _registry(self) -> CollectorRegistry:
        answers = await self._replicas.ask_all("metrics")
        families = merged(answers.values(), self._model_name)
        if self._replicas.router is not None:
            families += router_metrics(self._replicas.router, self._model_name)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(families))
        ProcessCollector(registry=registry)
        return registry

    def _watch(self, name: str | None) -> Watch:
        """Looks at one replica; at the first one, if none is named."""
        names = self._replicas.names()
        if name is None and names:
            name = names[0]
        if name not in names:
            raise NoReplicaError(f"there is no replica {name!r} now; there are {names}")
        for gone in [one for one in self._watches if one not in names]:
            del self._watches[gone]
        if name not in self._watches:
            self._watches[name] = ReplicaWatch(self._replicas, name, self._is_over)
        return self._watches[name]

    def open(self) -> None:
        """Nothing: requests have no lines in a log here, refusals do (`traffic.py`)."""

    async def close(self) -> None:
        """Let the pages go."""
        for one in self._watches.values():
            await one.close()


class ReplicaWatch(Watch):
    """Looks at one replica, beside a line for each of them."""

    def __init__(self, replicas: Replicas, name: str, is_over: Callable[[], bool]) -> None:
        super().__init__(is_over=is_over)
        self._replicas = replicas
        self._name = name

    async def look(self, is_wanted: Callable[[], bool]) -> tuple[str | None, float]:
        """See `Watch`."""
        frame: str = await self._replicas.ask(self._name, "frame")
        more = {"replica": self._name, "replicas": _lines(self._replicas.router)}
        return f"{frame[:-1]},{json.dumps(more)[1:]}", 0.0


def _lines(router: PrefixRouter | None) -> list[dict[str, Any]]:
    """A line of the page for each replica."""
    return [
        {
            "name": one.name,
            "is_current": one.is_current,
            "blocks": one.num_blocks,
            "active": one.load.num_active,
            "evictable": one.load.num_evictable,
            "prompt_tokens": one.load.prompt_tokens,
            "cached_tokens": one.load.cached_tokens,
            "running": one.load.num_running,
            "waiting": one.load.num_waiting,
            "sent": one.num_routed,
        }
        for one in (router.replicas() if router is not None else ())
    ]
