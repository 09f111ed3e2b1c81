"""State shared by the routes of a server: engine, settings, running calls."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Annotated

from fastapi import Depends, Request

from pyengine.errors import AdapterError
from pyengine.request.lora import LoRARequest
from pyengine.request.request import Request as EngineRequest
from pyengine.server.callers import Caller, require_admin
from pyengine.server.engine_protocol import EngineClient, EngineStream
from pyengine.server.errors import ApiError
from pyengine.server.explanations import Disclosure, RecentExplanations
from pyengine.server.schemas.slices import JsonThread
from pyengine.server.settings import ServerSettings
from pyengine.server.tokenizer_threads import TokenizerThreads
from pyengine.server.traffic import Traffic


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A running call: the engine's ids of its requests, its key, and the client's id for it."""

    request_ids: tuple[str, ...]
    key: bytes
    client_id: str | None


@dataclass(slots=True)
class ServerContext:
    """State of a server.

    `names` are the model's names, `live` holds the running calls by id.
    """

    engine: EngineClient
    settings: ServerSettings
    names: tuple[str, ...]
    tokenizers: TokenizerThreads
    max_model_len: int
    longest_text: int
    """No longer text fits into the model's context, in characters."""
    block_size: int
    """Tokens of a cached block."""
    traffic: Traffic = field(default_factory=Traffic)
    explanations: RecentExplanations = field(default_factory=RecentExplanations)
    json_thread: JsonThread = field(default_factory=JsonThread)
    created: int = field(default_factory=lambda: int(time.time()))
    live: dict[str, RunningCall] = field(default_factory=dict)
    num_open: int = 0
    """HTTP requests in progress, except those to /health."""
    num_open_of: Counter[str] = field(default_factory=Counter)
    """The same by the name of the key."""
    is_draining: bool = False
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is parsed."""
    num_resets: int = 0
    """Calls of `reset_prefix_cache` by an administrator, for all keys."""
    resets_of_keys: Counter[bytes] = field(default_factory=Counter)
    """Calls of `reset_prefix_cache` by each client, for its own key."""
    process: str = field(default_factory=token_hex)
    """Text of this process alone: what was stored after a reset is not found after a restart."""

    def check_model(self, name: str | None) -> str:
        """The model's name in responses. Raises `ApiError` (404) for any other model."""
        if name is None:
            return self.names[0]
        adapters = [each.lora_name for each in self.engine.list_loras()]
        if name not in self.names and name not in adapters:
            known = [*self.names, *adapters]
            raise ApiError(
                404,
                f"unknown model {name[:200]!r}; this server has {', '.join(known)}",
                param="model",
                code="model_not_found",
            )
        return name

    def lora_of(self, model: str) -> LoRARequest | None:
        """The adapter that a model's name stands for; None: it is the model itself."""
        return None if model in self.names else LoRARequest(model)

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter. Raises `AdapterError`, for a name of the model, too."""
        if lora_request.lora_name in self.names:
            raise AdapterError(
                f"{lora_request.lora_name!r} is the name of the model: give the adapter another one"
            )
        self.engine.add_lora(lora_request)

    @property
    def separates_keys(self) -> bool:
        """True if prompts share cached blocks only with prompts of the same key."""
        return len(self.settings.keys) > 1 and not self.settings.share_prefix_cache

    def salt(self, key: bytes, cache_salt: str | None) -> str | None:
        """The salt of a request: from its key if keys are separated, and from the client's salt.

        Each `reset_prefix_cache` changes it, so later requests match no earlier block. The parts
        are encoded as a list, so different parts never give equal salts.
        """
        digest = hashlib.sha256(key).hexdigest() if self.separates_keys else None
        resets = [self.num_resets, self.resets_of_keys[key]]
        if digest is None and cache_salt is None and not any(resets):
            return None
        process = self.process if any(resets) else None
        return json.dumps([process, *resets, digest, cache_salt])

    def reset(self, caller: Caller) -> None:
        """Hide cached blocks from later requests: of all keys for an admin, else of the caller's.

        Raises `ApiError` (403) for a client if keys share the cache.
        """
        if caller.is_admin:
            self.num_resets += 1
            return
        if not self.separates_keys:
            require_admin(caller, "/reset_prefix_cache with a shared cache")
        self.resets_of_keys[caller.key] += 1

    def reported_cached_tokens(self, num_cached: int) -> int:
        """The cached tokens of a prompt, rounded down to whole blocks.

        An exact count would reveal prompts of other clients, token by token.
        """
        if self.settings.exact_cached_tokens:
            return num_cached
        return num_cached - num_cached % self.block_size

    @property
    def disclosure(self) -> Disclosure:
        """The rules for explanations of cached tokens.

        Keys that share cached blocks do not get each other's texts.
        """
        has_neighbours = len(self.settings.keys) > 1
        is_shared = has_neighbours and not self.separates_keys
        is_exact = self.settings.exact_cached_tokens and not is_shared
        return Disclosure(self.block_size, is_exact, has_neighbours)

    def submit(
        self, name: str, key: bytes, client_id: str | None, requests: Sequence[EngineRequest]
    ) -> EngineStream:
        """Queue all requests of one call, or none. Call `finish` at its end.

        `name` is unique; `client_id` need not be.
        """
        stream = self.engine.submit(requests)
        request_ids = tuple([request.request_id for request in requests])
        self.live[name] = RunningCall(request_ids, key, client_id)
        return stream

    def calls_of(self, caller: Caller, ids: Sequence[str]) -> dict[str, list[RunningCall]]:
        """Running calls by the client's id or the response's id. Clients see their own only."""
        calls: dict[str, list[RunningCall]] = {name: [] for name in ids}
        of_answers = {name.removeprefix("chatcmpl-").removeprefix("cmpl-"): name for name in ids}
        for name, call in self.live.items():
            if not (caller.is_admin or call.key == caller.key):
                continue
            if name in of_answers:
                calls[of_answers[name]].append(call)
            elif call.client_id is not None and call.client_id in calls:
                calls[call.client_id].append(call)
        return calls

    def finish(self, name: str, stream: EngineStream) -> None:
        """End a call: its response was read, or its client is gone."""
        stream.close()
        self.live.pop(name, None)


async def context_of(request: Request) -> ServerContext:
    """The context of the server that received a request.

    A coroutine, because FastAPI calls plain functions in a thread, once per request.
    """
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]
"""The type of a route parameter that receives the context."""
