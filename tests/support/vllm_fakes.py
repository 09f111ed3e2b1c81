"""Small fakes of what the vLLM plugin touches; `tests/support/vllm_interface.json` names them."""

from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

KVCacheBlockCopy = namedtuple("KVCacheBlockCopy", "src_block_id dst_block_id")


class RequestStatus(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()


@dataclass
class PrefixCacheStats:
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        self.requests += not preempted
        self.preempted_requests += preempted
        self.queries += num_tokens
        self.hits += num_hits


@dataclass
class BlockStored:
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared:
    pass


@dataclass
class FullAttentionSpec:
    block_size: int = 4
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec:
    block_size: int = 4
    sliding_window: int = 8
    extra_retained_tokens: int = 0
    prefix_replay_tokens: int = 0

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return -(-tokens // self.block_size) + 1


@dataclass
class MambaSpec:
    block_size: int = 4
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None


class KVConnectorBase_V1:
    """A connector, which gets block ids."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        pass


class PoolConnector(KVConnectorBase_V1):
    """A connector that uses the pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool


class MultiConnector(KVConnectorBase_V1):
    """A connector over others."""

    def __init__(self, *connectors: KVConnectorBase_V1) -> None:
        self._connectors = connectors

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        for connector in self._connectors:
            connector.bind_kv_cache_manager(kv_cache_manager)


CLASSES = SimpleNamespace(
    KVConnectorBase_V1=KVConnectorBase_V1,
    KVCacheBlockCopy=KVCacheBlockCopy,
    RequestStatus=RequestStatus,
    PrefixCacheStats=PrefixCacheStats,
    BlockStored=BlockStored,
    BlockRemoved=BlockRemoved,
    AllBlocksCleared=AllBlocksCleared,
    FullAttentionSpec=FullAttentionSpec,
    MLAAttentionSpec=MLAAttentionSpec,
    SlidingWindowSpec=SlidingWindowSpec,
)


@dataclass(eq=False)
class Request:
    request_id: str
    _all_token_ids: list[int]
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    session_id: str | None = None
    num_in_flight_tokens: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self._all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)


def image(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def cache_config(num_blocks: int, *specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    settings = {
        "needs_kv_cache_zeroing": False,
        "hisparse_host_num_blocks": None,
        "prefix_cache_retention_interval": 0,
    }
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups, **(settings | more))


def engine_config(**more: Any) -> Any:
    """A `VllmConfig` of an engine that our manager supports."""
    model = {
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "enable_prompt_embeds": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | more.pop("model", {}))),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=more.pop("pcp", 1)),
        speculative_config=more.pop("drafts", None),
    )
