"""Plain data that every other room speaks: requests' settings, results, errors."""

from pyengine.core.errors import (
    BrokenLogitsError,
    ConfigurationError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    PyEngineError,
    QueueFullError,
    RequestFailedError,
    StructuredOutputError,
)
from pyengine.core.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pyengine.core.sampling_params import RequestOutputKind, SamplingParams
from pyengine.core.structured_outputs import StructuredOutputs

__all__ = [
    "BrokenLogitsError",
    "CompletionOutput",
    "ConfigurationError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineDeadError",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "PyEngineError",
    "QueueFullError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputError",
    "StructuredOutputs",
]
