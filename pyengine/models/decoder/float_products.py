"""Products of float matrices by torch and by oneDNN, over arrays of NumPy: see `product_choice`.

oneDNN also computes what follows a product while that is in the processor's cache: the activation
of a gate, and the gate times what it lets through. In bfloat16 it rounds the gate before that.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pyengine.utils.dtypes import Rows
from pyengine.utils.tensors import array_of, tensor_of

ProductName = Literal["torch", "onednn", "onednn-unpacked", "pyengine"]
"""`torch.nn.functional.linear`; oneDNN with weights in its layout, which is a copy; oneDNN with
weights as they are; the Rust kernel, with a copy in its layout."""

GATES = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
"""Activations that oneDNN applies after a product, in its words."""

_PACKED_FOR = 32  # rows for which oneDNN lays weights out


class TorchProduct:
    """A matrix `[outputs, inputs]` and a bias, multiplied by torch."""

    def __init__(self, weight: Rows, bias: Rows | None = None) -> None:
        import torch
        from torch.nn.functional import linear

        self._linear: Any = torch.inference_mode()(linear)
        self._weight = tensor_of(weight)
        self._bias = None if bias is None else tensor_of(bias)

    def multiply(self, rows: Rows) -> Rows:
        """See `Product.multiply`."""
        return array_of(self._linear(tensor_of(rows), self._weight, self._bias))


class OneDNNProduct:
    """The same by oneDNN, with a copy in its layout (`is_packed`) or the weight as it is."""

    def __init__(self, weight: Rows, bias: Rows | None = None, *, is_packed: bool) -> None:
        import torch

        operators: Any = torch.ops.mkldnn
        self._multiply = torch.inference_mode()(operators._linear_pointwise.default)
        self._multiply_by = torch.inference_mode()(operators._linear_pointwise.binary)
        self._weight = tensor_of(weight)
        if is_packed:
            self._weight = operators._reorder_linear_weight(self._weight, _PACKED_FOR)
        self._bias = None if bias is None else tensor_of(bias)

    def multiply(self, rows: Rows) -> Rows:
        """See `Product.multiply`."""
        return array_of(self.tensor(tensor_of(rows)))

    def tensor(self, rows: Any, after: tuple[str, str] = ("none", "")) -> Any:
        """The same of tensors; `after`: an operator and algorithm of oneDNN."""
        operator, algorithm = after
        return self._multiply(rows, self._weight, self._bias, operator, [], algorithm)

    def times(self, rows: Any, factors: Any) -> Any:
        """The product of tensors, times `factors`."""
        return self._multiply_by(rows, factors, self._weight, self._bias, "mul")


class OneDNNGate:
    """`activation(gate(rows)) * up(rows)`, for an activation of `GATES`."""

    def __init__(self, gate: OneDNNProduct, up: OneDNNProduct, activation: str) -> None:
        self._gate, self._up, self._after = gate, up, GATES[activation]

    def multiply(self, rows: Rows) -> Rows:
        """See `Kernels.inner_product`."""
        tensor = tensor_of(np.ascontiguousarray(rows))
        return array_of(self._up.times(tensor, self._gate.tensor(tensor, self._after)))


class FloatTable:
    """Rows of a matrix by their numbers; with a `product`, rows times the matrix, too."""

    def __init__(self, weight: Rows, product: Any = None) -> None:
        self._weight, self._product = weight, product

    def gather(self, ids: npt.NDArray[np.int64]) -> Rows:
        """See `Table.gather`."""
        rows: Rows = self._weight[ids]
        return rows

    def multiply(self, rows: Rows) -> Rows:
        """See `Product.multiply`."""
        result: Rows = self._product.multiply(rows)
        return result


def float_product(name: ProductName, weight: Rows, bias: Rows | None = None) -> Any:
    """The product of this name, which is not the Rust kernel's."""
    if name == "torch":
        return TorchProduct(weight, bias)
    return OneDNNProduct(weight, bias, is_packed=name == "onednn")


def onednn_gate(name: ProductName, gate: Rows, up: Rows, activation: str) -> OneDNNGate:
    """A gate by oneDNN."""
    return OneDNNGate(float_product(name, gate), float_product(name, up), activation)
