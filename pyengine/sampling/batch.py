"""What the sampler needs to know of a batch: worked out once, good for many steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.adjust import Adjustments
from pyengine.sampling.draw_cpu import Columns
from pyengine.sampling.host import upload
from pyengine.sampling.state import SamplingState


class SamplingBatch:
    """Requests in the order of the logits' rows, and what stays the same about them.

    As long as the same requests are sampled step after step, the same object serves.
    """

    __slots__ = (
        "adjustments",
        "depends_on_output",
        "draws",
        "matchers",
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
        self.matchers = {
            row: state.matcher for row, state in enumerate(states) if state.matcher is not None
        }
        """Of the rows whose answers have to have some form."""
        random_rows = [row for row, state in enumerate(states) if state.is_drawn]
        self.draws = DrawBatch(states, random_rows) if random_rows else None
        """Rows that are drawn; the others are greedy. ``None``: all are."""
        self.wanted = {
            row: state.num_logprobs
            for row, state in enumerate(states)
            if state.num_logprobs is not None
        }
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
    """The requests of a batch that draw their tokens; ``rows`` are their places in it."""

    __slots__ = ("_settings", "columns", "rows", "seeds")

    def __init__(self, states: Sequence[SamplingState], rows: Sequence[int]) -> None:
        self.rows = np.array(rows, dtype=np.int64)
        self.seeds: npt.NDArray[np.uint64] = np.array(
            [states[row].seed for row in rows], dtype=np.uint64
        )
        self.columns = _columns([states[row] for row in rows])
        self._settings: dict[tuple[int, int, torch.device], DrawSettings] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def settings(self, rows: slice, device: torch.device) -> DrawSettings:
        """The settings of these of its requests, made when they are first asked for."""
        key = (rows.start, rows.stop, device)
        if key not in self._settings:
            self._settings[key] = _settings(self.columns, rows, device)
        return self._settings[key]


def _columns(states: Sequence[SamplingState]) -> Columns:
    table = np.array([state.draw_settings for state in states], dtype=np.float64).T.copy()
    temperature, min_p, top_k, top_p = table[:, :, None]
    return Columns(temperature, min_p, top_k.astype(np.int64), top_p)


def _settings(columns: Columns, rows: slice, device: torch.device) -> DrawSettings:
    def moved(column: npt.NDArray[Any]) -> torch.Tensor:
        return upload(column, device)

    min_p, top_k, top_p = columns.min_p[rows], columns.top_k[rows], columns.top_p[rows]
    return DrawSettings(
        temperature=moved(columns.temperature[rows]),
        min_p=moved(min_p) if (min_p > 0).any() else None,
        top_k=moved(top_k) if (top_k > 0).any() else None,
        top_p=moved(top_p) if (top_p < 1).any() else None,
        largest_k=int(top_k.max(initial=0)) or 1,
        has_bare_top_p=bool(((top_p < 1) & (top_k == 0)).any()),
    )
