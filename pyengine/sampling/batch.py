"""The requests of a batch for the sampler, and the changes of their logits.

Allowed tokens, barred tokens, bias and penalties change few logits of a row. They are gathered,
changed and written back by flat index (row * vocabulary + token). So the cost follows the number of
tokens that a request has seen, not the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.draw_cpu import Columns
from pyengine.sampling.state import Positions, SamplingState
from pyengine.utils.host_copy import upload

_Ids: TypeAlias = npt.NDArray[np.int64]

_LARGEST = torch.finfo(torch.float32).max
"""The limit of logits: a row with an infinite logit has no distribution."""


class Adjustments:
    """The changes of a batch's logits; computed once, valid for many steps.

    In vLLM's order: tokens that are not allowed, bad words, and stop tokens before
    ``min_tokens`` become -inf, then the bias is added, then penalties apply.
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        rows = dict(enumerate(states))
        self._allowed = _Cells({row: item.allowed_ids for row, item in rows.items()})
        self._barred = _Cells({row: item.barred_ids for row, item in rows.items()})
        self._stops = _Cells({row: item.stop_ids for row, item in rows.items()})
        self._stops_until = np.array([state.params.min_tokens for state in states])[
            self._stops.rows
        ]
        self._bias = _Cells({row: item.bias_ids for row, item in rows.items()})
        self._bias_values = np.concatenate([state.bias_values for state in states])
        self._worded = [(row, item) for row, item in rows.items() if item.bad_words]
        self._penalties = _Penalties(rows)

    def apply(self, logits: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Return the changed logits: float32 [B, V], or ``logits`` itself if none changes.

        ``positions[i]`` is the position of row i's token in its output. ``logits`` [B, V] stays
        as it is.
        """
        stops = np.asarray(positions, dtype=np.int64)[self._stops.rows] < self._stops_until
        words = {row: ids for row, item in self._worded if len(ids := item.barred_by_output())}
        is_static = len(self._allowed) or len(self._barred) or len(self._bias)
        if not (is_static or stops.any() or words or self._penalties.is_due):
            return logits
        adjusted = logits.to(torch.float32, copy=True).contiguous()
        flat, vocab_size = adjusted.view(-1), adjusted.shape[1]
        if len(self._allowed):
            index = self._allowed.index(vocab_size, flat.device)
            kept = flat[index]
            rows = upload(np.unique(self._allowed.rows), flat.device)
            adjusted.index_fill_(0, rows, -torch.inf)
            flat[index] = kept
        if len(self._barred):
            flat.index_fill_(0, self._barred.index(vocab_size, flat.device), -torch.inf)
        if words:
            flat.index_fill_(0, _Cells(words).index(vocab_size, flat.device), -torch.inf)
        if stops.any():
            index = self._stops.index(vocab_size, flat.device)
            if not stops.all():
                index = index[upload(np.flatnonzero(stops), flat.device)]
            flat.index_fill_(0, index, -torch.inf)
        if len(self._bias):
            index = self._bias.index(vocab_size, flat.device)
            bias = upload(self._bias_values, flat.device)
            flat[index] = (flat[index] + bias).clamp_(max=_LARGEST)
        self._penalties.apply(flat, vocab_size)
        return adjusted


class _Cells:
    """Places in a table of logits: (row, token id), in the order of `ids_by_row`."""

    def __init__(self, ids_by_row: Mapping[int, _Ids]) -> None:
        several = [ids for ids in ids_by_row.values() if len(ids)]
        lengths = [len(ids) for ids in ids_by_row.values()]
        self.rows: _Ids = np.repeat(np.array([*ids_by_row], dtype=np.int64), lengths)
        self._ids: _Ids = np.concatenate(several) if several else np.empty(0, dtype=np.int64)
        self._made: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Their flat index: int64 [n]; raises `ValueError` for ids outside the vocabulary."""
        if self._made is None or self._made[0] != vocab_size or self._made[1].device != device:
            if len(self._ids) and not 0 <= self._ids.min() <= self._ids.max() < vocab_size:
                raise ValueError(
                    f"token ids {self._ids.min()} to {self._ids.max()} in rows of "
                    f"{vocab_size} logits"
                )
            index = upload(self.rows * vocab_size + self._ids, device)
            self._made = (vocab_size, index)
        return self._made[1]


class _Penalties:
    """Repetition first, then frequency and presence.

    Repetition as in CTRL (Keskar et al. 2019), with the sign taken into account so that a
    penalised logit always falls; frequency and presence as in OpenAI's API.
    """

    def __init__(self, states: Mapping[int, SamplingState]) -> None:
        penalised = {row: item for row, item in states.items() if item.counts is not None}
        params = [count.params for count in penalised.values()]
        self._rows = list(penalised)
        self._counts = [count.counts for count in penalised.values() if count.counts is not None]
        self._repetition = np.array([p.repetition_penalty for p in params], dtype=np.float32)
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)

    @property
    def is_due(self) -> bool:
        """True if any token has been counted."""
        return any(map(len, self._counts))

    def apply(self, flat: torch.Tensor, vocab_size: int) -> None:
        """Change the logits of the counted tokens in place; `flat` is float32 [B * V]."""
        if not self.is_due:
            return
        seen = {row: count.ids for row, count in zip(self._rows, self._counts, strict=True)}
        index = _Cells(seen).index(vocab_size, flat.device)
        times = np.concatenate([count.counts for count in self._counts])
        row = np.repeat(np.arange(len(self._counts)), [len(count) for count in self._counts])
        offset = self._frequency[row] * times + self._presence[row] * (times > 0)
        divisor = upload(self._repetition[row], flat.device)
        values = flat[index]
        penalised = torch.where(values > 0, values / divisor, values * divisor)
        penalised -= upload(offset, flat.device)
        flat[index] = penalised.clamp_(max=_LARGEST)


