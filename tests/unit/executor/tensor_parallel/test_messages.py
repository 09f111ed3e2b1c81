"""A step that is packed and received fills the same arrays."""

import pickle

import numpy as np
import pytest
import torch

from pyengine.executor.input_buffers import InputBuffers, RunnerLimits
from pyengine.executor.tensor_parallel.ranks import pack_step
from pyengine.kv_cache import BlockManager

LIMITS = RunnerLimits(max_num_batched_tokens=16, max_num_seqs=3, max_blocks_per_seq=6, num_groups=2)


class PlanWithCopies:
    """A plan of the block manager that has blocks to copy as well."""

    def __init__(self, plan, copies):
        self._plan = plan
        self._copies = copies

    def __getattr__(self, name):
        return getattr(self._plan, name)

    def copies(self):
        return self._copies


@pytest.mark.parametrize("copies", [[], [(3, 5), (1, 0)]])
@pytest.mark.parametrize("extra", [None, np.array([0, 4, 2], dtype=np.int64)])
def test_the_workers_get_what_rank_0_has(copies, extra):
    ours, theirs = (InputBuffers(LIMITS, 4, torch.device("cpu")) for _ in range(2))
    manager = BlockManager(24, 4, groups=(None, 3))
    long, short = manager.sequence(range(14)), manager.sequence([40, 41, 42])
    plan = manager.begin_step(12)
    plan.prefill(short, 3)
    plan.prefill(long, 9)  # whole blocks of it: eight tokens
    sent = PlanWithCopies(plan, copies)
    filled = ours.fill(sent).upload()
    message = pack_step(sent, ours.arrays, extra, block_size=4)

    received = pickle.loads(message)
    received.arrays = theirs.arrays
    assert (received.num_tokens, received.num_sequences, received.num_samples) == (11, 2, 1)
    assert received.copies() == copies
    assert (received.extra_rows is None) if extra is None else (received.extra_rows == extra).all()
    got = theirs.fill(received).upload()
    for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens"):
        assert getattr(got, name).tolist() == getattr(filled, name).tolist(), name
    assert got.logits_indices.tolist() == filled.logits_indices.tolist()
    width = 2  # eight tokens of the longer one
    assert (got.block_tables[..., :width] == filled.block_tables[..., :width]).all()
    assert got.block_tables.any()
    plan.rollback()


def test_only_the_tables_that_are_used_are_sent():
    buffers = InputBuffers(LIMITS, 4, torch.device("cpu"))
    manager = BlockManager(24, 4, groups=(None, 3))
    plan = manager.begin_step(1)
    plan.prefill(manager.sequence([5]), 1)
    buffers.fill(plan)
    step = pickle.loads(pack_step(plan, buffers.arrays, None, block_size=4))
    plan.rollback()
    assert step.filled.block_tables.shape == (2, 1, 1)  # of one block, in two groups
