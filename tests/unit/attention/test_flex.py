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
from tests.unit.attention import compiled_flex
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_metadata_follows,
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
def test_graph_metadata_follows_its_steps(case):
    assert_graph_metadata_follows(FlexBackend, SHAPE.pool(), SHAPE, options_of(case))


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
"""Steps with one and more rows, sequences, tiles and pages, in all relevant mixtures."""


def test_a_kind_of_layer_is_compiled_once_and_once_more_for_a_single_row():
    """Everything before code generation: captured variables, shapes that change."""
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


def test_layers_of_a_pool_share_what_is_compiled():
    """Their tensors lie at different places of one allocation."""
    torch._dynamo.reset()
    counters.clear()
    traced = compiled(library.flex_attention, backend="aot_eager")
    pool = KVPool([SHAPE.pool().specs[0]] * 5, 40, SHAPE.block_size, torch.device("cpu"))
    backend = FlexBackend(pool)
    backend.attend = traced
    for lengths in ([(1, 9), (1, 4)], [(7, 4)], [(1, 9), (7, 4), (2, 20)]):
        step = make_step(lengths, SHAPE)
        metadata = backend.metadata(step.inputs)
        for layer in range(5):
            metadata.forward(layer, (step.query, step.key, step.value), options_of("plain"))
    seen = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert seen == 2


def test_each_engine_has_graphs_of_its_own_which_are_deleted_with_it():
    """torch limits the graphs of a code object: ten engines exceed that of one."""
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
    ("version", "dims", "max_blocks"),
    [
        ("2.11.0+cu130", (128, 128), 32_767),
        ("2.14.1", (64, 128), 32_767),
        ("2.15.0", (128, 128), None),
    ],
)
def test_a_pool_is_refused_whose_slots_the_kernels_of_this_torch_cannot_reach(
    monkeypatch, version, dims, max_blocks
):
    """Their offsets are of 32 bits before 2.15: past that they read elsewhere, and say nothing."""
    monkeypatch.setattr(flex.torch, "__version__", version)

    def build(num_blocks):
        spec = KVCacheSpec(8, *dims, "bfloat16")
        return FlexBackend(KVPool([spec], num_blocks, 64, torch.device("meta")))

    build(max_blocks or 1 << 20)
    if max_blocks is not None:
        with pytest.raises(
            ConfigurationError, match=f"num_blocks={max_blocks + 1}: .* num_blocks={max_blocks},"
        ):
            build(max_blocks + 1)


def test_keys_and_values_may_differ_in_size():
    shape = Shape(dim_v=5)
    step = make_step([(1, 9), (3, 4)], shape)
    assert_like_oracle(FlexBackend, shape.pool(), step, options_of("all"))


def expected_tiles(step, window, tile):
    """The pages that each tile of rows reads in part and in full, key by key."""
    tables, size = step.inputs.host_block_tables[0], SHAPE.block_size
    starts, positions = step.inputs.host_query_start_loc, step.inputs.positions.tolist()
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    calls = []
    for begin in range(0, len(rows), tile):
        seen = [
            [
                int(tables[row, key // size])
                for key in range(max(0, position - (window or position + 1) + 1), position + 1)
            ]
            for row, position in zip(rows[begin:][:tile], positions[begin:][:tile], strict=True)
        ]
        pages = {page for keys in seen for page in keys}
        full = {page for page in pages if all(keys.count(page) == size for keys in seen)}
        calls.append((pages - full, full))
    return calls


def listed(pages):
    """Each tile's pages, as sets; none is listed twice."""
    counts, ids = pages
    lists = [own[:count].tolist() for own, count in zip(ids, counts, strict=True)]
    assert all(len(own) == len(set(own)) for own in lists)
    return [set(own) for own in lists]


@pytest.mark.parametrize("window", [None, 1, 6, 13])
@pytest.mark.parametrize("tile", [1, 2, 16])
@settings(max_examples=200)
@given(lengths=new_and_context)
def test_tiles_list_each_page_that_a_row_sees_once_and_no_others(tile, window, lengths):
    """The uncompiled mathematics reads the mask function alone: the tiles are checked here."""
    step = make_step(lengths, SHAPE)
    tables = step.inputs.host_block_tables[0]
    tiles = tile_pages(step.inputs, tables, window, SHAPE.block_size, tile)
    got = list(zip(listed(tiles.in_part), listed(tiles.in_full), strict=True))
    assert got == expected_tiles(step, window, tile)
    if tile == 1:
        assert all(len(in_part) <= 2 for in_part, _ in got)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[(1, 9), (1, 4), (3, 4)], [(1, 21), (1, 9)], [(40, 12)]])
