"""Paged attention as one operator that torch.compile does not look into.

A compiled graph holds tensors and numbers only, while attention needs the plan of the step, which
is another one in every step. So the graph holds the number of its model, and the operator looks up
which step that model is running. This table is the one place of ambient state: an entry lives as
long as one forward pass, and `running` alone writes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyengine.attention.interface import AttentionOptions
from pyengine.attention.metadata import PagedContext
from pyengine.core.errors import ConfigurationError

_running: dict[int, PagedContext] = {}


@contextmanager
def running(number: int, context: PagedContext) -> Iterator[None]:
    """Inside, the operators of model `number` attend by `context`.

    Raises `ConfigurationError` if the model is running already: one thread drives it.
    """
    if _running.setdefault(number, context) is not context:
        raise ConfigurationError(
            f"compiled model {number} is in a forward pass already: use an engine from one thread"
        )
    try:
        yield
    finally:
        del _running[number]


@torch.library.custom_op("pyengine::paged_attention", mutates_args=())
def paged_attention(  # noqa: PLR0913, PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: int,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend in `layer` of model `number`; shapes as in `AttentionPlan.forward`.

    It writes keys and values into the pool, which no other part of a graph sees; the order of the
    layers is that of their inputs.
    """
    options = AttentionOptions(scaling, sliding_window, softcap, sinks)
    return _running[number].attend(layer, query, key, value, options)


@paged_attention.register_fake
def _shape(
    query: torch.Tensor,
    _key: torch.Tensor,
    value: torch.Tensor,
    *_rest: object,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
