"""Logits to tokens. Knows torch and plain data; nothing of models, blocks or the cache."""

from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.host import upload
from pyengine.sampling.logprobs import (
    PendingPromptLogprobs,
    PromptRows,
    TokenLogprobs,
    prompt_logprobs,
)
from pyengine.sampling.sampler import PendingSample, Sampled, Sampler
from pyengine.sampling.state import SamplingState, tokens_of_words
from pyengine.sampling.structured import MaskFiller, TokenMasks, TokenMatcher
from pyengine.sampling.uniform import sample_seed

__all__ = [
    "MaskFiller",
    "PendingPromptLogprobs",
    "PendingSample",
    "PromptRows",
    "Sampled",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "TokenLogprobs",
    "TokenMasks",
    "TokenMatcher",
    "prompt_logprobs",
    "sample_seed",
    "tokens_of_words",
    "upload",
]
