"""The description of a built engine, for logs, `describe()` and the command line."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pyengine.attention.choice import Choice, explain_backends
from pyengine.attention.needs import AttentionNeeds
from pyengine.config import EngineSettings
from pyengine.cpu.threads import ComputeThreads
from pyengine.engine.model_limits import ModelLimits
from pyengine.engine.offloading import KVOffloader
from pyengine.executor.executor import Executor
from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.kv_cache_config import KVCacheConfig
from pyengine.executor.model_runner import ModelRunner, Runner
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.states import state_bytes
from pyengine.models.loaded import LoadedModel
from pyengine.sampling_params import SamplingParams
from pyengine.speculation.draft_model import LoadedDraft
from pyengine.utils.openmp import loaded_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A loaded model, and what was chosen and computed for it before the engine is connected."""

    settings: EngineSettings
    loaded: LoadedModel
    draft: LoadedDraft | None
    needs: AttentionNeeds
    choice: Choice
    cache: KVCacheConfig
    manager: BlockManager
    model_limits: ModelLimits
    runner_limits: RunnerLimits


def describe(
    setup: Setup,
    executor: Executor,
    threads: ComputeThreads,
    offloader: KVOffloader | None,
    params: SamplingParams,
) -> dict[str, object]:
    """All rows of the description."""
    settings, loaded, cache, draft = setup.settings, setup.loaded, setup.cache, setup.draft
    return {
        **_about_model(loaded, settings),
        **threads.describe(),
        **_about_linears(loaded),
        **_about_attention(setup.choice, setup.needs, executor.runner),
        "kv_cache_scales": _about_scales(cache),
        **_about_cache(cache, setup.model_limits, settings),
        **_about_store(settings, offloader),
        "async_scheduling": executor.depth > 1,
        **_about_speculation(settings, setup.runner_limits),
        **({} if draft is None else draft.describe(draft.configure_cache(settings, cache))),
        "generation_config": about_sampling(settings, params),
    }


def _about_model(loaded: LoadedModel, settings: EngineSettings) -> dict[str, object]:
    torch = loaded_torch()
    return {
        "python": platform.python_version(),
        "torch": "not loaded" if torch is None else torch.__version__,
        "model": loaded.name,
        "model_path": str(loaded.path),
        "decoder": loaded.model.origin,
        "device": str(loaded.device),
        "dtype": loaded.dtype,
        "dtype_reason": loaded.dtype_reason,
        "load_format": loaded.load_format,
        "quantization": loaded.quantization,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }


def _products_in_use(loaded: LoadedModel) -> Sequence[str]:
    return ["torch"] if loaded.products is None else loaded.products.in_use


def _about_linears(loaded: LoadedModel) -> dict[str, object]:
    if not loaded.has_float_linears:
        return {"linear_backend": loaded.quantization, "linear_reason": "quantization"}
    if loaded.products is None:
        return {"linear_backend": "torch", "linear_reason": f"by {loaded.model.origin}"}
    return loaded.products.describe()


def _about_attention(choice: Choice, needs: AttentionNeeds, runner: Runner) -> dict[str, object]:
    graphs = getattr(runner, "graphs", None)
    pieces = runner.piecewise if isinstance(runner, ModelRunner) else None
    sizes = [] if graphs is None else graphs.sizes
    others = [] if pieces is None else pieces.sizes
    return {
        "attention_backend": choice.backend,
        "attention_reason": choice.reason,
        "attention_backends": explain_backends(choice, needs),
        "cuda_graphs": f"batches of {sizes}" if sizes else "none",
        "piecewise_cuda_graphs": f"steps of {others} tokens" if others else "none",
        "compile": isinstance(runner, ModelRunner) and runner.is_compiled,
        "kv_cache_dtype": needs.cache_dtype,
    }


def _about_scales(cache: KVCacheConfig) -> str:
    count = sum(spec != spec.unscaled for spec in cache.specs)
    return f"of the checkpoint, {count} layers" if count else "none"


def _about_cache(
    cache: KVCacheConfig, model_limits: ModelLimits, settings: EngineSettings
) -> dict[str, object]:
    return {
        "block_size": cache.block_size,
        "num_blocks": cache.size.num_blocks,
        "kv_cache_bytes": cache.size.num_bytes,
        "kv_cache_reason": cache.size.reason,
        **_about_states(cache),
        "layer_groups": str(cache.groups),
        "max_model_len": model_limits.max_model_len,
        "max_model_len_reason": model_limits.limited_by,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "in_flight_sharing": settings.in_flight_sharing,
        "partial_reuse": settings.partial_reuse,
        "eviction": settings.eviction,
        "event_hash_seed": "none" if settings.event_hash_seed is None else settings.event_hash_seed,
    }


def _about_states(cache: KVCacheConfig) -> dict[str, object]:
    if not cache.states:
        return {}
    return {
        "state_bytes": state_bytes(cache.states),
        "running_states": cache.size.num_states,
        "snapshot_blocks": cache.snapshot_blocks,
    }


def _about_store(settings: EngineSettings, offloader: KVOffloader | None) -> dict[str, object]:
    about: dict[str, object] = {"kv_cache_dir": str(settings.kv_cache_dir or "none")}
    if offloader is not None:
        tier = "disk" if settings.kv_cache_host_memory is None else "host"
        about |= {"kv_cache_tier": tier, **offloader.describe()}
        if settings.kv_cache_access == "read":
            about["kv_cache_access"] = "read"
    return about


def _about_speculation(settings: EngineSettings, limits: RunnerLimits) -> dict[str, object]:
    if settings.speculation is None:
        return {"speculation": "none"}
    return {
        "speculation": settings.speculation,
        **({} if settings.draft_model is None else {"draft_model": str(settings.draft_model)}),
        "num_speculative_tokens": limits.rows_per_seq - 1,
    }


def about_sampling(settings: EngineSettings, params: SamplingParams) -> str:
    """A description of `default_params`: their source, and the differences from our defaults."""
    plain = SamplingParams()
    chosen = [
        f"{field.name}={getattr(params, field.name)!r}"
        for field in fields(params)
        if getattr(params, field.name) != getattr(plain, field.name)
    ]
    text = ", ".join(chosen) or "the defaults of SamplingParams"
    return f"{settings.generation_config}: {text}"


def rows_have_same_bits(settings: EngineSettings, loaded: LoadedModel, choice: Choice) -> bool:
    """True if the KV of a token has the same bits in every batch and chunk.

    Kernels of ours compute in float32 and bfloat16, torch in float16.
    """
    is_exact = not loaded.has_float_linears or set(_products_in_use(loaded)) <= {"pyengine"}
    is_ours = choice.backend == "cpu" and not settings.compile
    return is_exact and is_ours and loaded.dtype in ("float32", "bfloat16")
