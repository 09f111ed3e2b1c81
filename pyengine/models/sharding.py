"""Tensor parallelism: over how many processes a model can be divided, by its configuration alone.

Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053) is where the scheme is from: attention is
divided by heads, the MLP by its intermediate size, the embedding by the vocabulary. Which matrix is
divided how is transformers' plan of the model's class; here is what that plan needs.
"""

from collections.abc import Iterator
from math import gcd
from typing import Any

from pyengine.core.errors import ConfigurationError

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_INTERMEDIATE_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def check_tensor_parallel(config: Any, size: int) -> None:
    """Raise `ConfigurationError` unless a model of this configuration can be divided by `size`.

    Its class needs a tensor-parallel plan in transformers, and `size` must divide the query heads,
    the KV heads, the intermediate sizes and the vocabulary of every layer. The message has the
    numbers and the sizes that would do.
    """
    if size < 1:
        raise ConfigurationError(f"tensor_parallel_size={size}: it must be at least 1")
    if size == 1:
        return
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
    fitting = [str(one) for one in range(2, common + 1) if common % one == 0]
    way_out = f"use {' or '.join(fitting)}" if fitting else "only tensor_parallel_size=1 does"
    have = ", ".join(f"{number} {what}" for what, number in sizes)
    raise ConfigurationError(
        f"tensor_parallel_size={size} does not divide {' and '.join(odd)}; this model "
        f"({config.model_type}) has {have}: {way_out}"
    )


def _divided(config: Any) -> Iterator[tuple[str, int]]:
    """What is divided, in words, and how much of it there is; layer by layer where they differ."""
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
    """Over how many of `size` processes the plan divides the KV heads: all of them, or 1.

    A plan that gathers the keys before attention (models that normalise across heads), or that
    leaves attention whole, gives every process all heads.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    divides = any(
        rule.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise"
        for rule, style in plan.items()
    )
    return size if divides else 1
