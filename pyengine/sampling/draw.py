"""Random choice: temperature, min-p, top-k, top-p, and one draw per row.

Every filter is a *floor*: tokens below it are out, all others stay. A floor is a value, so it
does not depend on how a sort orders equal logits, nor on the route by which it was found (a
short top-k or a full sort). The draw then walks the remaining tokens by id. Together with
:mod:`pyengine.sampling.uniform` this makes a row's token a function of that row alone.
"""

from collections.abc import Sequence

import torch

from pyengine.core.sampling_params import SamplingParams
from pyengine.sampling.state import SamplingState
from pyengine.sampling.uniform import uniforms

_CHUNK_ELEMENTS = 1 << 22
"""Rows are drawn in chunks of about so many logits; a float64 copy of one is 32 MiB."""
_NUCLEUS_HEAD = 512
"""Most nuclei end within so many tokens; only rows whose nucleus does not are sorted whole."""


def draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """Return one drawn token per row: int64 [R], on the logits' device.

    ``logits`` are float32 [R, V], those of requests with a temperature above 0. The draw is by
    inverse transform: the first token, in order of id, at which the cumulated weight exceeds
    u times the total, in float64.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = [
        _draw_chunk(logits[start : start + rows], states[start : start + rows])
        for start in range(0, len(states), rows)
    ]
    return torch.cat(parts)


def _draw_chunk(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    params = [state.params for state in states]
    weights = logits.double()
    weights -= weights.amax(1, keepdim=True)  # first, so that no temperature overflows
    weights /= _column([p.temperature for p in params], logits.device)
    weights.exp_()
    if any(p.min_p > 0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits.device), 0)
    _filter_by_rank(logits, weights, params)
    cumulated = weights.cumsum(1)
    numbers = uniforms([state.seed for state in states], [state.num_output for state in states])
    targets = _column(numbers.tolist(), logits.device) * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, targets, right=True).clamp_(max=logits.shape[1] - 1)
    # A parallel scan is monotone only up to rounding, and NaN logits have no distribution at
    # all: where the drawn token has no weight, take the most probable one.
    has_weight = weights.gather(1, drawn) > 0
    return torch.where(has_weight, drawn, logits.argmax(1, keepdim=True)).squeeze(1)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def _filter_by_rank(
    logits: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]
) -> None:
    """Set the weights that top-k, then top-p, leave out to 0, in place. Both are [R, V]."""
    vocab_size = logits.shape[1]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    has_top_k = any(k < vocab_size for k in top_k)
    has_top_p = any(p.top_p < 1 for p in params)
    if not has_top_k and not has_top_p:
        return
    head = max((k for k in top_k if k < vocab_size), default=1)
    if any(p.top_p < 1 and k == vocab_size for p, k in zip(params, top_k, strict=True)):
        head = max(head, min(_NUCLEUS_HEAD, vocab_size))
    largest, ids = logits.topk(head)
    if has_top_k:
        ks = torch.tensor(top_k, device=logits.device).unsqueeze(1)
        floor = largest.gather(1, (ks - 1).clamp(max=head - 1))
        weights.masked_fill_((logits < floor) & (ks < vocab_size), 0)
    if has_top_p:
        top_p = _column([p.top_p for p in params], logits.device)
        floor = _nucleus_floor(logits, weights, top_p, (largest, ids))
        weights.masked_fill_((logits < floor) & (top_p < 1), 0)


def _nucleus_floor(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_p: torch.Tensor,
    head: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the lowest logit of each row's nucleus: [R, 1]; rows with top-p 1 are undefined.

    The nucleus is the fewest most probable tokens whose weights add up to ``top_p`` of the
    row's (Holtzman et al., "The curious case of neural text degeneration", 2020). ``head``
    holds each row's largest logits, in falling order, and their token ids; a nucleus that goes
    beyond them is found by sorting its row.
    """
    largest, ids = head
    short = weights.gather(1, ids).cumsum(1) < top_p * weights.sum(1, keepdim=True)
    place = short.sum(1, keepdim=True).clamp_(max=largest.shape[1] - 1)
    floor = largest.gather(1, place)
    if largest.shape[1] < logits.shape[1]:
        beyond = (short[:, -1] & (top_p[:, 0] < 1)).nonzero().squeeze(1)
        if len(beyond):
            rows = logits[beyond]
            ordered = rows.sort(descending=True)
            floor[beyond] = _nucleus_floor(
                rows, weights[beyond], top_p[beyond], (ordered.values, ordered.indices)
            )
    return floor
