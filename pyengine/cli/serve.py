"""`pyengine serve`: the model behind an OpenAI-compatible HTTP server."""

from typing import Annotated

import typer

from pyengine.cli.backend import open_async_engine
from pyengine.cli.display import note
from pyengine.cli.options import command
from pyengine.core.distribution import needs_serve_extra
from pyengine.core.errors import ConfigurationError
from pyengine.core.server_settings import ServerSettings
from pyengine.core.settings import EngineSettings

_LIBRARIES = ("fastapi", "h11", "prometheus_client", "pydantic", "pydantic_core", "uvicorn")


@command(max_num_waiting=1024)
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, local folder or GGUF file; without it the embedded model."),
    ] = None,
    settings: EngineSettings,
    server: ServerSettings,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API. SIGTERM or Ctrl-C lets what runs end, and leaves."""
    try:
        from pyengine.server import lifetime
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _LIBRARIES:
            raise
        raise ConfigurationError(needs_serve_extra("pyengine serve", missing)) from error
    # The address first: where it is taken nothing is loaded.
    with lifetime.listening(server) as socket, open_async_engine(settings) as engine:
        where = lifetime.address_of(server, socket)
        made = lifetime.make_server(engine, server, lambda: note(f"serving on {where}"))
        made.run(sockets=[socket])
