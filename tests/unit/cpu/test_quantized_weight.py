"""Products with quantised weights: near those of the `gguf` package, and alike in every batch."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pyengine.cpu import BufferError, CpuAttention, QuantizedWeight

pytestmark = pytest.mark.levels

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")

HALF_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
}
"""Where a block has half-precision floats."""


def random_blocks(format: str, out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bits, but for their half-precision floats, which are small."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[Type[format]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (out_features * in_features // size, num_bytes), np.uint8)
    for at in HALF_FIELDS[format]:
        halves = rng.normal(size=len(blocks)).astype(np.float16) * np.float16(0.01)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    if format == "MXFP4":
        blocks[:, 0] = rng.integers(110, 126, len(blocks))  # the exponent
    return blocks.reshape(-1)


def weight_and_floats(
    format: str, out_features: int, in_features: int, seed: int = 0
) -> tuple[QuantizedWeight, np.ndarray]:
    """A weight, and its numbers as the gguf package has them."""
    data = random_blocks(format, out_features, in_features, seed)
    floats = gguf.dequantize(data.reshape(out_features, -1), Type[format])
    return QuantizedWeight(format, data, out_features, in_features), floats


def multiply(weight: QuantizedWeight, rows: np.ndarray, *, threads: int = 1, **more) -> np.ndarray:
    out = np.full((len(rows), weight.out_features), 7, rows.dtype)
    weight.multiply(CpuAttention(threads), rows, out, **more)
    return out


def rounded(rows: np.ndarray) -> np.ndarray:
    """Rows with each 32 numbers rounded to a 127th of the largest, in float64."""
    blocks = rows.astype(np.float64).reshape(len(rows), -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
    return (np.round(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(rows.shape)


def bfloat16(rows: np.ndarray) -> np.ndarray:
    """The upper halves of float32, which has to be bfloat16."""
    bits = rows.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def as_float32(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_the_weight_are_those_of_the_gguf_package(format):
    weight, floats = weight_and_floats(format, 37, 512)
    assert (weight.format, weight.shape) == (format, (37, 512))
    outputs = np.array([0, 36, 15, 16, 0])
    out = np.empty((5, 512), np.float32)
    weight.gather(outputs, out)
    assert (out == floats[outputs]).all()
    halves = np.empty((5, 512), np.uint16)
    weight.gather(outputs, halves)
    assert np.abs(as_float32(halves) / np.where(out == 0, 1, out) - (out != 0)).max() < 2**-8


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_the_rounded_rows(format, has_bias):
    weight, floats = weight_and_floats(format, 70, 768)
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(23, 768)).astype(np.float32)
    rows[3, :32] = 0
    bias = rng.normal(size=70).astype(np.float32) if has_bias else None
    exact = rounded(rows) @ floats.astype(np.float64).T + (bias if has_bias else 0)
    actual = multiply(weight, rows, bias=bias)
    size = np.abs(rows) @ np.abs(floats).T + 1
    assert (np.abs(actual - exact) / size).max() < 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_the_rows_costs_a_few_thousandths(format):
    weight, floats = weight_and_floats(format, 64, 2048)
    rows = np.random.default_rng(2).normal(size=(16, 2048)).astype(np.float32)
    exact = rows.astype(np.float64) @ floats.astype(np.float64).T
    error = np.linalg.norm(multiply(weight, rows) - exact) / np.linalg.norm(exact)
    assert error < 0.01


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch_and_by_any_number_of_threads(format):
    (weight, _), (gate, _) = (weight_and_floats(format, 300, 512, seed) for seed in (3, 4))
    rows = np.random.default_rng(5).normal(size=(40, 512)).astype(np.float32)
    together = multiply(weight, rows, threads=2)
    gated = np.empty_like(together)
    weight.multiply_gated(CpuAttention(2), rows, gate, gated)
    for count in (1, 2, 3, 5, 7, 9, 16, 17, 33):
        assert (multiply(weight, rows[-count:]) == together[-count:]).all()
        out = np.empty((count, 300), np.float32)
        weight.multiply_gated(CpuAttention(1), rows[:count], gate, out)
        assert (out == gated[:count]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_bfloat16_is_float32_that_was_rounded(format):
    weight, _ = weight_and_floats(format, 50, 512)
    rows = np.random.default_rng(6).normal(size=(5, 512)).astype(np.float32)
    rows = (rows.view(np.uint32) & 0xFFFF0000).view(np.float32)
    whole, half = multiply(weight, rows), multiply(weight, bfloat16(rows))
    nearest = whole.view(np.uint32) + 0x7FFF + (whole.view(np.uint32) >> 16 & 1)
    assert (half == (nearest >> 16).astype(np.uint16)).all()


@pytest.mark.parametrize("gate_format", ["Q4_K", "Q6_K"])
def test_a_gated_product_is_that_of_both(gate_format):
    (up, _), (gate, _) = (
        weight_and_floats("Q4_K", 33, 256),
        weight_and_floats(gate_format, 33, 256, 9),
    )
    rows = np.random.default_rng(7).normal(size=(6, 256)).astype(np.float32)
    gates = multiply(gate, rows).astype(np.float64)
    expected = gates / (1 + np.exp(-gates)) * multiply(up, rows)
    out = np.empty((6, 33), np.float32)
    up.multiply_gated(CpuAttention(2), rows, gate, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("exact_halves", [True, False])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_groups_are_codes_less_their_zero_point_times_a_scale(group_size, exact_halves, has_zeros):
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 16, (45, 384), np.uint8)
    scales = rng.normal(size=(45, 384 // group_size)).astype(
        np.float16 if exact_halves else np.float32
    )
    scales = scales.astype(np.float32)
    zeros = rng.integers(0, 17, scales.shape, np.uint8) if has_zeros else None
    steps = codes - np.repeat(
        zeros if has_zeros else np.full(scales.shape, 8), group_size, 1
    ).astype(int)
    floats = steps.astype(np.float32) * np.repeat(scales, group_size, 1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    weight = QuantizedWeight.from_groups(packed, scales, zeros, group_size=group_size)
    assert (weight.format, weight.shape) == (f"groups of {group_size}", (45, 384))
    out = np.empty((45, 384), np.float32)
    weight.gather(np.arange(45), out)
    assert (out == floats).all()
    rows = rng.normal(size=(3, 384)).astype(np.float32)
    exact = rounded(rows) @ floats.astype(np.float64).T
    size = np.abs(rows) @ (np.abs(floats) + np.abs(np.repeat(scales, group_size, 1)) * 16).T
    assert (np.abs(multiply(weight, rows) - exact) / size).max() < 1e-6


def test_memory_is_that_of_the_file():
    for format in FORMATS:
        data = random_blocks(format, 256, 1024)
        max_ratio = 1.29 if format == "MXFP4" else 1.04  # its codes take 5 bits
        assert QuantizedWeight(format, data, 256, 1024).num_bytes < max_ratio * data.nbytes


def test_numbers_that_are_not_finite_stay_in_their_row():
    for format in FORMATS:
        weight, _ = weight_and_floats(format, 20, 256)
        rows = np.random.default_rng(9).normal(size=(4, 256)).astype(np.float32)
        clean = multiply(weight, rows)
        rows[1, 40], rows[2, 255] = np.nan, np.inf
        actual = multiply(weight, rows)
        assert (actual[[0, 3]] == clean[[0, 3]]).all()
        assert not np.isfinite(actual[1:3]).any()


def test_read_only_memory_is_taken():
    data = random_blocks("Q4_0", 4, 32).tobytes()
    assert QuantizedWeight("Q4_0", memoryview(data), 4, 32).shape == (4, 32)


def test_what_does_not_fit_is_refused_and_named():
    data = random_blocks("Q4_K", 4, 256)
    for wrong, text in (
        (("Q2_K", data, 4, 256), 'format="Q2_K"'),
        (("Q4_K", data[:-1], 4, 256), "data has 575 elements"),
        (("Q4_K", data, 5, 256), "data has 576 elements"),
        (("Q4_K", data, 4, 288), "in_features=288"),
        (("Q4_K", data, 0, 256), "out_features is 0"),
        (("Q4_K", data, 4, 0), "in_features is 0"),
        (("Q4_K", data, 2**60, 256), "exceeds the address space"),
    ):
        with pytest.raises(ValueError, match=text):
            QuantizedWeight(*wrong)
    data[144 + 2 : 144 + 4] = [0, 0x7C]
    with pytest.raises(ValueError, match="output 1 from input 0"):
        QuantizedWeight("Q4_K", data, 4, 256)
    codes, scales = np.zeros((4, 32), np.uint8), np.ones((4, 2), np.float32)
    for wrong, group_size in (
        ((codes, scales), 16),
        ((codes, scales), 0),
        ((codes, scales), 64),
        ((codes, scales[:3]), 32),
        ((codes, scales, np.zeros((4, 1), np.uint8)), 32),
        ((codes, scales * np.float32(np.inf)), 32),
        ((codes[:, :24], scales[:, :1]), 32),
    ):
        with pytest.raises((ValueError, BufferError)):
            QuantizedWeight.from_groups(*wrong, group_size=group_size)


def test_arrays_that_do_not_fit_are_refused_and_nothing_written():
    weight, _ = weight_and_floats("Q4_0", 3, 64)
    threads, rows = CpuAttention(1), np.ones((4, 64), np.float32)
    out, bias = np.full((4, 3), 7, np.float32), np.ones(3, np.float32)
    for wrong in (
        (rows[:3], out),
        (rows.astype(np.float64), out),
        (rows.astype(np.uint16), out),
        (rows[0], out),
        (rows, out.T),
        (rows, out, bias[:2]),
        (rows, out, out[0]),
    ):
        with pytest.raises(BufferError):
            weight.multiply(threads, *wrong)
    other, _ = weight_and_floats("Q4_0", 3, 32)
    for gate, *arrays in ((other, rows, out), (weight, rows[:3], out)):
        with pytest.raises(BufferError):
            weight.multiply_gated(threads, arrays[0], gate, arrays[1])
    assert (out == 7).all()
    with pytest.raises(BufferError, match=r"outputs\[1\]=3"):
        weight.gather(np.array([0, 3]), np.empty((2, 64), np.float32))
