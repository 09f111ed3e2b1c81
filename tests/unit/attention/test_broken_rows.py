"""Keys and values that are not finite reach the rows that see them, and no others.

A masked slot has the weight zero, and zero times NaN is NaN. Each backend is tried with broken rows
of other sequences in the pages that it reads.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyengine.attention import flashinfer
from pyengine.attention.backend import AttentionOptions
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.flash_attn import FlashAttn3Backend, FlashAttnBackend
from pyengine.attention.flashinfer import FlashInferBackend
from pyengine.attention.flex import FlexBackend
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import KVWriter
from pyengine.attention.varlen import CudnnBackend, VarlenBackend
from pyengine.kv_cache.pool import KVPool
from tests.unit.attention import compiled_flex, fake_kernels
from tests.unit.attention.steps import (
    CASES,
    Shape,
    Step,
    copied,
    make_step,
    options_of,
    rotation_of,
)

SHAPE = Shape()
BACKENDS: dict[str, Any] = {
    "gather": GatherBackend,
    "flex": FlexBackend,
    "flashinfer": FlashInferBackend,
    "flash-attn": FlashAttnBackend,
    "flash-attn-3": FlashAttn3Backend,
    "varlen": VarlenBackend,
    "cudnn": CudnnBackend,
    "cpu": CpuBackend,
}
WITHOUT_SOFTCAP = ("varlen", "cudnn")
TRIED = [
    (backend, case)
    for backend in BACKENDS
    for case in CASES
    if backend not in WITHOUT_SOFTCAP or "softcap" not in CASES[case]
]
NAN, INFINITY = math.nan, math.inf
BROKEN = [(1.0, NAN), (1.0, INFINITY), (1.0, -INFINITY), (NAN, 1.0), (INFINITY, 1.0), (NAN, NAN)]
"""What is put into a number of a token's key and into one of its value."""
LENGTHS = [(7, 6), (3, 5), (1, 9), (9, 0), (1, 4), (1, 0)]
"""Prefills and decodes, (new tokens, tokens before them); the first two share a page."""
DECODES = [(1, 3), (1, 9), (1, 0)]


@pytest.fixture(autouse=True, scope="module")
def libraries() -> Iterator[None]:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
        patch.setitem(sys.modules, "flash_attn", fake_kernels.flash_attn)
        patch.setitem(sys.modules, "flash_attn_interface", fake_kernels.flash_attn_3)
        patch.setattr(varlen, "varlen_attn", fake_kernels.varlen_attn)
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        for name in ("_MIN_WORKSPACE", "_INT_WORKSPACE"):
            patch.setattr(flashinfer, name, 1024)
        yield


def broken(step: Step, row: int, numbers: tuple[float, float]) -> Step:
    """The step with these numbers in a key and a value."""
    rows = step.key.clone(), step.value.clone()
    for tensor, number in zip(rows, numbers, strict=True):
        tensor[row, 1, 2] = number
    return replace(step, key=rows[0], value=rows[1])


