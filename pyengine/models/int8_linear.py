"""Linear layers with weights in 8-bit integers, one scale per output channel, symmetric.

What they multiply becomes integers too, so that oneDNN can use VNNI and AMX: each row gets a scale
of its own and two digits of 8 bits, which are two rows of one product. That is as good as 16 bits,
where one digit (dynamic quantisation by token: Yao et al., 2022, ZeroQuant, arXiv:2206.01861) costs
three times what rounding the weights does. Sums of integers are exact in any order: a row has the
same bits in every batch. `models/int8_encoding.py` writes digits so that no sum saturates.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models.fused_linear import ATTENTION, GATED, replace_linears
from pyengine.models.int8_encoding import LARGEST, Encoding, choose_encoding, pack

_SECOND = 1 / (2 * LARGEST)
"""What the second digit counts, in units of the first: that is half a unit off at most."""

_TINY = 1e-12
"""The least a scale is: rows and channels of zeros stay zeros."""

_numbers = count()


def _units(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[R, K]` in units of their scales, from -127 to 127, and these, float32 `[R, 1]`."""
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
    """Computes about what `linear` does, with a weight of a byte per element.

    `weight` is opaque: laid out for oneDNN, int8, without arithmetic of its own.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.encoding = choose_encoding()
        with torch.no_grad():
            numbers, scales = quantise(linear.weight.detach())
            self.weight = pack(numbers)
            self._scales = scales.flatten()
        bias: torch.Tensor | None = linear.bias
        self.bias = None if bias is None else bias.detach().float()
        self._number = next(_numbers)
        _layers[self._number] = self

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
    """The rows of an embedding in 8-bit integers, each with a scale; they come as `dtype`."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        with torch.no_grad():
            self._numbers, self._scales = quantise(embedding.weight.detach())
        self.dtype = embedding.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., embedding_dim]`."""
        rows = F.embedding(ids, self._numbers).float() * F.embedding(ids, self._scales)
        return rows.to(self.dtype)


_layers: "WeakValueDictionary[int, Int8Linear]" = WeakValueDictionary()
"""A compiled graph cannot hold a packed weight: it holds the number of the layer that does."""


def _int8_product(numbers: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    return _layers[number].product(numbers)


def _shape(numbers: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    num_rows = numbers.shape[0] // _layers[number].encoding.parts
    return numbers.new_empty(num_rows, out_features, dtype=torch.float32)


torch.library.define(
    "pyengine::int8_product", "(Tensor numbers, int number, int out_features) -> Tensor"
)
torch.library.impl("pyengine::int8_product", "CPU")(_int8_product)
torch.library.register_fake("pyengine::int8_product")(_shape)


def quantise_linears(model: Any, device: torch.device) -> int:
    """Replace every linear layer of `model` by one in 8-bit integers; returns how many.

    An embedding that is tied to the head is replaced too. Weights are given back one by one, where
    nothing else holds them. Raises `ConfigurationError`, and has changed nothing then, for a
    device other than the CPU, and for a model with weights that are no plain linear layer's.
    """
    onednn: Any = torch.backends.mkldnn
    if device.type != "cpu":
        raise ConfigurationError(
            f"quantization='int8' runs on cpu, the device is {device}: leave quantization out"
        )
    if not onednn.is_available():
        raise ConfigurationError(
            "quantization='int8' needs oneDNN, without which this torch was built: leave it out"
        )
    for name, module in _matrices(model):
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            raise ConfigurationError(
                f"quantization='int8': {type(model).__name__} cannot take it: its weights {name} "
                f"are those of a {type(module).__name__}, and only plain linear layers are "
                "quantised; leave quantization out"
            )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = type(embedding) is nn.Embedding
    if is_plain and head is not None and head.weight is embedding.weight:
        model.set_input_embeddings(Int8Embedding(embedding))
    del embedding, head
    return replace_linears(
        model, lambda one: type(one) is nn.Linear, Int8Linear, (ATTENTION, GATED)
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every weight of two dimensions or more, by name, and whose it is."""
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(prefix=name, recurse=False):
            if weight.ndim > 1:
                yield own, module
