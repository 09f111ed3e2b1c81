"""Logits to tokens. Knows torch and plain data; nothing of models, blocks or the cache."""

from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.logprobs import (
    PendingPromptLogprobs,
    PromptRows,
    TokenLogprobs,
    prompt_logprobs,
)
from pyengine.sampling.sampler import PendingSample, Sampled, Sampler
from pyengine.sampling.state import SamplingState, tokens_of_words

__all__ = [
    "PendingPromptLogprobs",
    "PendingSample",
    "PromptRows",
    "Sampled",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "TokenLogprobs",
    "prompt_logprobs",
    "tokens_of_words",
]
