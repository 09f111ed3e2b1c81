"""What the server asks of an engine: `AsyncEngine` has it, and so have several behind a router."""

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fastapi import APIRouter

from pyengine.engine.prompts import PromptLike
from pyengine.engine.request import Request
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.settings import ServerSettings


class ServedStream(Protocol):
    """The outputs of requests that were submitted together. See `OutputStream`."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Items of any of them as they come."""
        ...

    def close(self) -> None:
        """End what has not ended."""
        ...


class ServedLoad(Protocol):
    """How much there is to do."""

    @property
    def num_running(self) -> int:
        """Samples, or requests, that run."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        ...


class ServedEngine(Protocol):
    """An engine as routes see it; `AsyncEngine` says what each of these does."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, or None."""
        ...

    @property
    def model_path(self) -> Path:
        """The folder that the model was loaded from."""
        ...

    def describe(self) -> dict[str, object]:
        """See `AsyncEngine`."""
        ...

    def get_default_sampling_params(self) -> SamplingParams:
        """See `AsyncEngine`."""
        ...

    def prepare_structured_outputs(self) -> None:
        """See `AsyncEngine`."""
        ...

    def compile_structured_outputs(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[Any]:
        """See `AsyncEngine`."""
        ...

    def stats(self) -> ServedLoad:
        """See `AsyncEngine`."""
        ...

    def request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
    ) -> Request:
        """See `AsyncEngine`."""
        ...

    def submit(self, requests: Sequence[Request]) -> ServedStream:
        """See `AsyncEngine`."""
        ...

    def check_room(self) -> None:
        """See `AsyncEngine`."""
        ...

    async def abort(self, request_id: str) -> bool:
        """See `AsyncEngine`."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """See `AsyncEngine`."""
        ...

    def check_health(self) -> None:
        """See `AsyncEngine`."""
        ...


class Observed(Protocol):
    """Those who look on at an engine. See `Observation`."""

    @property
    def routers(self) -> Sequence[APIRouter]:
        """/metrics and /kv."""
        ...

    def open(self) -> None:
        """The server begins."""
        ...

    async def close(self) -> None:
        """It ends."""
        ...


Observe: TypeAlias = Callable[[Any, ServerSettings, str, Callable[[], bool]], Observed]
"""Makes them, of an engine, the settings, the model's name, and whether the server ends."""
