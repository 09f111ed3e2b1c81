"""`pyengine serve`: an OpenAI-compatible HTTP server."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pyengine.cli.backend import open_async_engine
from pyengine.cli.display import note
from pyengine.cli.options import command
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings
from pyengine.utils.packaging import needs_cluster_extra, needs_serve_extra

if TYPE_CHECKING:
    from pyengine.server.lifetime import SignalledServer

_MAX_REPLICAS = 64
"""Limit of replicas on one machine; each is a process with its own copy of the model."""
_LIBRARIES = ("fastapi", "h11", "prometheus_client", "pydantic", "pydantic_core", "uvicorn")


@command(max_num_waiting=1024)
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, local folder or GGUF file; default: the embedded model."),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=_MAX_REPLICAS, help="Engines on this machine behind a router; needs Ray."
        ),
    ] = 1,
    settings: EngineSettings,
    server: ServerSettings,
) -> None:
    """Serve MODEL with OpenAI's HTTP API. On SIGTERM or Ctrl-C, running requests finish first."""
    try:
        from pyengine.server import lifetime
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _LIBRARIES:
            raise
        raise ConfigurationError(needs_serve_extra("pyengine serve", missing)) from error
    # Bind the address first, to fail before the model is loaded.
    with lifetime.listening(server) as socket, ExitStack() as stack:
        where = lifetime.address_of(server, socket)
        on_ready = partial(note, f"serving on {where}")
        if replicas == 1:
            engine = stack.enter_context(open_async_engine(settings))
            http_server = lifetime.make_server(engine, server, on_ready)
        else:
            http_server = _over_replicas(settings, replicas, server, on_ready, stack)
        http_server.run(sockets=[socket])


def _over_replicas(
    settings: EngineSettings,
    count: int,
    server: ServerSettings,
    on_ready: Callable[[], object],
    stack: ExitStack,
) -> "SignalledServer":
    """A server in front of replicas on this machine, which end with `stack`."""
    try:
        from pyengine.cluster.ray_local import local_replicas
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "ray":
            raise
        needed = needs_cluster_extra("pyengine serve --replicas", "ray")
        raise ConfigurationError(needed) from error
    from pyengine.cluster.observers import ClusterObservers
    from pyengine.server.lifetime import make_server

    engine = stack.enter_context(local_replicas(settings, count))
    return make_server(engine, server, on_ready, ClusterObservers)
