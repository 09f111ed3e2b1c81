"""Shared blocks that are read once: with a stand-in for flashinfer, numbers are the oracle's."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.attention import flashinfer
from pyengine.attention.backend import StepInputs
from pyengine.attention.cascade import cascade_of, merged, most_saved_tokens
from pyengine.attention.flashinfer import FlashInferBackend
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache import BlockManager, SharedPrefixes, StepBuffers
from tests.support.attention import inputs_of, shared_rows
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import Shape, copied, options_of

BLOCK = 4
SHAPE = Shape(block_size=BLOCK)
TABLES = [[0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 6], [7, 8], [0, 1, 2, 9, 10]]
LENGTHS = [(1, 18), (1, 13), (3, 8), (2, 5), (4, 14)]
ORDER = [0, 1, 4, 2, 3]
PREFIXES = [[0, 4, 0, 2, -1], [0, 3, 2, 3, 0]]
"""All but the fourth share two blocks, three of these another."""


@pytest.fixture(autouse=True, scope="module")
def fake_package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
        patch.setattr(flashinfer, "_LEAST_WORKSPACE", 1024)
        patch.setattr(flashinfer, "_WORTH_A_CASCADE", 0)
        yield


def sharing(inputs: StepInputs, order: list[int], prefixes: list[list[int]]) -> StepInputs:
    rows = np.array(prefixes, dtype=np.int32).reshape(-1, 5)
    return replace(inputs, shared=shared_rows(0, np.array(order, dtype=np.int32), rows))


def test_levels_are_what_sequences_share() -> None:
    inputs = sharing(inputs_of(LENGTHS, TABLES, block=BLOCK), ORDER, PREFIXES)
    cascade = cascade_of(inputs, BLOCK)
    assert cascade is not None
    first, second = cascade.levels
    assert first.rows.tolist() == [0, 1, 7, 8, 9, 10, 2, 3, 4]
    assert (first.starts.tolist(), first.lengths.tolist()) == ([0, 9], [8])
    assert first.pages.indices.tolist() == [0, 1]
    assert second.rows.tolist() == [0, 1, 7, 8, 9, 10]
    assert (second.starts.tolist(), second.lengths.tolist()) == ([0, 6], [4])
    assert second.pages.indices.tolist() == [2]
    assert cascade.own_blocks.tolist() == [3, 3, 2, 0, 3]
    assert cascade.saved_tokens == 3 * 8 + 2 * 4
    assert most_saved_tokens(inputs, BLOCK) == cascade.saved_tokens


def test_deeper_prefixes_belong_to_their_sequences() -> None:
    tables = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 6]]
    prefixes = [[0, 4, 0, 1, -1], [0, 3, 1, 2, 0], [0, 2, 2, 3, 1]]
    lengths = [(1, 13), (1, 14), (1, 9), (1, 5)]
    inputs = sharing(inputs_of(lengths, tables, block=BLOCK), [0, 1, 2, 3], prefixes)
    cascade = cascade_of(inputs, BLOCK)
    assert cascade is not None
    assert [level.pages.indices.tolist() for level in cascade.levels] == [[0], [1]]
    assert cascade.own_blocks.tolist() == [2, 2, 2, 1]
    assert cascade.saved_tokens == (3 + 2) * BLOCK
    assert most_saved_tokens(inputs, BLOCK) == (3 + 2 + 1) * BLOCK


def assert_like_the_oracle(inputs: StepInputs, case: str) -> None:
    pool, options = SHAPE.pool(), options_of(case)
    rows: Any = [
        torch.randn(int(inputs.host_query_start_loc[-1]), heads, SHAPE.dim_k)
        for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    ]
    oracle = copied(pool)
    expected = GatherBackend(oracle).plan(replace(inputs, shared=None)).forward(0, rows, options)
    got = FlashInferBackend(pool).plan(inputs).forward(0, rows, options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["plain", "softcap", "sinks", "window"])
def test_a_step_gives_what_the_oracle_gives(case: str) -> None:
    """A window of a layer in a group that keeps everything is read without levels."""
    inputs = sharing(inputs_of(LENGTHS, TABLES, block=BLOCK), ORDER, PREFIXES)
    assert_like_the_oracle(inputs, case)


@settings(max_examples=40, deadline=None)
@given(
    depths=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=3, max_size=6),
    new=st.lists(st.integers(1, 6), min_size=6, max_size=6),
)
def test_steps_of_the_block_manager_give_what_the_oracle_gives(
    depths: list[list[int]], new: list[int]
) -> None:
    """Prompts are paths in a tree of blocks: those with a common path share its blocks."""
    manager = BlockManager(40, BLOCK)
    prompts = [
        [10 * at + branch for at, branch in enumerate(path) for _ in range(BLOCK)]
        for path in depths
    ]
    sequences = [
        manager.sequence([*prompt, *(1000 + row * 10 + i for i in range(new[row]))])
        for row, prompt in enumerate(prompts)
    ]
    for row, sequence in enumerate(sequences):  # so that all prefixes are computed
        plan = manager.begin_step(64)
        plan.prefill(sequence, len(prompts[row]))
        plan.commit([5] * plan.num_samples)
    plan = manager.begin_step(64)
    for sequence in sequences:
        if sequence.num_tokens > sequence.num_computed_tokens:
            plan.prefill(sequence, 64)
    count = plan.num_sequences
    if not count:
        return
    arrays = {
        "input_ids": np.zeros(64, np.int64),
        "positions": np.zeros(64, np.int64),
        "slot_mapping": np.zeros((1, 64), np.int64),
        "query_start_loc": np.zeros(8, np.int32),
        "seq_lens": np.zeros(7, np.int32),
        "block_tables": np.zeros((1, 7, 12), np.int32),
        "logits_indices": np.zeros(7, np.int64),
    }
    shared = shared_rows(0, np.zeros(7, np.int32), np.zeros((6, 5), np.int32))
    found = SharedPrefixes(
        order=shared.order, own_blocks=shared.own_blocks, prefixes=shared.rows, group=0
    )
    plan.fill(StepBuffers(**arrays), shared=found)
    shared.prefixes = shared.rows[: found.num_prefixes]
    starts, lens = arrays["query_start_loc"][: count + 1], arrays["seq_lens"][:count]
    tables, tokens = arrays["block_tables"][:, :count], int(starts[-1])
    none = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(
        input_ids=none,
        positions=torch.from_numpy(arrays["positions"][:tokens]),
        slot_mapping=torch.from_numpy(arrays["slot_mapping"][:, :tokens]),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.from_numpy(tables),
        logits_indices=none,
        host_query_start_loc=starts,
        host_seq_lens=lens,
        host_block_tables=tables,
        shared=shared,
    )
    assert_like_the_oracle(inputs, "plain")


def test_what_saves_little_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInferBackend(SHAPE.pool())
    inputs = sharing(inputs_of(LENGTHS, TABLES, block=BLOCK), ORDER, PREFIXES)
    saved = 32 * SHAPE.kv_heads * (SHAPE.dim_k + SHAPE.dim_v) * 4
    for least, expected in ((saved, True), (saved + 1, False)):
        monkeypatch.setattr(flashinfer, "_WORTH_A_CASCADE", least)
        assert backend.outweighs_graph(inputs) is expected
    assert not backend.outweighs_graph(replace(inputs, shared=None))


def test_a_result_without_weight_is_not_merged() -> None:
    out, other = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    lse, nothing = torch.randn(2, 3), torch.full((2, 3), -torch.inf)
    both, total = merged(out, lse, other, nothing)
    assert torch.equal(both, out) and torch.equal(total, lse)
