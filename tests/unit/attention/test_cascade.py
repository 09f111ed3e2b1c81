"""Shared blocks that are read once: with a stand-in for flashinfer, numbers are the oracle's."""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.attention import flashinfer
from pyengine.attention.backend import StepInputs
from pyengine.attention.cascade import cascade_of, max_saved_tokens
from pyengine.attention.flashinfer import FlashInferBackend
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache import BlockManager, SharedPrefixes, StepBuffers
from pyengine.utils.tensors import tensor_of
from tests.support.attention import inputs_of, shared_rows, step_inputs
from tests.support.graphs import record_eagerly
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import Shape, copied, make_step, options_of, refill
from tests.unit.executor.hand_made import PagedRun, random_model

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
        patch.setattr(flashinfer, "_MIN_WORKSPACE", 1024)
        patch.setattr(flashinfer, "_INT_WORKSPACE", 1024)
        patch.setattr(flashinfer, "_WORTH_A_CASCADE", 0)
        yield


def sharing(inputs: StepInputs, order: list[int], prefixes: list[list[int]]) -> StepInputs:
    rows = np.array(prefixes, dtype=np.int32).reshape(-1, 5)
    return replace(inputs, shared=shared_rows(0, np.array(order, dtype=np.int32), rows))


def test_the_prefixes_that_save_most_are_read_once() -> None:
    """Four sequences with two blocks save more than three of them with three."""
    prefixes = [[0, 4, 0, 2, -1], [0, 2, 2, 3, 0]]
    inputs = sharing(inputs_of(LENGTHS, TABLES, block=BLOCK), ORDER, prefixes)
    cascade = cascade_of(inputs, BLOCK)
    assert cascade is not None
    assert cascade.rows.tolist() == [0, 1, 7, 8, 9, 10, 2, 3, 4]
    assert (cascade.starts.tolist(), cascade.lengths.tolist()) == ([0, 9], [8])
    assert cascade.pages.indices.tolist() == [0, 1]
    assert cascade.own_blocks.tolist() == [2, 2, 2, 0, 2]
    assert cascade.saved_tokens == 3 * 8
    assert max_saved_tokens(inputs, BLOCK) == 3 * 8 + 4


def test_longer_prefixes_of_fewer_sequences_are_read_once_where_they_save_more() -> None:
    """Two pairs with three blocks save four times two; the four together three times one."""
    tables = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7], [0, 5, 6, 8], [9]]
    prefixes = [[0, 4, 0, 1, -1], [0, 2, 1, 3, 0], [2, 4, 1, 3, 0]]
    lengths = [(1, 13), (1, 14), (1, 13), (1, 15), (1, 2)]
    inputs = sharing(inputs_of(lengths, tables, block=BLOCK), [0, 1, 2, 3, 4], prefixes)
    cascade = cascade_of(inputs, BLOCK)
    assert cascade is not None
    assert cascade.starts.tolist() == [0, 2, 4]
    assert cascade.pages.indices.tolist() == [0, 1, 2, 0, 5, 6]
    assert cascade.own_blocks.tolist() == [3, 3, 3, 3, 0]
    assert cascade.saved_tokens == 2 * 3 * BLOCK
    assert max_saved_tokens(inputs, BLOCK) == (3 + 2 + 2) * BLOCK


def test_of_many_prefixes_those_that_save_most_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.attention.cascade.MAX_PREFIXES", 2)
    tables = [[0, 1], [0, 2], [3, 4, 5], [3, 4, 6], [7, 8, 9], [7, 8, 10]]
    prefixes = [[0, 2, 0, 1, -1], [2, 4, 0, 2, -1], [4, 6, 0, 2, -1]]
    inputs = inputs_of([(1, 4 * len(own) - 2) for own in tables], tables, block=BLOCK)
    cascade = cascade_of(sharing(inputs, list(range(6)), prefixes), BLOCK)
    assert cascade is not None
    assert cascade.pages.indices.tolist() == [3, 4, 7, 8]
    assert cascade.own_blocks.tolist() == [0, 0, 2, 2, 2, 2]


def assert_like_the_oracle(inputs: StepInputs, case: str) -> None:
    pool, options = SHAPE.pool(), options_of(case)
    rows: Any = [
        torch.randn(int(inputs.host_query_start_loc[-1]), heads, SHAPE.dim_k)
        for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    ]
    oracle = copied(pool)
    unshared = GatherBackend(oracle).metadata(replace(inputs, shared=None))
    expected = unshared.forward(0, rows, options)
    got = FlashInferBackend(pool).metadata(inputs).forward(0, rows, options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["plain", "softcap", "sinks", "window"])
def test_a_step_gives_what_the_oracle_gives(case: str) -> None:
    """A layer with a window reads each block for each sequence, in a group that keeps all."""
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
    buffers = SharedPrefixes(
        order=shared.order, own_blocks=shared.own_blocks, prefixes=shared.rows, group=0
    )
    plan.fill(StepBuffers(**arrays), shared=buffers)
    shared.prefixes = shared.rows[: buffers.num_prefixes]
    starts, lens = arrays["query_start_loc"][: count + 1], arrays["seq_lens"][:count]
    tables, tokens = arrays["block_tables"][:, :count], int(starts[-1])
    positions, slots = arrays["positions"][:tokens], arrays["slot_mapping"][:, :tokens]
    inputs = step_inputs(starts, lens, tables, positions, slots, shared=shared)
    assert_like_the_oracle(inputs, "plain")


