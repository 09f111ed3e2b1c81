"""Products with a matrix of floats: near the exact ones, and the same bits in every batch."""

from typing import get_args

import numpy as np
import pytest

from pyengine.cpu import BufferError, ConfigError, CpuAttention, PackedWeight
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype
from pyengine.models.decoder.cpu_products import CpuGate, CpuProduct
from pyengine.models.decoder.product_choice import kernel_supports
from pyengine.models.decoder.spec import Activation
from pyengine.utils.dtypes import Rows, rounded, widened

pytestmark = pytest.mark.levels

FORMATS = get_args(Dtype)


def random(shape: tuple[int, ...], dtype: Dtype = "float32", seed: int = 0) -> Rows:
    floats = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return rounded(floats, NUMPY[dtype])


def product(weight: Rows, bias: Rows | None = None, threads: int = 2) -> CpuProduct:
    return CpuProduct(CpuAttention(threads), PackedWeight(weight), bias)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (24, 17), (577, 200)])
def test_products_are_near_the_exact_ones(
    inputs: int, outputs: int, has_bias: bool, dtype: Dtype
) -> None:
    weight, bias = random((outputs, inputs), dtype), random((outputs,), dtype, 1)
    rows = random((7, inputs), dtype, 2)
    exact = widened(rows).astype(np.float64) @ widened(weight).astype(np.float64).T
    exact += widened(bias) if has_bias else 0
    actual = product(weight, bias if has_bias else None).multiply(rows)
    assert actual.dtype == NUMPY[dtype]
    error = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(widened(actual), exact, atol=1e-4, rtol=error)


def test_a_float32_weight_of_bfloat16_numbers_has_the_bits_of_one_that_is_not() -> None:
    """It is kept in 16 bits, which another output that is not bfloat16 prevents."""
    weight, rows = widened(random((40, 77), "bfloat16")), random((9, 77))
    whole = product(np.concatenate([weight, np.full((1, 77), 0.1, np.float32)]))
    assert np.array_equal(product(weight).multiply(rows), whole.multiply(rows)[:, :40])


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_the_weight_are_looked_up(dtype: Dtype) -> None:
    weight, ids = random((50, 33), dtype), np.array([0, 49, 17, 0])
    threads = CpuAttention(1)
    actual = CpuProduct(threads, PackedWeight(weight), dtype=dtype).gather(ids)
    assert np.array_equal(actual, weight[ids])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch_and_by_any_number_of_threads(dtype: Dtype) -> None:
    weight, bias, other = (
        random((450, 300), dtype),
        random((450,), dtype),
        random((450, 300), dtype),
    )
    rows = random((40, 300), dtype, 3)
    packed, gate = PackedWeight(weight), PackedWeight(other)
    together = CpuProduct(CpuAttention(2), packed, bias).multiply(rows)
    gated = CpuGate(CpuAttention(2), gate, packed, "silu").multiply(rows)
    alone = CpuAttention(1)
    for count in (1, 2, 3, 6, 7, 12, 33):
        actual = CpuProduct(alone, packed, bias).multiply(rows[-count:])
        assert np.array_equal(actual, together[-count:])
        actual = CpuGate(alone, gate, packed, "silu").multiply(rows[:count])
        assert np.array_equal(actual, gated[:count])


def test_rows_may_lie_in_any_way() -> None:
    whole, rows = product(random((5, 6))), random((12, 12))[:, ::2]
    actual = whole.multiply(rows)
    assert np.array_equal(actual, whole.multiply(np.ascontiguousarray(rows)))
    assert whole.multiply(rows[:0]).shape == (0, 5)


def test_formats_without_a_kernel_are_named() -> None:
    is_fast = CpuAttention.is_fast()
    for dtype in FORMATS:
        assert kernel_supports(dtype) == is_fast


def test_every_activation_has_a_gate() -> None:
    up, rows = random((30, 40)), random((5, 40))
    threads = CpuAttention(1)
    for activation in get_args(Activation):
        gate = PackedWeight(random((30, 40), seed=1))
        actual = CpuGate(threads, gate, PackedWeight(up), activation).multiply(rows)
        assert np.isfinite(actual).all()


def test_what_does_not_fit_is_refused_and_nothing_written() -> None:
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
    for gate, first, second in ((other, rows, out), (weight, rows[:3], out), (weight, rows, rows)):
        with pytest.raises(BufferError):
            weight.multiply_gated(threads, first, gate, second)
    with pytest.raises(ValueError, match=r'activation is "tanh", not one of .*"gelu_tanh"'):
        weight.multiply_gated(threads, rows, weight, out, "tanh")
    assert (out == 7).all()
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(ConfigError):
            PackedWeight(np.ones(shape, np.float32))
    with pytest.raises(BufferError):
        PackedWeight(np.ones((4, 4), np.float32).T[:2])
    assert (weight.in_features, weight.out_features) == (2, 3)
