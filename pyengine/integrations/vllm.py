"""A plugin for vLLM 0.32 that replaces its KV-cache manager.

    PYENGINE_BLOCK_MANAGER=1 vllm serve MODEL

vLLM calls `register` (entry point `vllm.general_plugins`) in every process, before the Scheduler is
created. Unsupported configurations use vLLM's own manager, and the log says why.
"""

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from pyengine.integrations.vllm_manager import KVCacheManager
from pyengine.integrations.vllm_states import by_kind

SWITCH = "PYENGINE_BLOCK_MANAGER"
PLUGIN = "pyengine-vllm"
SERIES = "0.32"

logger = logging.getLogger("vllm.pyengine")  # a child of vLLM's logger, for the same format

_scheduler: ContextVar[Any] = ContextVar("scheduler", default=None)


class State:
    """State of the plugin in this process: number of our managers, reasons for vLLM's own."""

    engaged = 0
    reasons: list[str]

    def __init__(self) -> None:
        self.reasons = []
        self.needs_hashes = True


state = State()


def is_enabled() -> bool:
    """True if the plugin is on: by the switch, or by its name in `VLLM_PLUGINS`."""
    switch = os.environ.get(SWITCH)
    if switch is not None:
        return switch not in ("", "0")
    return PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """The entry point."""
    if not is_enabled():
        return
    version = vllm_version()
    if version.rpartition(".")[0] != SERIES:
        logger.warning(
            "pyengine's block manager supports vLLM %s.x, not %s: using vLLM's own", SERIES, version
        )
        return
    install()


def vllm_version() -> str:
    """The installed version of vLLM without its build suffix."""
    version: str = importlib.import_module("vllm").__version__
    return ".".join(version.partition("+")[0].split(".")[:3])


