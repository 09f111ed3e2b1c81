"""flashinfer's metadata: with a stand-in for the package, the numbers are the oracle's."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pyengine.attention import flashinfer
from pyengine.attention.flashinfer import FlashInferBackend, PlanMemory, _Kind, workspace_bytes
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import PageLayout
from tests.unit.attention import fake_kernels
from tests.unit.attention.steps import (
    CASES,
    Shape,
    assert_graph_metadata_follows,
    assert_like_oracle,
    assert_turns_like_oracle,
    copied,
    make_step,
    new_and_context,
    options_of,
    refill,
)

SHAPE = Shape()


@pytest.fixture(autouse=True, scope="module")
def fake_package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
        patch.setattr(flashinfer, "_MIN_WORKSPACE", 1024)
        patch.setattr(flashinfer, "_INT_WORKSPACE", 1024)
        yield


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(lengths=new_and_context)
def test_every_step_gives_what_the_oracle_gives(case, lengths):
    step = make_step(lengths, SHAPE)
    assert_like_oracle(FlashInferBackend, SHAPE.pool(), step, options_of(case))
    assert_turns_like_oracle(FlashInferBackend, SHAPE.pool(), step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_a_cache_in_8_bit_floats_is_read_with_its_scales(case):
    pool = SHAPE.pool(torch.float8_e4m3fn, scale_k=0.5, scale_v=2.0)
    step = make_step([(1, 9), (3, 4)], SHAPE)
    assert_like_oracle(FlashInferBackend, pool, step, options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_graph_metadata_follows_its_steps(case):
    assert_graph_metadata_follows(FlashInferBackend, SHAPE.pool(), SHAPE, options_of(case))


def test_a_wrapper_is_planned_once_per_step_and_kind_of_layer():
    backend = FlashInferBackend(SHAPE.pool())
    step = make_step([(1, 9), (3, 4)], SHAPE)
    for _ in range(2):
        metadata = backend.metadata(step.inputs)
        for case in ("plain", "window", "plain", "window", "sinks"):
            step.run(metadata, options_of(case))
    assert sorted(wrapper.plans for wrapper in backend._wrappers.values()) == [2, 2, 2, 2]


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_plan_is_not_written_over_one_that_the_device_has_yet_to_read(monkeypatch, with_graphs):
    """Two steps are open at a time, and each plans for two kinds of layer."""
    monkeypatch.setattr(fake_kernels, "queue", queue := fake_kernels.PlanQueue())
    backend = FlashInferBackend(SHAPE.pool())
    memory = backend.plan_memory = PlanMemory(queue.mark)
    step = make_step([(1, 9), (1, 4)], SHAPE)
    metadata = backend.graph_metadata(step.inputs)
    if with_graphs:
        for case in ("plain", "window"):
            step.run(metadata, options_of(case))
    queue.is_late = True
    for _ in range(4):
        for _ in range(2):
            if with_graphs:
                metadata.refresh(step.inputs)
            else:
                metadata = backend.metadata(step.inputs)
            for case in ("plain", "window"):
                step.run(metadata, options_of(case))
        assert len(queue.waiting) == 4
        queue.run()
    assert len(memory._in_use) <= 4 + 2 * with_graphs, "memory is used again"


def test_the_wrappers_of_all_graphs_share_their_memory():
    """Otherwise each takes 8 MiB of the device, for every size and kind of layer."""
    backend = FlashInferBackend(SHAPE.pool())
    wrappers = []
    for size in (4, 2, 1):
        step = make_step([(1, 9)] * size, SHAPE, width=8)
        metadata = backend.graph_metadata(step.inputs)
        for case in ("plain", "window"):
            step.run(metadata, options_of(case))
        wrappers.append(list(metadata._decoders.values()))
    for of_kind in zip(*wrappers, strict=True):
        assert len({event.int_workspace.data_ptr() for event in of_kind}) == 1
        assert len({event.settings["paged_kv_indptr_buffer"].data_ptr() for event in of_kind}) == 1
        assert len({event.workspace.data_ptr() for event in of_kind}) == 1
    (plain, window), *_ = wrappers
    assert plain.int_workspace.data_ptr() != window.int_workspace.data_ptr()


def test_graphs_of_several_sizes_in_turn_give_what_the_oracle_gives():
    pool = SHAPE.pool()
    backend, options = FlashInferBackend(pool), options_of("plain")
    of_size = {}
    for size in (4, 2):
        step = make_step([(1, 3)] * size, SHAPE, width=8)
        of_size[size] = backend.graph_metadata(step.inputs), step
        step.run(of_size[size][0], options)
    for seed, size in enumerate((2, 4, 2, 4), start=1):
        metadata, step = of_size[size]
        other = make_step([(1, c) for c in range(seed, seed + size)], SHAPE, width=8, seed=seed)
        oracle = copied(pool)
        expected = other.run(GatherBackend(oracle).metadata(other.inputs), options)
        refill(step, other)
        metadata.refresh(step.inputs)
        torch.testing.assert_close(step.run(metadata, options), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows", "mib"),
    [
        (16, 8, 128, 256, 36),  # Qwen3-0.6B: graphs of up to 256
        (64, 8, 128, 512, 387),  # 256 MiB would not do
        (32, 8, 128, 0, 67),  # eager: prefills alone
        (8, 8, 64, 1, 16),
    ],
)
def test_the_workspace_follows_heads_and_sequences(heads, kv_heads, dim, rows, mib, monkeypatch):
    """Computed by hand from flashinfer's `PrefillPlan`, for the 132 processors of an H100."""
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE", 16 << 20)
    kind = _Kind(0, heads, kv_heads, dim, torch.bfloat16, None, None, 1.0)
    assert round(workspace_bytes(kind, 132, rows) / 2**20) == mib


def test_the_workspace_of_a_graph_holds_tiles_of_shared_prefixes():
    """256 rows of two query heads for a KV head, and a tile of 128 rows for each of 33 prefixes."""
    kind = _Kind(0, 16, 8, 128, torch.bfloat16, None, None, 1.0)
    tiles = 4 * 16 * (512 + 33 * 128) * 129
    assert workspace_bytes(kind, 132, 256, 33) == tiles + 1024 > workspace_bytes(kind, 132, 256)


@pytest.mark.parametrize("width", [3, 40, 8_192])
def test_PageLayouts_are_compressed_whatever_their_width(width):
    rng = np.random.default_rng(1)
    lens = rng.integers(1, 3 * 4, 20).astype(np.int32)
    tables = rng.integers(0, 99, (20, width)).astype(np.int32)
    pages = PageLayout.of(lens, tables.shape[1], 4).pages(tables)
    counts = -(-lens // 4)
    for row, count in enumerate(counts):
        assert (
            pages.indices[pages.indptr[row] : pages.indptr[row + 1]].tolist()
            == tables[row, :count].tolist()
        )
    assert ((counts - 1) * 4 + pages.last_page_len == lens).all()
