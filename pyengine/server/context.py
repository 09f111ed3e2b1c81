"""What the routes of one server share: the engine, the settings, who is served."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from pyengine.engine.request import Request as EngineRequest
from pyengine.server.engine_client import ServedEngine, ServedStream
from pyengine.server.errors import ApiError
from pyengine.server.middleware.auth import Caller, require_admin
from pyengine.server.middleware.traffic import Traffic
from pyengine.server.settings import ServerSettings
from pyengine.server.tokenizer_threads import TokenizerThreads


@dataclass(frozen=True, slots=True)
class Running:
    """A call that runs: the engine's ids of its requests, its key, and its id for the client."""

    request_ids: tuple[str, ...]
    key: bytes
    client_id: str | None


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
    block_size: int
    """Tokens of a cached block."""
    traffic: Traffic = field(default_factory=Traffic)
    created: int = field(default_factory=lambda: int(time.time()))
    live: dict[str, Running] = field(default_factory=dict)
    num_open: int = 0
    """HTTP requests that are being answered, those to /health aside."""
    is_draining: bool = False
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is read."""
    num_resets: int = 0
    """How often the cache was emptied by `reset_prefix_cache`, for all keys."""
    resets_of_keys: Counter[bytes] = field(default_factory=Counter)
    """How often a client emptied it for its own key."""

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

    @property
    def separates_keys(self) -> bool:
        """True if prompts share cached blocks only with those of the same key."""
        return len(self.settings.keys) > 1 and not self.settings.share_prefix_cache

    def salt(self, key: bytes, cache_salt: str | None) -> str | None:
        """The salt of a request: of its key where keys are separated, and the client's own.

        After `reset_prefix_cache` it is another one: no request finds what was cached before.
        Each part has its place, so no part of one request equals another part of a different one.
        """
        digest = hashlib.sha256(key).hexdigest() if self.separates_keys else None
        resets = [self.num_resets, self.resets_of_keys[key]]
        if digest is None and cache_salt is None and not any(resets):
            return None
        return json.dumps([*resets, digest, cache_salt])

    def reset(self, caller: Caller) -> None:
        """Have what is cached found by no later request: an admin's for all, else of the key.

        Raises `ApiError` (403) where a key has no cached prompts to itself.
        """
        if caller.is_admin:
            self.num_resets += 1
            return
        if not self.separates_keys:
            require_admin(caller, "/reset_prefix_cache, where keys share the cache,")
        self.resets_of_keys[caller.key] += 1

    def reported_cached_tokens(self, num_cached: int) -> int:
        """The cached tokens of a prompt as a client may see them: whole blocks.

        A count that is exact grows with each token that somebody else has sent before.
        """
        if self.settings.exact_cached_tokens:
            return num_cached
        return num_cached - num_cached % self.block_size

    def submit(
        self, name: str, key: bytes, client_id: str | None, requests: Sequence[EngineRequest]
    ) -> ServedStream:
        """Queue the requests of one call, all or none; `leave` is called at its end.

        `name` is the server's and is new; `client_id` may be that of other calls, too.
        """
        stream = self.engine.submit(requests)
        request_ids = tuple([request.request_id for request in requests])
        self.live[name] = Running(request_ids, key, client_id)
        return stream

    def calls_of(self, caller: Caller, wanted: Sequence[str]) -> dict[str, list[Running]]:
        """Calls of a key, for an admin of any, by the client's id or by the answer's."""
        calls: dict[str, list[Running]] = {name: [] for name in wanted}
        of_answers = {name.removeprefix("chatcmpl-").removeprefix("cmpl-"): name for name in wanted}
        for name, call in self.live.items():
            if not (caller.is_admin or call.key == caller.key):
                continue
            if name in of_answers:
                calls[of_answers[name]].append(call)
            elif call.client_id is not None and call.client_id in calls:
                calls[call.client_id].append(call)
        return calls

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
