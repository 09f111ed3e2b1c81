"""The draw of :mod:`pyengine.sampling.sampler` on the CPU: the same tokens in a tenth of the time.

Top-k, top-p and min-p leave few tokens of a large vocabulary. So a lower bound of the k-th largest
logit is found first; the rest uses the tokens above it only, the *candidates* of each row, in order
of id. A row whose filters may keep more is drawn from all of its tokens. Both ways give the same
token: tokens that are left out have no weight.

Many rows are divided among threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pyengine.cpu.threads import compute_alone, usable_threads

_Floats: TypeAlias = npt.NDArray[np.float32]
_Doubles: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]

_SHORT_ROW = 1024  # rows of up to this many tokens are not worth a search for candidates
_GROUP = 16  # logits of a group; the search for the bound reads the largest of each group
_NUCLEUS_HEAD = 512
"""Most nuclei have at most this many tokens; only rows with a longer one are drawn whole."""
_CHUNK_ELEMENTS = 1 << 18  # logits of a chunk of whole rows, which stays in the processor's cache
_LEAST_ELEMENTS = 1 << 17  # logits of a thread: about two milliseconds of work


@dataclass(frozen=True, slots=True)
class Columns:
    """The settings of rows as columns `[R, 1]`; 0, or 1 for `top_p`, means off."""

    temperature: _Doubles
    min_p: _Doubles
    top_k: _Ints
    top_p: _Doubles

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: _Ints) -> "Columns":
        """The columns of `rows`."""
        if len(rows) == len(self):
            return self
        return Columns(*(getattr(self, field.name)[rows] for field in fields(self)))


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's largest logit, of equal ones the lowest: int64 [B].

    On the CPU by NumPy's argmax: it uses vector instructions and torch's does not, which makes it
    13 times as fast.
    """
    if logits.device.type != "cpu":
        return logits.argmax(1)
    logits = logits.detach()
    if logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(1))
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    starts = range(0, len(logits), step)
    parts = [logits[start : start + step].float().numpy().argmax(1) for start in starts]
    return torch.from_numpy(np.concatenate(parts))


