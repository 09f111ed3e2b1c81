"""Random choice: temperature, min-p, top-k, top-p, and one draw per row.

Every filter is a *floor*: tokens below it are out, all others stay. A floor is a value, so it
does not depend on how a sort orders equal logits, nor on the route by which it was found (a
short top-k or a full sort). The draw then walks the remaining tokens by id. Together with
:mod:`pyengine.sampling.state` this makes a row's token a function of that row alone.
"""

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.batch import DrawBatch, DrawSettings
from pyengine.sampling.draw_cpu import draw_on_cpu
from pyengine.sampling.state import Positions, uniforms
from pyengine.utils.host_copy import upload

_CHUNK_ELEMENTS = 1 << 24
"""Rows are drawn in chunks of about so many logits: 256 rows of 151,936 in three, as each is a
dozen launches, one after the other. A float64 copy of one is 128 MiB."""
_NUCLEUS_HEAD = 512
"""Most nuclei end within so many tokens; only rows whose nucleus does not are sorted whole."""


def draw(logits: torch.Tensor, batch: DrawBatch, positions: Positions) -> torch.Tensor:
    """Return one drawn token for each row of the batch: int64 [R], on the logits' device.

    ``logits`` are [B, V], among them the batch's rows; ``positions[i]`` is the place of row i's
    token in its output, which its random number depends on. The draw is by inverse transform:
    the first token, in order of id, at which the cumulated weight exceeds u times the total, in
    float64.
    """
    numbers = uniforms(batch.seeds, np.asarray(positions)[batch.rows])
    if logits.device.type == "cpu":
        return torch.from_numpy(draw_on_cpu(logits.detach(), batch.rows, batch.columns, numbers))
    if len(batch) < len(logits):
        logits = logits[upload(batch.rows, logits.device)]
    return draw_on_device(logits.float(), batch, numbers)


def draw_on_device(
    logits: torch.Tensor, batch: DrawBatch, numbers: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Do the same without ever waiting for the device; ``logits`` float32 [R, V]."""
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
    # all: where the drawn token has no weight, take the most probable one. To ask first whether
    # there is such a row would make the host wait for a device.
    has_weight = weights.gather(1, drawn) > 0
    if logits.device.type != "cpu" or not bool(has_weight.all()):
        drawn = torch.where(has_weight, drawn, logits.argmax(1, keepdim=True))
    return drawn.squeeze(1)


def _filter_by_rank(logits: torch.Tensor, weights: torch.Tensor, settings: DrawSettings) -> None:
    """Set the weights that top-k, then top-p, leave out to 0, in place. Both are [R, V]."""
    vocab_size, ks, top_p = logits.shape[1], settings.top_k, settings.top_p
    if ks is None and top_p is None:
        return
    head = min(settings.largest_k, vocab_size)
    if top_p is not None and settings.has_bare_top_p:
        head = max(head, min(_NUCLEUS_HEAD, vocab_size))
        if logits.device.type != "cpu":  # whose nucleus goes beyond it, only the device knows
            head = vocab_size
    largest, ids = logits.topk(head)
    if ks is not None:
        floor = largest.gather(1, (ks - 1).clamp(min=0, max=head - 1))
        weights.masked_fill_((logits < floor) & (ks > 0), 0)
    if top_p is not None:
        whole = logits if settings.has_bare_top_p else None
        floor = _nucleus_floor(whole, weights, top_p, (largest, ids))
        weights.masked_fill_((logits < floor) & (top_p < 1), 0)


def _nucleus_floor(
    logits: torch.Tensor | None,
    weights: torch.Tensor,
    top_p: torch.Tensor,
    head: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the lowest logit of each row's nucleus: [R, 1]; rows with top-p 1 are undefined.

    The nucleus is the fewest most probable tokens whose weights add up to ``top_p`` of the
    row's (Holtzman et al., "The curious case of neural text degeneration", 2020). ``head``
    holds each row's largest logits, in falling order, and their token ids; a nucleus that goes
    beyond them is found by sorting its row, which the host waits for. Without ``logits`` none does:
    top-k has left no others a weight, but for equals of the last.
    """
    largest, ids = head
    short = weights.gather(1, ids).cumsum(1) < top_p * weights.sum(1, keepdim=True)
    place = short.sum(1, keepdim=True).clamp_(max=largest.shape[1] - 1)
    floor = largest.gather(1, place)
    if logits is not None and largest.shape[1] < logits.shape[1]:
        beyond = (short[:, -1] & (top_p[:, 0] < 1)).nonzero().squeeze(1)
        if len(beyond):
            rows = logits[beyond]
            ordered = rows.sort(descending=True)
            floor[beyond] = _nucleus_floor(
                rows, weights[beyond], top_p[beyond], (ordered.values, ordered.indices)
            )
    return floor
