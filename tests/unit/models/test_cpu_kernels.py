"""The Rust kernel's products: near the exact ones, and the same bits in every batch."""

import numpy as np
import pytest
import torch

from pyengine.kv_cache import BufferError, ConfigError, CpuAttention, PackedWeight
from pyengine.models.cpu_kernels import KernelProduct, kernel_supports
from pyengine.utils.openmp import torch_threads

pytestmark = pytest.mark.levels


def product(in_features: int, out_features: int, *, bias: bool = False) -> KernelProduct:
    torch.manual_seed(in_features)
    weight = torch.randn(out_features, in_features)
    return KernelProduct(weight, torch.randn(out_features) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (24, 17), (577, 200)])
def test_products_are_near_the_exact_ones(in_features, out_features, bias):
    torch.manual_seed(0)
    weight, addend = torch.randn(out_features, in_features), torch.randn(out_features)
    rows = torch.randn(7, in_features)
    exact = rows.double() @ weight.double().T + (addend.double() if bias else 0)
    found = KernelProduct(weight, addend if bias else None).multiply(rows)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)


def test_a_row_has_the_same_bits_in_every_batch_and_by_any_number_of_threads():
    whole, gate = product(300, 450, bias=True), product(300, 450)
    rows = torch.randn(40, 300)
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


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_product_is_that_of_both(bias):
    up, gate = product(40, 30, bias=bias), product(40, 30)
    rows = 3 * torch.randn(5, 40)
    expected = torch.nn.functional.silu(gate.multiply(rows)) * up.multiply(rows)
    torch.testing.assert_close(up.multiply_gated(rows, gate), expected)


def test_a_weight_that_wants_a_gradient_is_taken_as_it_is():
    weight = torch.randn(3, 4, requires_grad=True)
    found = KernelProduct(weight).multiply(torch.randn(2, 4, requires_grad=True))
    assert not found.requires_grad


def test_formats_without_a_kernel_are_named():
    assert kernel_supports(torch.float32) == CpuAttention.is_fast()
    assert not kernel_supports(torch.float16)


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
        (rows, out, out[0]),
        (out[:, :2], out),
    ):
        with pytest.raises(BufferError):
            weight.multiply(threads, *wrong)
    other = PackedWeight(np.ones((3, 4), np.float32))
    for gate, *wrong in ((other, rows, out), (weight, rows[:3], out), (weight, rows, rows)):
        with pytest.raises(BufferError):
            weight.multiply_gated(threads, wrong[0], gate, wrong[1])
    assert (out == 7).all()
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(ConfigError):
            PackedWeight(np.ones(shape, np.float32))
    with pytest.raises(BufferError):
        PackedWeight(np.ones((4, 4), np.float32).T[:2])
    assert (weight.in_features, weight.out_features) == (2, 3)
