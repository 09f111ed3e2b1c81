"""The buffers are filled in place and cut to the step."""

from dataclasses import replace

import pytest
import torch

from pyengine.cache import BlockManager
from pyengine.core.errors import ConfigurationError
from pyengine.runner import InputBuffers, RunnerLimits

LIMITS = RunnerLimits(max_num_batched_tokens=16, max_num_seqs=3, max_blocks_per_seq=4)


def test_the_block_manager_fills_the_tensors_that_the_model_reads():
    buffers = InputBuffers(LIMITS, torch.device("cpu"))
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
    assert inputs.input_ids.data_ptr() == buffers.arrays.input_ids.ctypes.data
    plan.rollback()


def test_every_layer_group_has_its_own_tables_and_slots():
    limits = replace(LIMITS, num_groups=2)
    buffers = InputBuffers(limits, torch.device("cpu"))
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
        manager.trash_block,
        *inputs.block_tables[1, 0, 1:],
    ]
    assert inputs.slot_mapping.tolist() == [
        [4 * table[position // 4] + position % 4 for position in range(8, 14)] for table in tables
    ]
    assert inputs.host_block_tables.shape == (2, 1, 4)
    assert (inputs.host_block_tables == inputs.block_tables.numpy()).all()


@pytest.mark.parametrize("name", RunnerLimits.__dataclass_fields__)
def test_a_limit_of_nothing_is_refused(name):
    fields = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_blocks_per_seq": 1, name: 0}
    with pytest.raises(ConfigurationError, match=f"{name}=0"):
        RunnerLimits(**fields)


def test_steps_of_one_size_share_their_views_and_not_their_contents():
    buffers = InputBuffers(LIMITS, torch.device("cpu"))
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
