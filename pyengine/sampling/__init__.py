"""Logits to tokens. Knows torch and plain data; nothing of models, blocks or the cache."""

from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs, prompt_logprobs
from pyengine.sampling.sampler import PendingSample, Sampled, Sampler
from pyengine.sampling.state import SamplingState

__all__ = [
    "PendingLogprobs",
    "PendingSample",
    "Sampled",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "TokenLogprobs",
    "prompt_logprobs",
]
