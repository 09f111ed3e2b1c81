"""Floats are rounded to integers with the codes, scales and zero points that torch gives."""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.cpu import (
    BufferError,
    ConfigError,
    CpuAttention,
    quantise_groups,
    quantise_q8_0,
)
from pyengine.models.integer_linear import GROUP, int4, q8_0, q8_0_of_rows
from pyengine.utils.dtypes import rounded, widened

Floats = npt.NDArray[np.float32]

THREADS = CpuAttention(2)
SIZES = (1e-42, 1e-38, 1e-7, 1e-3, 1.0, 2e3, 6e4, 9e5, 1e8, 1e38, 3e38)
KINDS: dict[str, Callable[[Floats, np.random.Generator], Any]] = {
    "normal": lambda floats, rng: floats,
    "uniform": lambda floats, rng: rng.random(floats.shape, np.float32) - np.float32(0.5),
    "positive": lambda floats, rng: np.abs(floats),
    "negative": lambda floats, rng: -np.abs(floats),
    "sparse": lambda floats, rng: floats * (rng.random(floats.shape) < 0.05),
    "coarse": lambda floats, rng: np.round(floats * 4) / 4,
    "constant": lambda floats, rng: np.repeat(floats[:, ::GROUP], GROUP, axis=1),
    "outliers": lambda floats, rng: np.where(rng.random(floats.shape) < 0.03, 30 * floats, floats),
}


