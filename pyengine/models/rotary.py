"""Rotary embeddings: fused with the KV write, and made static for CUDA graphs.

`make_rotary_static`: some kinds of scaling use other frequencies for long sequences. In each step
the host reads the largest position, which cannot be captured. If no sequence may be so long, that
check is removed.

`take_over_rotations`: a layer of transformers normalises its queries and keys, rotates them, and
passes them to attention. If it does no more, `OwnRotation` replaces it, which passes the
projections and the rotation to attention. A trial of the model over a few tokens decides, not the
layer's name: what reaches attention, and the use of its result, must be those of `OwnRotation`.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import unwrap
from itertools import product
from types import MethodType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from pyengine.attention.backend import (
    AttentionOptions,
    HeadNorm,
    RotaryLayout,
    Rotation,
    Rows,
    rotated,
)
from pyengine.attention.dispatch import PagedContext, paged_attention
from pyengine.utils.host_copy import upload


def make_rotary_static(model: nn.Module, longest: int) -> str | None:
    """Make the rotary embeddings of `model` capturable for sequences of up to `longest` tokens.

    Returns why one of them is not, in words for the caller; None: all are. Their results for
    such sequences stay the same.
    """
    for module in model.modules():
        if not _is_rotary(module) or not _depends_on_positions(module):
            continue
        limit = _short_positions(module)
        if limit is not None and longest <= limit:
            own: Any = module
            own.forward = MethodType(unwrap(type(module).forward), module)
            if not _depends_on_positions(module):
                continue
            del own.forward
        way_out = (
            "" if limit is None or longest <= limit else f": set max_model_len={limit} at most"
        )
        return (
            f"{type(model).__name__} with a rotary embedding of type {_kind(module)} chooses its "
            f"frequencies anew in every step, which a CUDA graph cannot{way_out}"
        )
    return None


def _is_rotary(module: nn.Module) -> bool:
    return isinstance(getattr(module, "inv_freq", None), torch.Tensor)


def _depends_on_positions(module: nn.Module) -> bool:
    """True if its result depends on the positions' values: on torch's device "meta", which has
    shapes only, that is an error."""
    shapes: Any = deepcopy(module).to("meta")
    for name, value in vars(shapes).items():
        if isinstance(value, torch.Tensor):
            setattr(shapes, name, value.to("meta"))
    positions = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            shapes(torch.zeros(1, 2, 8, device="meta"), positions)
    except (RuntimeError, NotImplementedError):
        return True
    except TypeError:  # it needs more than positions: the capture will fail
        return False
    return False


def _short_positions(module: Any) -> int | None:
    """The number of positions of its usual frequencies; None if unknown."""
    parameters = getattr(module.config, "rope_parameters", None) or {}
    longest = parameters.get("original_max_position_embeddings")
    if longest is None and "dynamic" in _kind(module):
        longest = getattr(module, "original_max_seq_len", None)
    return None if longest is None else int(longest)


def _kind(module: Any) -> str:
    return str(getattr(module, "rope_type", type(module).__name__))


_log = logging.getLogger(__name__)

_EARLY_POSITIONS = (0, 1, 2, 7)
_ULPS = 8
"""Tolerance of a trial in units of the last place of its largest number: the model rounds after
each operation, `rotated` once."""


class OwnRotation(nn.Module):
    """Replaces an attention layer of transformers, with its projections and norms."""

    def __init__(
        self,
        layer: Any,
        options: AttentionOptions,
        layout: RotaryLayout,
        offset: float | None,
    ) -> None:
        """`offset` is that of the norms; None: there are none."""
        super().__init__()
        self.layer_idx, self.head_dim = layer.layer_idx, layer.head_dim
        self.q_proj: Any = layer.q_proj
        self.k_proj: Any = layer.k_proj
        self.v_proj: Any = layer.v_proj
        self.o_proj: Any = layer.o_proj
        self.options, self.layout = replace(options, rotation=None), layout
        """The options of its attention, without the rotation of a step."""
        self.sinks = options.sinks  # where those who walk over parameters find it
        self._offset, self._eps = offset, 0.0
        if offset is not None:
            self.q_norm, self.k_norm = layer.q_norm, layer.k_norm
            self._eps = _eps(layer.q_norm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map `hidden_states` `[1, T, hidden]`; `paged` is among the `kwargs`."""
        query, key, value = (rows.transpose(1, 2) for rows in self.rows(hidden_states))
        out, _ = paged_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            paged=kwargs.get("paged"),
            scaling=self.options.scaling,
            sliding_window=self.options.sliding_window,
            softcap=self.options.softcap,
            s_aux=self.sinks,
            rotation=self.rotation(position_embeddings),
        )
        return self.o_proj(out.flatten(2)), None

    def rows(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, each `[1, T, heads, d]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return [item(hidden_states).view(shape) for item in (self.q_proj, self.k_proj, self.v_proj)]

    def rotation(self, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Rotation:
        """The rotation of cosines and sines `[1, T, columns]`."""
        cos, sin = position_embeddings
        return Rotation(cos[0], sin[0], self.layout, self.head_norm)

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of queries and keys before the rotation."""
        if self._offset is None:
            return None
        weights = (self.q_norm.weight, self.k_norm.weight)
        return HeadNorm(*weights, eps=self._eps, offset=self._offset)


def take_over_rotations(model: Any) -> int:
    """Replace the layers of `model` by `OwnRotation` if a trial gives the same.

    `model` attends by `paged_attention`. Returns the number of replaced layers; the log has the
    others.
    """
    if there := sum(isinstance(module, OwnRotation) for module in model.modules()):
        return there
    try:
        seen = _trial(model)
    except Exception as error:  # any model may reject the trial step
        _log.info("%s was not tried: %s", type(model).__name__, error)
        return 0
    taken = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            own = _same(layer, seen[layer]) if layer in seen else None
            if own is not None:
                setattr(parent, name, own)
                taken += 1
    if taken < len(seen):
        _log.info(
            "%s: %d of %d layers turn their queries and keys themselves",
            type(model).__name__,
            len(seen) - taken,
            len(seen),
        )
    return taken


class _Call(NamedTuple):
    """The inputs of attention, `[T, heads, d]`, and its result."""

    rows: Rows
    options: AttentionOptions
    attended: torch.Tensor


@dataclass(slots=True)
class _Seen:
    """A layer's run in a trial; `calls` has one call."""

    arguments: dict[str, Any]
    calls: list[_Call]
    result: Any = None


@dataclass(slots=True)
class _Witness:
    """A step in which attention returns random numbers, and records its inputs."""

    calls: list[_Call] = field(default_factory=list)

    def forward(self, _layer: int, rows: Rows, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        query, _, value = rows
        shape = (*query.shape[:2], value.shape[2])
        attended = torch.randn(shape, device=query.device).to(query.dtype)
        self.calls.append(_Call(rows, options, attended))
        return attended


@torch.inference_mode()
def _trial(model: Any) -> dict[nn.Module, _Seen]:
    """Run `model` over a few tokens; return the record of its attention layers."""
    witness, seen = _Witness(), dict[nn.Module, _Seen]()
    layers = [module for module in model.modules() if _has_the_parts(module)]

    def before(layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        bound = inspect.signature(type(layer).forward).bind(layer, *given, **named)
        witness.calls = []
        seen[layer] = _Seen(bound.arguments, witness.calls)

    def after(layer: Any, _given: Any, result: Any) -> None:
        seen[layer].result = result

    hooks: list[Any] = [
        each_layer.register_forward_pre_hook(before, with_kwargs=True) for each_layer in layers
    ]
    hooks += [each_layer.register_forward_hook(after) for each_layer in layers]
    device = next(model.parameters()).device
    config = model.config.get_text_config()
    last = int(getattr(config, "max_position_embeddings", 0) or 4096) - 1
    positions = upload(np.array([*_EARLY_POSITIONS, last]), device)
    context = PagedContext(witness, [None] * int(config.num_hidden_layers))
    state = torch.random.get_rng_state()
    try:
        model(
            input_ids=((positions * 31 + 7) % config.vocab_size)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            paged=context,
        )
    finally:
        torch.random.set_rng_state(state)
        for hook in hooks:
            hook.remove()
    return seen


def _has_the_parts(layer: Any) -> bool:
    named = ("layer_idx", "head_dim", "q_proj", "k_proj", "v_proj", "o_proj")
    return all(hasattr(layer, name) for name in named)


def _same(layer: Any, seen: _Seen) -> OwnRotation | None:
    """The replacement that reproduces `layer` in `seen`; None if there is none."""
    embeddings = seen.arguments.get("position_embeddings")
    if len(seen.calls) != 1 or not isinstance(embeddings, tuple):
        return None
    for layout, offset in product(_layouts(embeddings[0], layer.head_dim), _offsets(layer)):
        own = OwnRotation(layer, seen.calls[0].options, layout, offset)
        if _agrees(own, seen):
            return own
    return None


def _layouts(cos: torch.Tensor, head_dim: int) -> Iterator[RotaryLayout]:
    """The possible layouts of cosines `[1, T, columns]`."""
    columns = cos.shape[-1]
    orders: Sequence[Literal["halves", "pairs"]] = ("halves", "pairs")
    for order, (size, step) in product(orders, ((columns, 1), (columns, 2), (2 * columns, 1))):
        if 0 < size <= head_dim and size % 2 == 0:
            yield RotaryLayout(size, order, step)


def _offsets(layer: Any) -> Sequence[float | None]:
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is None for norm in norms):
        return [None]
    shapes = {tuple(getattr(norm, "weight", torch.empty(0)).shape) for norm in norms}
    return [None, 0.0, 1.0] if shapes == {(layer.head_dim,)} and _eps(norms[0]) else [None]


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


@torch.inference_mode()
def _agrees(own: OwnRotation, seen: _Seen) -> bool:
    """True if `own` passes the same inputs to attention, and maps its result in the same way."""
    call, arguments = seen.calls[0], seen.arguments
    query, key, value = (rows[0] for rows in own.rows(arguments["hidden_states"]))
    if value.shape != call.rows[2].shape or query.shape != call.rows[0].shape:
        return False
    turned = rotated(query, key, own.rotation(arguments["position_embeddings"]))
    result = seen.result[0] if isinstance(seen.result, tuple) else seen.result
    found = (*turned, value, own.o_proj(call.attended[None].flatten(2)))
    return all(map(_near, found, (*call.rows, result)))


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = expected.float().abs().max().item()
    limit = _ULPS * torch.finfo(expected.dtype).eps * largest
    return found.shape == expected.shape and bool(
        ((found.float() - expected.float()).abs() <= limit).all()
    )
