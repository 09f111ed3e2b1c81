"""Products of the CPU's kernel set: of experts, in an order of inputs, of halves of a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pyengine.cpu import CpuAttention, PackedWeight, QuantizedWeight
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder import cpu_products
from pyengine.models.decoder.checkpoint import Array, StoredTensor
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype
from pyengine.models.decoder.cpu_products import (
    CpuInnerProduct,
    CpuProduct,
    OrderedWeight,
    ReusedMemory,
)
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.product_choice import ProductChooser, onednn_supports
from pyengine.models.decoder.spec import MLP, ClampedGate
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.integer_linear import q8_0
from pyengine.utils.dtypes import rounded, widened
from pyengine.utils.tensors import array_of, tensor_of
from tests.unit.models.decoder.tiny_models import Tiny, save

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
THREADS = kernel_threads(2)

pytestmark = [
    pytest.mark.levels,
    pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA"),
]


@dataclass(frozen=True, slots=True)
class Numbers(StoredTensor):
    """Numbers in memory; with `is_packed` they are in 8 bits."""

    numbers: Any = None
    is_packed: bool = False

    def read(self) -> Array:
        return self.cut(self.numbers)

    @property
    def packed_as(self) -> str | None:
        return "Q8_0" if self.is_packed and self.is_whole else None

    @staticmethod
    def laid_out(parts: Sequence[Any], shape: tuple[int, int]) -> QuantizedWeight:
        return q8_0(np.concatenate([part.read() for part in parts]), THREADS)


def weight_of(numbers: Array, *, is_packed: bool = False) -> Weight:
    stored = Numbers(
        Path(), "weight", "F32", numbers.shape, 0, numbers=numbers, is_packed=is_packed
    )
    return Weight((stored,), numbers.shape)


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def activated(inner: torch.Tensor, mlp: MLP) -> torch.Tensor:
    F = torch.nn.functional
    if not mlp.is_gated:
        return F.gelu(inner) if mlp.activation == "gelu" else F.relu(inner).square()
    gate, up = inner.chunk(2, -1)
    if isinstance(mlp.activation, ClampedGate):
        gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
        return gate * torch.sigmoid(1.7 * gate) * (up + 1)
    functions: dict[Any, Any] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }
    result: torch.Tensor = functions[mlp.activation](gate) * up
    return result


MLPS = [
    *(MLP(size=64, activation=activation) for activation in ("silu", "gelu", "gelu_tanh", "relu")),
    MLP(size=64, activation=ClampedGate(alpha=1.7, limit=2.0)),
    *(MLP(size=64, activation=activation, is_gated=False) for activation in ("gelu", "relu2")),
]


@pytest.mark.parametrize("product", ["pyengine", "torch", "onednn", "onednn-unpacked"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mlp", MLPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_matrix_of_an_mlp(mlp: MLP, has_bias: bool, dtype: Dtype, product: Any) -> None:
    if product.startswith("onednn") and not onednn_supports(dtype):
        pytest.skip("torch was built without oneDNN")
    outputs = 64 * (1 + mlp.is_gated)
    matrix, bias, rows = floats(outputs, 96), floats(outputs, seed=1), floats(9, 96, seed=2)
    kernels = CpuKernels(THREADS, dtype=dtype, products=ProductChooser.fixed(product, "test"))
    inner = kernels.inner_product(weight_of(matrix), weight_of(bias) if has_bias else None, mlp)
    kind = NUMPY[dtype]
    actual = inner.multiply(rounded(rows, kind))
    assert actual.dtype == kind
    inputs, by, added = (
        torch.from_numpy(widened(rounded(array, kind))) for array in (rows, matrix, bias)
    )
    hidden = torch.nn.functional.linear(inputs, by, added if has_bias else None)
    expected = activated(hidden, mlp)
    limit = 1e-5 if dtype == "float32" else 1e-2
    assert (torch.from_numpy(widened(actual)) - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_a_packed_matrix_stay_packed(dtype: Dtype) -> None:
    """As in Phi-3, whose gate and up are one tensor."""
    matrix, rows = floats(128, 96), rounded(floats(5, 96, seed=1), NUMPY[dtype])
    product = CpuKernels(THREADS, dtype=dtype).inner_product(
        weight_of(matrix, is_packed=True), None, MLP(size=64, activation="silu")
    )
    assert isinstance(product, CpuInnerProduct)
    assert isinstance(product.product, CpuProduct)
    assert isinstance(product.product.packed, QuantizedWeight)
    exact = CpuKernels(THREADS).inner_product(
        weight_of(matrix), None, MLP(size=64, activation="silu")
    )
    expected = exact.multiply(widened(rows))
    error = np.linalg.norm(widened(product.multiply(rows)) - expected)
    assert 0 < error <= 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_in_another_order(dtype: Dtype) -> None:
    matrix, rows = floats(40, 64), rounded(floats(5, 64, seed=1), NUMPY[dtype])
    order = np.random.default_rng(2).permutation(64)
    packed = q8_0(np.ascontiguousarray(matrix[:, order]), THREADS)
    plain, ordered = (
        CpuProduct(THREADS, weight, floats(40, seed=3), dtype)
        for weight in (packed, OrderedWeight(packed, order))
    )
    actual = ordered.multiply(rows)
    assert np.array_equal(actual, plain.multiply(rows[:, order]))
    assert not np.array_equal(actual, plain.multiply(rows))
    ids = np.array([3, 0, 39])
    assert np.array_equal(ordered.gather(ids)[:, order], plain.gather(ids))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts(dtype: Dtype, quantization: Literal["none", "int8"]) -> None:
    count, hidden, size, tokens = 6, 64, 32, 17
    rng, kind = np.random.default_rng(5), NUMPY[dtype]
    gates = [floats(2 * size, hidden, seed=index) for index in range(count)]
    downs = [floats(hidden, size, seed=20 + index) for index in range(count)]
    rows = rounded(floats(tokens, hidden, seed=50), kind)
    chosen = np.stack([rng.permutation(count)[:3] for _ in range(tokens)])
    chosen[:, 0] = np.where(chosen[:, 0] == 4, 5, chosen[:, 0])  # an expert with few tokens or none
    chosen = np.stack([np.unique(row)[:2] for row in chosen])
    factors = rng.random(chosen.shape, np.float32)
    kernels = CpuKernels(THREADS, quantization, dtype)
    mlp = MLP(size=size, activation="silu")
    experts = kernels.experts(list(map(weight_of, gates)), list(map(weight_of, downs)), None, mlp)
    actual = experts.multiply(rows, chosen, factors)
    expected = torch.zeros(tokens, hidden)
    wide = torch.from_numpy(widened(rows))
    for token, experts_of in enumerate(chosen):
        for place, expert in enumerate(experts_of):
            inner = activated(wide[token] @ torch.from_numpy(gates[expert]).T, mlp)
            result = inner @ torch.from_numpy(downs[expert]).T
            expected[token] += float(factors[token, place]) * result
    limit = 0.03 if quantization == "int8" or dtype == "bfloat16" else 1e-5
    assert (torch.from_numpy(widened(actual)) - expected).norm() <= limit * expected.norm()
    for token in range(tokens):
        own = slice(token, token + 1)
        alone = experts.multiply(rows[own], chosen[own], factors[own])
        assert np.array_equal(alone[0], actual[token])


def address_of(array: Array) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_results_is_reused_once_no_array_or_tensor_holds_it(dtype: Dtype) -> None:
    packed, kind = PackedWeight(floats(17, 24)), NUMPY[dtype]
    plain, reusing = (
        CpuProduct(THREADS, packed),
        CpuProduct(THREADS, packed, results=ReusedMemory()),
    )
    rows = rounded(floats(9, 24, seed=1), kind)
    first = reusing.multiply(rows)
    address, part = address_of(first), first[3:]
    held = tensor_of(first)[1:3]
    del first
    second = reusing.multiply(rows[:2])
    assert np.array_equal(part, plain.multiply(rows)[3:])
    del part
    third = reusing.multiply(rows[:1])
    assert len({address, address_of(second), address_of(third)}) == 3
    assert np.array_equal(array_of(held), plain.multiply(rows)[1:3])
    assert np.array_equal(second, plain.multiply(rows[:2]))
    del held, second, third
    free = address_of(reusing.multiply(rows))
    assert address_of(reusing.multiply(rows[:1])) == free


def test_results_beyond_the_memory_that_is_kept_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_products, "_REUSED", 2 * 17 * 4)
    memory, kind = ReusedMemory(), np.dtype(np.float32)
    kept = memory.empty((2, 17), kind)
    address = address_of(kept)
    large = memory.empty((3, 17), kind)
    assert large.shape == (3, 17)
    del kept, large
    assert address_of(memory.empty((2, 17), kind)) == address


def test_the_head_reuses_its_memory(tmp_path: Path) -> None:
    save(Tiny("llama", "llama", {}), tmp_path)
    head: Any = open_model(tmp_path).decoder(CpuKernels(THREADS))._head
    assert head.results is not None
