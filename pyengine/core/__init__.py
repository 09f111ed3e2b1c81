"""Plain data that every other room speaks: requests' settings, results, errors."""

from pyengine.core.errors import (
    BrokenLogitsError,
    ConfigurationError,
    InvalidRequestError,
    ModelLoadError,
    PyEngineError,
)
from pyengine.core.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pyengine.core.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "BrokenLogitsError",
    "CompletionOutput",
    "ConfigurationError",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "PyEngineError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
