"""The public names of pyengine."""

from pyengine.async_engine import AsyncEngine
from pyengine.kv_cache import (
    BlockManager,
    Extended,
    KvError,
    Loading,
    NoBudget,
    NoRoom,
    Pin,
    PoolUsage,
    Prefilled,
    Remapping,
    ReplayReport,
    Sequence,
    SharedPrefixes,
    Stats,
    StepBuffers,
    StepPlan,
    Transfer,
    replay,
)
from pyengine.llm import LLM
from pyengine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pyengine.pooling_params import PoolingParams
from pyengine.request.lora import LoRARequest
from pyengine.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputs,
)

__version__: str

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockManager",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Extended",
    "KvError",
    "LoRARequest",
    "Loading",
    "NoBudget",
    "NoRoom",
    "Pin",
    "PoolUsage",
    "PoolingParams",
    "Prefilled",
    "Remapping",
    "ReplayReport",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "Sequence",
    "SharedPrefixes",
    "Stats",
    "StepBuffers",
    "StepPlan",
    "StructuredOutputs",
    "Transfer",
    "__version__",
    "replay",
]
