"""Digits of 8 bits as oneDNN multiplies them by int8 weights without an error.

Without VNNI oneDNN multiplies unsigned digits by signed weights and adds pairs of products in 16
bits, which saturate: 2 * 255 * 127 is more than 32,767. There each digit is the sum of
two halves, whose pairs fit. With VNNI sums have 32 bits. With AMX, signed digits are the fast
ones; elsewhere oneDNN may have loops in C for those, which take a thousand times as long.

Processors and switches (`ONEDNN_MAX_CPU_ISA`) are many, so a short trial of the operator decides,
not the name of an instruction set.
"""

from dataclasses import dataclass
from functools import cache
from time import thread_time
from typing import Any

import torch

from pyengine.errors import ConfigurationError

LARGEST = 127
"""Digits and weights are from -127 to 127."""

PACKED_ROWS = 32
"""Rows for which weights are laid out."""

_SHAPES = ((1, 24, 17), (33, 96, 40), (4, 576, 64))
"""Rows, input and output features of the trials: with and without incomplete vectors."""

_SLOW = 8
"""Signed digits are not taken where they are slower than unsigned ones by this factor."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a digit is written: as the sum of `parts` numbers, each larger by `zero`."""

    name: str
    zero: int
    parts: int

    def encode(self, digits: torch.Tensor) -> torch.Tensor:
        """Whole floats `[R, K]` from -127 to 127 as 8 bits, `[parts * R, K]`, first parts first."""
        if self.parts == 2:
            half = (digits / 2).floor()
            digits = torch.cat([half, digits - half])
        return (digits + self.zero).to(torch.uint8) if self.zero else digits.to(torch.int8)

    def multiply(
        self, numbers: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """What `encode` gave times a packed weight, float32 `[R, N]`; `scales` are `[N]`.

        The sum of both halves is exact below 2^24, and has the same bits as an undivided digit's.
        """
        if self.parts == 1:
            return _multiply(numbers, self.zero, weight, scales)
        first, second = _multiply(numbers, self.zero, weight, torch.ones_like(scales)).chunk(2)
        return first.add_(second).mul_(scales)


SIGNED = Encoding("signed", 0, 1)
UNSIGNED = Encoding("unsigned", 128, 1)
HALVES = Encoding("halves", 64, 2)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Weights `[N, K]` in int8 as oneDNN wants them; opaque."""
    operators: Any = torch.ops.onednn
    packed: torch.Tensor = operators.qlinear_prepack(numbers, [PACKED_ROWS, numbers.shape[1]])
    return packed


def _multiply(
    numbers: torch.Tensor, zero: int, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    operator: Any = torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros_like(scales, dtype=torch.int32)
    product: torch.Tensor = operator(
        *(numbers, 1.0, zero),
        *(weight, scales, zeros, None),
        *(1.0, 0, torch.float32),
        *("none", (), ""),
    )
    return product


def is_exact(encoding: Encoding) -> bool:
    """Whether the largest digits times the largest weights give the exact sums here."""
    return all(_trial(encoding, *shape) for shape in _SHAPES)


def _trial(encoding: Encoding, rows: int, size: int, channels: int) -> bool:
    weights = torch.full((channels, size), LARGEST, dtype=torch.int8)
    weights[::2] = -LARGEST
    digits = torch.full((rows, size), float(LARGEST))
    digits[1::2] = -LARGEST
    exact = (digits.double() @ weights.double().T).float()
    product = encoding.multiply(encoding.encode(digits), pack(weights), torch.ones(channels))
    return torch.equal(product, exact)


def _seconds(encoding: Encoding) -> float:
    """The processor time of a small product on one thread: other programs do not count."""
    numbers, weight = encoding.encode(torch.zeros(16, 128)), pack(torch.zeros(128, 128).char())
    scales, times = torch.ones(128), []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            start = thread_time()
            encoding.multiply(numbers, weight, scales)
            times.append(thread_time() - start)
    finally:
        torch.set_num_threads(num_threads)
    return min(times)


@cache
@torch.inference_mode()
def choose_encoding() -> Encoding:
    """The encoding for this processor: exact, and of those the fastest.

    Raises `ConfigurationError` where oneDNN gives no exact product of 8-bit integers.
    """
    is_signed_exact = is_exact(SIGNED)
    if is_signed_exact and _seconds(SIGNED) < _SLOW * _seconds(UNSIGNED):
        return SIGNED
    for encoding in (UNSIGNED, HALVES):
        if is_exact(encoding):
            return encoding
    if is_signed_exact:
        return SIGNED
    raise ConfigurationError(
        "quantization='int8': oneDNN gives wrong products of 8-bit integers on this processor, "
        "signed, unsigned and divided: leave quantization out"
    )
