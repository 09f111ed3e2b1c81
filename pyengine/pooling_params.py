"""How the hidden states of a prompt become an embedding or classes: validated once, then frozen."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pyengine.sampling_params import TRUNCATION
from pyengine.utils.validation import Rule, refuse, refuses_unknown

Pooling: TypeAlias = Literal["last", "mean"]
"""The state of the last token, or the mean of all states."""

POOLINGS: tuple[Pooling, ...] = ("last", "mean")

_RULES = {
    "dimensions": Rule(
        int,
        lambda x: 1 <= x < 2**31,
        "an integer of at least 1, or None for all",
        optional=True,
    ),
    "truncate_prompt_tokens": TRUNCATION,
}


@refuses_unknown("pooling parameter")
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Settings of one text to embed, score or classify, with vLLM's names.

    Raises :class:`InvalidRequestError` for a value that is out of range or has a wrong type, and
    for an unknown name.
    """

    pooling: Pooling | None = None
    """"last" or "mean" of the hidden states; ``None``: as the model's folder says, else "last"."""
    normalize: bool | None = None
    """Divide an embedding by its length; ``None``: as the model's folder says, else True."""
    dimensions: int | None = None
    """Keep the first so many numbers of an embedding, before it is normalised: for models trained
    for that (Matryoshka)."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as the model accepts."""
    use_activation: bool | None = None
    """False: return the logits of classes, without softmax or sigmoid."""

    def __post_init__(self) -> None:
        way: Any = self.pooling
        if way is not None and not (isinstance(way, str) and way in POOLINGS):
            raise refuse("pooling", self.pooling, "'last', 'mean', or None for the model's")
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise refuse(name, getattr(self, name), "True, False, or None for the default")
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))
