"""A replica: an engine whose cache is followed. Whatever reaches it from afar is not here."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace

from prometheus_client.core import Metric

from pyengine.cluster.calls import About, Delta, RemoteRequest
from pyengine.cluster.feed import EventFeed
from pyengine.cluster.fleet import News
from pyengine.cluster.messages import CacheKind, Load, ReplicaInfo
from pyengine.core.settings import EngineSettings
from pyengine.engine import AsyncEngine, RequestState, StepResult
from pyengine.server.dashboard.page import PoolWatch
from pyengine.server.metrics import EngineMetrics

DEFAULT_HASH_SEED = 0


class Replica:
    """One of several engines of the same settings, under a name that no other has had."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        if settings.event_hash_seed is None:
            settings = replace(settings, event_hash_seed=DEFAULT_HASH_SEED)
        self.engine = AsyncEngine(**asdict(settings))
        about = self.engine.describe()
        assert settings.event_hash_seed is not None
        kind = CacheKind(
            str(about["model"]), int(str(about["block_size"])), settings.event_hash_seed
        )
        self.info = ReplicaInfo(name, kind, int(str(about["num_blocks"])))
        self._feed = EventFeed(self.engine, self._load)
        self.engine.observe(self)
        self._metrics = EngineMetrics(self.engine, model_name=kind.model, name=name)
        self._watch = PoolWatch(self.engine, model_name=kind.model)

    def _load(self) -> Load:
        stats = self.engine.stats()
        usage, counters = stats.usage, stats.counters
        return Load(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_active=usage.active,
            num_evictable=usage.evictable,
            prompt_tokens=counters["prompt_tokens"],
            cached_tokens=counters["cached_tokens"],
        )

    def on_arrival(self, request: RequestState) -> None:
        """Nothing."""

    def on_finish(self, request: RequestState) -> None:
        """Nothing: the step says it."""

    def on_step(self, result: StepResult) -> None:
        """Tell those who follow. Called in the engine's thread."""
        self._feed.push()

    def about(self) -> About:
        """What an ingress has to know."""
        return About(
            description=self.engine.describe(),
            facts=self.engine.facts,
            default_params=self.engine.get_default_sampling_params(),
            model_path=str(self.engine.model_path),
            tokenizer=self.engine.tokenizer,
        )

    async def follow(self) -> AsyncGenerator[News]:
        """Who this is, a snapshot of its cache, then events after each step."""
        yield self.info
        async with aclosing(self._feed.follow(self.engine.between_steps)) as several:
            async for news in several:
                yield news

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[Delta]:
        """Run a request. Closing the iterator ends it. Raises as `AsyncEngine.generate` does."""
        several = self.engine.generate(
            request.token_ids,
            request.params,
            request.request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        is_first = True
        async with aclosing(several) as items:
            async for item in items:
                yield Delta.of(item, is_first=is_first)
                is_first = False

    async def abort(self, request_id: str) -> bool:
        """See `AsyncEngine.abort`."""
        return await self.engine.abort(request_id)

    def metrics(self) -> list[Metric]:
        """What Prometheus is told of this engine, under its name."""
        return list(self._metrics.collect())

    async def frame(self) -> str:
        """The pool as the page `/kv` shows it."""
        frame, _ = await self._watch.look(lambda: True)
        assert frame is not None
        return frame

    def close(self) -> None:
        """End the engine: what runs is aborted."""
        self.engine.close()
