"""The cpu backend against the gather backend, on random steps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyengine.attention import cpu
from pyengine.attention.backend import AttentionOptions
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import rotated
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of
from pyengine.utils.openmp import openmp_runtime
from tests.support.attention import inputs_of

pytestmark = pytest.mark.levels


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    dim_k: int
    dim_v: int
    block: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def pools(self, num_blocks: int, *dtypes: torch.dtype) -> list[KVPool]:
        """One for each dtype, by default two, with the same contents everywhere."""
        specs = [
            KVCacheSpec(self.kv_heads, self.dim_k, self.dim_v, dtype_of(dtype))
            for dtype in dtypes or (torch.float32, torch.float32)
        ]
        pools = [KVPool([spec], num_blocks, self.block, torch.device("cpu")) for spec in specs]
        pools[0].keys[0].normal_()
        pools[0].values[0].normal_()
        for other in pools[1:]:
            other.keys[0].copy_(pools[0].keys[0])
            other.values[0].copy_(pools[0].values[0])
        return pools

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values: as models give them, heads before tokens in memory."""
        sizes = ((self.heads, self.dim_k), (self.kv_heads, self.dim_k), (self.kv_heads, self.dim_v))
        query, key, value = (torch.randn(heads, count, dim).transpose(0, 1) for heads, dim in sizes)
        return query, key, value


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim_k=st.sampled_from([1, 8, 20, 64]),
    dim_v=st.sampled_from([3, 16, 64, 72]),
    block=st.sampled_from([1, 4, 16]),
)
steps = st.lists(
    st.tuples(st.integers(1, 80) | st.just(1), st.integers(0, 300)), min_size=1, max_size=5
)


def tables_of(lengths: list[tuple[int, int]], block: int) -> tuple[list[list[int]], int]:
    """Blocks from anywhere in the pool, and the size of the pool."""
    widths = [-(-(new + before) // block) for new, before in lengths]
    ids = np.random.default_rng(0).permutation(sum(widths) + 2).tolist()
    return [[ids.pop() for _ in range(width)] for width in widths], sum(widths) + 2


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    lengths=steps,
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 5.0),
    sinks=st.booleans(),
)
def test_it_gives_what_gather_gives(shape, lengths, window, softcap, sinks):
    torch.manual_seed(0)
    tables, num_blocks = tables_of(lengths, shape.block)
    inputs = inputs_of(lengths, tables, block=shape.block)
    inputs.slot_mapping[0, 0] = -1
    options = AttentionOptions(
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.randn(shape.heads) if sinks else None,
    )
    rows = shape.rows(sum(new for new, _ in lengths))
    ours, theirs = shape.pools(num_blocks)
    actual = CpuBackend(ours).metadata(inputs).forward(0, rows, options)
    expected = GatherBackend(theirs).metadata(inputs).forward(0, rows, options)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    for written, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert torch.equal(written[0][:-1], other[0][:-1])


