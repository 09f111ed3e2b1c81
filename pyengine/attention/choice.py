"""The choice of a backend: candidates in order of preference, tried out on this machine."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

import numpy as np

from pyengine.attention.backend import AttentionBackend, AttentionOptions, StepInputs
from pyengine.attention.needs import AttentionNeeds, LayerNeeds, flex_obstacle, int8_cache_obstacle
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.devices import Device, for_torch, on_device
from pyengine.utils.dtypes import torch_dtype
from pyengine.utils.packaging import is_installed, needs_extra
from pyengine.utils.validation import shown

if TYPE_CHECKING:
    import torch

_TRIAL_BLOCKS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, the reason, and its preferred tokens per KV block."""

    backend: str
    reason: str
    block_size: int = 16

    def build(self, pool: KVPool) -> AttentionBackend:
        """The backend over `pool`, whose blocks are of `block_size`."""
        return backend_class(self.backend)(pool)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend that is imported when it is needed: all but "cpu" import torch.

    `devices` are the types that it runs on. `obstacle` is the class's, where that needs no import.
    """

    module: str
    class_name: str
    devices: tuple[str, ...] = ("cuda",)
    needs_torch: bool = True
    obstacle: Callable[[AttentionNeeds], str | None] | None = None


_CANDIDATES = {  # the preferred first
    "cpu": _Candidate("cpu", "CpuBackend", ("cpu",), needs_torch=False),
    "flashinfer": _Candidate("flashinfer", "FlashInferBackend"),
    "flash-attn-3": _Candidate("flash_attn", "FlashAttn3Backend"),
    "flash-attn": _Candidate("flash_attn", "FlashAttnBackend"),
    "cudnn": _Candidate("varlen", "CudnnBackend"),
    "varlen": _Candidate("varlen", "VarlenBackend"),
    "flex": _Candidate("flex", "FlexBackend", ("cpu", "cuda"), obstacle=flex_obstacle),
    "gather": _Candidate("gather", "GatherBackend", ("cpu", "cuda"), obstacle=int8_cache_obstacle),
}


@cache
def backend_class(name: str) -> type[AttentionBackend]:
    """The class of a backend, imported at the first call."""
    candidate = _CANDIDATES[name]
    module = import_module(f"pyengine.attention.{candidate.module}")
    return cast("type[AttentionBackend]", getattr(module, candidate.class_name))


def choose_backend(
    requested: str, needs: AttentionNeeds, failed: Mapping[str, str] | None = None
) -> Choice:
    """The requested backend, or for "auto" the first in order of preference that can serve.

    A pure function; `failed` are backends that failed when tried out, and why.
    Raises `ConfigurationError` for an unknown name, for a forced choice that cannot serve
    (with the reason), and where none can.
    """
    if requested != "auto":
        if requested not in _CANDIDATES:
            known = ", ".join(["auto", *_CANDIDATES])
            raise ConfigurationError(
                f"attention_backend={shown(requested)} is not known: use one of {known}"
            )
        obstacle = _obstacle(requested, needs, failed)
        if obstacle is not None:
            raise ConfigurationError(
                f"attention_backend={requested!r} cannot serve: {obstacle}; "
                "attention_backend='auto' chooses one that can"
            )
        return _choice(requested, "asked for", needs)
    obstacles: list[str] = []
    for name in _CANDIDATES:
        obstacle = _obstacle(name, needs, failed)
        if obstacle is None and needs.device.type in backend_class(name).auto_on:
            passed_over = f" ({'; '.join(obstacles)})" if obstacles else ""
            return _choice(name, backend_class(name).strength + passed_over, needs)
        obstacles.append(f"{name}: {obstacle or f'on {needs.device.type} only when asked for'}")
    raise ConfigurationError(f"no attention backend can serve: {'; '.join(obstacles)}")


def _obstacle(name: str, needs: AttentionNeeds, failed: Mapping[str, str] | None) -> str | None:
    candidate = _CANDIDATES[name]
    if failed and name in failed:
        return failed[name]
    if needs.device.type not in candidate.devices:
        return f"it runs on {' and '.join(candidate.devices)}, the device is {needs.device}"
    if candidate.needs_torch and not is_installed("torch"):
        return needs_extra("torch", "it", "torch")
    obstacle = candidate.obstacle or backend_class(name).obstacle
    return obstacle(needs)


def _choice(name: str, reason: str, needs: AttentionNeeds) -> Choice:
    return Choice(name, reason, needs.block_size or backend_class(name).block_size)


def select_backend(requested: str, needs: AttentionNeeds) -> Choice:
    """`choose_backend`, and the choice tried out on this machine.

    A backend that does not import or compile is skipped with a warning; a forced one is an error.
    """
    failed: dict[str, str] = {}
    while True:
        choice = choose_backend(requested, needs, failed)
        candidate = backend_class(choice.backend)
        problem = None
        if candidate.is_uncertain:
            problem = try_out(candidate, needs, choice.block_size)
        if problem is None:
            _log.info("attention backend %s: %s", choice.backend, choice.reason)
            return choice
        failed[choice.backend] = f"it was tried and failed with {problem}"
        if requested == "auto":
            _log.warning("attention backend %s: %s", choice.backend, failed[choice.backend])


def explain_backends(choice: Choice, needs: AttentionNeeds) -> dict[str, str]:
    """For every backend, in order of preference: whether it was chosen, could serve, or why not."""
    verdicts = {}
    for name in _CANDIDATES:
        obstacle = _obstacle(name, needs, None)
        verdicts[name] = f"cannot serve: {obstacle}" if obstacle else "could serve"
        if name == choice.backend:
            verdicts[name] = "chosen"
    return verdicts


def try_out(
    build: Callable[[KVPool], AttentionBackend], needs: AttentionNeeds, block_size: int
) -> str | None:
    """Run a prefill and a decode of each kind of layer over a pool of a few blocks.

    Returns why that did not work, in one line; None: it did. The result is not checked.
    """
    kinds = list(dict.fromkeys(needs.layers))
    specs = [
        KVCacheSpec(kind.kv_heads, kind.head_dim_k, kind.head_dim_v, needs.cache_dtype)
        for kind in kinds
    ]
    try:
        with on_device(needs.device):
            backend = build(KVPool(specs, _TRIAL_BLOCKS, block_size, needs.device))
            for new_tokens in (3, 1):
                metadata = backend.metadata(_trial_inputs(new_tokens, block_size, needs.device))
                for layer, kind in enumerate(kinds):
                    rows = _trial_rows(new_tokens, kind, needs)
                    metadata.forward(layer, rows, _trial_options(kind, needs))
            if needs.device.type == "cuda":
                import torch

                torch.cuda.synchronize()
    except Exception as error:  # whatever an import, a compiler or a driver raises
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}"
    return None


def _trial_inputs(new_tokens: int, block_size: int, device: Device) -> StepInputs:
    """One sequence of three tokens, in block 1, of which the last `new_tokens` are new."""
    import torch

    from pyengine.utils.host_copy import upload

    device = for_torch(device)
    starts, lens = np.array([0, new_tokens], dtype=np.int32), np.array([3], dtype=np.int32)
    tables = np.array([[[1]]], dtype=np.int32)
    positions = torch.arange(3 - new_tokens, 3, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return StepInputs(
        input_ids=none,
        positions=positions,
        slot_mapping=positions[None] + block_size,
        query_start_loc=upload(starts, device),
        seq_lens=upload(lens, device),
        block_tables=upload(tables, device),
        logits_indices=none,
        host_query_start_loc=starts,
        host_seq_lens=lens,
        host_block_tables=tables,
    )


def _trial_rows(
    num_tokens: int, kind: LayerNeeds, needs: AttentionNeeds
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    import torch

    dtype, device = torch_dtype(needs.dtype), for_torch(needs.device)
    shapes = (
        (kind.query_heads, kind.head_dim_k),
        (kind.kv_heads, kind.head_dim_k),
        (kind.kv_heads, kind.head_dim_v),
    )
    query, key, value = (
        torch.zeros(num_tokens, *shape, dtype=dtype, device=device) for shape in shapes
    )
    return query, key, value


def _trial_options(kind: LayerNeeds, needs: AttentionNeeds) -> AttentionOptions:
    import torch

    dtype, device = torch_dtype(needs.dtype), for_torch(needs.device)
    sinks = torch.zeros(kind.query_heads, dtype=dtype, device=device)
    return AttentionOptions(
        scaling=kind.head_dim_k**-0.5,
        sliding_window=kind.window,
        softcap=kind.softcap,
        sinks=sinks if kind.sinks else None,
    )
