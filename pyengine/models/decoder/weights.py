"""The weights of a layer: asked for by name and shape, found in a file, laid out by the kernels.

A layer says once what it needs. With `NoKernels` nothing is read: building a decoder then checks
names, shapes and formats against the headers of files.

Sizes are those of a rank's part of a divided model. A layer says which axis of a weight is divided;
one that is not is whole on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from pyengine.models.decoder.adapters import AdapterTable, AdapterTables
from pyengine.models.decoder.checkpoint import StoredTensor, Tensors
from pyengine.models.decoder.kernels import (
    ConvWeights,
    ExpertProducts,
    GatedNormWeights,
    Kernels,
    NormWeights,
    Product,
    Rows,
    Step,
    Table,
    TableUse,
)
from pyengine.models.decoder.names import Names, Stored
from pyengine.models.decoder.ranks import WHOLE, Rank
from pyengine.models.decoder.recurrent import Convolution, GatedNorm
from pyengine.models.decoder.spec import MLP, Norm
from pyengine.models.decoder.stored_weight import Weight

Axis = Literal["outputs", "inputs"]
"""The axis of a matrix that ranks divide: each has its outputs, or a part of the sum."""


class Linear:
    """`[T, inputs]` to `[T, outputs]` by a product, which holds the weight, and adapters."""

    __slots__ = ("adapters", "product")

    def __init__(self, product: Product, adapters: AdapterTable | None = None) -> None:
        self.product, self.adapters = product, adapters

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Multiply the rows of the step."""
        result = self.product.multiply(rows)
        if step.adapters is None or self.adapters is None:
            return result
        return self.adapters.add(result, rows, step.adapters)