def of_groups(weight: Any, threads: CpuAttention = THREADS) -> tuple[Any, Any, Any]:
    outputs, inputs = weight.shape
    codes = np.full((outputs, inputs // 2), 0x99, np.uint8)
    scales = np.full((outputs, inputs // GROUP), np.nan, np.float32)
    zeros = np.full((outputs, inputs // GROUP), 99, np.uint8)
    quantise_groups(threads, weight, codes, scales, zeros)
    return codes, scales, zeros


def of_q8_0(weight: Any, threads: CpuAttention = THREADS) -> Any:
    blocks = np.full((len(weight), weight.shape[1] // GROUP, 2 + GROUP), 0x99, np.uint8)
    quantise_q8_0(threads, weight, blocks)
    return blocks


def check(weight: Floats) -> None:
    """The bits are those of torch."""
    torch = pytest.importorskip("torch", reason="the oracle of the codes")
    from tests.unit.models import quantised_by_torch as by_torch

    weight = np.ascontiguousarray(weight, np.float32)
    assert np.isfinite(weight).all()
    tensor = torch.from_numpy(weight)
    assert np.array_equal(of_q8_0(weight), by_torch.blocks_of(tensor))
    actual = of_groups(weight)
    for array, expected in zip(actual, by_torch.groups_of(tensor), strict=True):
        own, bits = (numbers.view(np.uint8) for numbers in (array, expected.contiguous().numpy()))
        assert np.array_equal(own, bits)


on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="torch adds up errors in another order: equally good spans may be chosen differently",
)


@on_x86
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_torch(kind: str, size: float) -> None:
    rng = np.random.default_rng(3)
    floats = KINDS[kind](rng.standard_normal((257, 3 * GROUP), np.float32), rng)
    check(np.clip(floats.astype(np.float64) * size, -3.4e38, 3.4e38))


@on_x86
def test_so_are_those_of_numbers_of_any_bits() -> None:
    rng = np.random.default_rng(4)
    floats = rng.integers(0, 1 << 32, (1024, 10 * GROUP), np.uint32).view(np.float32)
    check(np.where(np.isfinite(floats), floats, 0))
    sizes = rng.integers(-149, 127, (4096, 1))
    with np.errstate(under="ignore"):
        check(np.ldexp(rng.random((4096, GROUP), np.float32) - np.float32(0.5), sizes))


@on_x86
def test_and_those_of_a_single_group_and_of_many_tasks() -> None:
    rng = np.random.default_rng(5)
    check(rng.standard_normal((1, GROUP), np.float32))
    check(np.zeros((3, GROUP), np.float32))
    check(rng.standard_normal((600, 1024), np.float32))


def test_neither_threads_nor_the_type_of_a_weight_change_them() -> None:
    rng = np.random.default_rng(6)
    halves = rounded(rng.standard_normal((700, 2 * GROUP), np.float32), np.uint16)
    for threads in (CpuAttention(1), CpuAttention(3)):
        pairs = zip(of_groups(halves), of_groups(widened(halves), threads), strict=True)
        assert all(np.array_equal(actual, expected) for actual, expected in pairs)
        assert np.array_equal(of_q8_0(halves), of_q8_0(widened(halves), threads))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    weight = np.ones((3, 2 * GROUP), np.float32)
    weight[1, 40] = number
    for quantise in (int4, q8_0):
        with pytest.raises(ValueError, match="scale of output 1 from input 32 on is not finite"):
            quantise(weight, THREADS)


def test_so_are_numbers_beyond_the_formats() -> None:
    weight = np.full((2, GROUP), 1e7, np.float32)
    int4(weight, THREADS)  # which has float32 scales
    with pytest.raises(ValueError, match="scale of output 0 from input 0 on is not finite"):
        q8_0(weight, THREADS)
    weight[1, ::2], weight[1, 1::2] = 3e38, -3e38
    with pytest.raises(ValueError, match="scale of output 1 from input 0 on is not finite"):
        int4(weight, THREADS)


def test_integers_with_a_scale_for_each_output_keep_both() -> None:
    rng = np.random.default_rng(7)
    numbers = rng.integers(-128, 128, (9, 2 * GROUP), np.int8)
    scales = (rng.random((9, 1), np.float32) * np.float32(0.01)).astype(np.float32)
    out = np.empty((9, 2 * GROUP), np.float32)
    q8_0_of_rows(numbers, scales).gather(np.arange(9), out)
    assert np.array_equal(out, numbers * scales.astype(np.float16).astype(np.float32))
    scales[4] = 7e4
    with pytest.raises(ValueError, match="scale of output 4 from input 0 on is not finite"):
        q8_0_of_rows(numbers, scales)


def test_arrays_that_do_not_fit_are_refused() -> None:
    weight = np.ones((4, 2 * GROUP), np.float32)
    codes, scales, zeros = of_groups(weight)
    blocks = of_q8_0(weight)
    frozen = scales.copy()
    frozen.flags.writeable = False
    groups: list[tuple[tuple[Any, Any, Any, Any], str]] = [
        ((weight, codes[:3], scales, zeros), r"codes has shape \[3, 32\], not \[4, 32\]"),
        ((weight, codes, scales[:, :1].copy(), zeros), r"scales has shape \[4, 1\], not \[4, 2\]"),
        ((weight, codes, scales, zeros[:2]), r"zeros has shape \[2, 2\]"),
        ((weight, codes, zeros, scales), "scales has format"),
        ((weight[:, ::2], codes, scales, zeros), "weight is not contiguous"),
        ((weight, codes, frozen, zeros), "scales is read-only"),
        ((weight.astype(np.float64), codes, scales, zeros), "weight has format"),
        ((weight, codes, np.asfortranarray(scales), zeros), "scales is not contiguous"),
    ]
    for arrays, message in groups:
        with pytest.raises(BufferError, match=message):
            quantise_groups(THREADS, *arrays)
    eight_bits = [
        ((weight, blocks[:, :1].copy()), r"blocks has shape \[4, 1, 34\], not \[4, 2, 34\]"),
        ((weight, blocks.reshape(4, -1)), "blocks has 2 dimensions, not 3"),
    ]
    for pair, message in eight_bits:
        with pytest.raises(BufferError, match=message):
            quantise_q8_0(THREADS, *pair)
    odd = np.ones((4, 48), np.float32)
    refusal = "in_features=48: it must be a multiple of the block size, 32"
    with pytest.raises(ConfigError, match=refusal):
        quantise_groups(
            THREADS, odd, codes[:, :16].copy(), scales[:, :1].copy(), zeros[:, :1].copy()
        )
    with pytest.raises(ConfigError, match=refusal):
        quantise_q8_0(THREADS, odd, blocks[:, :1].copy())


def test_arrays_may_not_share_memory() -> None:
    memory = np.ones(1 << 12, np.uint8)
    weight = memory[:1024].view(np.float32).reshape(4, 2 * GROUP)
    codes, scales, zeros = of_groups(weight)
    own = memory[512:640].reshape(4, 32)
    with pytest.raises(BufferError, match="codes and weight share memory"):
        quantise_groups(THREADS, weight, own, scales, zeros)
    with pytest.raises(BufferError, match="scales and zeros share memory"):
        own = scales.reshape(-1).view(np.uint8)[:8].reshape(4, 2)
        quantise_groups(THREADS, weight, codes, scales, own)
    with pytest.raises(BufferError, match="blocks and weight share memory"):
        quantise_q8_0(THREADS, weight, memory[: 4 * 2 * 34].reshape(4, 2, 34))
