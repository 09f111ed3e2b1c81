"""The buffers are filled in place and cut to the step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyengine.executor.input_buffers import (
    InputBuffers,
    Padding,
    RunnerLimits,
    upload_at_once,
)
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.layer_groups import Table

LIMITS = RunnerLimits(max_num_batched_tokens=16, max_num_seqs=3, max_blocks_per_seq=4)


def test_the_block_manager_fills_the_tensors_that_the_model_reads():
    buffers = InputBuffers(LIMITS, 4, torch.device("cpu"))
    manager = BlockManager(8, 4)
    chunked, short = manager.sequence([5, 6, 7, 8, 9, 10]), manager.sequence([11, 12])
    plan = manager.begin_step(6)
    plan.prefill(short, 2)
    plan.prefill(chunked, 4)
    inputs = buffers.fill(plan).upload()
    assert inputs.input_ids.tolist() == [11, 12, 5, 6, 7, 8]
    assert inputs.positions.tolist() == [0, 1, 0, 1, 2, 3]
    assert inputs.query_start_loc.tolist() == [0, 2, 6]
    assert inputs.seq_lens.tolist() == [2, 4]
    assert inputs.logits_indices.tolist() == [1]
    assert inputs.block_tables.shape == (1, 2, 4)
    first, second = short.block_table[0], chunked.block_table[0]
    assert inputs.block_tables[0, :, 0].tolist() == [first, second]
    assert inputs.slot_mapping[0].tolist() == [
        *range(4 * first, 4 * first + 2),
        *range(4 * second, 4 * second + 4),
    ]
    assert inputs.host_seq_lens.tolist() == [2, 4]
    assert inputs.host_query_start_loc.tolist() == [0, 2, 6]
    assert inputs.input_ids.ctypes.data == buffers.arrays.input_ids.ctypes.data
    plan.rollback()


def test_every_layer_group_has_its_own_tables_and_slots():
    limits = replace(LIMITS, num_groups=2)
    buffers = InputBuffers(limits, 4, torch.device("cpu"))
    manager = BlockManager(16, 4, groups=(None, 3))
    sequence = manager.sequence(range(14))
    for chunk in (8, 8):
        plan = manager.begin_step(chunk)
        plan.prefill(sequence, chunk)
        inputs = buffers.fill(plan).upload()
        plan.commit([1] * plan.num_samples)
    tables = sequence.block_tables
    assert inputs.block_tables.shape == (2, 1, 4)
    assert inputs.block_tables[0, 0].tolist() == tables[0]
    assert inputs.block_tables[1, 0].tolist() == [
        manager.null_block,
        *inputs.block_tables[1, 0, 1:],
    ]
    assert inputs.slot_mapping.tolist() == [
        [4 * table[position // 4] + position % 4 for position in range(8, 14)] for table in tables
    ]
    assert inputs.host_block_tables.shape == (2, 1, 4)
    assert (inputs.host_block_tables == inputs.block_tables).all()


def test_steps_of_one_size_share_their_views_and_not_their_contents():
    buffers = InputBuffers(LIMITS, 4, torch.device("cpu"))
    manager = BlockManager(8, 4)
    sequence = manager.sequence([5, 6, 7])
    seen = []
    for chunk in (3, 1, 1):
        plan = manager.begin_step(chunk)
        plan.prefill(sequence, chunk)
        inputs = buffers.fill(plan).upload()
        seen.append((inputs, inputs.input_ids.tolist(), inputs.positions.tolist()))
        plan.commit([10 + len(seen)])
    assert [(ids, positions) for _, ids, positions in seen] == [
        ([5, 6, 7], [0, 1, 2]),
        ([11], [3]),
        ([12], [4]),
    ]
    assert seen[1][0] is seen[2][0]
    assert seen[0][0] is not seen[1][0]


class Decodes:
    """A step of decodes whose sequences have so many tokens; blocks count up from 1."""

    def __init__(self, lengths: list[int], buffers: InputBuffers, block_size: int) -> None:
        self.num_tokens = self.num_sequences = self.num_samples = len(lengths)
        self.lengths, self.block_size, self.arrays = lengths, block_size, buffers.arrays

    def copies(self):
        return []

    def fill(self, _buffers):
        count = self.num_tokens
        self.arrays.input_ids[:count] = self.lengths
        self.arrays.seq_lens[:count] = self.lengths
        for row, length in enumerate(self.lengths):
            blocks = -(-length // self.block_size)
            for group, tables in enumerate(self.arrays.block_tables):
                tables[row, :blocks] = np.arange(1, blocks + 1) + 1000 * group + row


class Recording:
    """Counts the bytes that are copied to the device."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, source, target):
        assert source.is_contiguous(), "torch would copy it once more, and wait"
        assert source.shape == target.shape
        self.num_bytes += source.nbytes
        return upload_at_once(source, target)


