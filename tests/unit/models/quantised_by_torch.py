"""Floats rounded to integers of 4 and 8 bits by torch: the oracle of the Rust functions.

Until they were written, models were quantised by this code. On x86 torch adds up errors eight side
by side, as the Rust functions do everywhere; on others its order differs, and so may the choice
between two spans whose errors are equal but for rounding.
"""

import numpy as np
import numpy.typing as npt
import torch

GROUP = 32
_LARGEST = 15
_SPANS = (1.0, 0.93, 0.86)
_MIN_HALF, _MAX_HALF = 2.0**-14, 65504.0


def groups_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[N, K / 2]`, two in a byte, float32 scales and zero points `[N, K / 32]`."""
    outputs, inputs = weight.shape
    codes, scales, zeros = _quantised(weight.float())
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
    in_range = (scales >= _MIN_HALF) & (scales <= _MAX_HALF)
    return torch.where(scales == 0, 1.0, torch.where(in_range, scales.half().float(), scales))


def blocks_of(weight: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The blocks of Q8_0, `[N, K / 32, 34]`."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).half()
    units = groups / scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
    numbers = units.round_().clamp_(-127, 127).to(torch.int8)
    blocks = np.empty((*scales.shape, 2 + GROUP), np.uint8)
    blocks[..., :2] = scales.contiguous().numpy().view(np.uint8).reshape(*scales.shape, 2)
    blocks[..., 2:] = numbers.numpy().view(np.uint8)
    return blocks
