"""The device and number format of a model, and the processes that it can be divided over.

Decoders of ours say themselves how they are divided (`decoder/ranks.py`). For modules of
transformers the plan of their class does; this module checks its needs.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.memory import available_memory
from pyengine.models.checkpoint_files import readable_size
from pyengine.models.decoder.ranks import check_divides
from pyengine.utils.devices import CPU, Device
from pyengine.utils.dtypes import DType
from pyengine.utils.openmp import loaded_torch
from pyengine.utils.packaging import installed_version, is_installed, require_torch
from pyengine.utils.validation import shown

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs that torch calls CUDA devices: NVIDIA's, that of WSL, AMD's."""
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_INTERMEDIATE_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def _text_of(value: object) -> str:
    """The text of a setting; none for numbers, which may have too many digits for it."""
    return "" if isinstance(value, int) else str(value)


def resolve_device(device: "str | torch.device") -> Device:
    """The device for "auto", "cpu", "cuda" or "cuda:1": `CPU`, or one of torch.

    "auto" is the first CUDA device if there is one, else the CPU. torch is imported for CUDA alone.
    Raises `ConfigurationError` for an unknown or missing device.
    """
    name = _text_of(device)
    if name == "auto":
        return _cuda(0) if _may_have_cuda() and _num_cuda_devices() else CPU
    match = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,4}))?", name)
    if match is None:
        raise ConfigurationError(
            f"device={shown(device)} is not known: use 'auto', 'cpu', 'cuda' or 'cuda:0'"
        )
    if match[1] == "cpu":
        return CPU
    require_torch(f"device={name!r}")
    count, index = _num_cuda_devices(), int(match[2] or 0)
    if index >= count:
        raise ConfigurationError(
            f"device={name!r}: torch {installed_version('torch')} sees {count} CUDA devices; "
            "use device='cpu' or one of these"
        )
    return _cuda(index)


def _cuda(index: int) -> Device:
    import torch

    return torch.device("cuda", index)


def _num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _may_have_cuda() -> bool:
    """False if torch is not installed, or no driver of a GPU is: then torch need not be asked."""
    if loaded_torch() is not None:
        return True
    return is_installed("torch") and any(map(os.path.exists, _DRIVERS))


def resolve_first_device(device: "str | torch.device", size: int) -> Device:
    """The device of the first of `size` processes that divide a model; the others take the next.

    On CUDA these are the devices 0 to `size - 1`. Raises `ConfigurationError` if there are fewer,
    and for another first device.
    """
    first = resolve_device(device)
    if size == 1:
        return first
    count = _num_cuda_devices()
    request = f"tensor_parallel_size={size}, device={str(device)!r}"
    if first.type == "cuda" and first.index:
        raise ConfigurationError(
            f"{request}: the processes take the devices from cuda:0 on; use device='cuda', and "
            "choose devices with CUDA_VISIBLE_DEVICES"
        )
    if first.type == "cuda" and size > count:
        raise ConfigurationError(
            f"{request}: torch sees {count} CUDA devices and each process takes one; "
            f"use tensor_parallel_size={count} or less"
        )
    return first


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The number format of a model's weights, and the reason for it."""

    dtype: DType
    reason: str


def choose_dtype(requested: "str | torch.dtype", saved: str | None, device: Device) -> DtypeChoice:
    """The number format for "auto", "float32", "bfloat16", "float16" or a torch dtype.

    "auto" on the CPU is bfloat16 if the model was `saved` so and the CPU has instructions for it,
    else float32. On CUDA it is the saved one, with bfloat16 in place of float32 or if unknown.
    """
    if requested == "auto":
        return _auto_dtype(saved, device)
    dtype = named_dtype(_text_of(requested).removeprefix("torch."))
    if dtype is None:
        raise ConfigurationError(
            f"dtype={shown(requested)} is not known: use 'auto', {', '.join(_DTYPES)}"
        )
    if device.type == "cpu" and dtype == "bfloat16" and bfloat16_instructions() is None:
        slow = f"this CPU has no instructions for bfloat16 ({_REQUIRED}): float32 would be faster"
        _log.warning("dtype='bfloat16': %s", slow)
        return DtypeChoice(dtype, f"asked for; {slow}")
    return DtypeChoice(dtype, "asked for")