def dirty(pool: KVPool, numbers: tuple[float, float], steps: Step) -> KVPool:
    """A copy of the pool with a broken token in each slot, the null block's too, except in slots
    that hold earlier tokens of the step's sequences."""
    used = copied(pool)
    key, value = (torch.ones(item[0].flatten(0, 1).shape) for item in (used.keys, used.values))
    key[..., 2], value[..., 2] = numbers
    KVWriter(used).write(0, (key, key, value), torch.arange(len(key)))
    starts, lens = steps.inputs.host_query_start_loc, steps.inputs.host_seq_lens
    for row, table in enumerate(steps.inputs.host_block_tables[0]):
        context = int(lens[row] - (starts[row + 1] - starts[row]))
        for at in range(context):
            slot = (int(table[at // pool.block_size]), at % pool.block_size)
            used.keys[0][slot], used.values[0][slot] = pool.keys[0][slot], pool.values[0][slot]
    return used


def assert_same_bits(backend: Any, pool: KVPool, step: Step, options: AttentionOptions) -> None:
    """Attention over a dirty pool equals attention over the pool."""
    expected = step.run(backend(copied(pool)).metadata(step.inputs), options)
    assert expected.isfinite().all()
    for numbers in BROKEN:
        got = step.run(backend(dirty(pool, numbers, step)).metadata(step.inputs), options)
        assert torch.equal(got, expected), numbers


@pytest.mark.parametrize(("name", "case"), TRIED)
def test_others_of_the_step_keep_their_bits(name: str, case: str) -> None:
    """Rows of other sequences, and earlier rows, which are cached as a prefix."""
    torch.manual_seed(1)
    backend, options = BACKENDS[name], options_of(case)
    step, pool = make_step(LENGTHS, SHAPE), SHAPE.pool()
    whole = step.run(backend(copied(pool)).metadata(step.inputs), options)
    assert whole.isfinite().all()
    for row, end in ((4, 7), (8, 10), (17, 20)):  # a row, and where its sequence ends
        other_rows = [at for at in range(len(whole)) if not row <= at < end]
        for numbers in BROKEN:
            other = broken(step, row, numbers)
            got = other.run(backend(copied(pool)).metadata(step.inputs), options)
            assert torch.equal(got[other_rows], whole[other_rows]), numbers
            if numbers[0] != INFINITY:  # a score that is minus infinity has the weight zero
                assert not got[row].isfinite().all(), numbers
            if numbers[0] != INFINITY and options.sliding_window is None:
                assert not got[row:end].isfinite().flatten(1).all(1).any(), numbers


@pytest.mark.parametrize(("name", "case"), TRIED)
def test_the_next_to_use_their_blocks_keep_their_bits(name: str, case: str) -> None:
    torch.manual_seed(2)
    pool, options = SHAPE.pool(), options_of(case)
    for lengths in (LENGTHS, DECODES):
        step = make_step(lengths, SHAPE)
        assert_same_bits(BACKENDS[name], pool, step, options)
        assert_same_bits(BACKENDS[name], pool, *rotation_of(step, options))


@pytest.mark.parametrize(("name", "case"), [t for t in TRIED if BACKENDS[t[0]].supports_graphs])
def test_nor_do_replays_see_the_null_block(name: str, case: str) -> None:
    torch.manual_seed(3)

    class Graph(BACKENDS[name]):  # type: ignore[misc]
        metadata = BACKENDS[name].graph_metadata

    step = make_step([*DECODES, (1, 0)], SHAPE)
    for inputs in (step.inputs.block_tables, step.inputs.host_block_tables):
        inputs[0, -1] = SHAPE.pool().num_blocks
    step.inputs.slot_mapping[0, -1] = -1

    class Served(Step):
        def run(self, metadata: Any, options: AttentionOptions) -> torch.Tensor:
            return super().run(metadata, options)[:-1]

    served = Served(step.inputs, step.query, step.key, step.value)
    assert_same_bits(Graph, SHAPE.pool(), served, options_of(case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gather", "flashinfer"])
def test_nor_in_8_bit_floats(name: str, case: str) -> None:
    pool = SHAPE.pool(torch.float8_e4m3fn, scale_k=0.5, scale_v=2.0)
    assert_same_bits(BACKENDS[name], pool, make_step(LENGTHS, SHAPE), options_of(case))


@pytest.mark.parametrize("case", CASES)
def test_nor_before_the_first_key_of_a_layer(case: str) -> None:
    """Layers that predict further tokens leave the slots of the first ones as they were."""

    class Later(GatherBackend):
        def metadata(self, inputs: Any, **_settings: Any) -> Any:
            return super().metadata(inputs, first_key=2)

    pool = SHAPE.pool()
    step = make_step([(2, 5), (1, 9), (1, 4)], SHAPE)
    for block in step.inputs.host_block_tables[0, :, 0]:
        pool.keys[0][block, :2] = NAN
    options = options_of(case)
    clean = copied(pool)
    clean.keys[0].nan_to_num_(0.0)
    expected = step.run(Later(clean).metadata(step.inputs), options)
    assert expected.isfinite().all()
    assert torch.equal(step.run(Later(pool).metadata(step.inputs), options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", compiled_flex.CASES)
def test_nor_by_kernels_that_torch_compiles(case: str) -> None:
    with compiled_flex.compiled_backend() as backend:
        for lengths in (LENGTHS, DECODES):
            step = make_step(lengths, compiled_flex.SHAPE)
            assert_same_bits(backend, compiled_flex.SHAPE.pool(), step, options_of(case))
