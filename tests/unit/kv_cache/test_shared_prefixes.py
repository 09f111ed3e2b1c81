"""The leading blocks that rows of a step share, in the caller's arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.kv_cache import (
    BlockManager,
    BufferError,
    ConfigError,
    Sequence,
    SharedPrefixes,
    StepBuffers,
)
from tests.support.blocks import computed, step_arrays

FILLER = -77
Arrays = dict[str, npt.NDArray[Any]]


def prefix_arrays(rows: int = 8, dtype: type[np.signedinteger[Any]] = np.int32) -> Arrays:
    shapes = {"order": rows, "own_blocks": rows, "prefixes": (rows, 5)}
    return {name: np.full(shape, FILLER, dtype) for name, shape in shapes.items()}


def batch(manager: BlockManager) -> list[Sequence]:
    """Three that share a block, two of them two more; one beside them."""
    common, more = list(range(4)), list(range(50, 58))
    prompts = [[*common, *more, 1], [9, 8], [*common, 2], [*common, *more, 3]]
    return [computed(manager, prompt) for prompt in prompts]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_tree_of_a_batch(dtype: type[np.signedinteger[Any]]) -> None:
    manager = BlockManager(24, 4)
    running = batch(manager)
    inputs, arrays = step_arrays(), prefix_arrays(dtype=dtype)
    shared = SharedPrefixes(**arrays)
    assert (shared.num_prefixes, shared.version) == (0, 0)
    plan = manager.begin_step(8)
    plan.decode(running)
    plan.fill(StepBuffers(**inputs), shared=shared)
    assert (shared.num_prefixes, shared.version) == (2, 1)
    order, prefixes, own = arrays["order"], arrays["prefixes"], arrays["own_blocks"]
    assert sorted(order[:4]) == [0, 1, 2, 3]
    assert set(order[4:]) | set(own[4:]) | set(prefixes[2:].flat) == {FILLER}
    (first, end, *blocks), (inner, inner_end, *inner_blocks) = prefixes[:2].tolist()
    assert (set(order[first:end]), blocks) == ({0, 2, 3}, [0, 1, -1])
    assert (set(order[inner:inner_end]), inner_blocks) == ({0, 3}, [1, 3, 0])
    assert own[:4].tolist() == [3, 0, 1, 3]
    tables = inputs["block_tables"]
    for start, stop, block, last, _ in prefixes[:2].tolist():
        rows = tables[order[start:stop], block:last]
        assert (rows == rows[0]).all()


def test_limits_of_blocks_and_rows() -> None:
    manager = BlockManager(24, 4)
    running = batch(manager)
    plan = manager.begin_step(8)
    plan.decode(running)
    for limits, expected in (
        ({"min_rows": 3}, [[0, 1, -1]]),
        ({"min_blocks": 2}, [[0, 3, -1]]),
        ({"min_blocks": 4}, []),
    ):
        arrays = prefix_arrays()
        shared = SharedPrefixes(**arrays, **limits)
        plan.fill(StepBuffers(**step_arrays()), shared=shared)
        assert arrays["prefixes"][: shared.num_prefixes, 2:].tolist() == expected


def test_arrays_are_written_when_the_batch_changes() -> None:
    manager = BlockManager(32, 4)
    running = batch(manager)
    arrays, buffers = prefix_arrays(), StepBuffers(**step_arrays())
    shared = SharedPrefixes(**arrays)

    def step(sequences: list[Sequence]) -> int:
        plan = manager.begin_step(8)
        plan.decode(sequences)
        plan.fill(buffers, shared=shared)
        plan.commit([0] * len(sequences))
        return shared.version

    assert [step(running) for _ in range(6)] == [1] * 6
    assert [step(running[1:]) for _ in range(3)] == [2] * 3
    assert arrays["own_blocks"][:3].tolist() == [0, 1, 1]
    arrays["own_blocks"][:] = FILLER
    step(running[1:])
    assert set(arrays["own_blocks"].tolist()) == {FILLER}, "nothing is new"


def test_a_window_shares_nothing() -> None:
    manager = BlockManager(48, 4, groups=[None, 8])
    running = batch(manager)
    plan = manager.begin_step(8)
    plan.decode(running)
    inputs = step_arrays()
    inputs["slot_mapping"] = np.zeros((2, 32), np.int64)
    inputs["block_tables"] = np.zeros((2, *inputs["block_tables"].shape), np.int64)
    for group, expected in ((0, 2), (1, 0)):
        shared = SharedPrefixes(**prefix_arrays(), group=group)
        plan.fill(StepBuffers(**inputs), shared=shared)
        assert shared.num_prefixes == expected
    unknown = SharedPrefixes(**prefix_arrays(), group=2)
    with pytest.raises(ConfigError, match="2 layer groups, got group=2"):
        plan.fill(StepBuffers(**inputs), shared=unknown)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_blocks": 0}, "min_blocks must be at least 1, got 0"),
        ({"min_rows": 1}, "min_rows must be at least 2, got 1"),
        ({"group": -1}, "group=-1 is not an unsigned integer"),
    ],
)
def test_bad_limits_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SharedPrefixes(**prefix_arrays(), **limits)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("order", np.zeros(8, np.float32), "order is int32 or int64"),
        ("own_blocks", np.zeros((2, 4), np.int32), "own_blocks has 2 dimensions, not 1"),
        ("prefixes", np.zeros(40, np.int32), "prefixes has 1 dimensions, not 2"),
        ("prefixes", np.zeros((8, 4), np.int32), "prefixes has 4 columns, not 5"),
    ],
)
def test_bad_arrays_are_refused(name: str, array: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(BufferError, match=message):
        SharedPrefixes(**(prefix_arrays() | {name: array}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("order", "order holds 3 elements per row, this plan needs 4"),
        ("own_blocks", "own_blocks holds 3 elements per row, this plan needs 4"),
        ("prefixes", r"prefixes \(rows\) holds 2 elements per row, this plan needs 3"),
    ],
)
def test_arrays_that_are_too_small_leave_everything_as_it_was(name: str, message: str) -> None:
    manager = BlockManager(24, 4)
    running = batch(manager)
    plan = manager.begin_step(8)
    plan.decode(running)
    inputs, arrays = step_arrays(filler=FILLER), prefix_arrays()
    arrays[name] = arrays[name][: 2 if name == "prefixes" else 3].copy()
    shared = SharedPrefixes(**arrays)
    with pytest.raises(BufferError, match=message):
        plan.fill(StepBuffers(**inputs), shared=shared)
    for array in (*inputs.values(), *arrays.values()):
        assert (array == FILLER).all()
    assert shared.version == 0
