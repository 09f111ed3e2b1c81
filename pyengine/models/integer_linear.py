"""Weights of floats that are rounded to integers of 4 or 8 bits.

4 bits have a scale and a zero point for 32 inputs, 8 bits a scale (ggml's Q8_0). With 4 bits, the
head, and an embedding that is tied to it, have 8: its rounding shows in every log-probability.
"""

import numpy as np
import numpy.typing as npt
import torch

from pyengine.cpu import QuantizedWeight

GROUP = 32
_LARGEST = 15
_SPANS = (1.0, 0.93, 0.86)
"""Shares of the span of a group that its codes may cover: outliers are cut where that is better."""
_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0  # float16 has numbers between with all of its digits
_AT_ONCE = 1 << 22  # weights that are quantised at once


def quantise_groups(
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[N, K / 2]`, two in a byte, float32 scales and zero points `[N, K / 32]`.

    Of the spans that are tried, each group has the one with the least squared error.
    """
    outputs, inputs = weight.shape
    rows = max(1, _AT_ONCE // inputs)
    parts = [_quantised(part.float()) for part in torch.split(weight.detach(), rows)]
    codes, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    pairs = codes.view(outputs, inputs // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales, zeros


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    best: tuple[torch.Tensor, ...] | None = None
    for span in _SPANS:
        scale = _rounded((high - low) * span / _LARGEST)
        zero = (-low * span / scale).round().clamp_(0, _LARGEST)
        codes = groups / scale[..., None]
        codes = codes.add_(zero[..., None]).round_().clamp_(0, _LARGEST)
        error = (codes - zero[..., None]).mul_(scale[..., None]).sub_(groups).square_().sum(-1)
        tried = codes.to(torch.uint8), scale, zero.to(torch.uint8), error
        if best is None:
            best = tried
        else:
            better = error < best[3]
            best = tuple(
                torch.where(better[..., None] if new.ndim == 3 else better, new, old)
                for new, old in zip(tried, best, strict=True)
            )
    assert best is not None
    return best[0].flatten(1), best[1], best[2]


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """Scales that float16 has, where it has their size; 1 for groups of zeros."""
    in_range = (scales >= _LEAST_HALF) & (scales <= _MOST_HALF)
    return torch.where(scales == 0, 1.0, torch.where(in_range, scales.half().float(), scales))


def q8_0(weight: torch.Tensor) -> QuantizedWeight:
    """A weight in ggml's Q8_0: 8 bits, and a float16 scale for 32 inputs."""
    outputs, inputs = weight.shape
    blocks = _blocks(outputs, inputs)
    start = 0
    for part in torch.split(weight.detach(), max(1, _AT_ONCE // inputs)):
        groups = part.float().view(len(part), -1, GROUP)
        scales = (groups.abs().amax(-1) / 127).half()
        units = groups / scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
        numbers = units.round_().clamp_(-127, 127).to(torch.int8)
        _fill(blocks[start : start + len(part)], numbers, scales)
        start += len(part)
    return QuantizedWeight("Q8_0", blocks.reshape(-1).data, outputs, inputs)


def q8_0_of_rows(numbers: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """The same from int8 `[N, K]` and a scale for each output, `[N, 1]`, rounded to float16."""
    outputs, inputs = numbers.shape
    blocks = _blocks(outputs, inputs)
    groups = numbers.view(outputs, -1, GROUP)
    _fill(blocks, groups, scales.half().expand(outputs, groups.shape[1]))
    return QuantizedWeight("Q8_0", blocks.reshape(-1).data, outputs, inputs)


def _blocks(outputs: int, inputs: int) -> npt.NDArray[np.uint8]:
    """Memory for the blocks of Q8_0: a scale and the integers of a group."""
    return np.empty((outputs, inputs // GROUP, 2 + GROUP), np.uint8)


def _fill(blocks: npt.NDArray[np.uint8], numbers: torch.Tensor, scales: torch.Tensor) -> None:
    blocks[..., :2] = scales.contiguous().numpy().view(np.uint8).reshape(*scales.shape, 2)
    blocks[..., 2:] = numbers.numpy().view(np.uint8)
