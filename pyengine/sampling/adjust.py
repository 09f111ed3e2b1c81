"""Changes to single logits: barred stop tokens, bias, penalties.

Each touches few tokens of a row, so they are gathered, changed and put back by flat index
(row * vocabulary + token): the cost follows the number of tokens a request has seen, not the
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.state import SamplingState
from pyengine.sampling.uniform import Positions

_LARGEST = torch.finfo(torch.float32).max
"""What overflows becomes this, not infinite: a row with an infinite logit has no distribution."""


def adjusted_logits(
    logits: torch.Tensor, states: Sequence[SamplingState], positions: Positions
) -> torch.Tensor:
    """Return the logits to choose from: float32 [B, V], or ``logits`` itself if none changes.

    In vLLM's order: stop tokens barred by ``min_tokens`` become -inf, then the bias is added,
    then penalties apply. ``positions[i]`` is the place of row i's token in its output.
    ``logits`` [B, V] is never written to.
    """
    rows = list(zip(states, positions, strict=True))
    if not any(state.changes_logits(position) for state, position in rows):
        return logits
    adjusted = logits.to(torch.float32, copy=True).contiguous()
    flat, vocab_size = adjusted.view(-1), adjusted.shape[1]
    barred = {
        row: state.stop_ids
        for row, (state, position) in enumerate(rows)
        if state.must_go_on(position)
    }
    if barred:
        flat.index_fill_(0, _flat_index(barred, vocab_size, flat.device), -torch.inf)
    _add_bias(flat, vocab_size, states)
    _apply_penalties(flat, vocab_size, states)
    return adjusted


def _flat_index(
    ids_by_row: dict[int, npt.NDArray[np.int64]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return the flat index of every (row, token id): int64 [n], rows in the dict's order."""
    shifted = [ids + row * vocab_size for row, ids in ids_by_row.items()]
    return torch.from_numpy(np.concatenate(shifted)).to(device)


def _add_bias(flat: torch.Tensor, vocab_size: int, states: Sequence[SamplingState]) -> None:
    ids = {row: state.bias_ids for row, state in enumerate(states) if len(state.bias_ids)}
    if ids:
        values = torch.from_numpy(np.concatenate([states[row].bias_values for row in ids]))
        index = _flat_index(ids, vocab_size, flat.device)
        flat[index] = (flat[index] + values.to(flat.device)).clamp_(max=_LARGEST)


def _apply_penalties(flat: torch.Tensor, vocab_size: int, states: Sequence[SamplingState]) -> None:
    """Repetition first, then frequency and presence.

    Repetition as in CTRL (Keskar et al. 2019), with the sign taken into account so that a
    penalised logit always falls; frequency and presence as in OpenAI's API.
    """
    seen = {
        row: state.counts
        for row, state in enumerate(states)
        if state.counts is not None and len(state.counts.ids)
    }
    if not seen:
        return
    divisors, offsets = [], []
    for row, counts in seen.items():
        params, times = states[row].params, counts.counts
        divisors.append(np.full(len(times), params.repetition_penalty, dtype=np.float32))
        offsets.append(params.frequency_penalty * times + params.presence_penalty * (times > 0))
    divisor = torch.from_numpy(np.concatenate(divisors)).to(flat.device)
    offset = torch.from_numpy(np.concatenate(offsets).astype(np.float32)).to(flat.device)
    ids = {row: counts.ids for row, counts in seen.items()}
    index = _flat_index(ids, vocab_size, flat.device)
    values = flat[index]
    penalised = torch.where(values > 0, values / divisor, values * divisor) - offset
    flat[index] = penalised.clamp_(max=_LARGEST)
