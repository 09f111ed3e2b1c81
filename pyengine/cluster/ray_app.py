"""The Ray Serve application: a deployment of engines, and the server as its ingress."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, cast

from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from pyengine.cluster.calls import ModelInfo, RemoteRequest
from pyengine.cluster.fleet import ReplicaUpdate
from pyengine.cluster.observers import ClusterObservers
from pyengine.cluster.prefix_router import PrefixRouter
from pyengine.cluster.ray_links import LinkedRouter, ReplicaLink, routers
from pyengine.cluster.ray_router import PrefixRequestRouter
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.cluster.replica import Replica
from pyengine.config import EngineSettings
from pyengine.errors import NoReplicaError, ReplicaLostError
from pyengine.outputs import RequestOutput
from pyengine.server.settings import ServerSettings

ENGINES = "engines"
_MAX_ONGOING = 1 << 20
"""Serve's limit of requests per replica; the engine limits its queue itself."""


class EngineDeployment:
    """A replica as a Serve deployment. The ingress calls its methods."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, EngineSettings(**settings))

    async def about(self) -> ModelInfo:
        """See `Replica.about`."""
        return self._replica.about()

    async def follow(self) -> AsyncGenerator[ReplicaUpdate]:
        """See `Replica.follow`."""
        async with aclosing(self._replica.follow()) as updates:
            async for update in updates:
                yield update

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        """See `Replica.generate`."""
        async with aclosing(self._replica.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """See `Replica.abort`."""
        return await self._replica.abort(request_id)

    async def metrics(self) -> list[Metric]:
        """See `Replica.metrics`."""
        return self._replica.metrics()

    async def frame(self) -> str:
        """See `Replica.frame`."""
        return await self._replica.frame()

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica if it raises."""
        self._replica.engine.check_health()

    def __del__(self) -> None:
        """Called by Serve at a graceful shutdown."""
        if hasattr(self, "_replica"):  # else `__init__` has failed
            self._replica.close()


def engines(
    settings: Mapping[str, Any], *, num_cpus: float = 1, num_gpus: float = 0, **options: Any
) -> serve.Application:
    """A deployment of engines with these `EngineSettings`.

    With `tensor_parallel_size`, the processes of a model are on one node, in one bundle of a
    placement group with `num_cpus` CPUs and `num_gpus` GPUs per process. `options` are those of
    `serve.deployment`.
    """
    size = settings.get("tensor_parallel_size", 1)
    resources = {"CPU": num_cpus * size, "GPU": num_gpus * size}
    if size > 1:
        options["placement_group_bundles"] = [
            {key: amount for key, amount in resources.items() if amount}
        ]
        options["placement_group_strategy"] = "STRICT_PACK"
    deployment = serve.deployment(
        EngineDeployment,
        name=ENGINES,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources["GPU"]},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
        **options,
    )
    return deployment.bind(dict(settings))


class RayReplicas:
    """The replicas behind a handle. See `Replicas`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    @property
    def _router(self) -> LinkedRouter | None:
        return routers.get(self._handle.deployment_id)

    def links(self) -> dict[str, ReplicaLink]:
        """Links to all current replicas."""
        return {} if self._router is None else self._router.links()

    def names(self) -> list[str]:
        """See `Replicas`."""
        return list(self.links())

    @property
    def router(self) -> PrefixRouter | None:
        """See `Replicas`."""
        return None if self._router is None else self._router.fleet.router

    async def about(self) -> ModelInfo:
        """The model's properties, from any replica."""
        return cast(ModelInfo, await self._handle.about.remote())

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        """See `Replicas`."""
        outputs = self._handle.options(stream=True).generate.remote(request)
        try:
            async for output in outputs:
                yield output
        except (ActorDiedError, ActorUnavailableError) as error:
            raise ReplicaLostError("the replica of this request was lost: send it again") from error
        except RayTaskError as error:  # wraps the engine's exception
            raise error.cause from error
        except RayServeException as error:
            raise NoReplicaError(f"no replica accepted the request: {error}") from error
        finally:
            outputs.cancel()

    def begun(self, key: str, num_prompt: int, num_cached: int) -> None:
        """See `Replicas`."""
        if self._router is not None:
            self._router.fleet.begun(key, num_prompt, num_cached)

    def ended(self, key: str) -> None:
        """See `Replicas`."""
        if self._router is not None:
            self._router.fleet.ended(key)

    async def abort(self, request_id: str) -> bool:
        """See `Replicas`."""
        return any((await self.ask_all("abort", request_id)).values())

    async def ask(self, name: str, method: str, *args: Any) -> Any:
        """See `Replicas`."""
        router, link = self._router, self.links().get(name)
        if router is None or link is None:
            raise NoReplicaError(f"unknown replica {name!r}")
        # Links belong to the router's event loop.
        answer = asyncio.run_coroutine_threadsafe(link.ask(method, *args), router._event_loop)
        return await asyncio.wrap_future(answer)

    async def ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """See `Replicas`."""
        names = self.names()
        calls = [self.ask(name, method, *args) for name in names]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            name: answer
            for name, answer in zip(names, answers, strict=True)
            if not isinstance(answer, BaseException)
        }


class Ingress:
    """The server's application as a deployment with an HTTP route."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, handle: DeploymentHandle, settings: Mapping[str, Any]
    ) -> None:
        from pyengine.server.app import create_app

        replicas = RayReplicas(handle)
        engine = RemoteEngine(replicas, await replicas.about())
        self._app = create_app(engine, ServerSettings(**settings), ClusterObservers)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve, after `__init__`."""
        return self._app


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The entry of a Serve config file, `import_path: pyengine.cluster.ray_app:application`.

    Its `args` are `engine` (`EngineSettings`), `server` (`ServerSettings`), and `replicas` (options
    of the engines' deployment, with `num_cpus` and `num_gpus` per process).
    """
    handle = engines(arguments.get("engine") or {}, **(arguments.get("replicas") or {}))
    ingress = serve.deployment(serve.ingress()(Ingress), name="ingress")
    # Created here, so API keys may come from the environment of the deploying process.
    server = ServerSettings(**(arguments.get("server") or {}))
    return ingress.bind(handle, asdict(server))