def test_what_saves_little_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInferBackend(SHAPE.pool())
    inputs = sharing(inputs_of(LENGTHS, TABLES, block=BLOCK), ORDER, PREFIXES)
    saved = 24 * SHAPE.kv_heads * (SHAPE.dim_k + SHAPE.dim_v) * 4
    for threshold, expected in ((saved, True), (saved + 1, False)):
        monkeypatch.setattr(flashinfer, "_WORTH_A_CASCADE", threshold)
        assert (backend.cascade(inputs) is not None) is expected
    assert backend.cascade(replace(inputs, shared=None)) is None


STEPS = (
    (
        [(1, 9), (1, 13), (1, 8), (1, 5), (1, 10)],
        [[0, 3, 0, 2, -1], [3, 5, 0, 1, -1]],
        [0, 1, 4, 2, 3],
    ),
    ([(1, 21), (1, 13), (1, 8), (1, 30), (1, 10)], [[1, 3, 0, 1, -1]], [0, 2, 4, 1, 3]),
    ([(1, 17), (1, 13), (1, 19), (1, 30), (1, 18)], [[0, 5, 0, 3, -1]], [4, 3, 2, 1, 0]),
    ([(1, 6), (1, 13), (1, 8), (1, 9), (1, 1)], [], [0, 1, 2, 3, 4]),
)
"""Steps of five sequences, the prefixes that they share, and their order."""


@pytest.mark.parametrize("case", ["plain", "softcap", "sinks", "window", "all"])
def test_graph_metadata_follows_its_steps(case: str) -> None:
    """Six rows, one of them padding, with the prefixes of each step."""
    pool, options, width = SHAPE.pool(), options_of(case), 9
    step = make_step([(1, 3)] * 6, SHAPE, width=width)
    backend = FlashInferBackend(pool)
    metadata = backend.sharing_graph_metadata(step.inputs)
    assert metadata is not None
    step.run(metadata, options)  # warm-up
    for seed, (lengths, prefixes, order) in enumerate(STEPS, start=1):
        other = make_step([*lengths, (1, 0)], SHAPE, width=width, seed=seed)
        tables = other.inputs.block_tables[0]
        for begin, end, first, last, _ in prefixes:
            tables[order[begin + 1 : end], first:last] = tables[order[begin], first:last]
        tables[-1] = pool.num_blocks
        other.inputs.slot_mapping[0, -1] = -1
        oracle = copied(pool)
        expected = other.run(GatherBackend(oracle).metadata(other.inputs), options)
        refill(step, other)
        inputs = sharing(step.inputs, order, prefixes)
        cascade = backend.cascade(inputs)
        assert (cascade is not None) is bool(prefixes)
        metadata.refresh(replace(inputs, cascade=cascade))
        got = step.run(metadata, options)
        torch.testing.assert_close(got[:-1], expected[:-1], atol=1e-5, rtol=1e-5)
    sharers = list(metadata._sharers.values())
    assert [sharer.plans for sharer in sharers] == ([1 + len(STEPS)] if case in SHARES else [])


SHARES = ("plain", "softcap", "sinks")


def test_graphs_of_all_sizes_share_the_memory_of_prefixes() -> None:
    backend, buffers = FlashInferBackend(SHAPE.pool()), []
    for size in (6, 2):
        step = make_step([(1, 9)] * size, SHAPE, width=8)
        metadata = backend.sharing_graph_metadata(step.inputs)
        assert metadata is not None
        step.run(metadata, options_of("plain"))
        (sharer,) = metadata._sharers.values()
        buffers.append([sharer.int_workspace, *sharer.settings.values()])
    for before, after in zip(*buffers, strict=True):
        assert not isinstance(before, torch.Tensor) or before.data_ptr() == after.data_ptr()
    assert backend.sharing_graph_metadata(make_step([(1, 9)], SHAPE, width=8).inputs) is None


def test_replayed_decodes_of_the_block_manager_give_what_the_oracle_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four prompts of two documents, in graphs of a runner, beside a runner without."""
    model = random_model("llama", num_hidden_layers=2)
    runs = [
        PagedRun(model, backend=FlashInferBackend, record=record_eagerly),
        PagedRun(model, backend=GatherBackend),
    ]
    assert runs[0].runner.graphs.sharing_sizes == [2, 4, 8]
    documents = [[3 + (token + number) % 90 for token in range(9)] for number in range(2)]
    prompts = [[*documents[number // 2], 20 + number] for number in range(4)]
    run_logits = []
    cascades = Mock(wraps=cascade_of)
    monkeypatch.setattr(flashinfer, "cascade_of", cascades)
    for run in runs:
        manager = BlockManager(60, BLOCK)
        sequences = [manager.sequence(prompt) for prompt in prompts]
        steps: list[Any] = [lambda plan, own=own: plan.prefill(own, 64) for own in sequences]
        steps += [lambda plan, own=sequences: plan.decode(own)] * 3
        logits = []
        for fill in steps:
            plan = manager.begin_step(64)
            fill(plan)
            logits.append(tensor_of(run.runner.prepare(plan)(None).sampling).clone())
            plan.commit([7] * plan.num_samples)
        run_logits.append(logits)
    for replayed, eager in zip(*run_logits, strict=True):
        torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-4)
    of_four = runs[0].runner.graphs._sharing[4].metadata
    assert of_four._inputs.cascade.lengths.tolist() == [2 * BLOCK, 2 * BLOCK]
    assert cascades.call_count == len(logits), "once a step"
