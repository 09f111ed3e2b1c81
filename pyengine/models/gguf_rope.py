"""Rotary positions of a GGUF file as transformers' `rope_parameters`.

Scaling is in keys (`rope.scaling.*`), and in tensors: `rope_freqs.weight` has a divisor for each
frequency (Llama 3.1 and later), `rope_factors_short.weight` and `rope_factors_long.weight` have
those for two ranges of lengths (Phi-3). Divisors are transformers' "longrope", which takes them as
they are.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGUFTensor
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.transformers_calls import load_errors

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that `rope_parameters` reads."""

_DEFAULT_BASE = 10_000.0  # llama.cpp's where the file has none
_DIVIDED = ("llama", "phi3", "granite", "granitemoe", "exaone4")
"""Architectures whose positions llama.cpp divides by the tensors."""
_TYPES = {"F32": "<f4", "F16": "<f2"}
_LARGEST_DIVISOR = 1e6


def rope_parameters(keys: HeaderKeys, rotated: int, positions: int) -> dict[str, Any]:
    """The `rope_parameters` of layers that rotate `rotated` numbers of a head.

    `positions` is the length of the context. Raises `ModelLoadError` for scaling of other kinds.
    """
    base = keys.number(".rope.freq_base", above=1.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base or _DEFAULT_BASE}
    divisors = _divisors(keys, rotated)
    factor = keys.number(".rope.scaling.factor")
    factor = factor or keys.number(".rope.scale_linear")
    original = keys.count(".rope.scaling.original_context_length") or positions
    attention = keys.number(".rope.scaling.attn_factor") or 1.0
    kind = keys.text(".rope.scaling.type") or ("longrope" if len(divisors) == 2 else "linear")
    if kind == "yarn" and factor and not divisors:
        return parameters | _yarn(keys, factor, original, attention)
    if kind == "longrope" and len(divisors) == 2 and not factor:
        return parameters | _longrope(divisors[0], divisors[1], attention, original)
    if kind not in ("linear", "none") or len(divisors) == 2:
        raise keys.refusal(
            ".rope.scaling.type",
            f"does not fit the other settings: a factor of {factor}, "
            f"{len(divisors)} tensors of divisors",
        )
    if attention != 1:
        raise keys.refusal(".rope.scaling.attn_factor", "scales attention without YaRN")
    factor = factor if factor and kind == "linear" else 1.0
    if divisors:
        scaled = [value * factor for value in divisors[0]]
        return parameters | _longrope(scaled, scaled, 1.0, positions)
    return parameters if factor == 1 else parameters | {"rope_type": "linear", "factor": factor}


def sliding_rope_parameters(keys: HeaderKeys, default: float | None = None) -> dict[str, Any]:
    """Those of layers with a sliding window in Gemma 3 and OLMo 3, whose positions are not scaled.

    `default` is the base where the file has none: by default Gemma's.
    """
    base = keys.number(".rope.freq_base_swa", above=1.0)
    return {"rope_type": "default", "rope_theta": base or default or _DEFAULT_BASE}


def attention_factor(factor: float) -> float:
    """YaRN's factor of attention: Peng et al. (2023), arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _yarn(keys: HeaderKeys, factor: float, original: int, attention: float) -> dict[str, Any]:
    whole = attention_factor(factor) * attention
    declared = keys.number(".rope.scaling.yarn_attn_factor")
    if declared is not None and not math.isclose(declared, whole, rel_tol=1e-3):
        raise keys.refusal(
            ".rope.scaling.yarn_attn_factor",
            f"is not {whole:.4f}, as by the other keys, and programs differ about which counts",
        )
    keys.expect(".rope.scaling.yarn_ext_factor", (1.0,), "mixes frequencies in an unknown way")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": whole,
        "beta_fast": keys.number(".rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": keys.number(".rope.scaling.yarn_beta_slow") or 1.0,
    }


def _longrope(
    short: list[float], long: list[float], attention: float, original: int
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _divisors(keys: HeaderKeys, rotated: int) -> list[list[float]]:
    """The divisors of the frequencies: none, those of all lengths, or of short and long ones."""
    tensors = {tensor.name: tensor for tensor in keys.header.tensors}
    names = [name for name in ROPE_TENSORS if name in tensors]
    architecture = str(keys.header.architecture)
    if names and architecture not in _DIVIDED:
        raise ModelLoadError(
            f"{keys.path}: the tensor {names[0]} divides the frequencies of positions, which is "
            f"not known of the architecture {architecture!r}; take the model as safetensors"
        )
    if len(names) == 3 or (len(names) == 1 and names[0] != ROPE_TENSORS[0]):
        raise ModelLoadError(
            f"{keys.path} has {' and '.join(names)} of the tensors {', '.join(ROPE_TENSORS)}: "
            "either the first alone, or the other two; convert the model again"
        )
    divisors = [_vector(keys.path, tensors[name], rotated // 2) for name in names]
    return [] if len(divisors) == 1 and set(divisors[0]) == {1.0} else divisors


def _vector(path: Path, tensor: GGUFTensor, length: int) -> list[float]:
    """The numbers of a float tensor of one dimension."""
    dtype = _TYPES.get(tensor.type)
    if dtype is None or tensor.shape != (length,):
        raise ModelLoadError(
            f"{path}: the tensor {tensor.name} has {list(tensor.shape)} numbers of type "
            f"{tensor.type}, and the header asks for {[length]} of F32; convert the model again"
        )
    with load_errors(f"{path} cannot be read"), path.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.num_bytes), dtype).astype(np.float64)
    if len(values) != length or not ((values > 0) & (values < _LARGEST_DIVISOR)).all():
        raise ModelLoadError(
            f"{path}: the tensor {tensor.name} has numbers that divide no frequency "
            f"(from {values.min():g} to {values.max():g}); it is damaged, get the file again"
        )
    numbers: list[float] = values.tolist()
    return numbers