ROWS, BLOCK = 256, 16


def packed(*sizes: int) -> int:
    """Bytes of arrays of these sizes, each of which begins at a multiple of 64."""
    return sum(-(-size // 64) * 64 for size in sizes)


@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize("capacity", [263, 2_560, 8_192])
def test_what_is_copied_follows_from_the_step_and_not_from_the_longest_there_may_be(
    groups: int, capacity: int
) -> None:
    limits = RunnerLimits(
        max_num_batched_tokens=ROWS,
        max_num_seqs=ROWS,
        max_blocks_per_seq=capacity,
        num_groups=groups,
    )
    buffers = InputBuffers(limits, BLOCK, torch.device("cpu"), apart=True)
    buffers.arrays.block_tables[:] = -7  # stale
    buffers._upload = recording = Recording()
    others = packed(*(ROWS * size for size in (8, 8, 8 * groups, 4, 8)), 4 * (ROWS + 1))
    for longest, width in ((570, 64), (1_024, 64), (1_025, 128), (4_208, min(capacity, 320))):
        lengths = [570 - row for row in range(ROWS - 1)] + [longest]
        inputs = buffers.fill(Decodes(lengths, buffers, BLOCK)).upload()
        assert inputs.block_tables.shape == (groups, ROWS, width)
        assert recording.num_bytes == others + 4 * groups * ROWS * width
        recording.num_bytes = 0
        assert (inputs.host_block_tables == inputs.block_tables).all()
        for row, length in enumerate(lengths):
            used = -(-length // BLOCK)
            table = buffers.arrays.block_tables[:, row, :used]
            assert (inputs.host_block_tables[:, row, :used] == table).all()
            assert (table > 0).all()


class LateStream:
    """A device that reads its sources as late as it may: when the host waits for it."""

    def __init__(self) -> None:
        self.waiting = []

    def __call__(self, source, target):
        self.waiting.append((source, target))
        return self.run

    def run(self) -> None:
        for pair in self.waiting:
            upload_at_once(*pair)
        self.waiting.clear()


def test_a_step_is_not_written_over_one_that_is_still_being_copied():
    """Nobody waits for the tokens of a step that samples nothing, or that is rolled back."""
    first = InputBuffers(LIMITS, 4, torch.device("cpu"), apart=True)
    second = InputBuffers(LIMITS, 4, torch.device("cpu"), apart=True, beside=first)
    stream = LateStream()
    first._upload = second._upload = stream
    inputs = first.fill(Decodes([5, 9], first, 4)).upload()
    second.fill(Decodes([3, 4], second, 4)).upload()
    assert len(stream.waiting) == 2  # the other buffers have nothing to wait for
    tables = inputs.block_tables
    stream.waiting, behind = stream.waiting[:1], stream.waiting[1:]  # what is on the device so far
    first.fill(Decodes([13, 1], first, 4))
    assert inputs.input_ids.tolist() == [5, 9]
    assert [row[: -(-n // 4)] for row, n in zip(tables[0].tolist(), (5, 9), strict=True)] == [
        [1, 2],
        [2, 3, 4],
    ]
    stream.waiting = behind
    stream.run()
    assert inputs.input_ids.tolist() == [3, 4]  # the device's side is the same


def test_what_was_never_copied_is_not_waited_for():
    buffers = InputBuffers(LIMITS, 4, torch.device("cpu"), apart=True)
    buffers._upload = stream = LateStream()
    for lengths in ([5, 9], [1, 2]):
        inputs = buffers.fill(Decodes(lengths, buffers, 4))  # rolled back before it was run
    assert inputs.upload().host_seq_lens.tolist() == [1, 2]
    assert len(stream.waiting) == 1


@pytest.mark.parametrize("reads_tables", [False, True])
def test_a_step_is_padded_on_the_host_and_costs_no_further_copy(reads_tables: bool) -> None:
    backend = SimpleNamespace(shared_group=None, reads_tables=reads_tables)
    buffers = InputBuffers(LIMITS, 4, torch.device("cpu"), backend, apart=True)
    buffers.arrays.slot_mapping[:] = 9  # stale
    buffers._upload = recording = Recording()
    padding = Padding(3, null_block=8)
    inputs = buffers.fill(Decodes([5], buffers, 4), padding).upload()
    assert inputs.input_ids.tolist() == [5, 0, 0]
    assert inputs.positions.tolist()[1:] == [0, 0]
    assert inputs.slot_mapping[0].tolist() == [9, -1, -1]
    assert inputs.query_start_loc.tolist()[1:] == [1, 2, 3]
    assert inputs.seq_lens.tolist() == [5, 1, 1]
    assert inputs.logits_indices.tolist()[1:] == [1, 2]
    assert inputs.host_seq_lens.tolist() == [5, 1, 1]
    assert inputs.host_block_tables[0, 0, 0] == 1
    assert not buffers.arrays.block_tables[0, 1:].any(), "those rows are the plan's"
    width = inputs.block_tables.shape[2] if reads_tables else 0
    arrays = (3 * 8, 3 * 8, 3 * 8, 3 * 4, 3 * 8, 4 * 4)
    assert recording.num_bytes == packed(*arrays, 4 * 3 * width)
    if reads_tables:
        assert inputs.block_tables[0, :, 0].tolist() == [1, 8, 8]


@pytest.mark.parametrize("capacity", [263, 2_560, 8_192])
def test_tables_that_nobody_reads_on_the_device_are_not_copied(capacity: int) -> None:
    limits = RunnerLimits(
        max_num_batched_tokens=ROWS, max_num_seqs=ROWS, max_blocks_per_seq=capacity, num_groups=7
    )
    backend = SimpleNamespace(shared_group=None, reads_tables=False)
    buffers = InputBuffers(limits, BLOCK, torch.device("cpu"), backend, apart=True)
    buffers._upload = recording = Recording()
    inputs = buffers.fill(Decodes([570] * ROWS, buffers, BLOCK)).upload()
    arrays = (*(ROWS * size for size in (8, 8, 8 * 7, 4, 8)), 4 * (ROWS + 1))
    assert recording.num_bytes == packed(*arrays)
    assert inputs.block_tables.shape == (7, ROWS, capacity)
    assert inputs.block_tables.untyped_storage().nbytes() == 4
    assert inputs.host_block_tables.ctypes.data == buffers.arrays.block_tables.ctypes.data


PARTS = (Table(0, 1, 0), Table(1, 2, 0), Table(1, 2, 1))


@pytest.mark.parametrize(("apart", "reads_tables"), [(False, True), (True, False), (True, True)])
def test_layers_that_share_a_tensor_have_tables_and_slots_of_their_own(
    apart: bool, reads_tables: bool
) -> None:
    limits = replace(LIMITS, num_groups=2, tables=PARTS)
    backend = SimpleNamespace(shared_group=None, reads_tables=reads_tables)
    buffers = InputBuffers(limits, 4, torch.device("cpu"), backend, apart=apart)
    manager = BlockManager(16, 4, groups=(None, 3))
    sequence = manager.sequence(range(14))
    for chunk in (8, 8):
        plan = manager.begin_step(chunk)
        plan.prefill(sequence, chunk)
        inputs = buffers.fill(plan).upload()
        full, sliding = sequence.block_tables
        plan.commit([1] * plan.num_samples)
    assert manager.null_block in sliding
    tables = [full, [2 * block for block in sliding], [2 * block + 1 for block in sliding]]
    assert inputs.host_block_tables[:, 0, :4].tolist() == tables
    assert buffers.tables[:, 0].tolist() == tables
    assert inputs.slot_mapping.tolist() == [
        [4 * table[position // 4] + position % 4 for position in range(8, 14)] for table in tables
    ]
    if reads_tables:
        assert inputs.block_tables[:, 0, :4].tolist() == tables


def test_padding_is_the_null_block_of_each_table() -> None:
    limits = replace(LIMITS, num_groups=2, tables=PARTS)
    backend = SimpleNamespace(shared_group=None, reads_tables=True)
    buffers = InputBuffers(limits, 4, torch.device("cpu"), backend, apart=True)
    padding = Padding(3, null_block=8)
    fixed = buffers.fixed_inputs(padding)
    assert fixed.block_tables[..., 0].tolist() == [[8] * 3, [16] * 3, [17] * 3]
    assert (fixed.slot_mapping == -1).all() and fixed.slot_mapping.shape == (3, 3)
    plan = Decodes([5], buffers, 4)
    buffers.arrays.slot_mapping[:, 0] = 9
    inputs = buffers.fill(plan, padding).upload()
    assert inputs.block_tables[..., 0].tolist() == [[1, 8, 8], [2002, 16, 16], [2003, 17, 17]]
    assert inputs.slot_mapping.tolist() == [[9, -1, -1], [17, -1, -1], [21, -1, -1]]