def check_dummy_memory(count: int, bits: int, device: Device) -> None:
    """Raise `ConfigurationError` if `count` dummy weights of at least `bits` do not fit."""
    needed, available = count * bits // 8, available_memory(device)
    if needed > available:
        raise ConfigurationError(
            f"load_format='dummy': the {count} weights take {readable_size(needed)} at {bits} bits "
            f"each, and {readable_size(available)} are available on {device}: take a smaller "
            "model, a shorter dtype, or quantization"
        )


def named_dtype(name: str | None) -> DType | None:
    """The number format of this name; None if it is none that a model runs in."""
    return next((dtype for dtype in _DTYPES if dtype == name), None)


def _auto_dtype(saved: str | None, device: Device) -> DtypeChoice:
    name, known = "without a dtype" if saved is None else f"in {saved}", named_dtype(saved)
    if device.type != "cpu":
        if known in ("bfloat16", "float16"):
            return DtypeChoice(known, "auto: as the model was saved")
        return DtypeChoice("bfloat16", f"auto: the model was saved {name}")
    if known != "bfloat16":
        return DtypeChoice("float32", f"auto: on the CPU, for a model saved {name}")
    instructions = bfloat16_instructions()
    if instructions is None:
        lacks = f"saved in bfloat16, for which this CPU has no instructions ({_REQUIRED})"
        return DtypeChoice("float32", f"auto: {lacks}")
    return DtypeChoice(known, f"auto: as the model was saved, and this CPU has {instructions}")


_BFLOAT16_LEVELS = {"amx": "AMX", "avx512_bf16": "AVX-512 BF16"}
_REQUIRED = " or ".join(_BFLOAT16_LEVELS.values())


def bfloat16_instructions() -> str | None:
    """The instructions by which our kernels multiply bfloat16 here; None: they have none."""
    return _BFLOAT16_LEVELS.get(CpuAttention.isa())


def check_tensor_parallel(config: Any, size: int, device: Device) -> None:
    """Raise `ConfigurationError` unless transformers can divide a module by `size`.

    Its class needs a tensor-parallel plan, and `size` must divide the query heads, the KV heads,
    the intermediate sizes and the vocabulary of every layer. The message has these numbers and the
    possible sizes. On a machine with CUDA devices transformers always divides a module over those:
    then the CPU, as the `device` of the first process, is refused.
    """
    if size == 1:
        return
    count = _num_cuda_devices()
    if device.type == "cpu" and count:
        raise ConfigurationError(
            f"tensor_parallel_size={size}, device='cpu': transformers divides models of type "
            f"{config.model_type} over the {count} CUDA devices that torch sees; start Python with "
            "CUDA_VISIBLE_DEVICES= (empty) to divide it over CPU processes"
        )
    if not getattr(config.get_text_config(), "base_model_tp_plan", None):
        raise ConfigurationError(
            f"tensor_parallel_size={size}: transformers has no tensor-parallel plan for models of "
            f"type {config.model_type}; use tensor_parallel_size=1"
        )
    check_divides(size, _divided(config), config.model_type)


def _divided(config: Any) -> Iterator[tuple[str, int]]:
    """The divided sizes, as text, and their numbers; layer by layer if these differ."""
    text = config.get_text_config()
    yield "tokens in the vocabulary", text.vocab_size
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for layer in layers:
        yield "query heads", layer.num_attention_heads
        yield "KV heads", getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        for name in _INTERMEDIATE_SIZES:
            if isinstance(number := getattr(layer, name, None), int) and number:
                yield f"of {name}", number


def kv_shards(config: Any, size: int) -> int:
    """The number of processes that the plan divides the KV heads over: `size`, or 1.

    A plan that gathers the keys before attention (models that normalise across heads), or that does
    not divide attention, gives every process all heads.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    divides = any(
        rule.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise"
        for rule, style in plan.items()
    )
    return size if divides else 1
