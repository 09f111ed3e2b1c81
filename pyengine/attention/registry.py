"""The choice of a backend, and the one function that transformers calls for every layer."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.attention import opaque
from pyengine.attention.cpu import CpuBackend, cpu_obstacle
from pyengine.attention.flash_attn import PAGE, FlashAttnBackend, flash_attn_obstacle
from pyengine.attention.flashinfer import FlashInferBackend, flashinfer_obstacle
from pyengine.attention.flex import FlexBackend, flex_obstacle
from pyengine.attention.gather import GatherBackend
from pyengine.attention.interface import AttentionBackend, AttentionOptions
from pyengine.attention.metadata import CompiledModel, PagedContext
from pyengine.attention.needs import AttentionNeeds
from pyengine.attention.trial import try_out
from pyengine.attention.varlen import VarlenBackend, varlen_obstacle
from pyengine.cache.kv_pool import KVPool
from pyengine.core.errors import ConfigurationError

ATTENTION_NAME = "pyengine_paged_attention"
"""transformers reads meaning into names that hold "flash", "paged|" or "/": this one has none."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that was chosen, why, and the tokens of a KV block that it wants."""

    backend: str
    reason: str
    block_size: int = 16

    def build(self, pool: KVPool) -> AttentionBackend:
        """The backend over `pool`, whose blocks are of `block_size`."""
        return _CANDIDATES[self.backend].build(pool)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend: how to build it, why it cannot serve (None: it can), and its strength.

    `block_size` is what it likes best. "auto" considers it on the devices `auto_on`. One that
    needs a package or compiles kernels is `uncertain`: it is tried out before it is relied on.
    """

    build: Callable[[KVPool], AttentionBackend]
    obstacle: Callable[[AttentionNeeds], str | None]
    strength: str
    block_size: int = 16
    auto_on: tuple[str, ...] = ("cpu", "cuda")
    uncertain: bool = False


def _gather_obstacle(needs: AttentionNeeds) -> str | None:
    if needs.device.type in ("cpu", "cuda"):
        return None
    return f"it runs on cpu and cuda, the device is {needs.device}"


_CANDIDATES = {  # the preferred first
    "cpu": _Candidate(CpuBackend, cpu_obstacle, "reads the blocks in place, in Rust"),
    "flashinfer": _Candidate(
        FlashInferBackend,
        flashinfer_obstacle,
        "its paged kernels serve this model",
        uncertain=True,
    ),
    "flash-attn": _Candidate(
        FlashAttnBackend,
        flash_attn_obstacle,
        "its paged kernels serve this model",
        block_size=PAGE,
        uncertain=True,
    ),
    "varlen": _Candidate(
        VarlenBackend,
        varlen_obstacle,
        "torch's own paged kernel serves this model",
        block_size=PAGE,
        uncertain=True,
    ),
    "flex": _Candidate(
        FlexBackend,
        flex_obstacle,
        "torch compiles a kernel for this model",
        block_size=64,
        auto_on=("cuda",),
        uncertain=True,
    ),
    "gather": _Candidate(GatherBackend, _gather_obstacle, "serves every model on every device"),
}


def choose_backend(
    requested: str, needs: AttentionNeeds, failed: Mapping[str, str] | None = None
) -> Choice:
    """The requested backend, or for "auto" the first in order of preference that can serve.

    A function of its arguments alone; `failed` are backends that were tried out in vain, and why.
    Raises `ConfigurationError` for an unknown name, for a forced choice that cannot serve
    (with the reason), and where none can.
    """
    if requested != "auto":
        if requested not in _CANDIDATES:
            known = ", ".join(["auto", *_CANDIDATES])
            raise ConfigurationError(
                f"attention_backend={requested!r} is not known: use one of {known}"
            )
        obstacle = _obstacle(requested, needs, failed)
        if obstacle is not None:
            raise ConfigurationError(
                f"attention_backend={requested!r} cannot serve: {obstacle}; "
                "attention_backend='auto' chooses one that can"
            )
        return _choice(requested, "asked for", needs)
    obstacles: list[str] = []
    for name, candidate in _CANDIDATES.items():
        obstacle = _obstacle(name, needs, failed)
        if obstacle is None and needs.device.type in candidate.auto_on:
            passed_over = f" ({'; '.join(obstacles)})" if obstacles else ""
            return _choice(name, candidate.strength + passed_over, needs)
        obstacles.append(f"{name}: {obstacle or _NOT_BY_ITSELF.format(needs.device.type)}")
    raise ConfigurationError(f"no attention backend can serve: {'; '.join(obstacles)}")


_NOT_BY_ITSELF = "on {} only when asked for"


def _obstacle(name: str, needs: AttentionNeeds, failed: Mapping[str, str] | None) -> str | None:
    return (failed or {}).get(name) or _CANDIDATES[name].obstacle(needs)


def _choice(name: str, reason: str, needs: AttentionNeeds) -> Choice:
    return Choice(name, reason, needs.block_size or _CANDIDATES[name].block_size)


def select_backend(requested: str, needs: AttentionNeeds) -> Choice:
    """`choose_backend`, and the choice tried out on this machine.

    One that does not import or compile is passed over with a warning; a forced one is an error.
    """
    failed: dict[str, str] = {}
    while True:
        choice = choose_backend(requested, needs, failed)
        candidate = _CANDIDATES[choice.backend]
        problem = None
        if candidate.uncertain:
            problem = try_out(candidate.build, needs, choice.block_size)
        if problem is None:
            _log.info("attention backend %s: %s", choice.backend, choice.reason)
            return choice
        failed[choice.backend] = f"it was tried and failed with {problem}"
        if requested == "auto":
            _log.warning("attention backend %s: %s", choice.backend, failed[choice.backend])


def explain_backends(choice: Choice, needs: AttentionNeeds) -> dict[str, str]:
    """For every backend, in order of preference: whether it was chosen, could serve, or why not."""
    verdicts = {}
    for name, candidate in _CANDIDATES.items():
        obstacle = candidate.obstacle(needs)
        verdicts[name] = f"cannot serve: {obstacle}" if obstacle else "could serve"
        if name == choice.backend:
            verdicts[name] = "chosen"
    return verdicts


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
    already. Keywords that count: `paged` (a `PagedContext`, or which `CompiledModel` is being
    compiled), `scaling`, `sliding_window`,
    `softcap`, `s_aux` (sinks). Returns `[1, T, query_heads, d]` and no weights.
    """
    context = kwargs.get("paged")
    if not isinstance(context, PagedContext | CompiledModel):
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
        return context.attend(module.layer_idx, q, k, v, options)[None], None
    return opaque.paged_attention(
        q,
        k,
        v,
        options.sinks,
        context.number,
        module.layer_idx,
        options.scaling,
        options.sliding_window,
        options.softcap,
    )[None], None


def backend_names() -> tuple[str, ...]:
    """All that `choose_backend` knows, the preferred first, whether they can serve or not."""
    return tuple(_CANDIDATES)