def test_the_block_mask_names_the_tiles_pages(lengths, window):
    step = make_step(lengths, SHAPE)
    backend = FlexBackend(SHAPE.pool())
    is_decode = all(new == 1 for new, _ in lengths)
    for metadata in (backend.metadata(step.inputs), backend.graph_metadata(step.inputs)):
        step.run(metadata, options_of("plain" if window is None else "window"))
        (mask,) = metadata._masks.values()
        tiles = expected_tiles(step, window, 1 if is_decode else 64)
        part = (mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0])
        full = (mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0])
        got = list(zip(listed(part), listed(full), strict=True))
        assert len(got) == max(2, len(tiles))
        assert got[: len(tiles)] == tiles
        assert not any(map(any, got[len(tiles) :]))
        for tensor in (*part, *full):
            assert tensor.dtype == torch.int32
            assert tensor.data_ptr() % 16 == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", compiled_flex.CASES)
def test_kernels_that_read_the_block_mask_give_what_the_oracle_gives(case):
    shape = compiled_flex.SHAPE
    with compiled_flex.compiled_backend() as backend:
        for lengths in ([(1, 37), (1, 90), (1, 15)], [(1, 70), (70, 40), (5, 31)]):
            step = make_step(lengths, shape)
            assert_like_oracle(backend, shape.pool(), step, options_of(case))


@pytest.mark.slow
def test_a_page_that_is_not_seen_in_full_is_noticed(monkeypatch):
    """The same, with one page too many among the full ones."""
    monkeypatch.setattr(flex, "tile_pages", wrong_tile_pages)
    step = make_step([(1, 37), (1, 90), (1, 15)], compiled_flex.SHAPE)
    close = "Tensor-likes are not close"
    with compiled_flex.compiled_backend() as backend, pytest.raises(AssertionError, match=close):
        assert_like_oracle(backend, compiled_flex.SHAPE.pool(), step, options_of("plain"))


def wrong_tile_pages(*arguments):
    """As if the last page were seen in full."""
    counts, pages = tile_pages(*arguments).in_part
    return flex.Tiles((counts * 0, pages), (counts, pages))


@pytest.mark.parametrize(("heads", "rows"), [(6, 16), (2, 16), (40, 32)])
def test_a_sequence_that_decodes_is_a_tile_of_its_own(heads, rows):
    """Its rows are the query heads of a KV head, and read its own pages only."""
    shape = Shape(heads=heads)
    step = make_step([(1, 9), (1, 4), (1, 0)], shape)
    metadata = FlexBackend(shape.pool()).metadata(step.inputs)
    step.run(metadata, options_of("plain"))
    ((key, mask),) = metadata._masks.items()
    assert key == (0, None, rows)
    assert (rows, shape.block_size) == mask.BLOCK_SIZE
    tables = step.inputs.host_block_tables[0]
    for row, length in enumerate((10, 5, 1)):
        count, rest = divmod(length, shape.block_size)
        assert mask.full_kv_num_blocks[0, 0, row] == count
        assert mask.full_kv_indices[0, 0, row, :count].tolist() == tables[row, :count].tolist()
        assert mask.kv_num_blocks[0, 0, row] == (rest > 0)
        assert mask.kv_indices[0, 0, row, 0] == tables[row, count] or not rest
    assert_like_oracle(FlexBackend, shape.pool(), step, options_of("plain"))