class SamplingBatch:
    """Requests in the order of the logits' rows, and their constant settings.

    While the same requests are sampled step after step, the same object serves.
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self.states = tuple(states)
        self.vocab_size = max([state.vocab_size for state in states], default=0)
        """The largest of them."""
        self.depends_on_output = any([state.depends_on_output for state in states])
        may_change_logits = any([state.may_change_logits for state in states])
        self.adjustments = Adjustments(self.states) if may_change_logits else None
        """``None``: no logits change."""
        self.matchers = {
            row: state.matcher for row, state in enumerate(states) if state.matcher is not None
        }
        """The matchers of rows with a grammar."""
        random_rows = [row for row, state in enumerate(states) if state.is_drawn]
        self.draws = DrawBatch(states, random_rows) if random_rows else None
        """The drawn rows; the others are greedy. ``None``: all are greedy."""
        self.wanted = {
            row: state.num_logprobs
            for row, state in enumerate(states)
            if state.num_logprobs is not None
        }
        """The number of log-probabilities of each row that reports them."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of rows as columns `[R, 1]`; `None` if no row uses one.

    A `top_k` of 0 is no limit. `largest_k` is the largest limit (at least 1). `has_bare_top_p` is
    true if a row has top-p without top-k.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    largest_k: int
    has_bare_top_p: bool


class DrawBatch:
    """The requests of a batch that draw their tokens; ``rows`` are their rows in it."""

    def __init__(self, states: Sequence[SamplingState], rows: Sequence[int]) -> None:
        self.rows = np.array(rows, dtype=np.int64)
        self.seeds: npt.NDArray[np.uint64] = np.array(
            [states[row].seed for row in rows], dtype=np.uint64
        )
        table = np.array([states[row].draw_settings for row in rows], dtype=np.float64).T.copy()
        temperature, min_p, top_k, top_p = table[:, :, None]
        self.columns = Columns(temperature, min_p, top_k.astype(np.int64), top_p)
        self._settings: dict[tuple[int, int, torch.device], DrawSettings] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def settings(self, rows: slice, device: torch.device) -> DrawSettings:
        """The settings of these requests, made at first use."""
        key = (rows.start, rows.stop, device)
        if key not in self._settings:
            self._settings[key] = self._made(rows, device)
        return self._settings[key]

    def _made(self, rows: slice, device: torch.device) -> DrawSettings:
        columns = self.columns
        min_p, top_k, top_p = columns.min_p[rows], columns.top_k[rows], columns.top_p[rows]
        return DrawSettings(
            temperature=upload(columns.temperature[rows], device),
            min_p=upload(min_p, device) if (min_p > 0).any() else None,
            top_k=upload(top_k, device) if (top_k > 0).any() else None,
            top_p=upload(top_p, device) if (top_p < 1).any() else None,
            largest_k=int(top_k.max(initial=0)) or 1,
            has_bare_top_p=bool(((top_p < 1) & (top_k == 0)).any()),
        )
