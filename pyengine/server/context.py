"""What the routes of one server share: the engine, the settings, who is served."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from pyengine.core.server_settings import ServerSettings
from pyengine.engine import RequestState
from pyengine.server.errors import ApiError
from pyengine.server.rendering import TokenizerThreads
from pyengine.server.served import ServedEngine, ServedStream


@dataclass(frozen=True, slots=True)
class Running:
    """A call that runs: the engine's ids of its requests, and the key that it came with."""

    request_ids: tuple[str, ...]
    key: bytes


@dataclass(slots=True)
class ServerContext:
    """A server as its routes see it.

    `names` are those of the model, `live` the calls that run, by their ids.
    """

    engine: ServedEngine
    settings: ServerSettings
    names: tuple[str, ...]
    tokenizers: TokenizerThreads
    max_model_len: int
    longest_text: int
    """Characters of a prompt that may fit into the model."""
    created: int = field(default_factory=lambda: int(time.time()))
    live: dict[str, Running] = field(default_factory=dict)
    num_open: int = 0
    """HTTP requests that are being answered, those to /health aside."""
    is_draining: bool = False
    num_resets: int = 0
    """How often the cache was emptied by `reset_prefix_cache`."""

    def check_model(self, name: str | None) -> str:
        """The model's name as the client calls it. Raises `ApiError` (404) for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; {', '.join(self.names)} is",
                param="model",
                code="model_not_found",
            )
        return name

    def salt(self, key: bytes, cache_salt: str | None) -> str | None:
        """The salt of a request: the client's own, or with `salt_by_key` one of its key, too.

        After `reset_prefix_cache` another one: what was cached before is not found any more.
        """
        parts = [] if cache_salt is None else [cache_salt]
        if self.settings.salt_by_key:
            parts = [hashlib.sha256(key).hexdigest(), *parts]
        if self.num_resets:
            parts = [f"{self.num_resets}", *parts]
        return json.dumps(parts) if parts else None

    def submit(self, name: str, key: bytes, requests: Sequence[RequestState]) -> ServedStream:
        """Queue the requests of one call, all or none; `leave` is called at its end."""
        if name in self.live:
            raise ApiError(
                400, f"request id {name!r} is in use: send another one, or none", param="request_id"
            )
        stream = self.engine.submit(requests)
        self.live[name] = Running(tuple([one.request_id for one in requests]), key)
        return stream

    def leave(self, name: str, stream: ServedStream) -> None:
        """Nobody reads the answer of this call any more, or all of it was read."""
        stream.close()
        self.live.pop(name, None)


async def context_of(request: Request) -> ServerContext:
    """The context of the server that a request came to. (Were it no coroutine, FastAPI would have
    a thread call it, for each request.)"""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]
"""A route's parameter."""
