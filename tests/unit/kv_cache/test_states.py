"""The pool of states: its arrays, its size, and copies of slots."""

import numpy as np
import pytest

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.states import StateArray, StatePool, StateSpec
from pyengine.utils.devices import CPU

SPECS = (
    StateSpec(StateArray((3, 8), "float32"), StateArray((2, 4, 5), "float32")),
    StateSpec(StateArray((2, 6), "bfloat16")),
)


def filled():
    pool = StatePool(SPECS, 4, CPU)
    for number, layer in enumerate(pool.layers):
        for array in (layer.conv, layer.recurrent):
            if array is not None:
                array[:] = np.arange(4).reshape(4, *[1] * (array.ndim - 1)) + 10 * number
    return pool


def test_each_layer_has_zeros_of_its_shapes_and_types():
    pool = StatePool(SPECS, 4, CPU)
    first, second = pool.layers
    assert first.conv.shape == (4, 3, 8) and first.recurrent.shape == (4, 2, 4, 5)
    assert second.conv.shape == (4, 2, 6) and second.recurrent is None
    assert first.conv.dtype == np.float32 and second.conv.dtype == np.uint16
    assert not any(array.any() for array in (first.conv, first.recurrent, second.conv))


def test_a_slot_takes_the_bytes_of_all_arrays():
    assert StatePool(SPECS, 4, CPU).bytes_per_slot == 4 * (24 + 40) + 2 * 12
    assert SPECS[0].num_bytes == 4 * (24 + 40)


def test_copies_are_read_before_any_is_written():
    pool = filled()
    pool.copy([(0, 1), (1, 0), (3, 2)])
    for number, layer in enumerate(pool.layers):
        expected = np.array([1, 0, 3, 3]) + 10 * number
        assert (layer.conv.reshape(4, -1) == expected[:, None]).all()
        if layer.recurrent is not None:
            assert (layer.recurrent.reshape(4, -1) == expected[:, None]).all()
    pool.copy([])


def test_tensors_are_over_the_memory_of_arrays():
    pytest.importorskip("torch")
    pool = filled()
    pool.layers[0].recurrent[2] = 7.5
    assert (pool.tensors[0].recurrent[2] == 7.5).all()
    assert str(pool.tensors[1].conv.dtype) == "torch.bfloat16"


def test_memory_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match="states of 280 bytes could not be allocated"):
        StatePool(SPECS, 1 << 46, CPU)


def test_a_model_without_states_has_an_empty_pool():
    pool = StatePool((), 4, CPU)
    pool.copy([(0, 1)])
    assert pool.layers == [] and pool.bytes_per_slot == 0
