"""The device and number format of a model, and the processes that it can be divided over.

Decoders of ours say themselves how they are divided (`decoder/ranks.py`). For modules of
transformers the plan of their class does; this module checks its needs.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.memory import available_memory
from pyengine.models.checkpoint_files import readable_size
from pyengine.utils.validation import shown

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_INTERMEDIATE_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:1".

    "auto" is the first CUDA device if there is one, else the CPU. Raises `ConfigurationError` for a
    device that torch does not know or see.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"device={shown(device)} is not known: use 'auto', 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = resolved.index or 0
        if index >= count:
            raise ConfigurationError(
                f"device={str(device)!r}: torch {torch.__version__} sees {count} CUDA devices; "
                "use device='cpu' or one that is there"
            )
        return torch.device("cuda", index)
    if resolved.type != "cpu":
        raise ConfigurationError(
            f"device={str(device)!r} is not supported: use 'auto', 'cpu' or 'cuda'"
        )
    return torch.device("cpu")


def resolve_first_device(device: str | torch.device, size: int) -> torch.device:
    """The device of the first of `size` processes that divide a model; the others take the next.

    On CUDA these are the devices 0 to `size - 1`. Raises `ConfigurationError` if there are fewer,
    and for another first device.
    """
    first = resolve_device(device)
    if size == 1:
        return first
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = f"tensor_parallel_size={size}, device={str(device)!r}"
    if first.type == "cuda" and first.index:
        raise ConfigurationError(
            f"{asked}: the processes take the devices from cuda:0 on; say device='cuda', and "
            "choose devices with CUDA_VISIBLE_DEVICES"
        )
    if first.type == "cuda" and size > count:
        raise ConfigurationError(
            f"{asked}: torch sees {count} CUDA devices and each process takes one; "
            f"use tensor_parallel_size={count} or less"
        )
    return first


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The number format of a model's weights, and the reason for it."""

    dtype: torch.dtype
    reason: str


def choose_dtype(
    asked: str | torch.dtype, saved: torch.dtype | None, device: torch.device
) -> DtypeChoice:
    """The number format for "auto", "float32", "bfloat16", "float16" or a torch dtype.

    "auto" on the CPU is bfloat16 if the model was `saved` so and the CPU has instructions for it,
    else float32. On CUDA it is the saved one, with bfloat16 in place of float32 or if unknown.
    """
    if asked == "auto":
        return _auto_dtype(saved, device)
    dtype = _DTYPES.get(asked) if isinstance(asked, str) else asked
    if dtype is None or dtype not in _DTYPES.values():
        raise ConfigurationError(
            f"dtype={shown(asked)} is not known: use 'auto', {', '.join(_DTYPES)}"
        )
    if device.type == "cpu" and dtype == torch.bfloat16 and bfloat16_instructions() is None:
        slow = f"this CPU has no instructions for bfloat16 ({_WANTED}): float32 would be faster"
        _log.warning("dtype='bfloat16': %s", slow)
        return DtypeChoice(dtype, f"asked for; {slow}")
    return DtypeChoice(dtype, "asked for")


def check_made_up(count: int, bits: int, device: torch.device) -> None:
    """Raise `ConfigurationError` if `count` made-up weights of at least `bits` do not fit."""
    needed, available = count * bits // 8, available_memory(device)
    if needed > available:
        raise ConfigurationError(
            f"load_format='dummy': the {count} weights take {readable_size(needed)} at {bits} bits "
            f"each, and {readable_size(available)} are available on {device}: take a smaller "
            "model, a shorter dtype, or quantization"
        )


def named_dtype(name: str | None) -> torch.dtype | None:
    """The number format of this name; None if it is none that a model runs in."""
    return None if name is None else _DTYPES.get(name)


def _auto_dtype(saved: torch.dtype | None, device: torch.device) -> DtypeChoice:
    name = "without a dtype" if saved is None else f"in {str(saved).removeprefix('torch.')}"
    if device.type != "cpu":
        if saved in (torch.bfloat16, torch.float16):
            return DtypeChoice(saved, "auto: as the model was saved")
        return DtypeChoice(torch.bfloat16, f"auto: the model was saved {name}")
    if saved != torch.bfloat16:
        return DtypeChoice(torch.float32, f"auto: on the CPU, for a model saved {name}")
    instructions = bfloat16_instructions()
    if instructions is None:
        lacks = f"saved in bfloat16, for which this CPU has no instructions ({_WANTED})"
        return DtypeChoice(torch.float32, f"auto: {lacks}")
    return DtypeChoice(saved, f"auto: as the model was saved, and this CPU has {instructions}")


_CPU_INSTRUCTIONS = {
    "AMX": "_is_amx_tile_supported",
    "AVX-512 BF16": "_is_avx512_bf16_supported",
}
_WANTED = " or ".join(_CPU_INSTRUCTIONS)

_ONEDNN_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_NO_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
_NO_AMX = ("AVX2_VNNI_2", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")
"""oneDNN's names of instruction sets, as its page "CPU Dispatcher Control" lists them."""


def bfloat16_instructions() -> str | None:
    """The instructions by which the CPU multiplies bfloat16; None: none that torch knows of.

    `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` hide instructions of torch and of oneDNN.
    """
    highest = next(filter(None, map(os.environ.get, _ONEDNN_SWITCHES)), "").upper()
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or highest in _NO_BFLOAT16:
        return None
    for name, question in _CPU_INSTRUCTIONS.items():
        if name == "AMX" and highest in _NO_AMX:
            continue
        supported = getattr(torch.cpu, question, None)  # private: it may be removed
        if supported is not None and supported():
            return name
    return None


def check_tensor_parallel(config: Any, size: int, device: torch.device) -> None:
    """Raise `ConfigurationError` unless transformers can divide a module by `size`.

    Its class needs a tensor-parallel plan, and `size` must divide the query heads, the KV heads,
    the intermediate sizes and the vocabulary of every layer. The message has these numbers and the
    possible sizes. On a machine with CUDA devices transformers always divides a module over those:
    then the CPU, as the `device` of the first process, is refused.
    """
    if size == 1:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
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
    sizes = sorted(set(_divided(config)))
    odd = [f"{number} {what}" for what, number in sizes if number % size]
    if not odd:
        return
    common = gcd(*(number for _, number in sizes))
    fitting = [str(index) for index in range(2, common + 1) if common % index == 0]
    way_out = f"use {' or '.join(fitting)}" if fitting else "only tensor_parallel_size=1 does"
    have = ", ".join(f"{number} {what}" for what, number in sizes)
    raise ConfigurationError(
        f"tensor_parallel_size={size} does not divide {' and '.join(odd)}; this model "
        f"({config.model_type}) has {have}: {way_out}"
    )


def _divided(config: Any) -> Iterator[tuple[str, int]]:
    """The divided sizes, in words, and their numbers; layer by layer if these differ."""
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
