"""The sampler: a batch of logits in, one token per request out; log-probabilities on request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pyengine.errors import BrokenLogitsError
from pyengine.kernels import ALIGNED, has_kernels
from pyengine.sampling.draw_cpu import Columns, draw_on_cpu, largest
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.sampling.penalties import LARGEST, Penalties
from pyengine.sampling.state import Positions, SamplingState, uniforms
from pyengine.sampling.token_masks import TokenMasks
from pyengine.utils.host_copy import HostCopy, OnDevices, upload

_CHUNK_ELEMENTS = 1 << 24
"""Logits of a chunk of rows on a device: 256 rows of 151,936 are three chunks, of a dozen launches
each. A float64 copy of one is 128 MiB."""
_CANDIDATES = 1 << 26
"""Logits of the rows that kernels draw from together: their candidates take at most 256 MiB."""

_Ids: TypeAlias = npt.NDArray[np.int64]


class Adjustments:
    """The changes of a batch's logits; computed once, valid for many steps.

    In vLLM's order: tokens that are not allowed, bad words, and stop tokens before
    ``min_tokens`` become -inf, then the bias is added, then penalties apply. They change few logits
    of a row, which are gathered, changed and written back by flat index (row * vocabulary + token).
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
        self._bias_values = OnDevices(np.concatenate([state.bias_values for state in states]))
        self._allowed_rows = OnDevices(np.unique(self._allowed.rows))
        self._worded = [(row, item) for row, item in rows.items() if item.bad_words]
        self._penalties = Penalties(rows)

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
            adjusted.index_fill_(0, self._allowed_rows.on(flat.device), -torch.inf)
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
            flat[index] = (flat[index] + self._bias_values.on(flat.device)).clamp_(max=LARGEST)
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
        self.wanted_rows = (
            OnDevices(np.array([*self.wanted], dtype=np.int64)) if self.wanted else None
        )
        """These rows; ``None``: there are none."""


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
        self.is_filtered = bool(((min_p > 0) | (top_k > 0) | (top_p < 1)).any())
        """True if a row has min-p, top-k or top-p."""
        self._table = table
        self._settings: dict[tuple[int, int, torch.device], DrawSettings] = {}
        self.row_ids = OnDevices(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def table(self) -> OnDevices:
        """The settings of kernels: temperature, min-p, top-k, top-p; the CPU does not need it."""
        return OnDevices(np.pad(self._table, ((0, 0), (0, -len(self) % ALIGNED))))

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


class Sampled:
    """The tokens of one step, in the order of the logits' rows: chosen on the device, then read."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        chosen: torch.Tensor,
        rows: Sequence[int] = (),
        pending: PendingLogprobs | None = None,
    ) -> None:
        """`chosen` are the tokens' logits; `pending` the log-probabilities of `rows`."""
        self.token_ids = token_ids
        """int64 [B], on the device, for work queued after the sampling; after `wait` on the CPU."""
        self.logprobs: list[TokenLogprobs | None] = []
        """After `wait` B entries, ``None`` for requests without log-probabilities."""
        self.pending_prompts: PendingLogprobs | None = None
        """Log-probabilities of the prompts in the step."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """The same after `wait`, one prompt after the other."""
        self._chosen = chosen
        self._copy = HostCopy([token_ids, chosen]) if token_ids.is_cuda else None
        self._rows = rows
        self._pending = pending

    def wait(self) -> "Sampled":
        """Wait for the tokens. Raises :class:`BrokenLogitsError` for a row without a choice."""
        if self._copy is not None:
            self.token_ids, self._chosen = self._copy.wait()
        has_choice = (self._chosen > -torch.inf).numpy()  # false for NaN too
        if not has_choice.all():
            raise BrokenLogitsError(np.flatnonzero(~has_choice).tolist(), len(has_choice))
        self.logprobs = [None] * len(self.token_ids)
        if self._pending is not None:
            for row, entry in zip(self._rows, self._pending.result(), strict=True):
                self.logprobs[row] = entry
        if self.pending_prompts is not None:
            self.prompt_logprobs = self.pending_prompts.result()
        return self


def sample(
    logits: torch.Tensor,
    states: Sequence[SamplingState] | SamplingBatch,
    positions: Positions | None = None,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Choose one token per row of ``logits``: [B, V], any floating type and device.

    As vLLM does, in this order:

    1. Log-probabilities are those of the raw logits.
    2. Stop tokens barred by ``min_tokens``, bias, penalties (:class:`Adjustments`); then tokens
       outside the grammar of the answer (:mod:`.token_masks`).
    3. Greedy requests take the largest logit, of equal ones the lowest id.
    4. The others: temperature, min-p, top-k, top-p, draw (:func:`draw`).

    A row's token depends on that row and its state only, not on the rest of the batch. No state
    changes: the caller records an accepted token with :meth:`SamplingState.append`.

    Does not wait for the device. ``positions[i]`` is the position of row i's token in its output,
    by default the length of the state's output: a state without its pending last token is one
    short. ``masks`` are the allowed tokens of rows with a grammar; this waits for them. Raises
    ``ValueError`` if rows and states don't correspond.
    """
    batch = states if isinstance(states, SamplingBatch) else SamplingBatch(states)
    num_rows = len(batch.states)
    if logits.dim() != 2 or len(logits) != num_rows or batch.vocab_size > logits.shape[1]:
        raise _wrong_shape(logits, batch)
    if not num_rows:
        return Sampled(logits.new_empty(0, dtype=torch.int64), torch.empty(0))
    if positions is None:
        positions = [state.num_output for state in batch.states]
    candidates = logits
    if batch.adjustments is not None:
        candidates = batch.adjustments.apply(logits, positions)
    if masks is not None and batch.draws is None and logits.device.type == "cpu":
        token_ids, chosen = masks.largest(candidates)
    else:
        if masks is not None:
            candidates = masks.apply(candidates, to_copy=candidates is logits)
        if batch.draws is None:
            token_ids = largest(candidates)
        else:
            token_ids = _drawn(candidates, batch.draws, positions)
        chosen = candidates.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    if batch.wanted_rows is None:
        return Sampled(token_ids, chosen)
    rows = None  # all of them, in order
    reported = token_ids
    if len(batch.wanted) < num_rows:
        rows = batch.wanted_rows.on(logits.device)
        reported = token_ids[rows]
    logprobs = PendingLogprobs(logits, reported, [*batch.wanted.values()], rows)
    return Sampled(token_ids, chosen, list(batch.wanted), logprobs)


def _drawn(candidates: torch.Tensor, draws: DrawBatch, positions: Positions) -> torch.Tensor:
    """One token per row, some of them drawn: int64 [B], on the device of `candidates` [B, V]."""
    drawn = draw(candidates, draws, positions)
    if len(drawn) == len(candidates):
        return drawn
    token_ids = largest(candidates)
    token_ids[draws.row_ids.on(drawn.device)] = drawn
    return token_ids


def _wrong_shape(logits: torch.Tensor, batch: SamplingBatch) -> ValueError:
    if logits.dim() != 2 or len(logits) != len(batch.states):
        return ValueError(
            f"logits of shape {tuple(logits.shape)} for {len(batch.states)} requests: "
            "one row per request is needed"
        )
    return ValueError(
        f"logits of {logits.shape[1]} tokens for a request with a vocabulary of {batch.vocab_size}"
    )


def draw(logits: torch.Tensor, batch: DrawBatch, positions: Positions) -> torch.Tensor:
    """Return one drawn token for each row of the batch: int64 [R], on the logits' device.

    ``logits`` are [B, V], among them the batch's rows; ``positions[i]`` is the position of row i's
    token in its output, which determines its random number.

    Every filter is a *floor*: tokens below it are out, all others stay, whatever the order of equal
    logits. The draw is by inverse transform: the first token, in order of id, at which the
    cumulated weight exceeds u times the total, in float64. So a row's token is a function of that
    row alone.
    """
    numbers = uniforms(batch.seeds, np.asarray(positions)[batch.rows])
    if logits.device.type == "cpu":
        return torch.from_numpy(draw_on_cpu(logits.detach(), batch.rows, batch.columns, numbers))
    if has_kernels(logits.device):
        return draw_by_kernels(logits, batch, numbers)
    if len(batch) < len(logits):
        logits = logits[batch.row_ids.on(logits.device)]
    return draw_on_device(logits.float(), batch, numbers)


def draw_by_kernels(
    logits: torch.Tensor, batch: DrawBatch, numbers: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Draw without waiting for the device, from `logits` `[B, V]` of any floating type.

    Logits are read once. Filters read again the parts of a row that may pass them. A row's token is
    that of `draw_on_device`, and depends on that row alone.
    """
    from pyengine.kernels.draw import Draws
    from pyengine.kernels.floors import draw_tokens

    if logits.stride(1) != 1:
        logits = logits.contiguous()
    columns, row_ids = upload(numbers, logits.device), batch.row_ids.on(logits.device)
    settings, drawn = batch.table.on(logits.device), []
    step = len(batch)
    if batch.is_filtered:
        step = max(ALIGNED, _CANDIDATES // logits.shape[1] // ALIGNED * ALIGNED)
    for part in (slice(start, start + step) for start in range(0, len(batch), step)):
        draws = Draws(logits, row_ids[part], settings[:, part])
        drawn.append(draw_tokens(draws, columns[part], is_filtered=batch.is_filtered))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def draw_on_device(
    logits: torch.Tensor, batch: DrawBatch, numbers: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Draw without waiting for the device; ``logits`` float32 [R, V]."""
    columns = upload(numbers[:, None], logits.device)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = [
        _draw_chunk(logits[part], batch.settings(part, logits.device), columns[part])
        for part in (slice(start, start + rows) for start in range(0, len(batch), rows))
    ]
    return torch.cat(parts)


def _draw_chunk(
    logits: torch.Tensor, settings: DrawSettings, numbers: torch.Tensor
) -> torch.Tensor:
    weights = logits.double()
    weights -= weights.amax(1, keepdim=True)  # first, so that no temperature overflows
    weights /= settings.temperature
    weights.exp_()
    if settings.min_p is not None:
        weights.masked_fill_(weights < settings.min_p, 0)
    _filter_by_rank(logits, weights, settings)
    cumulated = weights.cumsum(1)
    targets = numbers * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, targets, right=True).clamp_(max=logits.shape[1] - 1)
    # A parallel scan is monotone only up to rounding, and NaN logits have no distribution at
    # all: where the drawn token has no weight, take the most probable one. A check first whether
    # there is such a row would make the host wait for the device.
    has_weight = weights.gather(1, drawn) > 0
    return torch.where(has_weight, drawn, logits.argmax(1, keepdim=True)).squeeze(1)


def _filter_by_rank(logits: torch.Tensor, weights: torch.Tensor, settings: DrawSettings) -> None:
    """Set the weights outside top-k, then outside top-p, to 0, in place. Both are [R, V]."""
    vocab_size, ks, top_p = logits.shape[1], settings.top_k, settings.top_p
    if ks is None and top_p is None:
        return
    head = min(settings.largest_k, vocab_size)
    if top_p is not None and settings.has_bare_top_p:  # the host cannot know the longest nucleus
        head = vocab_size
    largest, ids = logits.topk(head)
    if ks is not None:
        floor = largest.gather(1, (ks - 1).clamp(min=0, max=head - 1))
        weights.masked_fill_((logits < floor) & (ks > 0), 0)
    if top_p is not None:
        floor = _nucleus_floor(weights, top_p, (largest, ids))
        weights.masked_fill_((logits < floor) & (top_p < 1), 0)


def _nucleus_floor(
    weights: torch.Tensor, top_p: torch.Tensor, head: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the lowest logit of each row's nucleus: [R, 1]; rows with top-p 1 are undefined.

    The nucleus is the fewest most probable tokens whose weights add up to ``top_p`` of the
    row's (Holtzman et al., "The curious case of neural text degeneration", 2020). ``head``
    holds each row's largest logits, in falling order, and their token ids: all tokens that have a
    weight, except equals of the last.
    """
    largest, ids = head
    short = weights.gather(1, ids).cumsum(1) < top_p * weights.sum(1, keepdim=True)
    place = short.sum(1, keepdim=True).clamp_(max=largest.shape[1] - 1)
    return largest.gather(1, place)
