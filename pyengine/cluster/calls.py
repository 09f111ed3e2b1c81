"""What goes between the ingress and a replica: requests one way, what is new of them the other."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.engine.input_processor import ModelLimits
from pyengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pyengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class About:
    """What the ingress has to know of a model to take requests for it."""

    description: dict[str, object]
    model_limits: ModelLimits
    default_params: SamplingParams
    model_path: str
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A request that was checked, on its way. `token_ids` is uint32 [T].

    `key` is its own, another one each time that it is sent.
    """

    key: str
    request_id: str
    token_ids: npt.NDArray[np.uint32]
    params: SamplingParams
    cache_salt: str | None = None
    priority: float = 0

    @property
    def namespace(self) -> bytes:
        """What its blocks are named under."""
        return b"" if self.cache_salt is None else self.cache_salt.encode()


@dataclass(frozen=True, slots=True)
class Delta:
    """A `RequestOutput` without what the ingress knows: the prompt.

    `prompt_logprobs` is in the first one of a request alone.
    """

    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None

    @classmethod
    def of(cls, item: RequestOutput, *, is_first: bool) -> "Delta":
        """What goes out of an item."""
        return cls(
            outputs=item.outputs,
            finished=item.finished,
            num_cached_tokens=item.num_cached_tokens,
            metrics=item.metrics,
            error=item.error,
            prompt_logprobs=item.prompt_logprobs if is_first else None,
        )
