"""The parts of vLLM that the plugin relies on: signatures, fields, and calling lines.

    .venv-peers/bin/python -m tests.support.vllm_interface

writes it down from the vLLM that is installed; `tests/peers` compares, `tests/unit/integrations`
holds our manager and the fakes to what is written.
"""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")

SIGNATURES = (
    "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.estimate_cached_tokens",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.finalize_partial_tail_offloads",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.free",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids_for_computed_tokens",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks_for_connector",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_num_common_prefix_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.make_prefix_cache_stats",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.new_step_starts",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.pop_blocks_for_free",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.prefix_cache_lookup_enabled",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.record_blocks_for_zeroing",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.record_prefix_cache_stats",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.remove_skipped_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.reset_prefix_cache",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.take_boundary_state_offloads",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.take_events",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.take_kv_cache_block_copies",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.take_new_block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.truncate_computed_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_unhashed_block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_unhashed_block_ids_all_groups",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.new_empty",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__",
    "vllm.v1.core.sched.scheduler.Scheduler._build_kv_connector_meta",
    "vllm.v1.core.sched.scheduler.Scheduler._make_cached_request_data",
    "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.bind_gpu_block_pool",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.bind_kv_cache_manager",
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher",
    "vllm.v1.metrics.stats.PrefixCacheStats.record",
)
FIELDS = (
    "vllm.distributed.kv_events.AllBlocksCleared",
    "vllm.distributed.kv_events.BlockRemoved",
    "vllm.distributed.kv_events.BlockStored",
    "vllm.v1.core.kv_cache_utils.KVCacheBlockCopy",
    "vllm.v1.core.sched.output.CachedRequestData",
    "vllm.v1.outputs.KVConnectorOutput",
    "vllm.v1.kv_cache_interface.KVCacheConfig",
    "vllm.v1.kv_cache_interface.FullAttentionSpec",
    "vllm.v1.metrics.stats.PrefixCacheStats",
)
REQUEST = "vllm.v1.request.Request"
CALLERS = ("vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler")


def find(path: str) -> Any:
    """The class or method of a dotted path."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def parameters(function: Any) -> list[str]:
    """Names and defaults, without types."""
    signature = inspect.signature(function)
    bare = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    return [re.sub(r" object at 0x\w+", "", str(each)) for each in bare]


def fields(cls: Any) -> list[str]:
    """Names of what its instances hold."""
    if dataclasses.is_dataclass(cls):
        return [each.name for each in dataclasses.fields(cls)]
    named = getattr(cls, "_fields", None) or getattr(cls, "__struct_fields__", None)
    return list(named or ())


def describe() -> dict[str, Any]:
    """The interface of the vLLM that is installed."""
    uses = set()
    for name in CALLERS:
        source = inspect.getsource(importlib.import_module(name))
        uses |= set(re.findall(r"self\.kv_cache_manager\.(\w+(?:\.\w+)?)", source))
    request = inspect.getsource(find(REQUEST))
    return {
        "signatures": {path: parameters(find(path)) for path in SIGNATURES},
        "fields": {path: fields(find(path)) for path in FIELDS},
        "request": sorted(set(re.findall(r"self\.(\w+)\s*(?::[^=\n]+)?=[^=]", request))),
        "statuses": [status.name for status in find("vllm.v1.request.RequestStatus")],
        "uses": sorted(uses),
    }


def drift(now: Any, then: Any, at: str = "") -> list[str]:
    """What is different now, in words."""
    if isinstance(now, dict) and isinstance(then, dict):
        keys = sorted(set(now) | set(then))
        return [line for key in keys for line in drift(now.get(key), then.get(key), f"{at}/{key}")]
    return [] if now == then else [f"{at}: was {then}, is {now}"]


def recorded() -> dict[str, Any]:
    """What is written down."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(describe(), indent=1) + "\n", encoding="utf-8")
