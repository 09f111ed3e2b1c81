"""The interface through which the server uses an engine, or replicas behind a router."""

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fastapi import APIRouter

from pyengine.engine.adapters import LoadedLoRA
from pyengine.engine.pooler import Pooler
from pyengine.outputs import RequestOutput
from pyengine.request.cache_hints import NO_HINTS, CacheHints
from pyengine.request.lora import LoRARequest
from pyengine.request.prompts import PromptLike, StrippedThinking
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.settings import ServerSettings


class EngineStream(Protocol):
    """Outputs of requests that were submitted together. See `OutputStream`."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Outputs of all requests as they arrive."""

    def close(self) -> None:
        """Abort the requests that have not finished."""


class EngineLoad(Protocol):
    """Load of an engine."""

    @property
    def num_running(self) -> int:
        """Running sequences, or running requests of replicas."""

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""


class EngineClient(Protocol):
    """An engine as the routes use it. `AsyncEngine` documents the methods."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, or None."""

    @property
    def model_path(self) -> Path:
        """The folder of the model."""

    @property
    def max_pinned_blocks(self) -> int:
        """Maximum number of blocks that all pins of callers keep; 0: there are no pins."""

    @property
    def pooler(self) -> Pooler:
        """See `AsyncEngine`. Raises `InvalidRequestError` if nothing can be embedded."""

    def describe(self) -> dict[str, object]:
        """See `AsyncEngine`."""

    def get_default_sampling_params(self) -> SamplingParams:
        """See `AsyncEngine`."""

    def prepare_structured_outputs(self) -> None:
        """See `AsyncEngine`."""

    def compile_structured_outputs(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[Any]:
        """See `AsyncEngine`."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `AsyncEngine`."""

    def remove_lora(self, lora_name: str) -> bool:
        """See `AsyncEngine`."""

    def list_loras(self) -> Sequence[LoadedLoRA]:
        """See `AsyncEngine`."""

    def stats(self) -> EngineLoad:
        """See `AsyncEngine`."""

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
        """See `AsyncEngine`."""

    def submit(self, requests: Sequence[Request]) -> EngineStream:
        """See `AsyncEngine`."""

    def load_of(self, tenant: bytes) -> EngineLoad:
        """See `AsyncEngine`."""

    def check_room(self, tenant: bytes = b"") -> None:
        """See `AsyncEngine`."""

    async def abort(self, request_id: str) -> bool:
        """See `AsyncEngine`."""

    async def drain(self, timeout: float | None = None) -> bool:
        """See `AsyncEngine`."""

    def check_health(self) -> None:
        """See `AsyncEngine`."""


@runtime_checkable
class ChangeableEngine(Protocol):
    """An engine whose weights can change, and that can sleep. `AsyncEngine` documents it."""

    weights_version: int
    is_sleeping: bool

    async def update_weights(self, weights: str, *, mode: Any) -> int:
        """See `AsyncEngine`."""

    async def sleep(self, level: int, *, mode: Any) -> None:
        """See `AsyncEngine`."""

    async def wake_up(self, tags: Sequence[str] | None, *, weights: str | None) -> None:
        """See `AsyncEngine`."""


class Observers(Protocol):
    """Observers of an engine. See `EngineObservers`."""

    @property
    def routers(self) -> Sequence[APIRouter]:
        """Routers of /metrics and /kv."""

    def open(self) -> None:
        """Start with the server."""

    async def close(self) -> None:
        """Stop with the server."""


MakeObservers: TypeAlias = Callable[[Any, ServerSettings, str, Callable[[], bool]], Observers]
"""Creates observers from engine, settings, model name, and a function: is the server draining?"""
