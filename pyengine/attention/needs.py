"""The demands of a model and a machine on an attention backend: plain data, and its sources."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.utils.devices import Device, for_torch
from pyengine.utils.dtypes import DType

OPTIONAL_PACKAGES = (
    *("flashinfer", "tvm_ffi", "requests"),
    *("flash_attn", "flash_attn_interface"),
)
"""Modules of packages that a backend may need beside torch."""

FLOAT8_DTYPES: frozenset[DType] = frozenset({"float8_e4m3fn"})
"""Element types of an 8-bit KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNeeds:
    """The demands of one layer on attention; `window` counts the query's own position."""

    query_heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The demands of the model, its KV pool and the machine on a backend.

    - `block_size`: tokens of a KV block that the caller asked for; None: the backend chooses.
    - `layers`: one entry per layer, or per kind of layer.
    - `dtype`: of queries and of the result; `kv_dtype`: of the KV cache, None: the same.
    - `capability`: of the CUDA device, (major, minor); None without one.
    - `torch_version`: (major, minor); (0, 0) without a CUDA device. `cudnn_version`: 92400 for
      9.24; 0 without.
    - `packages`: which of `OPTIONAL_PACKAGES` are installed; `choice.try_out` finds if they work.
    """

    device: Device
    block_size: int | None = None
    layers: tuple[LayerNeeds, ...] = ()
    dtype: DType = "float32"
    kv_dtype: DType | None = None
    capability: tuple[int, int] | None = None
    torch_version: tuple[int, int] = (0, 0)
    cudnn_version: int = 0
    packages: frozenset[str] = frozenset()

    @property
    def cache_dtype(self) -> DType:
        """The element type of the KV cache."""
        return self.kv_dtype or self.dtype


def needs_of(
    layers: Sequence[LayerNeeds],
    device: Device,
    dtype: DType,
    *,
    kv_dtype: DType | None = None,
    block_size: int | None = None,
) -> AttentionNeeds:
    """The needs of a model with these layers on this machine."""
    capability, torch_number, cudnn_version = _versions(device)
    return AttentionNeeds(
        device=device,
        block_size=block_size,
        layers=tuple(layers),
        dtype=dtype,
        kv_dtype=kv_dtype,
        capability=capability,
        torch_version=torch_number,
        cudnn_version=cudnn_version,
        packages=frozenset(
            name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is not None
        ),
    )


def _versions(device: Device) -> tuple[tuple[int, int] | None, tuple[int, int], int]:
    """The capability of a CUDA device, and the versions of torch and cuDNN."""
    if device.type != "cuda":
        return None, (0, 0), 0
    import torch

    cudnn: Any = torch.backends.cudnn
    capability = torch.cuda.get_device_capability(for_torch(device))
    return capability, torch_version(torch.__version__), cudnn.version() or 0


def torch_version(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as `2.12.0+cu130`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def cuda_obstacle(needs: AttentionNeeds, minimum: tuple[int, int]) -> str | None:
    """Why a kernel for CUDA devices of compute capability `minimum` cannot run; None: it can."""
    if needs.device.type != "cuda":
        return f"it runs on cuda, the device is {needs.device}"
    if needs.capability is not None and needs.capability < minimum:
        have, want = (".".join(map(str, item)) for item in (needs.capability, minimum))
        return f"it needs compute capability {want}, the GPU has {have}"
    return None


def half_obstacle(needs: AttentionNeeds) -> str | None:
    """Why a kernel for 16-bit floats cannot serve; None: it can."""
    if needs.dtype in ("float16", "bfloat16"):
        return None
    return f"it computes in float16 and bfloat16, the model in {needs.dtype}"


def cache_dtype_obstacle(needs: AttentionNeeds) -> str | None:
    """Why a kernel that reads keys and values as they were computed cannot serve; None: it can."""
    if needs.cache_dtype == needs.dtype:
        return None
    return f"it does not read a KV cache in {needs.cache_dtype}"


def int8_cache_obstacle(needs: AttentionNeeds) -> str | None:
    """Why a kernel that reads 8-bit floats, but no int8, cannot serve; None: it can."""
    return cache_dtype_obstacle(needs) if needs.cache_dtype == "int8" else None


def equal_dims_obstacle(needs: AttentionNeeds) -> str | None:
    """Why a kernel whose keys and values are of one size cannot serve; None: it can."""
    for layer in needs.layers:
        if layer.head_dim_k != layer.head_dim_v:
            return (
                f"its keys and values have one head size, those of the model are "
                f"{layer.head_dim_k} and {layer.head_dim_v}"
            )
    return None


def page_obstacle(needs: AttentionNeeds, multiple: int) -> str | None:
    """Why a kernel whose pages are a multiple of some tokens cannot serve; None: it can.

    A page cannot be put together from smaller blocks: the manager allocates any block that is
    free, and shares prefixes by the block, so neighbours in a sequence are not neighbours in
    memory. A block of the manager is a page of the kernel.
    """
    if needs.block_size is None or needs.block_size % multiple == 0:
        return None
    return (
        f"its pages are a multiple of {multiple} tokens, block_size={needs.block_size}; blocks "
        "of a sequence lie anywhere in the pool, so several cannot make up a page"
    )


def flex_obstacle(needs: AttentionNeeds) -> str | None:
    """Why the backend "flex" cannot serve; None: it can."""
    if needs.device.type == "cuda":
        obstacle = cuda_obstacle(needs, (8, 0))
        size = needs.block_size
        if obstacle is None and size is not None and (size < 16 or size & (size - 1)):
            obstacle = f"its blocks are powers of two from 16 on, block_size={size}"
        if obstacle is not None:
            return obstacle
        for layer in needs.layers:
            if min(layer.head_dim_k, layer.head_dim_v) < 16:
                return f"its head sizes start at 16, the model has {layer.head_dim_k}"
    return cache_dtype_obstacle(needs)
