"""The kernel set of decoders that torch compiles for CPUs: torch's, with products by Rust.

A product is an operator that torch's compiler does not look into. A graph holds the number of its
matrix, and the operator looks the matrix up.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from pyengine.cpu import CpuAttention, PackedWeight
from pyengine.kernels.operators import define_operator
from pyengine.models.decoder.arrays import array_of, tensor_of
from pyengine.models.decoder.cpu_products import CpuProduct
from pyengine.models.decoder.kernels import Table, TableUse
from pyengine.models.decoder.product_choice import ProductChooser
from pyengine.models.decoder.torch_kernels import TorchKernels, TorchProduct
from pyengine.models.decoder.weights import Weight

_numbers = count()
_products: "WeakValueDictionary[int, OpaqueProduct]" = WeakValueDictionary()


class OpaqueProduct:
    """A matrix `[outputs, inputs]` and a bias, in the layout of the Rust kernel.

    With a `table`, the same numbers as a tensor, rows can be looked up, too.
    """

    def __init__(
        self,
        threads: CpuAttention,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: torch.Tensor | None = None,
    ) -> None:
        vector = None if bias is None else array_of(bias)
        self.product = CpuProduct(threads, PackedWeight(array_of(weight)), vector)
        self.number, self._outputs, self._table = next(_numbers), len(weight), table
        _products[self.number] = self

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        found: torch.Tensor = torch.ops.pyengine.packed_linear(rows, self.number, self._outputs)
        return found

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Table.gather`."""
        assert self._table is not None
        return F.embedding(ids, self._table)


class CompiledCpuKernels(TorchKernels):
    """See `Kernels`, for a compiled decoder in float32 or bfloat16."""

    products = ProductChooser.fixed("pyengine", "a row has the same bits in every batch")

    def __init__(self, device: torch.device, dtype: torch.dtype, threads: CpuAttention) -> None:
        super().__init__(device, dtype)
        self._threads = threads

    def product(self, weight: Weight, bias: Weight | None) -> OpaqueProduct:
        """See `Kernels.product`."""
        vector = None if bias is None else self._read(bias)
        return OpaqueProduct(self._threads, self._read(weight), vector)

    def table(self, weight: Weight, use: TableUse = "both") -> Table:
        """See `Kernels.table`."""
        found = self._read(weight)
        if use == "lookup":
            return TorchProduct(found)
        return OpaqueProduct(self._threads, found, None, found if use == "both" else None)


def _multiply(rows: torch.Tensor, number: int, _outputs: int) -> torch.Tensor:
    return tensor_of(_products[number].product.multiply(array_of(rows.contiguous())))


def _shape(rows: torch.Tensor, _number: int, outputs: int) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], outputs)


define_operator(
    "packed_linear(Tensor rows, int number, int outputs) -> Tensor", _multiply, _shape, ("CPU",)
)
