"""A step's inputs in the caller's arrays: values, updates, and refusals that write nothing."""

import array
import sys
from typing import Any

import numpy as np
import pytest

from pyengine.kv_cache import BlockManager, BufferError, Sequence, StepBuffers, StepPlan
from tests.support.blocks import compute, computed, leave_evictable, step_arrays, unchanged

BLOCK = 4
FILLER = -77
NAMES = list(step_arrays())
SWAPPED = ">" if sys.byteorder == "little" else "<"


def mixed_step(manager: BlockManager) -> tuple[StepPlan, list[Sequence]]:
    """A decode, a full hit, a hit with new tokens after it, a chunk that does not sample."""
    leave_evictable(manager, list(range(8)))
    decoding = computed(manager, [50, 51, 52])
    hit = manager.sequence(list(range(8)))
    partly = manager.sequence([0, 1, 2, 3, 60, 61])
    chunk = manager.sequence(list(range(200, 220)))
    plan = manager.begin_step(9)
    assert plan.decode([decoding]) == []
    for sequence in (hit, partly, chunk):
        plan.prefill(sequence, 100)
    return plan, [decoding, hit, partly, chunk]


def slot(sequence: Sequence, position: int) -> int:
    return sequence.block_table[position // BLOCK] * BLOCK + position % BLOCK


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_every_array_of_a_mixed_step(dtype: type[np.signedinteger[Any]]) -> None:
    manager = BlockManager(12, BLOCK)
    plan, (decoding, hit, partly, chunk) = mixed_step(manager)
    arrays = step_arrays(dtype=dtype, filler=FILLER)
    plan.fill(StepBuffers(**arrays))
    expected = {
        "input_ids": [0, 7, 60, 61, 200, 201, 202, 203],
        "positions": [3, 7, 4, 5, 0, 1, 2, 3],
        "slot_mapping": [
            slot(decoding, 3),
            -1,
            *(slot(partly, position) for position in (4, 5)),
            *(slot(chunk, position) for position in range(4)),
        ],
        "query_start_loc": [0, 1, 2, 4, 8],
        "seq_lens": [4, 8, 6, 4],
        "logits_indices": [0, 1, 3],
    }
    for name, values in expected.items():
        array_ = arrays[name]
        assert array_.dtype == dtype
        assert array_[: len(values)].tolist() == values, name
        assert set(array_[len(values) :].tolist()) <= {FILLER}, f"{name} past its end"
    for row, sequence in enumerate((decoding, hit, partly, chunk)):
        table = sequence.block_table
        assert arrays["block_tables"][row, : len(table)].tolist() == table
        assert set(arrays["block_tables"][row, len(table) :].tolist()) == {FILLER}
    assert (plan.num_tokens, plan.num_sequences, plan.num_samples) == (8, 4, 3)


def test_int32_and_int64_may_be_mixed_and_need_not_be_numpy() -> None:
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    alike, mixed = step_arrays(), step_arrays(dtype=np.int32)
    mixed["input_ids"] = array.array("q", bytes(8 * 32))
    mixed["positions"] = memoryview(array.array("i", bytes(4 * 32)))
    mixed["slot_mapping"] = np.zeros(32, np.longlong)
    plan.fill(StepBuffers(**alike))
    plan.fill(StepBuffers(**mixed))
    for name in NAMES:
        assert np.array_equal(np.asarray(mixed[name]), alike[name]), name


def test_views_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    tensors = {name: torch.from_numpy(array_) for name, array_ in step_arrays().items()}
    plan.fill(StepBuffers(**{name: tensor.numpy() for name, tensor in tensors.items()}))
    assert tensors["seq_lens"].tolist() == [4, 8, 6, 4]


def test_an_empty_step() -> None:
    arrays = step_arrays(filler=FILLER)
    BlockManager(4, BLOCK).begin_step(10).fill(StepBuffers(**arrays))
    assert arrays["query_start_loc"][:2].tolist() == [0, FILLER]
    assert all((arrays[name] == FILLER).all() for name in NAMES if name != "query_start_loc")


# ---- block tables are updated, not rewritten


def tables_after(
    plan: StepPlan, buffers: StepBuffers, arrays: dict[str, Any], mark: int
) -> list[list[int]]:
    """Overwrite the block tables with a mark, fill, and see which entries were written."""
    arrays["block_tables"][:] = mark
    plan.fill(buffers)
    return [[int(entry) for entry in row if entry != mark] for row in arrays["block_tables"]]


def test_only_new_entries_are_written() -> None:
    manager = BlockManager(12, BLOCK)
    sequence = computed(manager, [1] * 7)
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    seen = []
    for _ in range(3):
        plan = manager.begin_step(1)
        plan.decode([sequence])
        seen.append(tables_after(plan, buffers, arrays, FILLER)[0])
        plan.commit([5])
    table = sequence.block_table
    assert len(table) == 3
    assert seen == [table[:2], [table[2]], []]


def test_filling_twice_is_filling_once() -> None:
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    plan.fill(buffers)
    before = {name: array_.copy() for name, array_ in arrays.items()}
    plan.fill(buffers)
    assert all((arrays[name] == before[name]).all() for name in NAMES)


def test_another_sequence_in_the_row_rewrites_it() -> None:
    manager = BlockManager(12, BLOCK)
    sequences = [computed(manager, [i] * 7) for i in (1, 2)]
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    for order in ([0, 1], [1, 0], [0], [0, 1]):
        plan = manager.begin_step(4)
        plan.decode([sequences[i] for i in order])
        plan.fill(buffers)
        for row, i in enumerate(order):
            table = sequences[i].block_table
            assert arrays["block_tables"][row, : len(table)].tolist() == table
        plan.commit([9] * len(order))


def test_a_merge_rewrites_the_row() -> None:
    manager = BlockManager(12, BLOCK, in_flight_sharing=False)
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    kept = computed(manager, [1] * 5)
    twin = manager.sequence([1] * 5, read_cache=False)
    plan = manager.begin_step(10)
    plan.prefill(twin, 10)
    plan.fill(buffers)
    (remapping,) = plan.commit([0])
    assert arrays["block_tables"][0, 0] == remapping.old_block
    plan = manager.begin_step(10)
    plan.decode([twin])
    plan.fill(buffers)
    assert arrays["block_tables"][0, :2].tolist() == twin.block_table
    assert twin.block_table[0] == kept.block_table[0] == remapping.new_block


def test_reset_and_rollback_rewrite_the_row() -> None:
    manager = BlockManager(12, BLOCK, prefix_caching=False)
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    sequence = manager.sequence([1] * 7)
    tables = []
    for end in ("rollback", "reset", "leave"):
        plan = manager.begin_step(10)
        plan.prefill(sequence, 10)
        plan.fill(buffers)
        tables.append(sequence.block_table)
        assert arrays["block_tables"][0, :2].tolist() == tables[-1]
        if end == "rollback":
            plan.rollback()
        else:
            plan.commit([1])
        if end == "reset":
            sequence.reset()
        taker = computed(manager, [9])  # takes the block that was freed last
        assert taker.num_tokens == 2
        tables.append(taker.block_table)
    assert tables[0] != tables[2] != tables[4]


def test_two_managers_may_share_the_arrays() -> None:
    arrays = step_arrays()
    buffers = StepBuffers(**arrays)
    for manager in (BlockManager(12, BLOCK), BlockManager(12, BLOCK)):
        computed(manager, [1] * 4 * (1 if arrays["seq_lens"][0] else 3))
        sequence = manager.sequence([2] * 4)
        compute(manager, sequence)
        plan = manager.begin_step(1)
        plan.decode([sequence])
        plan.fill(buffers)
        assert arrays["block_tables"][0, :2].tolist() == sequence.block_table


# ---- refusals


def refused(name: str, bad: Any, *names: object) -> None:
    with pytest.raises(BufferError) as raised:
        StepBuffers(**(step_arrays() | {name: bad}))
    assert type(raised.value) is BufferError
    assert all(str(part) in str(raised.value) for part in (name, *names)), raised.value


@pytest.mark.parametrize("name", NAMES)
def test_arrays_that_cannot_be_filled(name: str) -> None:
    good = step_arrays()[name]
    readonly = good.copy()
    readonly.setflags(write=False)
    refused(name, readonly, "read-only")
    for dtype in (np.int16, np.uint32, np.uint64, np.float32, np.float64, np.bool_):
        refused(name, good.astype(dtype), "int32 or int64", np.dtype(dtype).char)
    refused(name, np.zeros((*good.shape[:-1], good.shape[-1] * 2), np.int64)[..., ::2], "contig")
    refused(name, np.zeros((2, 2, *good.shape), np.int64), f"has {good.ndim + 2} dimensions")
    refused(name, np.zeros(good.shape[1:], np.int64))
    refused(name, [0] * 32, "has no buffer")
    refused(name, None, "has no buffer")


def test_columns_are_not_rows() -> None:
    refused("block_tables", np.zeros((8, 4), np.int64, order="F"), "contiguous")


def test_arrays_of_the_other_byte_order() -> None:
    refused("input_ids", np.zeros(32, f"{SWAPPED}i4"), "int32 or int64")


TOO_SMALL = [
    ("input_ids", (7,), "8"),
    ("positions", (7,), "8"),
    ("slot_mapping", (0,), "8"),
    ("query_start_loc", (4,), "5"),
    ("seq_lens", (3,), "4"),
    ("block_tables", (3, 8), "4"),
    ("block_tables", (4, 1), "2"),
    ("block_tables", (4, 0), "2"),
    ("logits_indices", (2,), "3"),
]


@pytest.mark.parametrize(("name", "shape", "needed"), TOO_SMALL)
def test_arrays_too_small_for_the_step(name: str, shape: tuple[int, ...], needed: str) -> None:
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    arrays = step_arrays(filler=FILLER) | {name: np.full(shape, FILLER, np.int64)}
    with unchanged(manager), pytest.raises(BufferError) as raised:
        plan.fill(StepBuffers(**arrays))
    assert name in str(raised.value)
    assert f"needs {needed}" in str(raised.value)
    assert all((array_ == FILLER).all() for array_ in arrays.values())
    plan.fill(StepBuffers(**step_arrays()))  # the plan is as good as before


def test_arrays_of_just_the_right_size() -> None:
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    arrays = step_arrays(tokens=8, sequences=4, width=2)
    arrays["logits_indices"] = np.zeros(3, np.int32)
    plan.fill(StepBuffers(**arrays))
    assert arrays["logits_indices"].tolist() == [0, 1, 3]


def test_a_token_that_does_not_fit_the_array() -> None:
    manager = BlockManager(4, BLOCK)
    sequence = manager.sequence([1, 2**32 - 1])
    plan = manager.begin_step(10)
    plan.prefill(sequence, 10)
    wide = step_arrays()
    plan.fill(StepBuffers(**wide))
    assert wide["input_ids"][1] == 2**32 - 1
    narrow = step_arrays(dtype=np.int32, filler=FILLER)
    with pytest.raises(BufferError, match=f"input_ids.*{2**32 - 1}"):
        plan.fill(StepBuffers(**narrow))
    assert all((array_ == FILLER).all() for array_ in narrow.values())


def test_tensors_of_torch_are_filled_in_place() -> None:
    torch = pytest.importorskip("torch")
    manager = BlockManager(12, BLOCK)
    plan, _ = mixed_step(manager)
    arrays = step_arrays(filler=FILLER)
    tensors = {name: torch.full(array.shape, FILLER) for name, array in arrays.items()}
    plan.fill(StepBuffers(**arrays))
    plan.fill(StepBuffers(**tensors))
    for name, tensor in tensors.items():
        assert tensor.tolist() == arrays[name].tolist(), name
    wrong = {**tensors, "seq_lens": tensors["seq_lens"].to(torch.bfloat16)}
    with pytest.raises(BufferError, match="seq_lens"):
        StepBuffers(**wrong)
    strided = {**tensors, "positions": torch.zeros(64, dtype=torch.int64)[::2]}
    with pytest.raises(BufferError, match="positions is not contiguous"):
        StepBuffers(**strided)