class ActivatedLinear(Linear):
    """The first matrix of an MLP with adapters, and then its activation."""

    __slots__ = ("_kernels", "_mlp")

    def __init__(
        self, product: Product, adapters: AdapterTable, kernels: Kernels, mlp: MLP
    ) -> None:
        super().__init__(product, adapters)
        self._kernels, self._mlp = kernels, mlp

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Multiply the rows of the step, and apply the activation."""
        return self._kernels.activated(super().__call__(rows, step), self._mlp)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one layer, or (`layer` None) those outside of layers: the part of a `rank`."""

    _tensors: Tensors
    _names: Names
    kernels: Kernels
    layer: int | None = None
    rank: Rank = WHOLE
    adapters: AdapterTables | None = None
    """The tables of adapters, which linear layers add theirs to; None: they have none."""

    def of_layer(self, layer: int) -> "Weights":
        """The weights of this layer."""
        return replace(self, layer=layer)

    def outside(self) -> "Weights":
        """The weights outside of layers."""
        return replace(self, layer=None)

    def with_kernels(self, kernels: Kernels, rank: Rank = WHOLE) -> "Weights":
        """The same weights for another kernel set, of one rank."""
        return replace(self, kernels=kernels, rank=rank)

    @property
    def tensors(self) -> Tensors:
        """All tensors of the model."""
        return self._tensors

    @property
    def names(self) -> Names:
        """Their names, by those that layers ask for."""
        return self._names

    def with_adapters(self, tables: AdapterTables) -> "Weights":
        """The same weights, for linear layers with adapters."""
        return replace(self, adapters=tables)

    def has(self, name: str) -> bool:
        """True if the file has it."""
        prefix, options = self._names.of(name, self.layer)
        return any(self._tensors.has(prefix + opt.parts[0] + opt.weight) for opt in options)

    def linear(
        self,
        name: str,
        outputs: int | Sequence[int],
        inputs: int,
        *,
        has_bias: bool = False,
        divided: Axis | None = None,
        groups: int = 1,
    ) -> Linear:
        """A linear layer; several `outputs` follow each other.

        A file may have them in `groups` of equal sizes, see `Stored.is_grouped`.
        """
        sizes = [outputs] if isinstance(outputs, int) else list(outputs)
        weight, bias = self._pair(name, sizes, inputs, has_bias, divided)
        if groups > 1 and self._stored(name)[1].is_grouped:
            weight = _ungrouped(weight, sizes, groups)
        if divided == "inputs" and self.rank.number:
            bias = None  # it is added once
        table = self._adapter_table(name, sizes, inputs, groups)
        return Linear(self.kernels.product(weight, bias), table)

    def _adapter_table(
        self, name: str, sizes: Sequence[int], inputs: int, groups: int = 1
    ) -> AdapterTable | None:
        """The table for the adapters of a linear layer, if the model has such."""
        if self.adapters is None:
            return None
        return self.adapters.table((name, self.layer), sizes, inputs, groups)

    def router(self, outputs: int, inputs: int, *, has_bias: bool) -> Linear:
        """The router of experts, with float32 results: rounding decides no close scores."""
        return Linear(
            self.kernels.exact_product(*self._pair("router", [outputs], inputs, has_bias, None))
        )

    def inner(
        self, prefix: str, mlp: MLP, inputs: int, *, divided: Axis | None = "outputs"
    ) -> Linear:
        """The first matrix of an MLP, with its activation."""
        name, sizes = ("gate_up", [mlp.size] * 2) if mlp.is_gated else ("up", [mlp.size])
        weight, bias = self._pair(prefix + name, sizes, inputs, mlp.has_bias, divided)
        table = self._adapter_table(prefix + name, sizes, inputs)
        if table is not None:
            product = self.kernels.product(weight, bias)
            return ActivatedLinear(product, table, self.kernels, mlp)
        return Linear(self.kernels.inner_product(weight, bias, mlp))

    def table(
        self,
        name: str,
        rows: int,
        columns: int,
        *,
        use: TableUse = "both",
        is_divided: bool = False,
    ) -> Table:
        """A matrix to look rows up in, and to multiply by.

        Unlike elsewhere, `rows` are those of all ranks: the last one may have fewer than others.
        """
        return self.kernels.table(self._table(name, rows, columns, is_divided), use)

    def differs(self, name: str, other: str, rows: int, columns: int) -> bool:
        """True if the file has the table `name` beside `other`, with other numbers.

        `other` is outside of layers. A rank compares its own part.
        """
        if not self.has(name):
            return False
        pairs = (self, name), (self.outside(), other)
        own, outer = (weights._table(key, rows, columns, is_divided=True) for weights, key in pairs)
        return bool(self.kernels.differ(own, outer))

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

    def vector(self, name: str, size: int, *, divided: Axis | None = None) -> Any:
        """A vector in float32."""
        prefix, stored = self._stored(name)
        weight = self._vector(prefix, stored, stored.weight, [size], divided)
        return self.kernels.exact_vector(weight)

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        *others: tuple[int, ...],
        is_log: bool = False,
        is_transposed: bool = False,
    ) -> Any:
        """An array of `shape` in float32, which may have `other` shapes in files.

        If it `is_log`, minus the exponential of the numbers in the file; a matrix may be
        transposed.
        """
        prefix, stored = self._stored(name)
        [part] = stored.parts
        tensor = self._tensors.take(prefix + part + stored.weight, shape, *others)
        tensor = tensor.reshaped(shape)
        weight = Weight((tensor,), shape)
        if is_transposed:
            weight = Weight((tensor.transposed(),), shape[::-1])
        return self.kernels.exact_array(weight, is_log=is_log)

    def conv(self, name: str, conv: Convolution, sizes: Sequence[int] = ()) -> ConvWeights:
        """A convolution, whose channels may be in several tensors, of these sizes.

        transformers divides them equally when it saves such a model, whatever their sizes are.
        """
        prefix, stored = self._stored(name)
        parts = sizes if len(stored.parts) == len(sizes) else [conv.channels]
        equal = [conv.channels // len(parts)] * len(parts)
        if self._tensors.has_shape(
            prefix + stored.parts[0] + stored.weight, (equal[0], 1, conv.size)
        ):
            parts = equal
        tensors = []
        for part, channels in zip(stored.parts, parts, strict=True):
            shape = (channels, conv.size)
            found = self._tensors.take(
                prefix + part + stored.weight, (channels, 1, conv.size), shape
            )
            tensors.append(found.reshaped(shape))
        weight = Weight(tuple(tensors), (conv.channels, conv.size))
        bias = None
        if conv.has_bias:
            bias = self._vector(prefix, stored, stored.bias, [conv.channels])
        return self.kernels.conv_weights(conv, weight, bias)

    def gated_norm(self, name: str, norm: GatedNorm, width: int) -> GatedNormWeights:
        """A norm with a gate, of rows of this width."""
        prefix, stored = self._stored(name)
        [part] = stored.parts
        shapes = (width,), (width // norm.size, norm.size)
        tensor = self._tensors.take(prefix + part + stored.weight, *shapes).reshaped((width,))
        return GatedNormWeights(norm, self.kernels.vector(Weight((tensor,), (width,))))

    def experts(self, count: int, mlp: MLP, hidden: int) -> ExpertProducts:
        """The matrices of all experts."""
        inner = [mlp.size, mlp.size] if mlp.is_gated else [mlp.size]
        name = "expert_gate_up" if mlp.is_gated else "expert_up"
        gate_up, first = self._of_experts(name, count, inner, hidden, mlp, "outputs")
        down, second = self._of_experts("expert_down", count, [hidden], mlp.size, mlp, "inputs")
        biases = (first, second) if mlp.has_bias else None
        return self.kernels.experts(gate_up, down, biases, mlp)

    def _of_experts(
        self, name: str, count: int, sizes: list[int], inputs: int, mlp: MLP, divided: Axis
    ) -> tuple[list[Weight], list[Weight]]:
        """The matrices and biases of one kind, expert by expert."""
        prefix, stored = self._stored(name, expert=0)
        matrices, biases = [], []
        for expert in range(count):
            of_expert = expert, count
            matrices.append(self._matrix(prefix, stored, sizes, inputs, divided, of_expert))
            if mlp.has_bias:
                bias = self._vector(prefix, stored, stored.bias, sizes, divided, of_expert)
                is_added = divided == "outputs" or self.rank.number == 0
                biases.append(bias if is_added else bias.zeros())
        return matrices, biases

    def _stored(self, name: str, expert: int | None = None) -> tuple[str, Stored]:
        """The first alternative that the file has, else the first of all."""
        prefix, options = self._names.of(name, self.layer)
        for option in options:
            part = option.parts[0] if expert is None else option.parts[0].format(expert)
            if self._tensors.has(prefix + part + option.weight):
                return prefix, option
        return prefix, options[0]

    def _table(self, name: str, rows: int, columns: int, is_divided: bool) -> Weight:
        prefix, stored = self._stored(name)
        whole = self._matrix(prefix, stored, [rows], columns, None)
        if not is_divided or self.rank.size == 1:
            return whole
        part = self.rank.part(rows)
        [tensor] = whole.parts
        return Weight((tensor.only(part),), (part.stop - part.start, columns))

    def _pair(
        self, name: str, sizes: list[int], inputs: int, has_bias: bool, divided: Axis | None
    ) -> tuple[Weight, Weight | None]:
        """A matrix, and its bias if it has one."""
        prefix, stored = self._stored(name)
        weight = self._matrix(prefix, stored, sizes, inputs, divided)
        bias = self._vector(prefix, stored, stored.bias, sizes, divided) if has_bias else None
        return weight, bias

    def _matrix(
        self,
        prefix: str,
        stored: Stored,
        sizes: list[int],
        inputs: int,
        divided: Axis | None,
        expert: tuple[int, int] | None = None,
    ) -> Weight:
        whole_inputs = inputs * self.rank.size if divided == "inputs" else inputs
        tensors = []
        for part, size in self._in_file(stored, sizes, divided):
            shape: tuple[int, ...] = (size, whole_inputs)
            if stored.is_transposed:
                shape = (whole_inputs, size)
            if stored.is_row:
                shape = (whole_inputs,)
            tensor = self._take(prefix + part, stored.weight, shape, expert)
            if stored.is_transposed:
                tensor = tensor.transposed()
            tensors.append(tensor)
        if divided == "inputs" and self.rank.size > 1:
            columns = slice(self.rank.number * inputs, (self.rank.number + 1) * inputs)
            tensors = [tensor.only_columns(columns) for tensor in tensors]
        elif divided == "outputs":
            tensors = self._own_rows(tensors, stored, sizes)
        return Weight(tuple(tensors), (sum(sizes), inputs), stored.is_interleaved)

    def _vector(
        self,
        prefix: str,
        stored: Stored,
        suffix: str,
        sizes: list[int],
        divided: Axis | None = None,
        expert: tuple[int, int] | None = None,
    ) -> Weight:
        tensors = [
            self._take(prefix + part, suffix, (size,), expert)
            for part, size in self._in_file(stored, sizes, divided)
        ]
        if divided == "outputs":
            tensors = self._own_rows(tensors, stored, sizes)
        return Weight(tuple(tensors), (sum(sizes),), stored.is_interleaved)

    def _in_file(
        self, stored: Stored, sizes: list[int], divided: Axis | None
    ) -> Iterator[tuple[str, int]]:
        """The tensors of a weight in the file, and their outputs, of all ranks."""
        whole = [size * self.rank.size for size in sizes] if divided == "outputs" else sizes
        parts = whole if len(stored.parts) == len(sizes) else [sum(whole)]
        if stored.kinds and len(stored.parts) < len(sizes):
            left = iter(whole)
            parts = [sum(islice(left, count)) for count in stored.kinds]
        return zip(stored.parts, parts, strict=True)

    def _own_rows(
        self, tensors: list[StoredTensor], stored: Stored, sizes: list[int]
    ) -> list[StoredTensor]:
        """This rank's part of the outputs of each kind, which may be in one tensor."""
        number, ranks = self.rank.number, self.rank.size
        if ranks == 1:
            return tensors
        if stored.is_interleaved:
            sizes = [sum(sizes)]  # outputs of two halves alternate, and so do those of a part
        if len(tensors) == len(sizes):
            pairs = zip(tensors, sizes, strict=True)
            return [tensor.only(slice(number * n, (number + 1) * n)) for tensor, n in pairs]
        [whole], own, start = tensors, [], 0
        for size in sizes:
            own.append(whole.only(slice(start + number * size, start + (number + 1) * size)))
            start += size * ranks
        return own

    def _take(
        self, name: str, suffix: str, shape: tuple[int, ...], expert: tuple[int, int] | None
    ) -> StoredTensor:
        if expert is None:
            return self._tensors.take(name + suffix, shape)
        index, count = expert
        if "{}" in name:
            return self._tensors.take(name.format(index) + suffix, shape)
        return self._tensors.take(name + suffix, (count, *shape)).expert(index)


def _ungrouped(weight: Weight, sizes: Sequence[int], groups: int) -> Weight:
    """A matrix whose outputs are grouped in its one tensor, with those of each kind in a row."""
    [tensor] = weight.parts
    per_group = [size // groups for size in sizes]
    parts, first = [], 0
    for size in per_group:
        for group in range(groups):
            start = group * sum(per_group) + first
            parts.append(tensor.only(slice(start, start + size)))
        first += size
    return Weight(tuple(parts), weight.shape)


class NoKernels:
    """Reads nothing and computes nothing: weights are checked by their headers."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments, **_named: None