layouts = st.builds(
    RotaryLayout,
    size=st.integers(1, 32).map(lambda half: 2 * half),
    order=st.sampled_from(["halves", "pairs"]),
    step=st.integers(1, 2),
)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    lengths=steps,
    layout=layouts,
    offset=st.none() | st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    of_angles=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_turns_what_a_layer_leaves_to_it(shape, lengths, layout, offset, dtype, of_angles):
    torch.manual_seed(0)
    tables, num_blocks = tables_of(lengths, shape.block)
    inputs, count = inputs_of(lengths, tables, block=shape.block), sum(new for new, _ in lengths)
    assume(shape.dim_k > 1)
    layout = replace(layout, size=min(layout.size, shape.dim_k // 2 * 2))
    cos, sin = torch.randn(2, count, layout.size // 2 * layout.step + 1).to(of_angles)
    norm = None
    if offset is not None:
        norm = HeadNorm(*torch.randn(2, shape.dim_k).to(dtype), eps=1e-3, offset=offset)
    rotation = Rotation(cos, sin, layout, norm)
    sizes = (
        (shape.heads, shape.dim_k),
        (shape.kv_heads, shape.dim_k),
        (shape.kv_heads, shape.dim_v),
    )
    product = torch.randn(count, sum(heads * dim for heads, dim in sizes)).to(dtype)
    parts = product.split([heads * dim for heads, dim in sizes], -1)
    rows = [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]
    ours, theirs = shape.pools(num_blocks, dtype, dtype)
    options = AttentionOptions(0.3, None, None, None, rotation)
    actual = CpuBackend(ours).metadata(inputs).forward(0, rows, options)
    turned = rotated(*rows[:2], rotation)
    plain = AttentionOptions(0.3, None, None, None)
    expected = CpuBackend(theirs).metadata(inputs).forward(0, (*turned, rows[2]), plain)
    limit = 2e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, expected, atol=limit, rtol=limit)
    torch.testing.assert_close(
        ours.keys[0][:-1], theirs.keys[0][:-1], atol=limit / 2, rtol=limit / 2
    )
    assert torch.equal(ours.values[0][:-1], theirs.values[0][:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_a_step_turn_by_their_own_angles(dtype):
    torch.manual_seed(0)
    shape, lengths = Shape(kv_heads=2, group=2, dim_k=16, dim_v=16, block=4), [(3, 5), (1, 9)]
    tables, num_blocks = tables_of(lengths, shape.block)
    inputs = inputs_of(lengths, tables, block=shape.block)
    rows = [row.to(dtype) for row in shape.rows(4)]
    whole = torch.randn(2, 4, 16).to(dtype)
    part, other = whole[..., :8], torch.randn(2, 4, 16).to(dtype)
    angles = [whole, whole, other, part, part, whole.flip(1), whole]
    ours, theirs = shape.pools(num_blocks, dtype, dtype)
    metadata = CpuBackend(ours).metadata(inputs)
    for cos, sin in angles:
        rotation = Rotation(cos, sin, RotaryLayout(cos.shape[-1], "halves", 1))
        options = AttentionOptions(0.3, rotation=rotation)
        actual = metadata.forward(0, rows, options)
        assert torch.equal(actual, CpuBackend(theirs).metadata(inputs).forward(0, rows, options))
        whole.neg_()  # as a graph may write where angles were


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    lengths=steps,
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 5.0),
    sinks=st.booleans(),
)
def test_bfloat16_is_float32_that_was_rounded(shape, lengths, window, softcap, sinks):
    torch.manual_seed(0)
    tables, num_blocks = tables_of(lengths, shape.block)
    inputs = inputs_of(lengths, tables, block=shape.block)
    options = AttentionOptions(
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.randn(shape.heads).bfloat16() if sinks else None,
    )
    rows = [row.bfloat16() for row in shape.rows(sum(new for new, _ in lengths))]
    ours, gathered, exact = shape.pools(num_blocks, torch.bfloat16, torch.bfloat16, torch.float32)
    actual = CpuBackend(ours).metadata(inputs).forward(0, rows, options)
    assert actual.dtype == torch.bfloat16
    expected = GatherBackend(gathered).metadata(inputs).forward(0, rows, options)
    torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)
    metadata = CpuBackend(exact).metadata(inputs)
    rounded = metadata.forward(0, tuple(row.float() for row in rows), options).bfloat16()
    if shape.dim_k % 32 or shape.dim_v % 16:  # else AMX multiplies them, where there is some
        assert torch.equal(actual, rounded)
    for written, other in ((ours.keys, gathered.keys), (ours.values, gathered.values)):
        assert torch.equal(written[0][:-1], other[0][:-1])


def test_a_decoding_row_is_the_same_in_every_batch_and_with_any_threads():
    torch.manual_seed(0)
    shape = Shape(kv_heads=3, group=3, dim_k=64, dim_v=64, block=16)
    lengths = [(1, 37 * number) for number in range(24)]
    tables, num_blocks = tables_of(lengths, shape.block)
    pool = shape.pools(num_blocks)[0]
    rows, options = shape.rows(len(lengths)), AttentionOptions(scaling=0.125)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        metadata = CpuBackend(pool).metadata(inputs_of(lengths, tables, block=shape.block))
        results.append(metadata.forward(0, rows, options))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for at, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        metadata = CpuBackend(pool).metadata(inputs_of([length], [table], block=shape.block))
        alone = metadata.forward(0, tuple(tensor[at : at + 1] for tensor in rows), options)
        assert torch.equal(alone[0], results[0][at])


def test_it_runs_inside_inference_mode_and_outside():
    shape = Shape(kv_heads=1, group=2, dim_k=8, dim_v=8, block=4)
    pool = shape.pools(4)[0]
    metadata = CpuBackend(pool).metadata(inputs_of([(1, 5)], [[2, 0]], block=4))
    rows, options = shape.rows(1), AttentionOptions(scaling=1.0)
    outside = metadata.forward(0, rows, options)
    with torch.inference_mode():
        inside = metadata.forward(0, tuple(tensor.clone() for tensor in rows), options)
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("runtime", [None, openmp_runtime()])
def test_threads_of_its_own_and_those_of_torch_give_the_same_from_any_caller(runtime, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu, "openmp_runtime", lambda: runtime)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shape = Shape(kv_heads=3, group=3, dim_k=64, dim_v=64, block=16)
    lengths = [(1, 37 * number) for number in range(24)]
    tables, num_blocks = tables_of(lengths, shape.block)
    rows, options = shape.rows(len(lengths)), AttentionOptions(scaling=0.125)
    pools = shape.pools(num_blocks, *[torch.float32] * 4)
    backends = [CpuBackend(pool) for pool in pools]

    def attend(backend: CpuBackend) -> list[torch.Tensor]:
        metadata = backend.metadata(inputs_of(lengths, tables, block=shape.block))
        return [metadata.forward(0, rows, options) for _ in range(10)]

    with ThreadPoolExecutor(len(backends)) as callers:
        items = [item for batch in callers.map(attend, backends) for item in batch]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = attend(CpuBackend(pools[0]))[0]
    assert all(torch.equal(alone, match) for match in items)
