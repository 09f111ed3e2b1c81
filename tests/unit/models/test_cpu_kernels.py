"""The Rust kernel's products: near the exact ones, and the same bits in every batch."""

from typing import get_args

import numpy as np
import pytest
import torch

from pyengine.cpu import BufferError, ConfigError, CpuAttention, PackedWeight
from pyengine.models import cpu_kernels
from pyengine.models.cpu_kernels import (
    Activation,
    KernelProduct,
    ReusedMemory,
    activated,
    kernel_is_default,
    kernel_supports,
)
from pyengine.utils.openmp import torch_threads

pytestmark = pytest.mark.levels


FORMATS = [torch.float32, torch.bfloat16]


def product(
    in_features: int, out_features: int, dtype=torch.float32, *, bias: bool = False
) -> KernelProduct:
    torch.manual_seed(in_features)
    weight = torch.randn(out_features, in_features).to(dtype)
    return KernelProduct(weight, torch.randn(out_features).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (24, 17), (577, 200)])
def test_products_are_near_the_exact_ones(in_features, out_features, bias, dtype):
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    addend = torch.randn(out_features).to(dtype)
    rows = torch.randn(7, in_features).to(dtype)
    exact = rows.double() @ weight.double().T + (addend.double() if bias else 0)
    found = KernelProduct(weight, addend if bias else None).multiply(rows)
    assert found.dtype == dtype
    rounded = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=rounded)


def test_a_float32_weight_of_bfloat16_numbers_has_the_bits_of_one_that_is_not():
    """It is kept in 16 bits, which another output that is not bfloat16 prevents."""
    weight, rows = torch.randn(40, 77).bfloat16().float(), torch.randn(9, 77)
    whole = KernelProduct(torch.cat([weight, torch.full((1, 77), 0.1)]))
    assert torch.equal(KernelProduct(weight).multiply(rows), whole.multiply(rows)[:, :40])


@pytest.mark.parametrize("dtype", FORMATS)
def test_memory_of_results_is_reused_once_no_tensor_holds_it(dtype):
    plain, reusing = product(24, 17, dtype), product(24, 17, dtype)
    reusing.results = ReusedMemory()
    rows = torch.randn(9, 24).to(dtype)
    first = reusing.multiply(rows[None])
    assert torch.equal(first, plain.multiply(rows[None]))
    place, held = first.data_ptr(), first[0, 3:]
    del first
    second = reusing.multiply(rows[:2])
    assert torch.equal(held, plain.multiply(rows)[3:])
    assert torch.equal(second, plain.multiply(rows[:2]))
    del held, second
    free = reusing.multiply(rows).data_ptr()
    assert free != place
    assert reusing.multiply(rows[:1]).data_ptr() == free


def test_results_beyond_the_memory_that_is_kept_have_their_own(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_REUSED", 2 * 17 * 4)
    memory = ReusedMemory()
    kept = memory.empty((2, 17), torch.float32)
    place = kept.data_ptr()
    large = memory.empty((3, 17), torch.float32)
    assert large.shape == (3, 17)
    del kept, large
    assert memory.empty((2, 17), torch.float32).data_ptr() == place


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_the_weight_are_looked_up(dtype):
    weight = torch.randn(50, 33).to(dtype)
    ids = torch.tensor([[0, 49], [17, 0]])
    assert torch.equal(KernelProduct(weight).gather(ids), weight[ids])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch_and_by_any_number_of_threads(dtype):
    whole, gate = product(300, 450, dtype, bias=True), product(300, 450, dtype)
    rows = torch.randn(40, 300).to(dtype)
    with torch_threads(2):
        together, gated = whole.multiply(rows), gate.multiply_gated(rows, gate)
    with torch_threads(1):
        for count in (1, 2, 3, 6, 7, 12, 33):
            assert torch.equal(whole.multiply(rows[-count:]), together[-count:])
            assert torch.equal(gate.multiply_gated(rows[:count], gate), gated[:count])


def test_rows_may_lie_in_any_way_and_have_any_shape():
    whole = product(6, 5)
    rows = torch.randn(4, 3, 12)[..., ::2]
    found = whole.multiply(rows)
    assert found.shape == (4, 3, 5)
    assert torch.equal(found, whole.multiply(rows.contiguous()))
    assert whole.multiply(rows[:0]).shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_gated_product_is_that_of_both(activation, bias, dtype):
    up, gate = product(40, 30, dtype, bias=bias), product(40, 30, dtype)
    rows = (3 * torch.randn(5, 40)).to(dtype)
    expected = activated(gate.multiply(rows), activation) * up.multiply(rows)
    # Here bfloat16 is rounded three times, in the kernel once.
    bounds = {"rtol": 2**-5, "atol": 1e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(up.multiply_gated(rows, gate, activation), expected, **bounds)


def test_a_weight_that_wants_a_gradient_is_taken_as_it_is():
    weight = torch.randn(3, 4, requires_grad=True)
    found = KernelProduct(weight).multiply(torch.randn(2, 4, requires_grad=True))
    assert not found.requires_grad


def test_formats_without_a_kernel_are_named():
    is_fast = CpuAttention.is_fast()
    for dtype in FORMATS:
        assert kernel_supports(dtype) == is_fast
    assert not kernel_supports(torch.float16)
    assert kernel_is_default(torch.float32) == is_fast
    assert kernel_is_default(torch.bfloat16) == (is_fast and CpuAttention.isa() != "amx")
    assert not kernel_is_default(torch.float16)


def test_what_does_not_fit_is_refused_and_nothing_written():
    threads, weight = CpuAttention(1), PackedWeight(np.ones((3, 2), np.float32))
    rows, out = np.ones((4, 2), np.float32), np.full((4, 3), 7, np.float32)
    bias = np.ones(3, np.float32)
    for wrong in (
        (rows[:3], out),
        (rows.T.copy(), out),
        (rows.astype(np.float64), out),
        (rows[0], out),
        (rows, out.T),
        (rows, out, bias[:2]),
        (rows.astype(np.uint16), out),
        (rows, out.astype(np.uint16)),
        (rows, out, bias.astype(np.uint16)),
        (rows, out, out[0]),
        (out[:, :2], out),
    ):
        with pytest.raises(BufferError):
            weight.multiply(threads, *wrong)
    other = PackedWeight(np.ones((3, 4), np.float32))
    for gate, *wrong in ((other, rows, out), (weight, rows[:3], out), (weight, rows, rows)):
        with pytest.raises(BufferError):
            weight.multiply_gated(threads, wrong[0], gate, wrong[1])
    with pytest.raises(ValueError, match=r'activation is "relu", not one of .*"gelu_tanh"'):
        weight.multiply_gated(threads, rows, weight, out, "relu")
    assert (out == 7).all()
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(ConfigError):
            PackedWeight(np.ones(shape, np.float32))
    with pytest.raises(BufferError):
        PackedWeight(np.ones((4, 4), np.float32).T[:2])
    assert (weight.in_features, weight.out_features) == (2, 3)