def install() -> None:
    """Replace vLLM's manager by ours. Idempotent."""
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
    if getattr(scheduler.KVCacheManager, "_pyengine", False):
        return
    scheduler.KVCacheManager = manager_factory(scheduler.KVCacheManager)
    _wrap(scheduler.Scheduler, "__init__", _with_scheduler)
    _wrap(scheduler.Scheduler, "_make_cached_request_data", _with_merged_tables)
    _wrap(scheduler.Scheduler, "_build_kv_connector_meta", _with_planned_loads)
    _wrap(scheduler.Scheduler, "update_from_output", _with_ended_loads)
    _wrap(importlib.import_module("vllm.v1.engine.core"), "get_request_block_hasher", _if_needed)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _with_scheduler(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """`Scheduler.__init__`: makes the Scheduler available to the manager created inside."""
    token = _scheduler.set(scheduler)
    try:
        original(scheduler, *args, **kwargs)
    finally:
        _scheduler.reset(token)


def _with_merged_tables(
    original: Any, scheduler: Any, running_reqs: Any, *args: Any, **kwargs: Any
) -> Any:
    """`_make_cached_request_data`: sends new block tables of merged requests to the workers.

    Only if each step ends before the next one is planned. An id in `resumed_req_ids` replaces the
    whole table of a request.
    """
    data = original(scheduler, running_reqs, *args, **kwargs)
    manager = scheduler.kv_cache_manager
    if isinstance(manager, KVCacheManager) and replaces_tables(scheduler):
        tables = manager.merged_tables(running_reqs)
        for index, request in enumerate(running_reqs if tables else ()):
            table = tables.get(request.request_id)
            if table is not None:
                data.new_block_ids[index] = table
                data.resumed_req_ids.add(request.request_id)
    return data


def _with_planned_loads(
    original: Any, scheduler: Any, connector: Any, scheduler_output: Any
) -> Any:
    """`_build_kv_connector_meta`: the manager learns which step its synchronous loads are in."""
    if isinstance(scheduler.kv_cache_manager, KVCacheManager):
        scheduler.kv_cache_manager.loads_planned(scheduler_output)
    return original(scheduler, connector, scheduler_output)


def _with_ended_loads(
    original: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """`update_from_output`: the manager learns first which blocks a step did not load."""
    if isinstance(scheduler.kv_cache_manager, KVCacheManager):
        output = model_runner_output.kv_connector_output
        invalid = output.invalid_block_ids if output else ()
        scheduler.kv_cache_manager.loads_ended(scheduler_output, invalid)
    return original(scheduler, scheduler_output, model_runner_output)


def replaces_tables(scheduler: Any) -> bool:
    """True if tables of running requests can be replaced: one step at a time, runner v1, and no
    connector, which may save blocks by the ids that it got first."""
    overlapping = scheduler.scheduler_config.async_scheduling or scheduler.use_pp
    return not (overlapping or scheduler.use_v2_model_runner or scheduler.connector)


def _if_needed(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_request_block_hasher`: our manager does not need vLLM's hashes, connectors may."""
    return original(*args, **kwargs) if state.needs_hashes else None


def manager_factory(own: type) -> Callable[..., Any]:
    """A factory that the Scheduler calls instead of `KVCacheManager`."""
    classes = vllm_classes()

    def make(kv_cache_config: Any, **settings: Any) -> Any:
        settings["kv_cache_config"] = kv_cache_config
        scheduler = _scheduler.get()
        reason = out_of_scope(settings, scheduler, classes)
        state.needs_hashes = reason is not None or getattr(scheduler, "connector", None) is not None
        if reason is not None:
            state.reasons.append(reason)
            logger.warning("using vLLM's block manager, not pyengine's: %s", reason)
            return own(**settings)
        state.engaged += 1
        logger.info("using pyengine's block manager")
        return KVCacheManager(**settings, classes=classes)

    make._pyengine = True  # type: ignore[attr-defined]
    return make


def vllm_classes() -> SimpleNamespace:
    """vLLM's classes of returned and inspected objects."""
    modules = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorBase_V1",),
        "vllm.distributed.kv_events": ("AllBlocksCleared", "BlockRemoved", "BlockStored"),
        "vllm.v1.core.kv_cache_utils": ("KVCacheBlockCopy",),
        "vllm.v1.kv_cache_interface": (
            "FullAttentionSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
        ),
        "vllm.v1.metrics.stats": ("PrefixCacheStats",),
        "vllm.v1.request": ("RequestStatus",),
    }
    return SimpleNamespace(
        **{
            name: getattr(importlib.import_module(module), name)
            for module, names in modules.items()
            for name in names
        }
    )


def out_of_scope(settings: dict[str, Any], scheduler: Any, classes: Any) -> str | None:
    """The reason to use vLLM's own manager; None if ours supports the configuration.

    `scheduler` is being created: it has a configuration and a connector, or is None.
    """
    return next((reason for reason in _reasons(settings, scheduler, classes) if reason), None)


def _reasons(settings: dict[str, Any], scheduler: Any, classes: Any) -> Any:
    cache = settings["kv_cache_config"]
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if not specs:
        yield "the model has no KV cache"
    attention, recurrent = by_kind(specs)
    for spec in attention:
        yield from _reasons_of_the_layers(spec, classes)
    if recurrent:
        yield from _reasons_of_states(settings, attention, recurrent, scheduler)
    yield from _reasons_of_the_blocks(settings, attention, recurrent)
    for name in ("dcp_world_size", "pcp_world_size"):
        if settings.get(name, 1) > 1:
            yield f"context parallelism ({name} is {settings[name]})"
    if settings.get("use_eagle"):
        yield "EAGLE drops the last block of a hit"
    if settings.get("num_prefill_lookahead"):
        yield "drafters of several modules recompute the end of a prompt"
    if settings.get("metrics_collector") is not None:
        yield "kv_cache_metrics follows vLLM's own blocks"
    if cache.prefix_cache_retention_interval and not recurrent:
        # With 0, all blocks are cached here.
        yield f"prefix_cache_retention_interval is {cache.prefix_cache_retention_interval}"
    if cache.hisparse_host_num_blocks:
        yield "HiSparse keeps blocks on the host"
    if scheduler is not None:
        yield from _reasons_of_the_engine(scheduler.vllm_config)
        yield from _reasons_of_the_connector(scheduler.connector, classes.KVConnectorBase_V1)
    if [getattr(spec, "sliding_window", None) for spec in specs] != [None]:
        yield from _reasons_of_windows(settings, scheduler)


def _reasons_of_states(
    settings: dict[str, Any], attention: list[Any], recurrent: list[Any], scheduler: Any
) -> Any:
    """Groups of recurrent layers beside those of attention layers."""
    if len(attention) != 1 or getattr(attention[0], "sliding_window", None):
        yield "recurrent layers without exactly one group of full attention"
    kinds = {
        (
            spec.block_size,
            spec.mamba_cache_mode,
            spec.num_prefill_checkpoint_blocks,
            spec.prefill_checkpoint_alignment,
        )
        for spec in recurrent
    }
    if len(kinds) > 1:
        yield "groups of recurrent layers differ"
    if any(spec.num_speculative_blocks for spec in recurrent) or (
        scheduler is not None and scheduler.vllm_config.speculative_config is not None
    ):
        yield "recurrent layers with speculative decoding"
    mode = "align" if settings.get("enable_caching", True) else "none"
    if recurrent[0].mamba_cache_mode != mode:
        yield f"mamba_cache_mode is {recurrent[0].mamba_cache_mode}, not {mode}"
    interval = settings["kv_cache_config"].prefix_cache_retention_interval or 0
    if interval < 0 or interval % settings["scheduler_block_size"]:
        yield f"prefix_cache_retention_interval is {interval}"


def _reasons_of_windows(settings: dict[str, Any], scheduler: Any) -> Any:
    """Several groups of layers, or one with a window."""
    if settings.get("enable_kv_cache_events"):
        yield "events name the group of layers"
    if scheduler is not None and scheduler.connector is not None:
        yield "a connector reads blocks of several groups of layers, or of a window"
    if scheduler is not None and scheduler.vllm_config.model_config.enable_prompt_embeds:
        yield "windows do not pass prompts given as embeddings"


def _reasons_of_the_layers(spec: Any, classes: Any) -> Any:
    supported = (classes.FullAttentionSpec, classes.MLAAttentionSpec, classes.SlidingWindowSpec)
    if type(spec) not in supported:
        name = type(spec).__name__
        yield f"the cache is a {name}, not of full attention, a sliding window or states"
    names = ["attention_chunk_size"]
    if type(spec) is not classes.SlidingWindowSpec:
        names.append("sliding_window")  # of layers that vLLM keeps as those of full attention
    for name in names:
        if getattr(spec, name, None) is not None:
            yield f"{name} is {getattr(spec, name)}"
    if getattr(spec, "extra_retained_tokens", 0) or getattr(spec, "prefix_replay_tokens", 0):
        yield "tokens before the window are computed again"
    if getattr(spec, "non_causal", False):
        yield "attention is not causal"


def _reasons_of_the_blocks(
    settings: dict[str, Any], attention: list[Any], recurrent: list[Any]
) -> Any:
    sizes = {spec.block_size for spec in attention}
    # Without a cache, a state stands for the whole sequence, and nothing is hashed.
    if not recurrent or settings.get("enable_caching", True):
        sizes |= {spec.block_size for spec in recurrent}
        sizes |= {settings["scheduler_block_size"], settings["hash_block_size"]}
    if len(sizes) > 1:
        yield "blocks have several sizes"
    if 1 in sizes:
        yield "a block holds one token"


def _reasons_of_the_engine(config: Any) -> Any:
    model = config.model_config
    if model.runner_type == "pooling":
        yield "the model is a pooling model"
    if model.is_encoder_decoder:
        yield "the model has an encoder"
    if model.is_diffusion:
        yield "the model is a diffusion model"
    if config.parallel_config.prefill_context_parallel_size > 1:
        yield "context parallelism (prefill_context_parallel_size)"


def _reasons_of_the_connector(connector: Any, base: Any) -> Any:
    """Most connectors get block ids; some count references in vLLM's pool or read its index."""
    if connector is None:
        return
    cls = type(connector)
    children = getattr(connector, "_connectors", None)  # of a MultiConnector
    if children is not None:
        for child in children:
            yield from _reasons_of_the_connector(child, base)
    elif any(
        getattr(cls, name) is not getattr(base, name)
        for name in ("bind_kv_cache_manager", "bind_gpu_block_pool")
    ):
        yield f"the connector {cls.__name__} uses vLLM's own pool of blocks"
