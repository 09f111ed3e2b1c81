"""Reads the settings of rotary embeddings, as files of all years have them.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, which has both. The
kind is in `rope_type` or, before that, `type`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotary,
    Scaling,
    YarnScaling,
)
from pyengine.utils.validation import shown

ROPE_DEFAULTS = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
}
"""Defaults of the keys that are read here."""

_UNTIL_TRAINED_LENGTH = "it changes frequencies beyond the trained positions only"
_YARN_BETAS = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class RotaryKind:
    """How a family rotates: the default of the share of a head, None if it always is a whole head.

    `renamed` are kinds that the family knows under other names.
    """

    order: Literal["halves", "pairs"] = "halves"
    share: float | None = None
    renamed: tuple[tuple[str, str], ...] = ()


def rope_section(settings: Settings) -> Settings | None:
    """`rope_parameters` or `rope_scaling`; None: neither."""
    keys = ("rope_parameters", "rope_scaling")
    sections = [settings.section(key) if settings.has(key) else None for key in keys]
    filled = [section for section in sections if section is not None and not section.is_empty]
    settings.pass_over(dict.fromkeys(keys, "null, or read"))
    if len(filled) > 1:
        settings.refuse("rope_scaling", "rope_parameters is there too; delete one of them")
    return filled[0] if filled else settings.default_section("rope_parameters")


def rope_type(section: Settings | None, kind: RotaryKind | None = None) -> str:
    """The kind of rotary embedding that a section names."""
    if section is None:
        return "default"
    kinds = {key: section.raw(key) for key in ("rope_type", "type") if section.has(key)}
    for key, value in kinds.items():
        if not isinstance(value, str):
            section.refuse(key, "it must be the name of a kind")
    names = list(kinds.values())
    section.pass_over({"rope_type": "null, or read", "type": "null, or read"})
    if len(set(names)) > 1:
        section.refuse("type", f"and rope_type={shown(names[0])}: delete one of them")
    name = names[0] if names else "default"
    return dict(kind.renamed if kind else ()).get(name, name)


def read_rotary(settings: Settings, head_dim: int, kind: RotaryKind) -> Rotary:
    """The rotary embedding of all layers."""
    return rotary_of(settings, rope_section(settings), head_dim, kind)


def rotary_of(
    settings: Settings,
    section: Settings | None,
    head_dim: int,
    kind: RotaryKind,
    *,
    theta: str = "rope_theta",
) -> Rotary:
    """The rotary embedding of a `section`, with what it lacks from the `settings` around it.

    `theta` is the key of its base there.
    """
    inner = section or Settings({}, "")
    base = _inner_or_outer(inner, "rope_theta", settings, theta)
    share = _share(inner, settings, kind)
    name = rope_type(section, kind)
    if name == "default":
        if settings.has("original_max_position_embeddings"):  # read for scaled kinds only
            settings.integer("original_max_position_embeddings")
        dim = int(head_dim * share)
        return _rotary(dim, base, kind, None)
    if name == "proportional":
        angles = int(share * head_dim // 2)
        scaling = (
            LinearScaling(factor=inner.number("factor", above=0)) if inner.has("factor") else None
        )
        return Rotary(
            size=head_dim,
            theta=base,
            exponent_size=head_dim,
            turned=angles,
            order=kind.order,
            scaling=scaling,
        )
    if name not in _READERS:
        inner.refuse("rope_type", f"known are default, proportional, {', '.join(_READERS)}")
    dim = int(head_dim * share)
    return _rotary(dim, base, kind, _READERS[name](inner, settings))


def two_rotaries(
    settings: Settings, head_dim: int, kind: RotaryKind, sliding_theta: str
) -> tuple[Rotary, Rotary]:
    """Those of full and of sliding layers: by kind of layer in newer files, by key in older ones.

    In older files `rope_scaling` is for full layers, `sliding_theta` the key of sliding ones' base.
    """
    section = rope_section(settings)
    full, sliding = section, None
    if section is not None and not settings.has("rope_scaling"):
        full, sliding = (
            section.section(key) if section.has(key) else None
            for key in ("full_attention", "sliding_attention")
        )
    elif section is not None and section.has("type") and not section.has("rope_type"):
        section.refuse("type", "transformers does not read it here: name the kind rope_type")
    why = "transformers does not read it for layers of two kinds"
    settings.only("original_max_position_embeddings", why=why)
    for inner in (full, sliding):
        if inner is not None:
            inner.only("truncate", True, why=why)
            is_scaled = rope_type(inner, kind) != "default"
            if is_scaled and kind.share is not None and not inner.has("partial_rotary_factor"):
                inner.refuse("rope_type", "partial_rotary_factor is needed with it")
    return (
        rotary_of(settings, full, head_dim, kind),
        rotary_of(settings, sliding, head_dim, kind, theta=sliding_theta),
    )


def usable_positions(settings: Settings, kind: RotaryKind | None = None) -> int:
    """The positions that a model can be used for.

    LongRoPE chooses its frequencies by the longest sequence of a batch. Beyond the trained length
    they would change under cached keys, so such models run up to that length.
    """
    positions = settings.integer("max_position_embeddings")
    section = rope_section(settings)
    if rope_type(section, kind) == "longrope" and section is not None:
        return min(positions, _original(section, settings))
    return positions


def yarn_score_scale(section: Settings | None) -> float:
    """DeepSeek's factor on attention scores, for a section with `mscale_all_dim`."""
    if section is None or rope_type(section) == "default" or not section.has("mscale_all_dim"):
        return 1.0
    scale = _magnitude(section.number("factor"), section.number("mscale_all_dim"))
    return scale * scale


