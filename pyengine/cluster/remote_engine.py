"""An `EngineClient` over replicas: validates requests here and runs them on a replica."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Never, Protocol
from uuid import uuid4

import numpy as np

from pyengine.cluster.calls import ModelInfo, RemoteRequest
from pyengine.cluster.prefix_router import PrefixRouter
from pyengine.engine.adapters import LoadedLoRA
from pyengine.engine.explain import with_hint
from pyengine.engine.input_processor import InputProcessor, refuse_taken
from pyengine.errors import (
    AdapterError,
    EngineClosedError,
    InvalidRequestError,
    NoReplicaError,
    ReplicaLostError,
)
from pyengine.outputs import CacheExplanation, RequestOutput
from pyengine.request.cache_hints import NO_HINTS, CacheHints
from pyengine.request.lora import LoRARequest
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompts import (
    PromptLike,
    StrippedThinking,
    match_params,
    parse_prompt,
    salted,
)
from pyengine.request.request import Request, RequestOptions
from pyengine.sampling_params import SamplingParams, StructuredOutputs

_POLL_SECONDS = 0.02
_TRIES = 3
"""Attempts of a request if its replica is lost."""


class Replicas(Protocol):
    """The replicas behind an ingress, independent of the transport."""

    def generate(self, request: RemoteRequest) -> AsyncGenerator[RequestOutput]:
        """Run a request on a replica.

        Raises `ReplicaLostError` if the replica is lost, `NoReplicaError` without replicas.
        """

    def begun(self, key: str, num_prompt: int, num_cached: int) -> None:
        """Record the first output of a request: tokens of the prompt, and cached ones."""

    def ended(self, key: str) -> None:
        """Record the end of a request."""

    async def abort(self, request_id: str) -> bool:
        """Abort a running request; its stream ends with the tokens so far. False if unknown."""

    async def ask(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of one replica. Raises `NoReplicaError` if it is unknown."""

    async def ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of each replica. The result omits replicas that fail."""

    def names(self) -> list[str]:
        """Names of the replicas that accept requests."""

    @property
    def router(self) -> PrefixRouter | None:
        """The router; None before the first replica has joined."""


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """Requests at replicas: with a first output (running), and without (waiting)."""

    num_running: int
    num_waiting: int


class RemoteEngine:
    """Accepts requests like an `AsyncEngine` and runs them on replicas. For one event loop.

    If a replica is lost, its requests without an output are sent to another one. The others fail
    with `ReplicaLostError`.
    """

    def __init__(self, replicas: Replicas, about: ModelInfo, *, seed: int = 0) -> None:
        self.replicas = replicas
        self._about = about
        self.tokenizer = about.tokenizer
        self.model_path = Path(about.model_path)
        block_size = int(str(about.description["block_size"]))
        # Replicas cache the log-probabilities of prompts, the ingress does not.
        no_cache = PromptEntryCache(0, block_size)
        self._input_processor = InputProcessor(
            about.model_limits, no_cache, tokenizer=about.tokenizer, seed=seed
        )
        self._live: dict[str, _Remote] = {}
        self._is_draining = False
        self._num_created = 0

    def describe(self) -> dict[str, object]:
        """The description of a replica; all are alike."""
        return dict(self._about.description)

    def get_default_sampling_params(self) -> SamplingParams:
        """See `AsyncEngine.get_default_sampling_params`."""
        return self._about.default_params

    def prepare_structured_outputs(self) -> None:
        """See `AsyncEngine.prepare_structured_outputs`: the ingress validates grammars, too."""
        self._input_processor.grammars.prepare()

    def compile_structured_outputs(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[Any]:
        """See `AsyncEngine.compile_structured_outputs`."""
        return self._input_processor.grammars.compile(structured_outputs, tenant)

    @property
    def max_pinned_blocks(self) -> int:
        """Maximum number of blocks that all pins of a replica keep."""
        return self._about.max_pinned_blocks

    @property
    def pooler(self) -> Never:
        """Raises `InvalidRequestError`: replicas return no hidden states."""
        raise InvalidRequestError(
            "replicas behind a router embed, score and classify nothing: ask a server of one engine"
        )

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Raises `AdapterError`: replicas have no adapters."""
        raise _no_adapters()

    def remove_lora(self, lora_name: str) -> bool:
        """Raises `AdapterError`: replicas have no adapters."""
        raise _no_adapters()

    def list_loras(self) -> Sequence[LoadedLoRA]:
        """None: replicas have no adapters."""
        return ()

    def stats(self) -> RemoteLoad:
        """The current load."""
        begun = sum([request.has_begun for request in self._live.values()])
        return RemoteLoad(begun, len(self._live) - begun)

    def request(  # noqa: PLR0913
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
        tenant: bytes = b"",
        cache_hints: CacheHints = NO_HINTS,
        thinking: StrippedThinking | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """See `AsyncEngine.request`."""
        if lora_request is not None:
            raise _no_adapters()
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        parsed = replace(parsed, thinking=thinking)
        (params,) = match_params(sampling_params, 1, self._about.default_params)
        self._num_created += 1
        name = f"{self._num_created}" if request_id is None else request_id
        options = RequestOptions(priority=priority, tenant=tenant, cache_hints=cache_hints)
        return self._input_processor.request(name, parsed, params, options)

    def submit(self, requests: Sequence[Request]) -> "RemoteStream":
        """See `AsyncEngine.submit`. Call it on the event loop."""
        self.check_room()
        refuse_taken(requests, self._live)
        stream = RemoteStream(
            self, [_Remote(request, index) for index, request in enumerate(requests)]
        )
        self._live.update({request.state.request_id: request for request in stream.requests})
        return stream

    def load_of(self, tenant: bytes) -> RemoteLoad:
        """The load of a tenant's requests."""
        own = [request for request in self._live.values() if request.state.tenant == tenant]
        begun = sum([request.has_begun for request in own])
        return RemoteLoad(begun, len(own) - begun)

    def check_room(self, tenant: bytes = b"") -> None:
        """See `AsyncEngine.check_room`; replicas limit their queues themselves."""
        if self._is_draining:
            raise EngineClosedError("the engine is draining and accepts no more requests")
        self.check_health()

    async def run(self, remote: "_Remote") -> AsyncGenerator[RequestOutput]:
        """The outputs of one request. Retries on another replica before the first output."""
        for remaining in reversed(range(_TRIES)):
            call = _call(remote.state)
            try:
                async with aclosing(self.replicas.generate(call)) as outputs:
                    async for output in outputs:
                        if not remote.has_begun:
                            num_prompt = len(call.token_ids)
                            self.replicas.begun(call.key, num_prompt, output.num_cached_tokens)
                        remote.has_begun = True
                        yield remote.completed(output)
                return
            except ReplicaLostError:
                if remote.has_begun or not remaining:
                    raise
            finally:
                self.replicas.ended(call.key)

    async def abort(self, request_id: str) -> bool:
        """See `AsyncEngine.abort`."""
        return request_id in self._live and await self.replicas.abort(request_id)

    def leave(self, requests: "Sequence[_Remote]") -> None:
        """Remove requests that have ended or whose caller has stopped reading."""
        for request in requests:
            if self._live.get(request.state.request_id) is request:
                del self._live[request.state.request_id]

    async def drain(self, timeout: float | None = None) -> bool:
        """See `AsyncEngine.drain`."""
        self._is_draining = True
        end = None if timeout is None else monotonic() + timeout
        while self._live:
            if end is not None and monotonic() >= end:
                await asyncio.gather(*[self.replicas.abort(name) for name in self._live])
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def check_health(self) -> None:
        """Raise `NoReplicaError` if no replica takes requests."""
        if not self.replicas.names():
            raise NoReplicaError("no replica is available: try again later")


def _call(state: Request) -> RemoteRequest:
    return RemoteRequest(
        key=uuid4().hex,
        request_id=state.request_id,
        token_ids=np.asarray(state.prompt_token_ids, dtype=np.uint32),
        params=state.params,
        cache_salt=state.namespace.decode() or None,
        priority=state.priority,
        cache_hints=state.cache_hints,
        thinking=state.thinking,
        tenant=state.tenant,
    )


class _Remote:
    """A request in progress at a replica."""

    def __init__(self, state: Request, index: int) -> None:
        self.state = state
        self.index = index
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None
        self._first: RequestOutput | None = None
        self._cache: CacheExplanation | None = None
        self._ids = [int(token) for token in state.prompt_token_ids]

    def completed(self, output: RequestOutput) -> RequestOutput:
        """A replica's output with what it leaves out: the prompt, and the first output's part."""
        if self._first is None:
            self._first = output
            if output.cache is not None:
                self._cache = with_hint(output.cache, self._ids, self.state.rules.tokenizer)
        return replace(
            output,
            prompt=self.state.prompt,
            prompt_token_ids=self._ids,
            prompt_logprobs=self._first.prompt_logprobs,
            index=self.index,
            cache=self._cache,
            pin_error=self._first.pin_error,
        )

    def cancel(self) -> None:
        """Abort the request: its caller has stopped reading."""
        if self.task is not None:
            self.task.cancel()


class RemoteStream:
    """Outputs of requests that were submitted together. See `OutputStream`."""

    def __init__(self, engine: RemoteEngine, requests: "list[_Remote]") -> None:
        self._engine = engine
        self.requests = requests
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        for request in requests:
            request.task = asyncio.create_task(self._run(request))

    async def _run(self, remote: _Remote) -> None:
        try:
            async with aclosing(self._engine.run(remote)) as items:
                async for item in items:
                    self._items.put_nowait(item)
        except Exception as error:
            self._items.put_nowait(error)
        finally:
            self._engine.leave([remote])

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """See `OutputStream`: ends after all requests, or raises the first error."""
        remaining = len(self.requests)
        while remaining:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            remaining -= item.finished
            yield item

    def close(self) -> None:
        """Abort the requests that have not finished. Idempotent."""
        self._engine.leave(self.requests)
        for request in self.requests:
            request.cancel()


def _no_adapters() -> AdapterError:
    return AdapterError("replicas have no LoRA adapters yet: serve them from one engine")
