"""The backends of the CPU against attention written out row by row."""

import numpy as np
import pytest
import torch

from pyengine.attention import gather
from pyengine.attention.backend import AttentionOptions
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache.layer_groups import LayerGroups, Location
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from tests.support.attention import inputs_of

BLOCK = 4
HEADS, KV_HEADS, DIM_K, DIM_V = 6, 2, 8, 5
STEPS = {
    "decode": [(1, 9), (1, 0), (1, 16)],
    "same lengths": [(1, 9), (1, 9)],
    "prefill": [(7, 0)],
    "chunks": [(5, 9), (3, 2)],
    "mixed": [(1, 3), (6, 5), (1, 11), (4, 0)],
}


def row_by_row(query, keys, values, position, options):
    """One query `[heads, d]` over all `keys` `[n, kv, d]` of its sequence, in float64."""
    out = torch.zeros(HEADS, values.shape[-1], dtype=torch.float64)
    first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        k, v = keys[first : position + 1, kv].double(), values[first : position + 1, kv].double()
        scores = k @ query[head].double() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.exp()
        total = weights.sum()
        if options.sinks is not None:
            total = total + options.sinks[head].double().exp()
        out[head] = (weights / total) @ v
    return out.float()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", [GatherBackend, CpuBackend])
def test_every_row_attends_to_what_it_should(backend, step, window, softcap, sinks):
    torch.manual_seed(0)
    lengths = STEPS[step]
    pool = KVPool([KVCacheSpec(KV_HEADS, DIM_K, DIM_V, "float32")], 30, BLOCK, torch.device("cpu"))
    pool.keys[0].fill_(9.0)
    pool.values[0].fill_(9.0)
    ids = np.random.default_rng(0).permutation(30).tolist()
    tables = [[ids.pop() for _ in range(-(-(n + c) // BLOCK))] for n, c in lengths]
    full = [
        (torch.randn(n + c, KV_HEADS, DIM_K), torch.randn(n + c, KV_HEADS, DIM_V))
        for n, c in lengths
    ]
    for (_, context), table, (k, v) in zip(lengths, tables, full, strict=True):
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)])
        pool.write(0, k[:context], v[:context], slots.long())
    queries = [torch.randn(n, HEADS, DIM_K) for n, _ in lengths]
    options = AttentionOptions(
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.randn(HEADS) if sinks else None,
    )

    metadata = backend(pool).metadata(inputs_of(lengths, tables, block=BLOCK))
    got = metadata.forward(
        0,
        (
            torch.cat(queries),
            torch.cat([k[c:] for (_, c), (k, _) in zip(lengths, full, strict=True)]),
            torch.cat([v[c:] for (_, c), (_, v) in zip(lengths, full, strict=True)]),
        ),
        options,
    )

    expected = [
        row_by_row(q[i], k, v, context + i, options)
        for (new, context), q, (k, v) in zip(lengths, queries, full, strict=True)
        for i in range(new)
    ]
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 4, 5, 9])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", [GatherBackend, CpuBackend])
def test_layer_groups_give_bit_for_bit_what_full_tables_give(backend, step, window, softcap):
    """Two layers that share a tensor, with NaN in blocks that slid out and in the null block."""
    torch.manual_seed(0)
    lengths, spec = STEPS[step], KVCacheSpec(KV_HEADS, DIM_K, DIM_V, "float32")
    cpu = torch.device("cpu")
    ids = np.random.default_rng(0).permutation(60).tolist()
    sizes = [-(-(n + c) // BLOCK) for n, c in lengths]
    tables = [[[ids.pop() for _ in range(size)] for size in sizes] for _ in range(2)]
    full = KVPool([spec] * 2, 60, BLOCK, cpu)
    groups = LayerGroups((None, window), 1, (Location(0, 0), Location(1, 0)))
    shared = KVPool([spec] * 2, 60, BLOCK, cpu, groups)
    for layer, own in enumerate(tables):
        for (_, context), table in zip(lengths, own, strict=True):
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)]
            rows = torch.randn(context, KV_HEADS, DIM_K), torch.randn(context, KV_HEADS, DIM_V)
            for pool in (full, shared):
                pool.write(layer, *rows, torch.tensor(slots, dtype=torch.int64))
    slid = [
        [60 if at < max(0, context - window + 1) // BLOCK else block for at, block in enumerate(t)]
        for (_, context), t in zip(lengths, tables[1], strict=True)
    ]
    gone = [b for t, kept in zip(tables[1], slid, strict=True) for b in set(t) - set(kept)]
    for tensor in (shared.keys[0], shared.values[0]):
        tensor[[60, *gone]] = float("nan")
    new = sum(n for n, _ in lengths)
    query = torch.randn(new, HEADS, DIM_K)
    rows = torch.randn(new, KV_HEADS, DIM_K), torch.randn(new, KV_HEADS, DIM_V)
    for layer, sight in enumerate((None, window)):
        options = AttentionOptions(scaling=0.4, sliding_window=sight, softcap=softcap)
        expected = backend(full).metadata(inputs_of(lengths, tables[layer], block=BLOCK))
        got = backend(shared).metadata(inputs_of(lengths, tables[0], slid, block=BLOCK))
        assert torch.equal(
            got.forward(layer, (query, *rows), options),
            expected.forward(layer, (query, *rows), options),
        )


def test_neighbouring_blocks_are_read_in_place():
    def index(blocks):
        return gather._block_index(np.array(blocks, dtype=np.int32), torch.device("cpu"))

    assert index([[3, 4, 5]]) == slice(3, 6)
    for blocks in ([[3, 5]], [[5, 4]], [[3], [4]]):
        assert index(blocks).tolist() == blocks
    cache = torch.arange(7 * BLOCK, dtype=torch.float32).view(7, BLOCK, 1, 1)
    scratches = gather.Scratch(torch.device("cpu")), gather.Scratch(torch.device("cpu"))
    span = gather.Span(0, 6, 0, 0, 6, np.array([3, 4], dtype=np.int32))
    piece = gather.SpanPiece(span, None, torch.device("cpu"))
    for rows in gather._gather(cache, cache, piece, scratches):
        assert rows.flatten().tolist() == [12, 13, 14, 15, 16, 17]
        assert rows.data_ptr() == cache[3].data_ptr()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gathered_blocks_share_memory_from_call_to_call_on_the_cpu_only(device):
    cache = torch.randn(9, BLOCK, 2, 3, device=device)
    scratch = gather.Scratch(torch.device(device))
    blocks, peers = (torch.tensor(ids, device=device) for ids in ([7, 2, 2], [1]))
    keys = scratch.select(cache, blocks)
    assert keys.shape == (3, BLOCK, 2, 3)
    if device == "cpu":
        assert torch.equal(keys, cache[[7, 2, 2]])
        start = keys.data_ptr()
        assert scratch.select(cache, peers).data_ptr() == start
        assert scratch.select(cache.double(), peers).dtype == torch.float64


def test_more_than_the_scratch_holds_is_allocated(monkeypatch):
    monkeypatch.setitem(gather._BATCH_BYTES, "cpu", 100)
    scratch = gather.Scratch(torch.device("cpu"))
    cache = torch.randn(9, BLOCK, 2, 3)
    blocks = torch.tensor([7, 2, 2])
    first, second = scratch.select(cache, blocks), scratch.select(cache, blocks)
    assert torch.equal(first, cache[blocks])
    assert first.data_ptr() != second.data_ptr()
