"""Sums, norms and activations of rows: arrays that do not fit are refused and not written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyengine.cpu import (
    BufferError,
    ConfigError,
    CpuAttention,
    add_norm,
    add_rows,
    gate_rows,
    map_rows,
    norm_rows,
)

pytestmark = pytest.mark.levels

THREADS = CpuAttention(2)
NORM = (np.ones(3, np.float32), np.zeros(3, np.float32), 1e-5, 0.0, False)
Array = Any


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


CALLS: dict[str, Callable[[Array, Array], None]] = {
    "add_norm": lambda rows, out: add_norm(THREADS, ones(4, 3), rows, 1.0, NORM, out),
    "the stream of add_norm": lambda rows, out: add_norm(
        THREADS, out, rows, 1.0, NORM, np.empty((4, 3), np.float32)
    ),
    "norm_rows": lambda rows, out: norm_rows(THREADS, rows, NORM, out),
    "add_rows": lambda rows, out: add_rows(THREADS, out, rows, 1.0),
    "map_rows": lambda rows, out: map_rows(THREADS, rows, out, "silu"),
    "gate_rows": lambda rows, out: gate_rows(THREADS, np.concatenate([rows, rows], -1), out),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_do_not_fit_are_refused_and_nothing_is_written(name: str) -> None:
    call, rows, out = CALLS[name], ones(4, 3), np.full((4, 3), 7, np.float32)
    read_only = out.copy()
    read_only.flags.writeable = False
    for wrong in (
        (rows[:3], out),
        (rows[:, :2].copy(), out),
        (rows.astype(np.float64), out),
        (rows.astype(np.uint16), out),
        (rows, out.astype(np.uint16)),
        (rows, out[:, :2]),
        (rows, out.T.copy().T),
        (rows, out[0]),
        (rows, read_only),
    ):
        with pytest.raises(BufferError):
            call(*wrong)
    assert (out == 7).all()
    call(rows, out)
    assert (out != 7).all()


def test_arrays_that_share_memory_are_refused() -> None:
    rows, out, memory = ones(4, 3), ones(4, 3), ones(24)
    weight = (rows[0], None, 1e-5, 0.0, False)
    for call in (
        lambda: norm_rows(THREADS, rows, NORM, rows),
        lambda: norm_rows(THREADS, out, weight, rows),
        lambda: add_norm(THREADS, rows, rows, 1.0, NORM, out),
        lambda: add_norm(THREADS, rows, out, 1.0, NORM, rows),
        lambda: add_norm(THREADS, rows, ones(4, 3), 1.0, weight, out),
        lambda: add_rows(THREADS, rows, rows, 1.0),
        lambda: map_rows(THREADS, rows, rows, "relu"),
        lambda: gate_rows(THREADS, memory.reshape(4, 6), memory[:12].reshape(4, 3)),
    ):
        with pytest.raises(BufferError):
            call()
    assert (rows == 1).all() and (memory == 1).all()


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_vectors_of_a_norm_fit_its_rows(kind: Any) -> None:
    rows, out = np.ones((4, 3), kind), np.full((4, 3), 7, kind)
    short, other = np.ones(2, kind), np.ones(3, np.float32 if kind is np.uint16 else np.uint16)
    for weight, bias in ((short, None), (None, short), (other, None), (None, other)):
        with pytest.raises((BufferError, ConfigError)):
            norm_rows(THREADS, rows, (weight, bias, 1e-5, 0.0, True), out)
    assert (out == 7).all()
    norm_rows(THREADS, rows, (None, None, 1e-5, 0.0, False), out)
    assert (out != 7).all()


def test_functions_that_are_not_known_are_named() -> None:
    rows, out = ones(4, 3), ones(4, 3)
    with pytest.raises(ValueError, match=r'activation is "tanh", not one of .*"gelu_tanh"'):
        map_rows(THREADS, rows, out, "tanh")
    with pytest.raises(ValueError, match=r'activation is "cap"'):
        gate_rows(THREADS, ones(4, 6), out, "cap")


def test_no_rows_have_no_results() -> None:
    empty = ones(0, 3)
    norm_rows(THREADS, empty, NORM, ones(0, 3))
    add_rows(THREADS, empty, ones(0, 3), 1.0)
    gate_rows(THREADS, ones(0, 6), empty)
