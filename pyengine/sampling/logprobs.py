"""Log-probabilities of the chosen token, its rank, and the most probable tokens.

They are of the model's distribution: raw logits, before bias, penalties and temperature.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pyengine.kernels import ALIGNED, has_kernels
from pyengine.outputs import Logprob
from pyengine.utils.host_copy import HostCopy

_CHUNK_ELEMENTS = 1 << 22  # logits of a chunk of rows; a float32 copy of one is 16 MiB
_CHUNK_ROWS = 64  # the most rows of a chunk
_KERNEL_ELEMENTS = 1 << 24  # the same for kernels, with the copies of reported tokens: 64 MiB
_KERNEL_COPIES = 8  # copies of a reported token's id and log-probability, in units of 4 bytes
_PART = 1 << 14  # exponentials of a part; torch sums up to 32,768 numbers by one thread
_TIE_SLACK = 16  # candidates beyond the requested ones, to see all equal logits
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position: of its token and of the alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token; equal ones rank by token id, lowest first."""
    top_ids: tuple[int, ...]
    """The most probable tokens, as many as requested, in order of rank."""
    top_logprobs: tuple[float, ...]

    def as_dict(
        self, decode: Callable[[int], tuple[str, bytes]] | None = None
    ) -> dict[int, Logprob]:
        """Return the form for users: the token itself first, then the others by rank.

        ``decode`` gives a token's text and bytes; without it they are ``None``.
        """
        ranked = {self.token_id: (self.logprob, self.rank)}
        for place, (token, logprob) in enumerate(
            zip(self.top_ids, self.top_logprobs, strict=True), start=1
        ):
            ranked.setdefault(token, (logprob, place))
        return {
            token: Logprob(logprob, rank, *(decode(token) if decode is not None else ()))
            for token, (logprob, rank) in ranked.items()
        }


class PendingLogprobs:
    """Log-probabilities on the device: of one token per row, and of the best ``top[i]``.

    ``logits`` are raw, [T, V] of any floating type (computed in float32); ``token_ids`` int64
    [T], on the same device; ``top`` holds T counts from 0 to V. ``rows``, int64 [T], selects rows
    of ``logits`` [B, V] without a copy. The work is queued at once, in slices of rows, so that its
    memory does not grow with T; the caller may drop the logits.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        top: Sequence[int],
        rows: torch.Tensor | None = None,
    ) -> None:
        self._top, self._chunks = [], []
        step = _chunk_rows(logits, max(top, default=0))
        for chunk in (slice(start, start + step) for start in range(0, len(top), step)):
            self._top.append(top[chunk])
            which = rows if rows is None else rows[chunk]
            if has_kernels(logits.device):
                part = logits[chunk] if which is None else logits
                queued = _chunk_by_kernels(part, token_ids[chunk], max(top[chunk]), which)
            else:
                part = logits[chunk if which is None else which]
                queued = _chunk(part.float(), token_ids[chunk], max(top[chunk]))
            self._chunks.append(HostCopy(queued))

    def result(self) -> list[TokenLogprobs]:
        """Wait for them; one entry per row."""
        return [
            entry
            for chunk, top in zip(self._chunks, self._top, strict=True)
            for entry in _entries(chunk.wait(), top)
        ]


def _chunk_rows(logits: torch.Tensor, most: int) -> int:
    """The number of rows of a chunk of `logits` `[T, V]`, of which up to `most` are reported."""
    if has_kernels(logits.device):
        step = _KERNEL_ELEMENTS // (logits.shape[1] + _KERNEL_COPIES * most)
        return max(1, step // ALIGNED * ALIGNED)
    return max(1, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // logits.shape[1]))


def _chunk_by_kernels(
    logits: torch.Tensor, token_ids: torch.Tensor, most: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """As `_chunk`, of these `rows`; reads the logits once."""
    from pyengine.kernels.best_tokens import best_tokens

    if rows is None:
        rows = torch.arange(len(token_ids), device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return token_ids, *best_tokens(logits, rows, token_ids, most)


def _chunk(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Tokens, their log-probabilities and ranks, [T]; the best ids and theirs, [T, most]."""
    normaliser = _log_sum_exp(logits)
    column = token_ids.unsqueeze(1)
    chosen = logits.gather(1, column)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < column))
    best = _best_ids(logits, most)
    logprobs = (chosen - normaliser).squeeze(1)
    return token_ids, logprobs, ahead.sum(1) + 1, best, logits.gather(1, best) - normaliser


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of each row's exponentials, [T, 1].

    A row's has the same bits in every batch and with every number of threads: parts of fixed length
    are summed, then the sums of a row. On CPUs, torch divides a long sum among threads if its
    result is one number, as the sum of a single row is.
    """
    if logits.device.type != "cpu":
        return logits.logsumexp(1, keepdim=True)
    peaks = logits.amax(1, keepdim=True)
    peaks = peaks.masked_fill_(peaks.isinf(), 0)  # infinity less infinity is no number
    powers = (logits - peaks).exp_()
    whole = powers.shape[1] // _PART * _PART
    sums = powers[:, whole:].sum(1, keepdim=True)
    if whole:
        parts = powers[:, :whole].view(len(powers), whole // _PART, _PART)
        sums += parts.sum(2).sum(1, keepdim=True)
    return sums.log_().add_(peaks)


def _entries(chunk: Sequence[torch.Tensor], top: Sequence[int]) -> Iterator[TokenLogprobs]:
    columns = [tensor.tolist() for tensor in chunk]
    for token, logprob, rank, ids, logprobs, count in zip(*columns, top, strict=True):
        yield TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))


def _best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` largest logits, equal ones by id: int64 [T, count].

    ``topk`` may take any of several equal values, in any order, and low-precision models have many
    equal logits. On the CPU a few more are taken: if the last of each row is below the last wanted
    value, no candidate is missing. That cannot be checked without waiting for a device. There,
    logits and ids become one integer each.
    """
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if logits.device.type != "cpu":
        return _best_by_keys(logits, count)
    head = count + _TIE_SLACK
    is_short = head < logits.shape[1]
    if is_short:
        values, ids = logits.topk(head)
        is_short = bool((values[:, -1] < values[:, count - 1]).all())
    if not is_short:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count].clone()
    by_id = ids.sort(dim=1).values
    by_value = logits.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
    return by_id.gather(1, by_value[:, :count])


def _best_by_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`_best_ids` of float32 logits without a choice among equals.

    A key has the bits of the logit, in its order, and the inverted id in the lower half.
    """
    bits = logits.masked_fill(logits == 0, 0).view(torch.int32)  # equals: 0 and -0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << _ID_BITS
    keys |= _ID_MASK - torch.arange(logits.shape[1], device=logits.device)
    return _ID_MASK - (keys.topk(count).values & _ID_MASK)
