"""What the sampler needs to know of a batch: worked out once, good for many steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.adjust import Adjustments
from pyengine.sampling.state import SamplingState
from pyengine.sampling.uniform import seeds_of


class SamplingBatch:
    """Requests in the order of the logits' rows, and what stays the same about them.

    As long as the same requests are sampled step after step, the same object serves.
    """

    __slots__ = (
        "adjustments",
        "depends_on_output",
        "draws",
        "random_rows",
        "states",
        "vocab_size",
        "wanted",
    )

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self.states = tuple(states)
        self.vocab_size = max([state.vocab_size for state in states], default=0)
        """The largest of them."""
        self.depends_on_output = any([state.depends_on_output for state in states])
        may_change_logits = any([state.may_change_logits for state in states])
        self.adjustments = Adjustments(self.states) if may_change_logits else None
        """``None``: tokens are chosen from the model's own logits."""
        self.random_rows = [row for row, state in enumerate(states) if state.is_drawn]
        """Rows that are drawn; the others are greedy."""
        self.draws = DrawBatch([states[row] for row in self.random_rows])
        counts = [state.num_logprobs for state in states]
        self.wanted = {row: count for row, count in enumerate(counts) if count is not None}
        """How many log-probabilities each row asks for, of those that do."""

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of some rows as columns `[R, 1]`; `None` where no row asks for it.

    A `top_k` of 0 is no limit. `largest_k` is the largest that is one (at least 1).
    `has_bare_top_p` says that some row asks for top-p and not for top-k.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    largest_k: int
    has_bare_top_p: bool


class DrawBatch:
    """Requests that draw their tokens, one row each."""

    __slots__ = ("_settings", "seeds", "states")

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self.states = tuple(states)
        self.seeds: npt.NDArray[np.uint64] = seeds_of([state.seed for state in states])
        self._settings: dict[tuple[int, int, torch.device], DrawSettings] = {}

    def __len__(self) -> int:
        return len(self.states)

    def rows(self, rows: slice, device: torch.device) -> DrawSettings:
        """The settings of these rows, made when they are first asked for."""
        key = (rows.start, rows.stop, device)
        if key not in self._settings:
            self._settings[key] = _settings(self.states[rows], device)
        return self._settings[key]


def _settings(states: Sequence[SamplingState], device: torch.device) -> DrawSettings:
    params = [state.params for state in states]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    top_k = [max(0, min(one.params.top_k, one.vocab_size)) for one in states]
    return DrawSettings(
        temperature=column([p.temperature for p in params]),
        min_p=column([p.min_p for p in params]) if any(p.min_p > 0 for p in params) else None,
        top_k=torch.tensor(top_k, device=device).unsqueeze(1) if any(top_k) else None,
        top_p=column([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
        largest_k=max(top_k, default=0) or 1,
        has_bare_top_p=any(p.top_p < 1 and p.top_k <= 0 for p in params),
    )
