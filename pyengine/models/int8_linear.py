"""Linear layers with weights in 8-bit integers, one scale per output channel, symmetric.

The rows become integers too, so that oneDNN can use VNNI and AMX: each row gets a scale and two
digits of 8 bits, which are two rows of one product. That is as good as 16 bits; one digit (dynamic
quantisation by token: Yao et al., 2022, ZeroQuant, arXiv:2206.01861) has three times the error of
the rounded weights. Sums of integers are exact in any order: a row has the same bits in every
batch.

Without VNNI oneDNN multiplies unsigned digits by signed weights and adds pairs of products in 16
bits, which saturate: 2 * 255 * 127 is more than 32,767. There each digit is the sum of two halves,
whose pairs fit. With VNNI sums have 32 bits. With AMX, signed digits are fast; elsewhere oneDNN may
use loops in C for those, which take a thousand times as long. Processors and switches
(`ONEDNN_MAX_CPU_ISA`) are many, so a short trial of the operator decides, not the name of an
instruction set.
"""

from dataclasses import dataclass
from functools import cache
from time import thread_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models.linear import (
    ATTENTION,
    GATED,
    concatenated,
    define_operator,
    layer_of,
    numbered,
    replace_linears,
)
from pyengine.utils.openmp import torch_threads

LARGEST = 127
"""Digits and weights are from -127 to 127."""

PACKED_ROWS = 32
"""The number of rows for which weights are laid out."""

_SHAPES = ((1, 24, 17), (33, 96, 40), (4, 576, 64))
"""Rows, input and output features of the trials: with and without incomplete vectors."""

_SLOW = 8  # signed digits are not used if they are slower than unsigned ones by this factor


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of a digit: the sum of `parts` numbers, each with the offset `zero`."""

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
        """Encoded digits times a prepacked weight, float32 `[R, N]`; `scales` are `[N]`.

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
    """Weights `[N, K]` in int8, prepacked for oneDNN; opaque."""
    operators: Any = torch.ops.onednn
    prepacked: torch.Tensor = operators.qlinear_prepack(numbers, [PACKED_ROWS, numbers.shape[1]])
    return prepacked


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
    """True if the largest digits times the largest weights give exact sums here."""
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
    with torch_threads(1):
        for _ in range(4):
            start = thread_time()
            encoding.multiply(numbers, weight, scales)
            times.append(thread_time() - start)
    return min(times)


@cache
@torch.inference_mode()
def choose_encoding() -> Encoding:
    """The fastest exact encoding on this processor.

    Raises `ConfigurationError` if oneDNN has no exact product of 8-bit integers.
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


_SECOND = 1 / (2 * LARGEST)
"""The unit of the second digit, in units of the first, whose error is half a unit at most."""

_TINY = 1e-12  # the least scale: rows and channels of zeros stay zeros


def _units(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[R, K]` in units of their scales, -127 to 127, and the scales, float32 `[R, 1]`."""
    floats = rows.float()
    scales = floats.abs().amax(1, keepdim=True).clamp_min(_TINY) / LARGEST
    return floats / scales, scales


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[R, K]` of any floating type as int8, and their scales, float32 `[R, 1]`."""
    units, scales = _units(rows)
    return units.round().to(torch.int8), scales


def digits(rows: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[R, K]` as two digits, encoded, `[2 * R, K]` or more; scales as `quantise`.

    First digits come first; second ones count `1 / 254` of them.
    """
    units, scales = _units(rows)
    first = units.round()
    second = ((units - first) / _SECOND).round()
    return encoding.encode(torch.cat([first, second])), scales


class Int8Linear(nn.Module):
    """Approximates `linear`, with a weight of a byte per element.

    `quantised` are the integers `[N, K]` and scales `[N, 1]` of its weight, if they are known:
    then that is not read. `weight` is opaque: laid out for oneDNN, int8, without arithmetic.
    """

    def __init__(
        self, linear: nn.Linear, quantised: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.encoding = choose_encoding()
        with torch.no_grad():
            numbers, scales = quantised or quantise(linear.weight.detach())
            self.weight = pack(numbers)
            self._scales = scales.flatten()
        bias: torch.Tensor | None = linear.bias
        self.bias = None if bias is None else bias.detach().float()
        self._number = numbered(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, of the same type."""
        numbers, scales = digits(rows.flatten(0, -2), self.encoding)
        if torch.compiler.is_compiling():
            product = torch.ops.pyengine.int8_product(numbers, self._number, self.out_features)
        else:
            product = self.product(numbers)
        first, second = product.view(2, scales.shape[0], self.out_features).unbind()
        found: torch.Tensor = torch.add(first, second, alpha=_SECOND) * scales
        if self.bias is not None:
            found = found + self.bias
        return found.to(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def product(self, numbers: torch.Tensor) -> torch.Tensor:
        """Encoded digits times the weight, float32, a row for each digit."""
        return self.encoding.multiply(numbers, self.weight, self._scales)


class Int8Embedding(nn.Module):
    """The rows of an embedding in 8-bit integers, each with a scale; the result is of `dtype`."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        with torch.no_grad():
            self._numbers, self._scales = quantise(embedding.weight.detach())
        self.dtype = embedding.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., embedding_dim]`."""
        rows = F.embedding(ids, self._numbers).float() * F.embedding(ids, self._scales)
        return rows.to(self.dtype)


def _int8_product(numbers: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    product: torch.Tensor = layer_of(number).product(numbers)
    return product


def _shape(numbers: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    num_rows = numbers.shape[0] // layer_of(number).encoding.parts
    return numbers.new_empty(num_rows, out_features, dtype=torch.float32)


define_operator(
    "int8_product(Tensor numbers, int number, int out_features) -> Tensor", _int8_product, _shape
)


def quantise_linears(model: Any) -> int:
    """Replace every linear layer of `model` by one in 8-bit integers; returns how many.

    An embedding that is tied to the head is replaced too. Weights are freed one by one. Raises
    `ConfigurationError`, without changes, if torch lacks oneDNN.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        raise ConfigurationError(
            "quantization='int8' needs oneDNN, without which this torch was built: leave it out"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = type(embedding) is nn.Embedding
    if is_plain and head is not None and head.weight is embedding.weight:
        model.set_input_embeddings(Int8Embedding(embedding))
    del embedding, head
    return replace_linears(
        model,
        lambda item: type(item) is nn.Linear,
        lambda linears: Int8Linear(concatenated(linears)),
        (ATTENTION, GATED),
    )
