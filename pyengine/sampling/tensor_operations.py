"""The operations of the sampler on tensors: by torch, and by Triton kernels where there are any.

Nothing here waits for the device. This is the only module of the package that imports torch; it is
imported when there are tensors. On the CPU it is the reference of the operations on arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pyengine.kernels import ALIGNED, has_kernels
from pyengine.sampling.draws import DrawBatch, DrawSettings
from pyengine.utils.host_copy import HostCopy, upload

_CHUNK_ELEMENTS = 1 << 24
"""Logits of a chunk of rows on a device: 256 rows of 151,936 are three chunks, of a dozen launches
each. A float64 copy of one is 128 MiB."""
_CANDIDATES = 1 << 26
"""Logits of the rows that kernels draw from together: their candidates take at most 256 MiB."""
_LOGPROB_ELEMENTS = 1 << 22
"""Logits of a chunk of rows with log-probabilities; a float32 copy of one is 16 MiB."""
_LOGPROB_ROWS = 64  # maximum rows of such a chunk
_KERNEL_ELEMENTS = 1 << 24  # the same for kernels, with the copies of reported tokens: 64 MiB
_KERNEL_COPIES = 8  # copies of a reported token's id and log-probability, in units of 4 bytes
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_WORD = 32  # tokens in a word of a mask


class TensorOperations:
    """See `operations.Operations`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def float32_copy(self, logits: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return logits.to(torch.float32, copy=True).contiguous()

    def fill(self, values: torch.Tensor, index: torch.Tensor, value: float) -> None:
        """Set the elements, or rows, at `index` to `value`."""
        values.index_fill_(0, index, value)

    def where(self, condition: Any, chosen: Any, other: Any) -> torch.Tensor:
        """`chosen` where the condition is true, else `other`."""
        return torch.where(condition, chosen, other)

    def clamp_max(self, values: torch.Tensor, limit: float) -> torch.Tensor:
        """The values, or `limit` where they are larger; changed in place."""
        return values.clamp_(max=limit)

    def largest(self, logits: torch.Tensor) -> torch.Tensor:
        """The id of each row's largest logit, of equal ones the lowest: int64 [B]."""
        return logits.argmax(1)

    def logits_of(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The logit of one token per row: [B]."""
        return logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)

    def draw(
        self, logits: torch.Tensor, draws: DrawBatch, numbers: npt.NDArray[np.float64]
    ) -> torch.Tensor:
        """One token for each of the rows of `draws`, see `sampler.draw`: int64 [R]."""
        if has_kernels(self.device):
            return draw_by_kernels(logits, draws, numbers)
        if len(draws) < len(logits):
            logits = logits[draws.row_ids.on(self.device)]
        return draw_on_device(logits.float(), draws, numbers)

    def forbid(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        bits: npt.NDArray[np.int32],
        *,
        to_copy: bool,
    ) -> torch.Tensor:
        """Logits that are -inf where the bits of `rows` are 0: themselves, or a copy.

        The copy is in float32 where no kernel serves.
        """
        words = upload(bits, self.device)
        if has_kernels(self.device):
            from pyengine.kernels.masks import forbid

            logits = logits.clone(memory_format=torch.contiguous_format) if to_copy else logits
            forbid(logits, upload(rows, self.device), words)
            return logits
        if to_copy:
            logits = logits.to(torch.float32, copy=True)
        is_out = ~_unpacked(words, logits.shape[1])
        if len(bits) == len(logits):
            return logits.masked_fill_(is_out, -torch.inf)
        row_ids = upload(rows, self.device)
        logits[row_ids] = logits[row_ids].masked_fill_(is_out, -torch.inf)
        return logits

    def logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        top: Sequence[int],
        rows: torch.Tensor | None,
    ) -> Callable[[], Iterator[tuple[int, float, int, list[int], list[float]]]]:
        """Queue what `PendingLogprobs` reports; the function waits for it.

        The work is queued in slices of rows, so that its memory does not grow with their number.
        """
        chunks = []
        step = _chunk_rows(logits, max(top, default=0))
        for chunk in (slice(start, start + step) for start in range(0, len(top), step)):
            selected, num_logprobs = rows if rows is None else rows[chunk], max(top[chunk])
            if has_kernels(logits.device):
                part = logits[chunk] if selected is None else logits
                queued = _chunk_by_kernels(part, token_ids[chunk], num_logprobs, selected)
            else:
                part = logits[chunk if selected is None else selected]
                queued = _chunk(part.float(), token_ids[chunk], num_logprobs)
            chunks.append((HostCopy(queued), top[chunk]))

        def result() -> Iterator[tuple[int, float, int, list[int], list[float]]]:
            for copy, counts in chunks:
                columns = [tensor.tolist() for tensor in copy.wait()]
                for token, logprob, rank, ids, logprobs, count in zip(
                    *columns, counts, strict=True
                ):
                    yield token, logprob, rank, ids[:count], logprobs[:count]

        return result


@cache
def tensor_operations(device: torch.device) -> TensorOperations:
    """The operations on tensors of this device."""
    return TensorOperations(device)


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
        _draw_chunk(logits[part], batch.columns(part, logits.device), columns[part])
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
    index = short.sum(1, keepdim=True).clamp_(max=largest.shape[1] - 1)
    return largest.gather(1, index)


def _unpacked(words: torch.Tensor, count: int) -> torch.Tensor:
    """The first bits of each row of `words`, int32 [R, W], as NumPy unpacks them: bool [R, count].

    False past the end.
    """
    shifts = torch.arange(_WORD, dtype=torch.int32, device=words.device)
    flags = (words.unsqueeze(2) >> shifts).bitwise_and_(1).view(len(words), -1)
    return F.pad(flags, (0, count - flags.shape[1])).bool()  # cuts where that is negative


def _chunk_rows(logits: torch.Tensor, num_logprobs: int) -> int:
    """Rows of a chunk of `logits` `[T, V]`, each with up to `num_logprobs` reported tokens."""
    if has_kernels(logits.device):
        step = _KERNEL_ELEMENTS // (logits.shape[1] + _KERNEL_COPIES * num_logprobs)
        return max(1, step // ALIGNED * ALIGNED)
    return max(1, min(_LOGPROB_ROWS, _LOGPROB_ELEMENTS // logits.shape[1]))


def _chunk_by_kernels(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """As `_chunk`, of these `rows`; reads the logits once."""
    from pyengine.kernels.best_tokens import best_tokens

    if rows is None:
        rows = torch.arange(len(token_ids), device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return token_ids, *best_tokens(logits, rows, token_ids, num_logprobs)


def _chunk(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, ...]:
    """Tokens, their log-probabilities and ranks, [T]; best ids and theirs, [T, num_logprobs]."""
    normaliser = logits.logsumexp(1, keepdim=True)
    column = token_ids.unsqueeze(1)
    chosen = logits.gather(1, column)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < column))
    best = _best_by_keys(logits, num_logprobs)
    logprobs = (chosen - normaliser).squeeze(1)
    return token_ids, logprobs, ahead.sum(1) + 1, best, logits.gather(1, best) - normaliser


def _best_by_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` largest float32 logits, equal ones by id: int64 [T, count].

    ``topk`` may take any of several equal values, in any order, and low-precision models have many
    equal logits. So logits and ids become one integer each: the upper half has the bits of the
    logit, in its order, the lower one the inverted id.
    """
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = logits.masked_fill(logits == 0, 0).view(torch.int32)  # equals: 0 and -0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << _ID_BITS
    keys |= _ID_MASK - torch.arange(logits.shape[1], device=logits.device)
    return _ID_MASK - (keys.topk(count).values & _ID_MASK)
