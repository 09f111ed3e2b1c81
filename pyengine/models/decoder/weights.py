"""The weights of a layer: asked for by name and shape, found in a file, laid out by the kernels.

A layer says once what it needs. With `NoKernels` nothing is read: building a decoder then checks
names, shapes and formats against the headers of files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.models.decoder.checkpoint import StoredTensor, Tensors
from pyengine.models.decoder.kernels import (
    ExpertProducts,
    Kernels,
    NormWeights,
    Product,
    Table,
)
from pyengine.models.decoder.names import Names, Stored
from pyengine.models.decoder.spec import MLP, Norm


@dataclass(frozen=True, slots=True)
class Weight:
    """Tensors in files, whose parts follow each other along the first axis of `shape`.

    A kernel set makes a product of it: of the numbers, or of the bytes of a format that it knows.
    """

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    is_interleaved: bool = False

    def half(self, number: int) -> "Weight":
        """The first or the second half of the rows."""
        size = self.shape[0] // 2
        shape = (size, *self.shape[1:])
        if len(self.parts) == 2:
            return Weight((self.parts[number],), shape)
        [whole] = self.parts
        rows = (
            slice(number, None, 2)
            if self.is_interleaved
            else slice(number * size, size * (number + 1))
        )
        return Weight((whole.only(rows),), shape)

    @property
    def packed_as(self) -> str | None:
        """The format of the bytes of all parts; None: they are floats, or differ."""
        formats = {part.packed_as for part in self.parts}
        return formats.pop() if len(formats) == 1 and not self.is_interleaved else None

    def laid_out(self) -> Any:
        """The weight of the Rust kernels, for a matrix that is `packed_as` something."""
        return type(self.parts[0]).laid_out(self.parts, (self.shape[0], self.shape[1]))

    def split(self) -> "list[Weight]":
        """The parts, each a weight."""
        return [Weight((part,), part.shape) for part in self.parts]

    @property
    def name(self) -> str:
        """For messages."""
        return ", ".join(part.name for part in self.parts)

    def pieces(
        self, read: Callable[[StoredTensor], Any] | None = None
    ) -> Iterator[tuple[slice, Any, str]]:
        """Each part: its rows, its numbers, and their format in the file. Read one at a time.

        Numbers are arrays, or what `read` returns for a part.
        """
        start = 0
        for part in self.parts:
            numbers = part.read() if read is None else read(part)
            halves = (numbers[0::2], numbers[1::2]) if self.is_interleaved else (numbers,)
            for half in halves:
                yield slice(start, start + len(half)), half, part.dtype
                start += len(half)


class Linear:
    """`[T, inputs]` to `[T, outputs]` by a product, which holds the weight."""

    __slots__ = ("product",)

    def __init__(self, product: Product) -> None:
        self.product = product

    def __call__(self, rows: Any) -> Any:
        """Multiply."""
        return self.product.multiply(rows)


class Weights:
    """The weights of one layer, or (`layer` None) those outside of layers."""

    def __init__(
        self, tensors: Tensors, names: Names, kernels: Kernels, layer: int | None = None
    ) -> None:
        self._tensors, self._names, self.kernels = tensors, names, kernels
        self.layer = layer

    def of_layer(self, layer: int) -> "Weights":
        """The weights of this layer."""
        return Weights(self._tensors, self._names, self.kernels, layer)

    def with_kernels(self, kernels: Kernels) -> "Weights":
        """The same weights for another kernel set."""
        return Weights(self._tensors, self._names, kernels, self.layer)

    def has(self, name: str) -> bool:
        """True if the file has it."""
        prefix, options = self._names.of(name, self.layer)
        return any(self._tensors.has(prefix + each.parts[0] + each.weight) for each in options)

    def linear(
        self, name: str, outputs: int | Sequence[int], inputs: int, *, has_bias: bool = False
    ) -> Linear:
        """A linear layer; several `outputs` follow each other."""
        sizes = [outputs] if isinstance(outputs, int) else list(outputs)
        prefix, stored = self._stored(name)
        weight = self._matrix(prefix, stored, sizes, inputs)
        bias = self._bias(prefix, stored, sizes) if has_bias else None
        return Linear(self.kernels.product(weight, bias))

    def router(self, outputs: int, inputs: int, *, has_bias: bool) -> Linear:
        """The router of experts, with float32 results: close scores are no matter of rounding."""
        prefix, stored = self._stored("router")
        weight = self._matrix(prefix, stored, [outputs], inputs)
        bias = self._bias(prefix, stored, [outputs]) if has_bias else None
        return Linear(self.kernels.exact_product(weight, bias))

    def inner(self, prefix: str, mlp: MLP, inputs: int) -> Linear:
        """The first matrix of an MLP, with its activation."""
        name, sizes = ("gate_up", [mlp.size] * 2) if mlp.is_gated else ("up", [mlp.size])
        start, stored = self._stored(prefix + name)
        weight = self._matrix(start, stored, sizes, inputs)
        bias = self._bias(start, stored, sizes) if mlp.has_bias else None
        return Linear(self.kernels.inner_product(weight, bias, mlp))

    def table(self, name: str, rows: int, columns: int) -> Table:
        """A matrix to look rows up in, and to multiply by."""
        prefix, stored = self._stored(name)
        return self.kernels.table(self._matrix(prefix, stored, [rows], columns))

    def differs(self, name: str, other: str, rows: int, columns: int) -> bool:
        """True if the file has the matrix `name` beside `other`, and its numbers are others."""
        if not self.has(name):
            return False
        (first, one), (second, two) = self._stored(name), self._stored(other)
        return bool(
            self.kernels.differ(
                self._matrix(first, one, [rows], columns),
                self._matrix(second, two, [rows], columns),
            )
        )

    def optional_norm(self, name: str, norm: Norm | None, size: int) -> NormWeights | None:
        """A norm over `size` elements; None if there is none."""
        return None if norm is None else self.norm(name, norm, size)

    def norm(self, name: str, norm: Norm, size: int) -> NormWeights:
        """A norm over `size` elements."""
        weight = bias = None
        if norm.has_weight:
            prefix, stored = self._stored(name)
            weight = self.kernels.vector(self._vector(prefix, stored, stored.weight, [size]))
            if norm.has_bias:
                bias = self.kernels.vector(self._vector(prefix, stored, stored.bias, [size]))
        return NormWeights(norm, size, weight, bias)

    def scalar(self, name: str) -> Any:
        """A vector of one number, in the dtype of rows."""
        prefix, stored = self._stored(name)
        return self.kernels.vector(self._vector(prefix, stored, stored.weight, [1]))

    def vector(self, name: str, size: int) -> Any:
        """A vector in float32."""
        prefix, stored = self._stored(name)
        return self.kernels.exact_vector(self._vector(prefix, stored, stored.weight, [size]))

    def experts(self, count: int, mlp: MLP, hidden: int) -> ExpertProducts:
        """The matrices of all experts."""
        inner = [mlp.size, mlp.size] if mlp.is_gated else [mlp.size]
        both = [
            self._of_experts(name, count, sizes, inputs, mlp)
            for name, sizes, inputs in (
                ("expert_gate_up", inner, hidden),
                ("expert_down", [hidden], mlp.size),
            )
        ]
        (gate_up, first), (down, second) = both
        biases = (first, second) if mlp.has_bias else None
        return self.kernels.experts(gate_up, down, biases, mlp)

    def _of_experts(
        self, name: str, count: int, sizes: list[int], inputs: int, mlp: MLP
    ) -> tuple[list[Weight], list[Weight]]:
        """The matrices and biases of one kind, expert by expert."""
        prefix, stored = self._stored(name, expert=0)
        matrices, biases = [], []
        for expert in range(count):
            matrices.append(self._matrix(prefix, stored, sizes, inputs, (expert, count)))
            if mlp.has_bias:
                biases.append(self._bias(prefix, stored, sizes, (expert, count)))
        return matrices, biases

    def _stored(self, name: str, expert: int | None = None) -> tuple[str, Stored]:
        """The first alternative that the file has, else the first of all."""
        prefix, options = self._names.of(name, self.layer)
        for each in options:
            part = each.parts[0] if expert is None else each.parts[0].format(expert)
            if self._tensors.has(prefix + part + each.weight):
                return prefix, each
        return prefix, options[0]

    def _matrix(
        self,
        prefix: str,
        stored: Stored,
        sizes: list[int],
        inputs: int,
        expert: tuple[int, int] | None = None,
    ) -> Weight:
        parts = sizes if len(stored.parts) == len(sizes) else [sum(sizes)]
        found = []
        for part, size in zip(stored.parts, parts, strict=True):
            shape: tuple[int, ...] = (inputs, size) if stored.is_transposed else (size, inputs)
            if stored.is_row:
                shape = (inputs,)
            tensor = self._take(prefix + part, stored.weight, shape, expert)
            if stored.is_transposed:
                tensor = tensor.transposed()
            found.append(tensor)
        return Weight(tuple(found), (sum(sizes), inputs), stored.is_interleaved)

    def _bias(
        self, prefix: str, stored: Stored, sizes: list[int], expert: tuple[int, int] | None = None
    ) -> Weight:
        return self._vector(prefix, stored, stored.bias, sizes, expert)

    def _vector(
        self,
        prefix: str,
        stored: Stored,
        suffix: str,
        sizes: list[int],
        expert: tuple[int, int] | None = None,
    ) -> Weight:
        parts = sizes if len(stored.parts) == len(sizes) else [sum(sizes)]
        found = [
            self._take(prefix + part, suffix, (size,), expert)
            for part, size in zip(stored.parts, parts, strict=True)
        ]
        return Weight(tuple(found), (sum(sizes),), stored.is_interleaved)

    def _take(
        self, name: str, suffix: str, shape: tuple[int, ...], expert: tuple[int, int] | None
    ) -> StoredTensor:
        if expert is None:
            return self._tensors.take(name + suffix, shape)
        index, count = expert
        if "{}" in name:
            return self._tensors.take(name.format(index) + suffix, shape)
        return self._tensors.take(name + suffix, (count, *shape)).expert(index)


class NoKernels:
    """Reads nothing and computes nothing: weights are checked by their headers."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments: None
