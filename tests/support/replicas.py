"""Replicas in this process, behind the router: everything but Ray. One may be lost at any time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pyengine.async_engine import AsyncEngine
from pyengine.cluster.calls import RemoteRequest
from pyengine.cluster.fleet import Fleet, ReplicaUpdate
from pyengine.cluster.prefix_router import PrefixRouter
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.cluster.replica import Replica
from pyengine.config import EngineSettings
from pyengine.errors import ReplicaLostError
from pyengine.outputs import RequestOutput
from pyengine.request.prompts import PromptLike
from pyengine.sampling_params import SamplingParams


class Lossy:
    """A replica whose process can end: nothing more comes of it then."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_lost = asyncio.Event()
        self.num_requests = 0

    async def _until_lost(self, items: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        lost = asyncio.ensure_future(self.is_lost.wait())
        item = asyncio.ensure_future(anext(items, None))
        try:
            while True:
                await asyncio.wait((item, lost), return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise ReplicaLostError("it was killed")
                if item.result() is None:
                    return
                yield item.result()
                item = asyncio.ensure_future(anext(items, None))
        finally:
            lost.cancel()
            item.cancel()
            await asyncio.gather(lost, item, return_exceptions=True)
            await items.aclose()

    async def follow(self) -> AsyncGenerator[ReplicaUpdate]:
        async with aclosing(self._until_lost(self.replica.follow())) as updates:
            async for update in updates:
                yield update

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        self.num_requests += 1
        async with aclosing(self._until_lost(self.replica.generate(request))) as outputs:
            async for output in outputs:
                yield output


class LocalReplicas:
    """See `Replicas`. Entered on an event loop, it knows all of its replicas."""

    def __init__(self, *replicas: Replica, **options: Any) -> None:
        self._made = replicas
        self._options = options

    async def __aenter__(self) -> "LocalReplicas":
        self.fleet = Fleet(**self._options)
        self.there = {replica.info.name: Lossy(replica) for replica in self._made}
        self.fleet.update(self.there)
        await self.until_current()
        return self

    async def until_current(self) -> None:
        async with asyncio.timeout(20):
            while True:
                router = self.fleet.router
                if router is not None:
                    known = [replica.name for replica in router.replicas() if replica.is_current]
                    if sorted(known) == sorted(self.there):
                        return
                await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        self.fleet.close()

    def lose(self, name: str) -> None:
        """As `kill -9` does: its callers get an error, its events stop."""
        self.there.pop(name).is_lost.set()
        self.fleet.forget(name)

    def come_back(self, replica: Replica) -> None:
        self.there[replica.info.name] = Lossy(replica)
        self.fleet.update(self.there)

    def names(self) -> list[str]:
        return list(self.there)

    @property
    def router(self) -> PrefixRouter | None:
        return self.fleet.router

    async def ask(self, name: str, method: str, *args: Any) -> Any:
        found = getattr(self.there[name].replica, method)(*args)
        return await found if isinstance(found, Awaitable) else found

    async def ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        return {name: await self.ask(name, method, *args) for name in self.there}

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        name = self.fleet.route(request, list(self.there))
        async with aclosing(self.there[name].generate(request)) as outputs:
            async for output in outputs:
                yield output

    def begun(self, key: str, num_prompt: int, num_cached: int) -> None:
        self.fleet.begun(key, num_prompt, num_cached)

    def ended(self, key: str) -> None:
        self.fleet.ended(key)

    async def abort(self, request_id: str) -> bool:
        return any((await self.ask_all("abort", request_id)).values())


def small_replica(name: str, folder: Path, **settings: Any) -> Replica:
    """One of a model of a few kilobytes."""
    given = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 512, **settings}
    return Replica(name, EngineSettings(folder, **given))


async def read(
    engine: RemoteEngine | AsyncEngine, prompt: PromptLike, params: SamplingParams
) -> Any:
    """The last item of a request, and the tokens of all."""
    stream = engine.submit([engine.request(prompt, params)])
    tokens: list[int] = []
    try:
        async for item in stream:
            tokens += item.outputs[0].token_ids
    finally:
        stream.close()
    return item, tokens