def _rotary(dim: int, theta: float, kind: RotaryKind, scaling: Scaling | None) -> Rotary:
    size = dim + dim % 2
    return Rotary(
        size=size,
        theta=theta,
        exponent_size=max(1, dim),
        turned=size // 2,
        order=kind.order,
        scaling=scaling,
    )


def _inner_or_outer(inner: Settings, key: str, outer: Settings, outer_key: str) -> float:
    """The number in the section, or outside; if it is in both, they must be equal."""
    if not inner.has(key):
        inner.pass_over({key: "null"})
        return outer.number(outer_key, above=0)
    value = inner.number(key, above=0)
    if outer.has(outer_key) and outer.number(outer_key, above=0) != value:
        outer.refuse(
            outer_key, f"and {key}={value:g} among the rotary settings: delete one of them"
        )
    outer.pass_over({outer_key: "the section has it"})
    return value


def _share(inner: Settings, outer: Settings, kind: RotaryKind) -> float:
    """The share of a head that rotates."""
    key = "partial_rotary_factor"
    if kind.share is None:
        for settings in (inner, outer):
            settings.only(key, 1.0, 1, why="this family rotates whole heads")
        return 1.0
    if inner.has(key) or outer.has(key):
        return _inner_or_outer(inner, key, outer, key)
    inner.pass_over({key: "null"})
    outer.pass_over({key: "null"})
    return kind.share


def _original(inner: Settings, outer: Settings) -> int:
    """The trained positions: outside of the section, in it, or all positions."""
    key = "original_max_position_embeddings"
    sections = [settings for settings in (outer, inner) if settings.has(key)]
    numbers = [settings.integer(key) for settings in sections]
    if len(set(numbers)) > 1:
        outer.refuse(key, f"and {numbers[1]} among the rotary settings: delete one of them")
    inner.pass_over({key: "null, or read"})
    if numbers:
        return numbers[0]
    if outer.has_default(key):
        return outer.integer(key)
    return outer.integer("max_position_embeddings")


def _linear(inner: Settings, outer: Settings) -> Scaling:
    outer.pass_over({"original_max_position_embeddings": "linear scaling has none"})
    return LinearScaling(factor=inner.number("factor", above=0))


def _dynamic(inner: Settings, outer: Settings) -> None:
    """NTK scaling by the length of a sequence has no effect up to the trained positions."""
    inner.number("factor", above=0)
    inner.pass_over({"original_max_position_embeddings": _UNTIL_TRAINED_LENGTH})
    outer.pass_over({"original_max_position_embeddings": _UNTIL_TRAINED_LENGTH})


def _llama3(inner: Settings, outer: Settings) -> Scaling:
    low, high = inner.number("low_freq_factor", above=0), inner.number("high_freq_factor", above=0)
    if high == low:
        inner.refuse("high_freq_factor", "it must differ from low_freq_factor")
    return Llama3Scaling(
        factor=inner.number("factor", above=0), low=low, high=high, original=_original(inner, outer)
    )


def _yarn(inner: Settings, outer: Settings) -> Scaling:
    original = _original(inner, outer)
    factor = outer.integer("max_position_embeddings") / original
    if inner.has("factor"):
        factor = inner.number("factor", above=0)
    fast, slow = (
        (inner.number(key, above=0) if inner.has(key) else default)
        for key, default in zip(("beta_fast", "beta_slow"), _YARN_BETAS, strict=True)
    )
    attention = _yarn_attention(inner, factor)
    truncate = inner.flag("truncate") if inner.has("truncate") else True
    inner.pass_over(dict.fromkeys(("factor", "beta_fast", "beta_slow", "truncate"), "null"))
    return YarnScaling(
        factor=factor,
        original=original,
        attention=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )


def _yarn_attention(inner: Settings, factor: float) -> float:
    """The factor on cosines and sines: given, or from `mscale` and `mscale_all_dim`."""
    keys = "mscale", "mscale_all_dim"
    scales = [inner.number(key) if inner.has(key) else 0.0 for key in keys]
    inner.pass_over(dict.fromkeys((*keys, "attention_factor"), "null"))
    if inner.has("attention_factor"):
        return inner.number("attention_factor")
    if all(scales):
        return _magnitude(factor, scales[0]) / _magnitude(factor, scales[1])
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(inner: Settings, outer: Settings) -> Scaling:
    original = _original(inner, outer)
    factor = outer.integer("max_position_embeddings") / original
    if inner.has("factor"):
        factor = inner.number("factor", above=0)
    if original == 1:
        outer.refuse("original_max_position_embeddings", "LongRoPE needs more than one")
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if inner.has("attention_factor"):
        attention = inner.number("attention_factor")
    inner.pass_over({"factor": "null", "attention_factor": "null"})
    inner.pass_over({"long_factor": _UNTIL_TRAINED_LENGTH})
    divisors = inner.items("short_factor", None) or []
    return LongRopeScaling(
        divisors=inner.numbers("short_factor", len(divisors)), attention=attention
    )


_READERS: dict[str, Callable[[Settings, Settings], Scaling | None]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
