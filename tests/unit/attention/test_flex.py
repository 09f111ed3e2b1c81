"""FlexAttention, run for real: uncompiled on the CPU, where it is torch's own mathematics."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.utils import counters

from pyengine.attention import flex
from pyengine.attention.flex import RECOMPILE_LIMIT, FlexBackend, compiled, tile_pages
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_plan_follows,
    assert_like_oracle,
    assert_turns_like_oracle,
    make_step,
    new_and_context,
    options_of,
)

library = pytest.importorskip("torch.nn.attention.flex_attention")
SHAPE = Shape()


@pytest.fixture(autouse=True, scope="module")
def no_compiler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(case, lengths):
    step = make_step(lengths, SHAPE)
    assert_like_oracle(FlexBackend, SHAPE.pool(), step, options_of(case))
    assert_turns_like_oracle(FlexBackend, SHAPE.pool(), step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_graph_plan_follows_its_steps(case):
    assert_graph_plan_follows(FlexBackend, SHAPE.pool(), SHAPE, options_of(case))


SIZES = [
    [(1, 0)],
    [(1, 9)],
    [(1, 9), (1, 4)],
    [(1, 0)] * 17,
    [(1, 0)] * 33,
    [(2, 0)],
    [(7, 4)],
    [(70, 0)],
    [(1, 9), (7, 4), (2, 20)],
]
"""Steps with one and more rows, sequences, tiles, pages, in all mixtures that matter."""


def test_a_kind_of_layer_is_compiled_once_and_once_more_for_a_single_row():
    """All that comes before code is generated: what functions capture, shapes that change."""
    torch._dynamo.reset()
    counters.clear()
    traced = compiled(library.flex_attention, backend="aot_eager")

    class Traced(FlexBackend):
        def __init__(self, pool):
            super().__init__(pool)
            self.attend = traced

    seen = []
    for case in ("plain", "all"):
        for lengths in SIZES:
            step = make_step(lengths, SHAPE)
            assert_like_oracle(Traced, SHAPE.pool(), step, options_of(case))
        seen.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert seen == [2, 4]
    assert torch._dynamo.config.recompile_limit >= RECOMPILE_LIMIT


def test_each_engine_has_graphs_of_its_own_which_are_deleted_with_it():
    """torch limits the graphs of a code object: ten engines have more than one has."""
    torch._dynamo.reset()
    graphs = []

    def record(graph, _inputs):
        graphs.append(weakref.ref(graph))
        return graph

    class Traced(FlexBackend):
        def __init__(self, pool):
            super().__init__(pool)
            self.attend = compiled(library.flex_attention, backend=record)

    limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = 4
    try:
        for number in range(3):
            for lengths in SIZES[2], SIZES[8]:
                step = make_step(lengths, SHAPE)
                assert_like_oracle(Traced, SHAPE.pool(), step, options_of("all"))
            assert len(graphs) > number
    finally:
        torch._dynamo.config.accumulated_recompile_limit = limit
    gc.collect()
    assert {graph() for graph in graphs} == {None}


@pytest.mark.parametrize(
    ("version", "dims", "most"),
    [
        ("2.11.0+cu130", (128, 128), 32_767),
        ("2.14.1", (64, 128), 32_767),
        ("2.15.0", (128, 128), None),
    ],
)
def test_a_pool_is_refused_whose_slots_the_kernels_of_this_torch_cannot_reach(
    monkeypatch, version, dims, most
):
    """Their offsets are of 32 bits before 2.15: past that they read elsewhere, and say nothing."""
    monkeypatch.setattr(flex.torch, "__version__", version)

    def build(num_blocks):
        spec = KVCacheSpec(8, *dims, torch.bfloat16)
        return FlexBackend(KVPool([spec], num_blocks, 64, torch.device("meta")))

    build(most or 1 << 20)
    if most is not None:
        with pytest.raises(
            ConfigurationError, match=f"num_blocks={most + 1}: .* num_blocks={most},"
        ):
            build(most + 1)


def test_keys_and_values_may_differ_in_size():
    shape = Shape(dim_v=5)
    step = make_step([(1, 9), (3, 4)], shape)
    assert_like_oracle(FlexBackend, shape.pool(), step, options_of("all"))


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("tile", [2, 16])
@given(lengths=new_and_context)
def test_tiles_list_each_page_that_a_row_sees_once_and_no_others(tile, window, lengths):
    """The uncompiled mathematics reads the mask function alone: the tiles are checked here."""
    step, size = make_step(lengths, SHAPE), SHAPE.block_size
    tables = step.inputs.host_block_tables[0]
    pages = tile_pages(step.inputs, tables, window, size, tile)
    positions = step.inputs.positions.tolist()
    rows = np.repeat(np.arange(len(lengths)), [n for n, _ in lengths])
    expected: list[set[int]] = [set() for _ in range(-(-len(rows) // tile))]
    for at, (row, position) in enumerate(zip(rows, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        seen = {int(tables[row, key // size]) for key in range(first, position + 1)}
        expected[at // tile] |= seen
    assert [set(own.tolist()) for own in pages] == expected
    assert all(len(own) == len(set(own.tolist())) for own in pages)


def test_the_block_mask_names_the_tiles_pages():
    step = make_step([(1, 9), (1, 4), (3, 4)], SHAPE)
    plan = FlexBackend(SHAPE.pool()).plan(step.inputs)
    step.run(plan, options_of("window"))
    mask = plan._masks[0, 5, 1]
    pages = tile_pages(step.inputs, step.inputs.host_block_tables[0], 5, SHAPE.block_size, 64)
    assert mask.kv_num_blocks.tolist() == [[[len(pages[0]), 0]]]  # two tiles at least
    assert mask.kv_indices[0, 0, 0].tolist() == pages[0].tolist()
    assert mask.kv_indices.dtype == torch.int32


@pytest.mark.parametrize(("heads", "rows"), [(6, 16), (2, 16), (40, 32)])
def test_a_sequence_that_decodes_is_a_tile_of_its_own(heads, rows):
    """Its rows are the query heads of a KV head; it looks at its own pages alone."""
    shape = Shape(heads=heads)
    step = make_step([(1, 9), (1, 4), (1, 0)], shape)
    plan = FlexBackend(shape.pool()).plan(step.inputs)
    step.run(plan, options_of("plain"))
    ((key, mask),) = plan._masks.items()
    assert key == (0, None, rows)
    assert (rows, shape.block_size) == mask.BLOCK_SIZE
    tables = step.inputs.host_block_tables[0]
    for row, length in enumerate((10, 5, 1)):
        count = -(-length // shape.block_size)
        assert mask.kv_num_blocks[0, 0, row] == count
        pages = mask.kv_indices[0, 0, row, :count].tolist()
        assert pages == sorted(tables[row, :count].tolist())
    assert_like_oracle(FlexBackend, shape.pool(), step, options_of("plain"))
