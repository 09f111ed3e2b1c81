"""Bytes read and operations done in a second by this machine, by the fastest of several programs.

Reading: an array far larger than the caches, by torch's sum, by torch's product of a matrix and a
vector, and by the `pyengine` kernel's product of one row. Operations: products of 2,048 x 2,048 by
2,048 x 2,048 numbers, by torch, by oneDNN and by the `pyengine` kernel.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benches.engine.floor.parts import Arithmetic
from pyengine.cpu import PackedWeight
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype
from pyengine.models.decoder.float_products import float_product
from pyengine.models.decoder.product_choice import onednn_supports
from pyengine.models.integer_linear import q8_0
from pyengine.utils.dtypes import rounded
from pyengine.utils.openmp import torch_threads

LARGE = 1 << 29
"""Bytes of the array that is read."""
SIDE = 2048
ROUNDS = 3
_COLUMNS = 4096

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes or operations per second, and the fastest program."""

    per_second: float
    program: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the machine with `threads` threads.

    `reading` is that of a large array, `reading_alone` with one thread. `reading_again` is that of
    `weight_bytes` bytes, as many as the weights of the model: a part of these may be in a cache.
    """

    threads: int
    reading: Rate
    reading_alone: Rate
    reading_again: Rate
    weight_bytes: int
    peaks: dict[Arithmetic, Rate]

    @classmethod
    def even(cls, threads: int, bandwidth: float, operations: float) -> "Limits":
        """Limits that were not measured: one rate for all reading, one for all products."""
        reading, product = Rate(bandwidth, "given"), Rate(operations, "given")
        kinds: tuple[Arithmetic, ...] = ("float32", "bfloat16", "int8")
        return cls(threads, reading, reading, reading, 0, dict.fromkeys(kinds, product))

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def limits_of(content: dict[str, Any]) -> Limits:
    """The limits in a file of results."""
    rates = {name: Rate(**content[name]) for name in _READINGS}
    peaks = {kind: Rate(**rate) for kind, rate in content["peaks"].items()}
    return Limits(content["threads"], **rates, weight_bytes=content["weight_bytes"], peaks=peaks)


_READINGS = ("reading", "reading_alone", "reading_again")


def measure_limits(
    threads: int, weight_bytes: int, *, large: int = LARGE, side: int = SIDE
) -> Limits:
    """Measure this machine with so many threads."""
    with torch_threads(threads):
        again = _fastest(_Array(weight_bytes).readers(threads), weight_bytes)
        operations = 2.0 * side**3
        peaks: dict[Arithmetic, Rate] = {
            "float32": _fastest(_float_products(threads, side, "float32"), operations),
            "bfloat16": _fastest(_float_products(threads, side, "bfloat16"), operations),
            "int8": _fastest(_integer_products(threads, side), operations),
        }
        array = _Array(large)
        reading = _fastest(array.readers(threads), large)
    with torch_threads(1):
        alone = _fastest(array.readers(1), large)
    return Limits(threads, reading, alone, again, weight_bytes, peaks)


def _fastest(programs: Iterable[tuple[str, Work]], amount: float) -> Rate:
    """The rate of the fastest program, each at its best of `ROUNDS`."""
    seconds = {}
    for name, work in programs:
        work()
        seconds[name] = min(_seconds(work) for _ in range(ROUNDS))
    best = min(seconds, key=seconds.__getitem__)
    return Rate(amount / seconds[best], best)


def _seconds(work: Work) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


class _Array:
    """About so many bytes, and the kernel's copy of them."""

    def __init__(self, num_bytes: int) -> None:
        array = np.ones((max(1, num_bytes // (4 * _COLUMNS)), _COLUMNS), np.float32)
        self._matrix, self._packed = torch.from_numpy(array), PackedWeight(array)

    def readers(self, threads: int) -> Iterator[tuple[str, Work]]:
        """Programs that read it."""
        matrix, packed, kernel = self._matrix, self._packed, kernel_threads(threads)
        vector, row = torch.ones(_COLUMNS), np.ones((1, _COLUMNS), np.float32)
        out = np.empty((1, len(matrix)), np.float32)
        yield "torch.sum", matrix.sum
        yield "torch.mv", lambda: torch.mv(matrix, vector)
        yield "pyengine", lambda: packed.multiply(kernel, row, out)


def _float_products(threads: int, side: int, dtype: Dtype) -> Iterator[tuple[str, Work]]:
    """Programs that multiply two square matrices."""
    floats = np.random.default_rng(0).random((side, side), dtype=np.float32)
    rows = rounded(floats, NUMPY[dtype])
    by_torch = float_product("torch", rows)
    yield "torch", lambda: by_torch.multiply(rows)
    if onednn_supports(dtype):
        by_onednn = float_product("onednn", rows)
        yield "oneDNN", lambda: by_onednn.multiply(rows)
    packed, out, kernel = PackedWeight(rows), np.empty_like(rows), kernel_threads(threads)
    yield "pyengine", lambda: packed.multiply(kernel, rows, out)


def _integer_products(threads: int, side: int) -> Iterator[tuple[str, Work]]:
    """The same in 8-bit integers; the kernel's rows are floats, which it rounds."""
    whole = torch.randint(-100, 100, (side, side), dtype=torch.int8)
    yield "torch", lambda: torch._int_mm(whole, whole)
    floats = np.random.default_rng(0).random((side, side), dtype=np.float32)
    kernel = kernel_threads(threads)
    packed, out = q8_0(floats, kernel), np.empty_like(floats)
    yield "pyengine", lambda: packed.multiply(kernel, floats, out)
