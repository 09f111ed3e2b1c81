"""Random steps over a pool with something in every slot, and the oracle's results."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import rotated
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of
from tests.support.attention import step_inputs

CPU = torch.device("cpu")
NUM_BLOCKS = 40
Lengths = Sequence[tuple[int, int]]

new_and_context = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 7]), st.integers(0, 21)), min_size=1, max_size=5
)
"""Steps of up to five sequences: (new tokens, tokens before them) each."""


@dataclass
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim_k: int = 8
    dim_v: int = 8
    block_size: int = 4

    def pool(self, dtype: torch.dtype = torch.float32, **scales: float) -> KVPool:
        spec = KVCacheSpec(self.kv_heads, self.dim_k, self.dim_v, dtype_of(dtype), **scales)
        pool = KVPool([spec], NUM_BLOCKS, self.block_size, CPU)
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape))
        return pool


@dataclass
class Step:
    inputs: StepInputs
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, metadata: Any, options: AttentionOptions) -> torch.Tensor:
        out: torch.Tensor = metadata.forward(0, (self.query, self.key, self.value), options)
        return out


def make_step(lengths: Lengths, shape: Shape, *, width: int | None = None, seed: int = 0) -> Step:
    """A step whose first two sequences share their first block where both have computed it.

    What tables hold past a sequence's end is stale: ids of others' blocks.
    """
    rng, size = np.random.default_rng(seed), shape.block_size
    free = rng.permutation(NUM_BLOCKS).tolist()
    lens = np.array([n + c for n, c in lengths], dtype=np.int32)
    sizes = [-(-int(n) // size) for n in lens]
    tables = rng.integers(0, NUM_BLOCKS, (1, len(lens), width or max(sizes) + 1)).astype(np.int32)
    for row, count in enumerate(sizes):
        tables[0, row, :count] = [free.pop() for _ in range(count)]
    if len(lens) > 1 and all(context >= size for _, context in lengths[:2]):
        tables[0, 1, 0] = tables[0, 0, 0]
    starts = np.cumsum([0, *(n for n, _ in lengths)], dtype=np.int32)
    positions = np.concatenate([np.arange(c, c + n) for n, c in lengths])
    rows = np.repeat(np.arange(len(lens)), np.diff(starts))
    slots = tables[0, rows, positions // size].astype(np.int64) * size + positions % size
    inputs = step_inputs(starts, lens, tables, positions.astype(np.int64), slots[None])
    total = int(starts[-1])
    return Step(  # as transformers hands them over: heads first, then transposed
        inputs,
        torch.randn(shape.heads, total, shape.dim_k).transpose(0, 1),
        torch.randn(shape.kv_heads, total, shape.dim_k).transpose(0, 1),
        torch.randn(shape.kv_heads, total, shape.dim_v).transpose(0, 1),
    )


def copied(pool: KVPool) -> KVPool:
    """A copy of a pool."""
    twin = copy(pool)
    twin.keys = [tensor.clone() for tensor in pool.keys]
    twin.values = [tensor.clone() for tensor in pool.values]
    return twin


def assert_like_oracle(
    backend_type: Any, pool: KVPool, step: Step, options: AttentionOptions
) -> None:
    """The backend's result and its writes to the pool are the oracle's."""
    oracle = copied(pool)
    expected = step.run(GatherBackend(oracle).metadata(step.inputs), options)
    got = step.run(backend_type(pool).metadata(step.inputs), options)
    _assert_same(pool, oracle, got, expected)


def assert_turns_like_oracle(
    backend_type: Any, pool: KVPool, step: Step, options: AttentionOptions
) -> None:
    """The same where the layer leaves the rotation to the backend."""
    oracle = copied(pool)
    turned, turning = rotation_of(step, options)
    expected = turned.run(GatherBackend(oracle).metadata(step.inputs), options)
    got = step.run(backend_type(pool).metadata(step.inputs), turning)
    _assert_same(pool, oracle, got, expected)


def _assert_same(pool: KVPool, oracle: KVPool, got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(pool.keys[0].float(), oracle.keys[0].float())
    assert torch.equal(pool.values[0].float(), oracle.values[0].float())


def rotation_of(step: Step, options: AttentionOptions) -> tuple[Step, AttentionOptions]:
    """A step with rotated queries and keys, and options by which a backend rotates `step`."""
    angles = torch.linspace(-3, 3, len(step.query))[:, None] * torch.tensor([1.0, 0.1, 2.0])
    weights = torch.linspace(0.5, 1.5, step.query.shape[2])
    norm = HeadNorm(weights, weights.flip(0), eps=1e-6, offset=0.0)
    rotation = Rotation(angles.cos(), angles.sin(), RotaryLayout(6, "halves", 1), norm)
    query, key = rotated(step.query, step.key, rotation)
    return replace(step, query=query, key=key), replace(options, rotation=rotation)


def refill(step: Step, other: Step) -> None:
    """Put another step of the same shape into the tensors of `step`, as a runner does."""
    for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables"):
        getattr(step.inputs, name).copy_(getattr(other.inputs, name))
    step.query, step.key, step.value = other.query, other.key, other.value


def assert_graph_metadata_follows(
    backend_type: Any, pool: KVPool, shape: Shape, options: AttentionOptions
) -> None:
    """Metadata refreshed for each of several decode steps gives what new metadata gives."""
    width, padding = 8, (1, 0)
    step = make_step([(1, 3), (1, 9), padding], shape, width=width)
    backend = backend_type(pool)
    metadata = backend.graph_metadata(step.inputs)
    step.run(metadata, options)  # warm-up
    for seed, contexts in enumerate([(4, 8), (21, 0), (2, 30)], start=1):
        other = make_step([*((1, c) for c in contexts), padding], shape, width=width, seed=seed)
        other.inputs.block_tables[0, -1] = pool.num_blocks
        other.inputs.slot_mapping[0, -1] = -1
        oracle = copied(pool)
        expected = other.run(GatherBackend(oracle).metadata(other.inputs), options)
        refill(step, other)
        metadata.refresh(step.inputs)
        got = step.run(metadata, options)
        torch.testing.assert_close(got[:-1], expected[:-1], atol=1e-5, rtol=1e-5)
        turned, turning = rotation_of(other, options)
        expected = turned.run(GatherBackend(oracle).metadata(other.inputs), options)
        got = step.run(metadata, turning)
        torch.testing.assert_close(got[:-1], expected[:-1], atol=1e-5, rtol=1e-5)


CASES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "own position": {"sliding_window": 1},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
    "all": {"sliding_window": 6, "softcap": 0.9, "sinks": torch.linspace(-1, 3, 6)},
}


def options_of(case: str) -> AttentionOptions:
    return AttentionOptions(scaling=0.4, **CASES[case])
