"""Blocks that sequences share are read once for all of them, and no bit changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.attention.backend import AttentionOptions, SharedRows, StepInputs
from pyengine.attention.cpu import CpuBackend, CpuMetadata
from pyengine.cpu import BufferError, CpuAttention
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of
from tests.support.attention import inputs_of, shared_rows

BLOCK, SHARED, HEADS, KV_HEADS, DIM = 16, 600, 6, 2, 16


def prefixes(*rows: list[int]) -> SharedRows:
    """Three sequences on one prefix, two of which share more."""
    return shared_rows(0, np.arange(3, dtype=np.int32), np.array(rows, dtype=np.int32))


def tables() -> list[list[int]]:
    """They share 32 blocks, the first two share 16 more."""
    first = list(range(60))
    return [first, [*first[:48], *range(60, 72)], [*first[:32], *range(72, 100)]]


LENGTHS = [(1, 60 * BLOCK - 1), (3, 59 * BLOCK), (1, 50 * BLOCK + 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_bit_changes(dtype, softcap):
    torch.manual_seed(0)
    spec = KVCacheSpec(KV_HEADS, DIM, DIM, dtype_of(dtype))
    pool = KVPool([spec], 100, BLOCK, torch.device("cpu"))
    pool.keys[0].normal_()
    pool.values[0].normal_()
    inputs = inputs_of(LENGTHS, tables(), block=BLOCK)
    rows = [torch.randn(5, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    options = AttentionOptions(scaling=0.3, softcap=softcap)
    backend = CpuBackend(pool)
    alone = backend.metadata(inputs).forward(0, rows, options)
    shared = prefixes([0, 3, 0, 32, -1], [0, 2, 32, 48, 0])
    together = backend.metadata(replace(inputs, shared=shared)).forward(0, rows, options)
    assert torch.equal(alone, together)


def test_what_the_tables_contradict_is_refused():
    spec = KVCacheSpec(KV_HEADS, DIM, DIM, "float32")
    pool = KVPool([spec], 100, BLOCK, torch.device("cpu"))
    inputs = inputs_of(LENGTHS, tables(), block=BLOCK)
    with pytest.raises(BufferError, match="prefix 0 does not begin where its parent ends"):
        CpuBackend(pool).metadata(replace(inputs, shared=prefixes([0, 3, 0, 48, -1])))


@pytest.mark.slow
@pytest.mark.skipif(not CpuAttention.is_fast(), reason="`gather` is chosen, which shares nothing")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_hands_them_to_the_kernel(overlap, monkeypatch):
    """Tokens and log-probabilities are those of an engine that reads every block for each row."""
    widths: list[int] = []
    metadata = CpuBackend.metadata

    def seen(backend: CpuBackend, inputs: StepInputs) -> CpuMetadata:
        assert inputs.shared is not None
        widths.append(len(inputs.shared.prefixes))
        return metadata(backend, inputs)

    rng = np.random.default_rng(0)
    system, tools = rng.integers(3, 40_000, SHARED).tolist(), rng.integers(3, 40_000, 300).tolist()
    prompts = [[*system, *(tools if at % 2 else []), 100 + at] for at in range(6)]
    prompts += [system[: 32 * BLOCK]] * 2  # whose last token is computed in a block that both have
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)

    def answers() -> list[list[tuple[int, float]]]:
        llm = LLM(num_blocks=256, max_num_seqs=8, dtype="float32", async_scheduling=overlap)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        # With two steps open the last one is rolled back.
        assert llm.stats().counters["rolled_back_steps"] <= overlap, "a step failed"
        return [
            [
                (token, entry[token].logprob)
                for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)
            ]
            for output in outputs
        ]

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "metadata", seen)
        together = answers()
    assert max(widths) >= 2, "nothing was shared"
    whole = CpuBackend.__init__

    def alone(backend: CpuBackend, pool: KVPool) -> None:
        whole(backend, pool)
        backend.shared_group = None

    monkeypatch.setattr(CpuBackend, "__init__", alone)
    assert answers() == together
