"""The choice of a backend, and the one function that transformers calls for every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.attention.gather import GatherBackend
from pyengine.attention.interface import AttentionBackend, AttentionOptions
from pyengine.attention.metadata import PagedContext
from pyengine.cache.kv_pool import KVPool
from pyengine.core.errors import ConfigurationError

ATTENTION_NAME = "pyengine_paged_attention"
"""transformers reads meaning into names that hold "flash", "paged|" or "/": this one has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What the model, its KV pool and the machine demand of a backend."""

    device: torch.device
    block_size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that was chosen, and why."""

    backend: str
    reason: str

    def build(self, pool: KVPool) -> AttentionBackend:
        """The backend over `pool`."""
        return _CANDIDATES[self.backend].build(pool)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend: how to build it, and why it cannot serve (None: it can)."""

    build: Callable[[KVPool], AttentionBackend]
    obstacle: Callable[[AttentionNeeds], str | None]
    strength: str


def _gather_obstacle(needs: AttentionNeeds) -> str | None:
    if needs.device.type in ("cpu", "cuda"):
        return None
    return f"it runs on cpu and cuda, the device is {needs.device}"


_CANDIDATES = {  # the preferred first
    "gather": _Candidate(GatherBackend, _gather_obstacle, "serves every model on every device"),
}


def choose_backend(requested: str, needs: AttentionNeeds) -> Choice:
    """The requested backend, or for "auto" the first in order of preference that can serve.

    Raises `ConfigurationError` for an unknown name, for a forced choice that cannot serve
    (with the reason), and where none can.
    """
    if requested == "auto":
        obstacles: list[str] = []
        for name, candidate in _CANDIDATES.items():
            obstacle = candidate.obstacle(needs)
            if obstacle is None:
                passed_over = f" ({'; '.join(obstacles)})" if obstacles else ""
                return Choice(name, candidate.strength + passed_over)
            obstacles.append(f"{name}: {obstacle}")
        raise ConfigurationError(f"no attention backend can serve: {'; '.join(obstacles)}")
    if requested not in _CANDIDATES:
        known = ", ".join(["auto", *_CANDIDATES])
        raise ConfigurationError(
            f"attention_backend={requested!r} is not known: use one of {known}"
        )
    obstacle = _CANDIDATES[requested].obstacle(needs)
    if obstacle is not None:
        raise ConfigurationError(
            f"attention_backend={requested!r} cannot serve: {obstacle}; "
            "attention_backend='auto' chooses one that can"
        )
    return Choice(requested, "asked for")


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
    """What transformers calls in place of its own attention, once per layer.

    `query` is `[1, query_heads, T, d]`, `key` and `value` `[1, kv_heads, T, d]`, rotated
    already. Keywords that count: `paged` (a `PagedContext`), `scaling`, `sliding_window`,
    `softcap`, `s_aux` (sinks). Returns `[1, T, query_heads, d]` and no weights.
    """
    context = kwargs.get("paged")
    if not isinstance(context, PagedContext):
        raise ConfigurationError(
            f"{type(module).__name__} was called without paged=PagedContext(...): the model has "
            "been set to paged attention and runs through ModelRunner only"
        )
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ConfigurationError(
            f"{type(module).__name__} passes a mask or a position bias to its attention, "
            "which paged attention cannot honour: this model is not supported"
        )
    context.attended += 1
    _check_window(module, kwargs.get("sliding_window"), context.kept[module.layer_idx])
    scaling = kwargs.get("scaling")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.plan.forward(module.layer_idx, q, k, v, options)[None], None


def _check_window(module: Any, asked: int | None, kept: int | None) -> None:
    """Raise for a layer that sees further back than its group keeps its blocks."""
    if kept is None or (asked is not None and asked <= kept):
        return
    sight = "every position" if asked is None else f"the last {asked} positions"
    raise ConfigurationError(
        f"layer {module.layer_idx} ({type(module).__name__}) attends to {sight}, but of its keys "
        f"and values only the last {kept} are kept, as the model's configuration says that its "
        "attention slides: the two contradict each other, this model is not supported"
    )


def backend_names() -> tuple[str, ...]:
    """All that `choose_backend` knows, the preferred first, whether they can serve or not."""
    return tuple(_CANDIDATES)
