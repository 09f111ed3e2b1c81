"""Messages between ingress and replica: requests and their outputs."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.engine.model_limits import ModelLimits
from pyengine.outputs import RequestOutput
from pyengine.request.cache_hints import NO_HINTS, CacheHints
from pyengine.request.prompts import StrippedThinking
from pyengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a model that the ingress needs to accept requests."""

    description: dict[str, object]
    model_limits: ModelLimits
    default_params: SamplingParams
    model_path: str
    tokenizer: Any
    max_pinned_blocks: int = 0
    """Maximum number of blocks that the pins of a replica keep."""


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A validated request. `token_ids` is uint32 [T]; `key` is unique per attempt."""

    key: str
    request_id: str
    token_ids: npt.NDArray[np.uint32]
    params: SamplingParams
    cache_salt: str | None = None
    priority: float = 0
    cache_hints: CacheHints = NO_HINTS
    thinking: StrippedThinking | None = None
    tenant: bytes = b""

    @property
    def namespace(self) -> bytes:
        """The namespace of its blocks."""
        return b"" if self.cache_salt is None else self.cache_salt.encode()


def without_prompt(item: RequestOutput, *, is_first: bool) -> RequestOutput:
    """An output as a replica sends it: without the prompt, which the ingress has.

    Only the first one of a request has `prompt_logprobs` and `cache`, which is without its hint.
    """
    cache = item.cache if is_first else None
    return replace(
        item,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=item.prompt_logprobs if is_first else None,
        cache=None if cache is None else replace(cache, _hint=None),
    )
