"""From a layer of the model to the metadata of the step: the function that transformers calls.

In an uncompiled model, `paged=` holds the step. A compiled graph holds tensors and numbers only. So
there attention is one opaque operator: the graph holds the number of its model, and the operator
looks up the step that the model runs. An entry of that table lives as long as one forward pass, and
only `running` writes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from pyengine.attention.backend import QKV, AttentionOptions
from pyengine.attention.context import PagedContext
from pyengine.errors import ConfigurationError
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation

ATTENTION_NAME = "pyengine_paged_attention"
"""transformers gives names with "flash", "paged|" or "/" a meaning: this name avoids them."""


class CompiledModel(NamedTuple):
    """The value of `paged=` while a model is compiled: the number that names it.

    A graph cannot hold a step; `running` provides the step when the graph runs.
    """

    number: int

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`: one operator that is opaque to the compiler."""
        attended: torch.Tensor = torch.ops.pyengine.paged_attention(
            *qkv,
            options.sinks,
            self.number,
            layer,
            options.scaling,
            options.sliding_window,
            options.softcap,
            *_apart(options.rotation),
        )
        return attended


def register_paged_attention() -> str:
    """Make paged attention known to transformers; returns the name for its models."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    return ATTENTION_NAME


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in place of its attention, once per layer.

    `query` is `[1, query_heads, T, d]`, `key` and `value` `[1, kv_heads, T, d]`, rotated
    already. Keywords that count: `paged` (a `PagedContext`, or which `CompiledModel` is being
    compiled), `scaling`, `sliding_window`, `softcap` and `s_aux` (sinks). Returns
    `[1, T, query_heads, d]` and no weights.
    """
    context = kwargs.get("paged")
    if not isinstance(context, (PagedContext, CompiledModel)):  # torch 2.9 compiles no union
        raise ConfigurationError(
            f"{type(module).__name__} was called without paged=PagedContext(...): the model has "
            "been set to paged attention and runs through ModelRunner only"
        )
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ConfigurationError(
            f"{type(module).__name__} passes a mask or a position bias to its attention, "
            "which paged attention cannot honour: this model is not supported"
        )
    scaling = kwargs.get("scaling")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if isinstance(context, PagedContext):
        return context.attend(module.layer_idx, (q, k, v), options)[None], None
    return context.forward(module.layer_idx, (q, k, v), options)[None], None


_running: dict[int, PagedContext] = {}


@contextmanager
def running(number: int, context: PagedContext) -> Iterator[None]:
    """Inside, the operators of model `number` attend by `context`.

    Raises `ConfigurationError` if the model is running already: one thread runs it.
    """
    if _running.setdefault(number, context) is not context:
        raise ConfigurationError(
            f"compiled model {number} is in a forward pass already: use an engine from one thread"
        )
    try:
        yield
    finally:
        del _running[number]


def _attend_opaquely(  # noqa: PLR0913, PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: int,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    angles: list[torch.Tensor],
    layout: str,
    weights: list[torch.Tensor],
    norm: list[float],
) -> torch.Tensor:
    """Attend in `layer` of model `number`; shapes as in `AttentionMetadata.forward`.

    It writes keys and values into the pool, which no other part of a graph sees; the order of the
    layers is that of their inputs. The result is contiguous, as `_shape` promises: a graph reads
    it in that order and checks no strides.
    """
    rotation = _together(angles, layout, weights, norm)
    options = AttentionOptions(scaling, sliding_window, softcap, sinks, rotation)
    return _running[number].attend(layer, (query, key, value), options).contiguous()


def _apart(
    rotation: Rotation | None,
) -> tuple[list[torch.Tensor], str, list[torch.Tensor], list[float]]:
    """A rotation as an operator takes it; `_together` is the way back."""
    if rotation is None:
        return [], "", [], []
    layout, norm = rotation.layout, rotation.norm
    words = f"{layout.size} {layout.order} {layout.step}"
    angles = [rotation.cos, rotation.sin]
    if norm is None:
        return angles, words, [], []
    return angles, words, [norm.query_weight, norm.key_weight], [norm.eps, norm.offset]


def _together(
    angles: list[torch.Tensor], layout: str, weights: list[torch.Tensor], norm: list[float]
) -> Rotation | None:
    if not angles:
        return None
    by_norm = HeadNorm(weights[0], weights[1], norm[0], norm[1]) if weights else None
    return Rotation(angles[0], angles[1], _layout(layout), by_norm)


@cache
def _layout(words: str) -> RotaryLayout:
    size, order, step = words.split()
    return RotaryLayout(int(size), "halves" if order == "halves" else "pairs", int(step))


def _shape(
    query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_rest: object
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])


# Not `custom_op`: it checks at every call whether an output is one of the inputs.
torch.library.define(
    "pyengine::paged_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int number, int layer, "
    "float scaling, int? sliding_window, float? softcap, "
    "Tensor[] angles, str layout, Tensor[] weights, float[] norm) -> Tensor",
)
torch.library.impl("pyengine::paged_attention", ("CPU", "CUDA"))(_attend_opaquely)
torch.library.register_fake("pyengine::paged_attention")(_shape)