def draw_on_cpu(logits: torch.Tensor, rows: _Ints, columns: Columns, numbers: _Doubles) -> _Ints:
    """Return one token for each of ``rows`` of ``logits`` [B, V], of any floating type: int64 [R].

    ``columns`` and ``numbers`` [R], in [0, 1), belong to ``rows``. As many threads compute as the
    caller may use.
    """
    num_threads = usable_threads()
    num_parts = min(num_threads, len(rows), len(rows) * logits.shape[1] // _LEAST_ELEMENTS)
    if num_parts < 2:
        return _draw(logits, rows, columns, numbers)
    first, *others = np.array_split(np.arange(len(rows)), num_parts)
    helpers = _helpers(num_threads - 1, os.getpid())
    parts = [
        helpers.submit(_draw, logits, rows[part], columns.take(part), numbers[part])
        for part in others
    ]
    tokens = _draw(logits, rows[first], columns.take(first), numbers[first])
    return np.concatenate([tokens, *(part.result() for part in parts)])


@cache
def _helpers(count: int, _process: int) -> ThreadPoolExecutor:
    """Threads of this process that draw; each computes with itself alone."""
    return ThreadPoolExecutor(count, "pyengine-draw", compute_alone)


def _draw(logits: torch.Tensor, rows: _Ints, columns: Columns, numbers: _Doubles) -> _Ints:
    """Draw as `draw_on_cpu`, in the calling thread."""
    vocab_size = logits.shape[1]
    tokens = np.full(len(rows), -1, dtype=np.int64)
    with np.errstate(all="ignore"):  # rows with NaN give an invalid token
        if vocab_size > _SHORT_ROW:
            filtered = (columns.top_k > 0) | (columns.top_p < 1) | (columns.min_p > 0)
            some = np.flatnonzero(filtered & (columns.top_k <= vocab_size // _GROUP // 2))
            if len(some):
                found = _from_candidates(logits, rows[some], columns.take(some), numbers[some])
                tokens[some] = found
        rest = np.flatnonzero(tokens < 0)
        step = max(1, _CHUNK_ELEMENTS // vocab_size)
        for part in (rest[start : start + step] for start in range(0, len(rest), step)):
            values = _rows_of(logits, rows[part])
            tokens[part], _ = _pick(values, columns.take(part), numbers[part], None)
    return tokens


def _from_candidates(
    logits: torch.Tensor, rows: _Ints, columns: Columns, numbers: _Doubles
) -> _Ints:
    """Draw from the candidates of each row; -1 if they may not be enough."""
    is_nucleus = ((columns.top_k == 0) & (columns.min_p == 0)).ravel()
    head = min(_NUCLEUS_HEAD, logits.shape[1] // _GROUP // 2)
    wanted = np.where(columns.top_k > 0, columns.top_k, head).ravel()
    found = _candidates(logits, rows, columns, wanted, is_nucleus)
    places, is_beyond = _pick(found.values, columns, numbers, found.totals)
    lowest = np.exp((found.bounds.astype(np.float64) - found.peaks) / columns.temperature[:, 0])
    is_enough = found.is_few & (
        (columns.top_k[:, 0] > 0) | (lowest < columns.min_p[:, 0]) | (is_nucleus & ~is_beyond)
    )
    return np.where(is_enough, found.ids[np.arange(len(rows)), places], -1)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The tokens of each row whose logits reach its bound, in order of id.

    `values` and `ids` are [R, W], padded with -inf. `totals` [R, 1] are the weights of whole rows
    if requested, else NaN. `is_few` marks rows with candidates here.
    """

    values: _Floats
    ids: _Ints
    bounds: _Floats
    peaks: _Floats
    totals: _Doubles
    is_few: npt.NDArray[np.bool_]


def _candidates(
    logits: torch.Tensor,
    rows: _Ints,
    columns: Columns,
    wanted: _Ints,
    needs_total: npt.NDArray[np.bool_],
) -> _Candidates:
    """Find at least `wanted` [R] candidates of each row, usually not many more.

    A row's candidates depend on its logits and its settings only.
    """
    vocab_size = logits.shape[1]
    groups = vocab_size // _GROUP
    bounds, peaks = np.empty((2, len(rows)), dtype=np.float32)
    totals = np.full((len(rows), 1), np.nan)
    counts = np.zeros(len(rows), dtype=np.int64)
    values, ids = [], []
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        block = _rows_of(logits, rows[part])
        largest = block[:, : groups * _GROUP].reshape(len(block), _GROUP, groups).max(1)
        # `wanted` groups have their largest logit here or above, so as many tokens do at least.
        last = groups - wanted[part]
        ranked = np.partition(largest, np.unique(last), axis=1)
        bounds[part] = ranked[np.arange(len(block)), last]
        flat = np.flatnonzero(block >= bounds[part, None])
        row, token = np.divmod(flat, vocab_size)
        count = np.bincount(row, minlength=len(block))
        peaks[part] = _peaks(block)[:, 0]
        is_few = (count > 0) & (count <= 2 * wanted[part] + _GROUP) & (peaks[part] >= bounds[part])
        kept = is_few[row]
        counts[part] = np.where(is_few, count, 0)
        values.append(block.reshape(-1)[flat[kept]])
        ids.append(token[kept])
        summed = np.flatnonzero(is_few & needs_total[part])
        if len(summed):
            totals[part][summed] = _total(
                block if len(summed) == len(block) else block[summed],
                peaks[part][summed, None],
                columns.take(start + summed),
            )
    shape = len(rows), int(counts.max(initial=1)) or 1
    row = np.repeat(np.arange(len(rows)), counts)
    place = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    padded, padded_ids = np.full(shape, -np.inf, dtype=np.float32), np.zeros(shape, dtype=np.int64)
    padded[row, place], padded_ids[row, place] = np.concatenate(values), np.concatenate(ids)
    return _Candidates(padded, padded_ids, bounds, peaks, totals, counts > 0)


def _pick(
    values: _Floats, columns: Columns, numbers: _Doubles, totals: _Doubles | None
) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Draw a place in each row of `values` [R, W]; true for rows whose nucleus may be longer.

    `totals` are the whole rows' weights for the nuclei; where NaN, those of `values`.
    """
    peaks = _peaks(values)
    is_beyond = np.zeros(len(values), dtype=np.bool_)
    has_top_k, has_top_p = bool((columns.top_k > 0).any()), bool((columns.top_p < 1).any())
    weights = _weights(values, peaks, columns)
    if has_top_k or has_top_p:
        ranked = -np.sort(-values, axis=1)
        floor = np.full_like(peaks, -np.inf)
        if has_top_k:
            last = np.clip(columns.top_k - 1, 0, values.shape[1] - 1)
            np.copyto(floor, np.take_along_axis(ranked, last, 1), where=columns.top_k > 0)
        if has_top_p:
            in_order = _weights(ranked, peaks, columns)
            if has_top_k:
                in_order *= ranked >= floor
            reached = torch.from_numpy(in_order).cumsum(1).numpy()
            whole = reached[:, -1:]
            if totals is not None:
                whole = np.where(np.isnan(totals), whole, totals)
            is_short = reached < columns.top_p * whole
            end = np.minimum(np.count_nonzero(is_short, axis=1)[:, None], values.shape[1] - 1)
            lowest = np.maximum(floor, np.take_along_axis(ranked, end, 1))
            np.copyto(floor, lowest, where=columns.top_p < 1)
            is_beyond = is_short[:, -1] & (columns.top_p[:, 0] < 1)
        weights *= values >= floor  # faster than by choosing or filling
    return _place_of(values, weights, numbers), is_beyond


def _place_of(values: _Floats, weights: _Doubles, numbers: _Doubles) -> _Ints:
    """Draw by inverse transform; if rounding hits a weight of 0, take the largest value."""
    cumulated = torch.from_numpy(weights).cumsum(1)
    targets = torch.from_numpy(numbers).unsqueeze(1) * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, targets, right=True).numpy()
    found = np.minimum(found, values.shape[1] - 1)
    has_weight = np.take_along_axis(weights, found, 1) > 0
    if not has_weight.all():
        found = np.where(has_weight, found, values.argmax(1)[:, None])
    places: _Ints = found[:, 0]
    return places


def _peaks(values: _Floats) -> _Floats:
    """Return the largest value of each row: [R, 1]."""
    peaks: _Floats = torch.from_numpy(values).amax(1, keepdim=True).numpy()
    return peaks


def _weights(values: _Floats, peaks: _Floats, columns: Columns) -> _Doubles:
    """Return exp((value - peak) / temperature) in float64, or 0 if that is less than min-p."""
    weights = torch.from_numpy(values).double()  # torch's, as it is faster at each of these
    weights -= torch.from_numpy(peaks)
    weights /= torch.from_numpy(columns.temperature)
    found: _Doubles = weights.exp_().numpy()
    if (columns.min_p > 0).any():
        found *= found >= columns.min_p
    return found


def _total(values: _Floats, peaks: _Floats, columns: Columns) -> _Doubles:
    """Return the sum of each row's weights: [R, 1], to seven digits."""
    weights = torch.from_numpy(values) - torch.from_numpy(peaks)
    weights /= torch.from_numpy(columns.temperature.astype(np.float32))
    total: _Doubles = weights.exp_().numpy().sum(1, keepdims=True, dtype=np.float64)
    return total


def _rows_of(logits: torch.Tensor, rows: _Ints) -> _Floats:
    """Return rows as float32: without a copy if they are float32 and consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        some = logits[rows[0] : rows[-1] + 1]
    else:
        some = logits[torch.from_numpy(rows)]
    values: _Floats = some.float().numpy()
    return values
