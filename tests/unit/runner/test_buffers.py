"""The buffers are filled in place and cut to the step."""

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
    inputs = buffers.fill(plan)
    assert inputs.input_ids.tolist() == [11, 12, 5, 6, 7, 8]
    assert inputs.positions.tolist() == [0, 1, 0, 1, 2, 3]
    assert inputs.query_start_loc.tolist() == [0, 2, 6]
    assert inputs.seq_lens.tolist() == [2, 4]
    assert inputs.logits_indices.tolist() == [1]
    assert inputs.block_tables.shape == (2, 4)
    first, second = short.block_table[0], chunked.block_table[0]
    assert inputs.block_tables[:, 0].tolist() == [first, second]
    assert inputs.slot_mapping.tolist() == [
        *range(4 * first, 4 * first + 2),
        *range(4 * second, 4 * second + 4),
    ]
    assert inputs.host_seq_lens.tolist() == [2, 4]
    assert inputs.host_query_start_loc.tolist() == [0, 2, 6]
    assert inputs.input_ids.data_ptr() == buffers.arrays.input_ids.ctypes.data
    plan.rollback()


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_blocks_per_seq"])
def test_a_limit_of_nothing_is_refused(name):
    fields = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_blocks_per_seq": 1, name: 0}
    with pytest.raises(ConfigurationError, match=f"{name}=0"):
        RunnerLimits(**fields)
