"""`pyengine serve`: an OpenAI-compatible HTTP server."""

from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from pyengine.cli.announcement import announcement
from pyengine.cli.backend import libraries, open_async_engine
from pyengine.cli.options import command
from pyengine.cli.status import interruptible_imports
from pyengine.cli.terminal import note
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings
from pyengine.utils.packaging import needs_extra

if TYPE_CHECKING:
    from pyengine.server.engine_protocol import EngineClient, MakeObservers

_MAX_REPLICAS = 64
"""Limit of replicas on one machine; each is a process with its own copy of the model."""
_LIBRARIES = ("fastapi", "httptools", "prometheus_client", "pydantic", "pydantic_core", "uvicorn")


@command(max_num_waiting=1024)
def serve(
    context: typer.Context,
    *,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=_MAX_REPLICAS, help="Engines on this machine behind a router; needs Ray."
        ),
    ] = 1,
    settings: EngineSettings,
    server: ServerSettings,
) -> None:
    """Serve a model with OpenAI's HTTP API. On SIGTERM or Ctrl-C, running requests finish first."""
    note("starting ...", dim=True)
    try:
        with interruptible_imports():
            from pyengine.server import lifetime
            from pyengine.server.observers import EngineObservers
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _LIBRARIES:
            with libraries():  # one of the engine's
                raise
        raise ConfigurationError(needs_extra("serve", "pyengine serve", missing)) from None
    # Bind the address first, to fail before the model is loaded.
    with lifetime.listening(server) as socket, ExitStack() as stack:
        where = lifetime.address_of(server, socket)
        started = perf_counter()
        engine: EngineClient
        if replicas == 1:
            engine = stack.enter_context(open_async_engine(settings))
            observers: MakeObservers = EngineObservers
        else:
            engine, observers = _over_replicas(settings, replicas, stack)
        note(f"loaded in {perf_counter() - started:.1f} s", dim=True)
        lines = announcement(
            where,
            engine.describe(),
            settings,
            server,
            is_local=lifetime.is_local(socket),
            replicas=replicas,
        )
        on_ready = partial(note, "\n".join(lines))
        lifetime.make_server(engine, server, on_ready, observers).run(sockets=[socket])


def _over_replicas(
    settings: EngineSettings, count: int, stack: ExitStack
) -> "tuple[EngineClient, MakeObservers]":
    """Replicas on this machine, which end with `stack`, and their observers."""
    try:
        from pyengine.cluster.ray_local import local_replicas
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "ray":
            raise
        needed = needs_extra("cluster", "pyengine serve --replicas", "ray")
        raise ConfigurationError(needed) from None
    from pyengine.cluster.observers import ClusterObservers

    return stack.enter_context(local_replicas(settings, count)), ClusterObservers
