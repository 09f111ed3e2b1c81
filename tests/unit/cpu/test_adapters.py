"""Adapters of a linear layer: the kernel against NumPy, refusals, and the tables of torch."""

from typing import Any

import numpy as np
import pytest

from pyengine.cpu import BufferError, CpuAttention, CpuError, add_adapters
from pyengine.models.adapters import AdapterLimits
from pyengine.models.decoder.cpu_adapters import CpuAdapterTable
from pyengine.utils.dtypes import rounded, widened

pytestmark = pytest.mark.levels

THREADS = CpuAttention(2)
LIMITS = AdapterLimits(max_loras=3, max_rank=8)
ENDS = (40, 47, 64 + 47 + 3)
Array = Any

Parts = dict[int, tuple[Array, Array]]


class NumpyAdapterTable:
    """The table of the kernel, in NumPy, adapter by adapter."""

    def __init__(
        self,
        ends: tuple[int, ...],
        limits: AdapterLimits,
        *,
        dtype: str = "float32",
    ) -> None:
        self._ends, self._kind = ends, np.uint16 if dtype == "bfloat16" else np.float32
        self._slots: list[Parts] = [{}] * limits.max_loras

    def write(self, slot: int, parts: Parts) -> None:
        self._slots[slot] = {
            part: (self._stored(first), self._stored(second))
            for part, (first, second) in parts.items()
        }

    def _stored(self, matrix: Array) -> Array:
        return widened(rounded(matrix, self._kind))

    def add(self, result: Array, rows: Array, slots: Array) -> Array:
        sums: Array = widened(result).copy()
        for slot, parts in enumerate(self._slots):
            own = slots == slot
            for part, (first, second) in parts.items():
                start = self._ends[part - 1] if part else 0
                sums[own, start : self._ends[part]] += widened(rows[own]) @ first.T @ second.T
        return rounded(sums, result.dtype.type)


def numbers(*shape: int, seed: int = 0, kind: Any = np.float32) -> Array:
    floats = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return rounded(floats, kind)


def filled(table: Any, inputs: int) -> Any:
    """Adapters of ranks 8, 3 and 1 in some parts of slots 0 and 2."""
    sizes = np.diff([0, *ENDS])
    for slot, ranks in ((0, {0: 8, 2: 3}), (2, {0: 1, 1: 8, 2: 8}), (1, {1: 5}), (1, {})):
        parts = {
            part: (
                numbers(rank, inputs, seed=slot + part) / 8,
                numbers(sizes[part], rank, seed=7 + part) / 2,
            )
            for part, rank in ranks.items()
        }
        table.write(slot, parts)
    return table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
@pytest.mark.parametrize("inputs", [1, 16, 33, 128])
@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_the_kernel_adds_what_numpy_does(dtype: Any, kind: Any, inputs: int, count: int) -> None:
    rows = numbers(count, inputs + 3, kind=kind)[:, :inputs]
    result = numbers(count, ENDS[-1], seed=1, kind=kind)
    slots = np.random.default_rng(2).integers(-1, 3, count).astype(np.int32)
    numpy_table = NumpyAdapterTable(ENDS, LIMITS, dtype=dtype)
    expected = filled(numpy_table, inputs).add(result, rows, slots)
    table = filled(CpuAdapterTable(THREADS, ENDS, inputs, LIMITS, dtype=dtype), inputs)
    added = table.add(result.copy(), rows, slots)
    tolerance = 1e-5 if kind is np.float32 else 8e-3
    np.testing.assert_allclose(widened(added), widened(expected), rtol=tolerance, atol=tolerance)
    without = (slots == -1) | (slots == 1)
    np.testing.assert_array_equal(added[without], result[without])
    for row in range(count):  # the same bits in every batch
        own = slice(row, row + 1)
        alone = table.add(result[own].copy(), rows[own], slots[own])
        np.testing.assert_array_equal(alone[0], added[row])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"slots": np.array([0, 3], np.int32)}, "3"),
        ({"slots": np.array([0, -2], np.int32)}, "-2"),
        ({"slots": np.array([0], np.int32)}, "rows"),
        ({"ranks": np.full((3, 3), 9, np.int32)}, "9"),
        ({"ranks": np.full((3, 3), -1, np.int32)}, "A"),
        ({"ends": np.array([40, 40, 114])}, "part"),
        ({"up": np.zeros((3, 8, 113), np.float32)}, "up"),
        ({"down": np.zeros((3, 15, 3, 16), np.float32)}, "inputs"),
        ({"down": np.zeros((3, 8, 3, 16), np.uint32)}, "up"),
        ({"down": np.zeros((3, 16, 3, 8), np.float32)}, "down"),
        ({"ends": np.array([40, 114])}, "differ"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fault: dict[str, Array], reason: str) -> None:
    arrays: dict[str, Array] = {
        "rows": numbers(2, 16),
        "out": numbers(2, ENDS[-1]),
        "slots": np.zeros(2, np.int32),
        "down": np.zeros((3, 16, 3, 16), np.float32),
        "up": np.zeros((3, 8, ENDS[-1]), np.float32),
        "ranks": np.full((3, 3), 8, np.int32),
        "ends": np.array(ENDS),
    }
    add_adapters(THREADS, **arrays)
    before = arrays["out"].copy()
    with pytest.raises((BufferError, CpuError), match=reason):
        add_adapters(THREADS, **{**arrays, **fault})
    np.testing.assert_array_equal(arrays["out"], before)


def test_the_tables_of_torch_have_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    from pyengine.models.decoder.torch_adapters import TorchAdapterTable, adapter_slots

    place = torch.device("cpu"), torch.float32
    rows, result = numbers(9, 32), numbers(9, ENDS[-1], seed=1)
    slots = np.array([2, -1, 0, 0, 1, -1, 2, 0, -1], np.int32)
    table = filled(TorchAdapterTable(place, ENDS, 32, LIMITS), 32)
    groups = adapter_slots(torch.from_numpy(slots), LIMITS.max_loras)
    added = table.add(torch.from_numpy(result), torch.from_numpy(rows), groups)
    expected = filled(NumpyAdapterTable(ENDS, LIMITS), 32).add(result, rows, slots)
    np.testing.assert_allclose(added.numpy(), expected, rtol=1e-5, atol=1e-5)
