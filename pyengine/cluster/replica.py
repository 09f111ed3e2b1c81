"""A replica: an engine that publishes its cache events. Independent of the transport."""

import asyncio
import os
import platform
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, closing
from dataclasses import asdict, replace
from functools import partial

from prometheus_client.core import Metric

from pyengine.async_engine import AsyncEngine
from pyengine.cluster.calls import ModelInfo, RemoteRequest, without_prompt
from pyengine.cluster.feed import EventFeed
from pyengine.cluster.fleet import ReplicaUpdate
from pyengine.cluster.messages import CacheFormat, Load, ReplicaInfo, SharedStore
from pyengine.config import EngineSettings
from pyengine.engine.stats import StepResult
from pyengine.outputs import RequestOutput
from pyengine.request.request import Request
from pyengine.server.dashboard.page import EngineBroadcaster
from pyengine.server.metrics import EngineMetrics

DEFAULT_HASH_SEED = 0


class Replica:
    """One of several engines with the same settings, under a unique name."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        if settings.event_hash_seed is None:
            settings = replace(settings, event_hash_seed=DEFAULT_HASH_SEED)
        self.engine = AsyncEngine(**asdict(settings))
        about = self.engine.describe()
        assert settings.event_hash_seed is not None
        kind = CacheFormat(
            str(about["model"]), int(str(about["block_size"])), settings.event_hash_seed
        )
        num_blocks = int(str(about["num_blocks"]))
        self.info = ReplicaInfo(name, kind, num_blocks, _shared_store(settings, about, num_blocks))
        self._feed = EventFeed(self.engine, self._load)
        self.engine.observe(self)
        self._metrics = EngineMetrics(self.engine, model_name=kind.model, name=name)
        self._broadcaster = EngineBroadcaster(self.engine, model_name=kind.model)

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
            restore_cost=stats.store.get("restore_cost", 1.0),
        )

    def on_arrival(self, request: Request) -> None:
        """Ignored."""

    def on_finish(self, request: Request) -> None:
        """Ignored: `on_step` publishes the events."""

    def on_step(self, result: StepResult) -> None:
        """Publish the events of a step. Called on the engine's thread."""
        self._feed.push()

    def about(self) -> ModelInfo:
        """The properties of the model for an ingress."""
        return ModelInfo(
            description=self.engine.describe(),
            model_limits=self.engine.model_limits,
            default_params=self.engine.get_default_sampling_params(),
            model_path=str(self.engine.model_path),
            tokenizer=self.engine.tokenizer,
            max_pinned_blocks=self.engine.max_pinned_blocks,
        )

    async def follow(self) -> AsyncGenerator[ReplicaUpdate]:
        """The replica's identity, a snapshot of its cache, then the events of each step."""
        yield self.info
        async with aclosing(self._feed.follow(self.engine.between_steps)) as updates:
            async for update in updates:
                yield update

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        """Run a request. Closing the iterator aborts it. Raises as `AsyncEngine.generate` does."""
        make = partial(
            self.engine.request,
            request.token_ids,
            request.params,
            request.request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=request.tenant,
            cache_hints=request.cache_hints,
            thinking=request.thinking,
        )
        # A grammar takes a while to compile.
        is_slow = request.params.structured_outputs is not None
        state = await asyncio.to_thread(make) if is_slow else make()
        is_first = True
        with closing(self.engine.submit([state])) as stream:
            async for item in stream:
                yield without_prompt(item, is_first=is_first)
                is_first = False

    async def abort(self, request_id: str) -> bool:
        """See `AsyncEngine.abort`."""
        return await self.engine.abort(request_id)

    def metrics(self) -> list[Metric]:
        """Prometheus metrics of this engine, labelled with its name."""
        return list(self._metrics.collect())

    async def frame(self) -> str:
        """A frame of the dashboard."""
        frame, _ = await self._broadcaster.poll(lambda: True)
        assert frame is not None
        return frame

    def close(self) -> None:
        """Close the engine and abort running requests."""
        self.engine.close()


def _shared_store(
    settings: EngineSettings, about: Mapping[str, object], num_blocks: int
) -> SharedStore | None:
    """The folder of an engine, by machine, device and inode; host memory is not shared."""
    if settings.kv_cache_dir is None:
        return None
    where = os.stat(settings.kv_cache_dir)
    block_bytes = int(str(about["kv_cache_bytes"])) // (num_blocks + 1)
    return SharedStore(
        folder=f"{platform.node()}:{where.st_dev}:{where.st_ino}",
        num_blocks=int(str(about["kv_cache_store_bytes"])) // block_bytes,
        is_writer=about["kv_cache_access"] == "write",
    )
