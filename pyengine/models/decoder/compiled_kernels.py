"""The kernel set of decoders that torch compiles for CPUs: torch's, with products by Rust.

A product is an operator that torch's compiler does not look into. A graph holds the number of its
matrix, and the operator looks the matrix up.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from pyengine.kernels.operators import define_operator
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.kernels import Table, TableUse
from pyengine.models.decoder.spec import MLP
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.torch_kernels import ExpertMatrices, TorchKernels, TorchProduct
from pyengine.utils.tensors import array_of, tensor_of

_numbers = count()
_products: "WeakValueDictionary[int, OpaqueProduct]" = WeakValueDictionary()


class OpaqueProduct:
    """A product over arrays with `outputs` results a row; a `table` allows look-ups of rows."""

    def __init__(self, product: Any, outputs: int, table: torch.Tensor | None = None) -> None:
        self.product, self._outputs, self._table = product, outputs, table
        self.number = next(_numbers)
        _products[self.number] = self

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        result: torch.Tensor = torch.ops.pyengine.packed_linear(rows, self.number, self._outputs)
        return result

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Table.gather`."""
        assert self._table is not None
        return F.embedding(ids, self._table)


class CompiledCpuKernels(TorchKernels):
    """See `Kernels`, for a compiled decoder; matrices are laid out by the set of `cpu`.

    Embeddings and experts are floats.
    """

    keeps_formats = True

    def __init__(self, device: torch.device, dtype: torch.dtype, cpu: CpuKernels) -> None:
        super().__init__(device, dtype)
        self._cpu, self.products = cpu, cpu.products
        self._multiplies_itself = False

    @property
    def has_torch_products(self) -> bool:
        """See `CpuKernels.has_torch_products`."""
        return self._multiplies_itself or self._cpu.has_torch_products

    def exact_product(self, weight: Weight, bias: Weight | None) -> TorchProduct:
        """See `Kernels.exact_product`."""
        self._multiplies_itself = True
        return super().exact_product(weight, bias)

    def matrices(self, weights: Sequence[Weight], bias: torch.Tensor | None) -> ExpertMatrices:
        """Lay out a matrix of every expert."""
        self._multiplies_itself = True
        return super().matrices(weights, bias)

    def product(self, weight: Weight, bias: Weight | None) -> OpaqueProduct:
        """See `Kernels.product`."""
        return OpaqueProduct(self._cpu.product(weight, bias), weight.shape[0])

    def inner_product(self, weight: Weight, bias: Weight | None, mlp: MLP) -> OpaqueProduct:
        """See `Kernels.inner_product`."""
        outputs = weight.shape[0] // (2 if mlp.is_gated else 1)
        return OpaqueProduct(self._cpu.inner_product(weight, bias, mlp), outputs)

    def table(self, weight: Weight, use: TableUse = "both") -> Table:
        """See `Kernels.table`."""
        if use == "lookup":
            return super().table(weight, use)
        rows = self._read(weight) if use == "both" else None
        return OpaqueProduct(self._cpu.table(weight, "product"), weight.shape[0], rows)


def _multiply(rows: torch.Tensor, number: int, _outputs: int) -> torch.Tensor:
    return tensor_of(_products[number].product.multiply(array_of(rows.contiguous())))


def _shape(rows: torch.Tensor, _number: int, outputs: int) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], outputs)


define_operator(
    "packed_linear(Tensor rows, int number, int outputs) -> Tensor", _multiply, _shape, ("CPU",)
)
