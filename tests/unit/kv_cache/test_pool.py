"""The tensors of a pool: what is written, copied and compared, and when they take memory."""

import math
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest

from pyengine.errors import ConfigurationError
from pyengine.kv_cache import pool_size
from pyengine.kv_cache.layer_groups import LayerGroups, Location, Table, choose_layer_groups
from pyengine.kv_cache.pool import KVCacheSpec, KVPool, bytes_per_block, tensor_specs
from pyengine.kv_cache.pool_size import PoolSettings, resolve_num_blocks
from pyengine.utils.dtypes import dtype_of
from tests.support.forked import run_forked

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

CPU = torch.device("cpu")
GIB = 1 << 30
SPEC = KVCacheSpec(num_kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")
LAYERS = [SPEC] * 4  # 4 layers * 2 heads * (8 + 8) * 4 bytes = 512 bytes per token


def test_the_pool_has_one_block_more_and_starts_as_zeros():
    specs = [SPEC, KVCacheSpec(1, 6, 4, "bfloat16")]
    pool = KVPool(specs, num_blocks=3, block_size=2, device=CPU)
    assert [t.shape for t in pool.keys] == [(4, 2, 2, 8), (4, 2, 1, 6)]
    assert [t.shape for t in pool.values] == [(4, 2, 2, 8), (4, 2, 1, 4)]
    assert pool.values[1].dtype == torch.bfloat16
    assert not any(t.any() for t in (*pool.keys, *pool.values))
    assert pool.null_blocks == [3]
    assert pool.num_bytes == sum(t.nbytes for t in (*pool.keys, *pool.values))


def test_layers_of_different_groups_share_tensors():
    groups = LayerGroups((None, 8), 2, (Location(0, 0), Location(1, 0), Location(1, 1)))
    wide = KVCacheSpec(1, 6, 4, "bfloat16")
    pool = KVPool([SPEC, SPEC, wide], 3, 2, CPU, groups)
    assert pool.num_layers == 3
    assert pool.keys[0] is pool.keys[1]
    assert pool.values[0] is pool.values[1]
    assert [t.shape for t in pool.keys] == [(4, 2, 2, 8), (4, 2, 2, 8), (4, 2, 1, 6)]
    assert pool.num_bytes == sum(t.nbytes for t in (*pool.keys[1:], *pool.values[1:]))
    assert pool.num_bytes == 4 * bytes_per_block([SPEC, wide], 2)
    pool.write(0, *(torch.ones(1, 2, 8),) * 2, torch.tensor([2]))
    pool.write(1, *(torch.full((1, 2, 8), 2.0),) * 2, torch.tensor([4]))
    assert pool.keys[0][:, 0, 0, 0].tolist() == [0, 1, 2, 0]


def test_layers_that_differ_cannot_share():
    groups = LayerGroups((None, 8), 1, (Location(0, 0), Location(1, 0)))
    with pytest.raises(ConfigurationError, match="layers 0 and 1 cannot share a KV tensor"):
        KVPool([SPEC, KVCacheSpec(1, 8, 8, "float32")], 3, 2, CPU, groups)


def test_a_tensor_is_filled_by_the_layers_that_share_it():
    groups = LayerGroups((None, 8), 2, (Location(0, 0), Location(1, 1), Location(1, 0, 2, 1)))
    half = KVCacheSpec(1, 8, 8, "float32")
    assert tensor_specs([SPEC, half, half], groups) == [SPEC, half]
    for other in (SPEC, replace(half, dtype="bfloat16"), KVCacheSpec(1, 12, 4, "float32")):
        with pytest.raises(ConfigurationError, match="layers 0 and 2 cannot share a KV tensor"):
            tensor_specs([SPEC, half, other], groups)


FULL, SLIDING = KVCacheSpec(1, 24, 24, "float32"), KVCacheSpec(2, 8, 8, "float32")
PARTS = {  # layers 1, 3, 4 are full
    "twice": (replace(FULL, num_kv_heads=2, head_dim_k=16, head_dim_v=16), SLIDING),
    "half": (SLIDING, replace(SLIDING, num_kv_heads=1, head_dim_k=32, head_dim_v=32)),
    "equal": (replace(FULL, head_dim_k=16, head_dim_v=16), SLIDING),
    "three halves": (FULL, SLIDING),
    "keys and values": (KVCacheSpec(1, 8, 16, "bfloat16"), KVCacheSpec(2, 8, 16, "bfloat16")),
    "int8 with scales": (KVCacheSpec(1, 20, 20, "int8"), KVCacheSpec(1, 8, 8, "int8")),
    "8-bit floats": (
        KVCacheSpec(2, 8, 8, "float8_e4m3fn", 0.5, 2.0),
        KVCacheSpec(1, 8, 8, "float8_e4m3fn"),
    ),
}


def pool_of_parts(name):
    """A pool of 6 blocks of 3 tokens whose layers differ in size."""
    windows = [8, None, 8, None, None, 8, 8, 8]
    specs = [PARTS[name][window is not None] for window in windows]
    groups = choose_layer_groups(windows, [spec.token_bytes for spec in specs], 1024)
    assert len(groups.windows) > 1 and groups.has_parts == (name != "equal")
    return KVPool(specs, 6, 3, CPU, groups)


@pytest.mark.parametrize("name", list(PARTS))
def test_blocks_of_parts_are_of_their_group_alone(name):
    """Each layer fills two blocks of its group through its table; no byte is another layer's."""
    pool = pool_of_parts(name)
    stored = []
    for layer, location in enumerate(pool.groups.locations):
        table = pool.tables[pool.layer_tables[layer]]
        assert table == Table(location.group, location.parts, location.part)
        if location.group > 2:  # there are no blocks for it
            continue
        blocks = (location.group, 6 - location.group)
        rows = [block * table.parts + table.part for block in blocks]
        for tensor in (pool.keys[layer], pool.values[layer]):
            assert len(tensor) == 7 * location.parts
            seen, generator = tensor.view(torch.uint8), torch.Generator().manual_seed(layer)
            assert not seen[rows].any()
            shape = (len(rows), *seen.shape[1:])
            numbers = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
            seen[rows] = numbers
            stored.append((seen, rows, numbers))
    assert all(torch.equal(seen[rows], numbers) for seen, rows, numbers in stored)
    assert pool.null_blocks == [6 * table.parts + table.part for table in pool.tables]


@pytest.mark.parametrize("name", list(PARTS))
def test_the_kernel_s_caches_are_the_tensors_of_their_layers(name):
    if PARTS[name][0].dtype == "float8_e4m3fn":
        pytest.skip("the kernel reads no 8-bit floats")
    pool = pool_of_parts(name)
    for (keys, values), *tensors in zip(pool.arrays, pool.keys, pool.values, strict=True):
        for array, tensor in zip((keys, values), tensors, strict=True):
            assert array.shape == tuple(tensor.shape)
            assert array.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("grouped", [False, True])
def test_blocks_are_copied_once_in_every_tensor(grouped):
    groups = LayerGroups((None, 8), 1, (Location(0, 0), Location(1, 0))) if grouped else None
    pool = KVPool([SPEC] * 2, 4, 2, CPU, groups)
    for tensor in {id(t): t for t in (*pool.keys, *pool.values)}.values():
        tensor.copy_(torch.arange(5.0).view(5, 1, 1, 1).expand_as(tensor))
    pool.copy_blocks([(0, 1), (1, 2), (2, 0)])  # a rotation: all are read before any is written
    pool.copy_blocks([])
    for tensor in (*pool.keys, *pool.values):
        assert tensor[:, 0, 0, 0].tolist() == [2, 0, 1, 3, 4]


MLA = KVCacheSpec(4, 24, 16, "bfloat16")
POOLS = {
    "equal layers": ([KVCacheSpec(2, 16, 16, "bfloat16")] * 4, None),
    "values of another size": ([MLA] * 3, None),
    "8-bit floats": ([KVCacheSpec(2, 16, 16, "float8_e4m3fn")] * 3, None),
    "int8 with scales": ([KVCacheSpec(3, 16, 8, "int8")] * 2, None),
    "an odd number of bytes": ([KVCacheSpec(1, 3, 3, "float8_e4m3fn")] * 2, None),
    "layers that differ": ([SPEC, MLA, KVCacheSpec(1, 32, 32, "float32")], None),
    "layer groups": (
        [SPEC, SPEC, MLA],
        LayerGroups((None, 8), 2, (Location(0, 0), Location(1, 0), Location(0, 1))),
    ),
}
COPIES = [
    [(0, 1)],
    [(3, 0), (0, 5), (5, 3)],  # a rotation
    [(1, 2), (1, 4), (2, 0), (6, 6)],  # a source of two, a chain, a block onto itself
]


def filled_pool(specs, groups, num_blocks=6):
    """A pool whose blocks all differ, the null block too."""
    pool = KVPool(specs, num_blocks, 3, CPU, groups)
    for seed, tensor in enumerate(pool._memory.tensors):
        generator = torch.Generator().manual_seed(seed)
        numbers = tensor.view(torch.uint8)
        numbers.copy_(torch.randint(256, numbers.shape, generator=generator))
    return pool


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("name", list(POOLS))
def test_copies_of_blocks_are_those_of_each_tensor_alone(monkeypatch, name, at_once):
    """Of bytes, in as many pieces as the limit wants; nothing else changes."""
    monkeypatch.setattr("pyengine.kv_cache.pool_memory._COPIED", at_once)
    specs, groups = POOLS[name]
    for copies in COPIES:
        pool = filled_pool(specs, groups)
        before = [tensor.view(torch.uint8).clone() for tensor in pool._memory.tensors]
        pool.copy_blocks(copies)
        for old, tensor in zip(before, pool._memory.tensors, strict=True):
            expected = old.clone()
            for source, target in copies:
                expected[target] = old[source]
            assert torch.equal(tensor.view(torch.uint8), expected)


class Counting(TorchDispatchMode):
    """Counts the operators that would each be a launch on a GPU."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("specs", "launches"),
    [([KVCacheSpec(2, 8, 8, "bfloat16")] * 32, 1), ([MLA] * 32, 2), ([SPEC, MLA] * 16, 3)],
)
def test_blocks_are_copied_in_all_tensors_of_a_size_at_once(specs, launches):
    """Two launches for each size of block, in place of two for each tensor."""
    pool = KVPool(specs, 4, 16, CPU)
    with Counting() as counting:
        pool.copy_blocks([(0, 1), (2, 3)])
    assert counting.calls == {"index_select": launches, "index_copy_": launches}


def test_copies_reach_every_tensor_of_a_pool_that_32_bits_do_not_index():
    """Rows, not bytes, are indexed: torch would launch once for each 2 GiB."""
    pool = KVPool([KVCacheSpec(8, 128, 128, "float32")] * 3, 30_000, 4, CPU)
    assert pool.num_bytes > 1 << 31
    for number, tensor in enumerate(pool._memory.tensors, start=1):
        tensor[29_999] = number
    pool.copy_blocks([(29_999, 7)])
    assert [float(tensor[7].mean()) for tensor in pool._memory.tensors] == [1, 2, 3, 4, 5, 6]
    assert not any(tensor[8].any() or tensor[30_000].any() for tensor in pool._memory.tensors)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_the_memory_of_a_pool_costs_nothing_until_it_is_written():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = KVPool([KVCacheSpec(8, 64, 64, "float32")] * 4, 4096, 16, CPU)
    assert pool.num_bytes > GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


_RESIDENT = """
import ctypes, mmap
import torch
from pyengine.kv_cache.pool import KVCacheSpec, KVPool

def resident_share(tensor):
    # the share of a tensor's whole pages that are in memory
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * count)()
    length = ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), length, pages) == 0
    return sum(page & 1 for page in pages) / count

pool = KVPool([KVCacheSpec(8, 64, 64, "float32")] * 2, 1024, 16, torch.device("cpu"))
pool.keys[1][7] = 3.0
assert resident_share(pool.keys[1]) < 0.5
if pool.populate(256):
    assert [resident_share(tensor[:256]) for tensor in (*pool.keys, *pool.values)] == [1.0] * 4
    assert resident_share(pool.keys[0]) < 0.5
if pool.populate():  # not before Linux 5.14
    assert [resident_share(tensor) for tensor in (*pool.keys, *pool.values)] == [1.0] * 4
assert pool.keys[1][:9, 0, 0, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 0]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mincore")
def test_a_pool_can_take_its_memory_before_it_is_written() -> None:
    """In a new process: here the heap may have as much memory from earlier tests."""
    run_forked(_RESIDENT, timeout=60)


def test_a_pool_takes_its_memory_in_the_background_piece_by_piece(monkeypatch):
    monkeypatch.setattr("pyengine.kv_cache.pool._POPULATED", 2048)
    pieces = []
    monkeypatch.setattr(
        "pyengine.kv_cache.pool.populate", lambda *piece: pieces.append(piece) or True
    )
    pool = KVPool(LAYERS, 4, 16, CPU)
    pool.populate_in_background()
    for thread in threading.enumerate():
        if thread.name == "pyengine-populate":
            thread.join(60)
    assert pieces == every_piece(pool, 2)


def test_a_pool_takes_the_memory_of_its_first_blocks_a_piece_a_call(monkeypatch):
    monkeypatch.setattr("pyengine.kv_cache.pool._POPULATED", 2048)
    pieces = []
    monkeypatch.setattr(
        "pyengine.kv_cache.pool.populate", lambda *piece: pieces.append(piece) or True
    )
    pool = KVPool(LAYERS, 4, 16, CPU)
    expected = every_piece(pool, 2)
    assert not pool.populate_piece(0)
    for count, end in ((1, 8), (2, 8), (3, 16), (99, 24)):
        while pool.populate_piece(count):
            pass
        assert pieces == expected[:end]


def test_a_pool_whose_memory_the_system_does_not_populate_says_so(monkeypatch):
    monkeypatch.setattr("pyengine.kv_cache.pool.populate", lambda *_: False)
    assert not KVPool(LAYERS, 4, 16, CPU).populate_piece(4)


def every_piece(pool, count):
    """Address and bytes of so many blocks of each tensor, then of the next ones."""
    return [
        (tensor[first].data_ptr(), tensor[first : first + count].nbytes)
        for first in range(0, pool.num_blocks + 1, count)
        for tensor in [*pool.keys, *pool.values]
    ]


def test_a_pool_on_a_device_has_its_memory():
    pool = KVPool(LAYERS, 4, 16, torch.device("meta"))
    assert not pool.populate()
    assert not pool.populate_piece(4)
    pool.populate_in_background()
    assert "pyengine-populate" not in [thread.name for thread in threading.enumerate()]


def test_rows_are_written_where_their_slots_say():
    pool = KVPool([SPEC] * 2, num_blocks=3, block_size=2, device=CPU)
    keys, values = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(1, keys, values, torch.tensor([5, 0, 3]))
    assert torch.equal(pool.keys[1][2, 1], keys[0])
    assert torch.equal(pool.keys[1][0, 0], keys[1])
    assert torch.equal(pool.values[1][1, 1], values[2])
    assert int(pool.values[1].flatten(2).any(-1).sum()) == 3
    assert not pool.keys[0].any()


def test_8_bit_floats_halve_the_memory_and_double_what_fits(monkeypatch):
    monkeypatch.setattr(pool_size, "available_memory", lambda device: 16 * GIB)
    wide, narrow = ([KVCacheSpec(8, 64, 64, dtype)] * 3 for dtype in ("bfloat16", "float8_e4m3fn"))
    assert 2 * bytes_per_block(narrow, 16) == bytes_per_block(wide, 16)
    sizes = [
        resolve_num_blocks(PoolSettings(block_size=16, kv_cache_memory=GIB), specs, CPU).num_blocks
        for specs in (wide, narrow)
    ]
    assert (sizes[1] + 1) // 2 == sizes[0] + 1  # the null block is paid for, too
    pools = [KVPool(specs, 3, 16, CPU) for specs in (wide, narrow)]
    assert 2 * pools[1].num_bytes == pools[0].num_bytes
    assert pools[1].num_bytes == sum(t.nbytes for t in (*pools[1].keys, *pools[1].values))


def test_a_pool_of_8_bit_floats_copies_blocks():
    pool = KVPool([KVCacheSpec(1, 2, 2, "float8_e4m3fn")], 3, 2, CPU)
    rows = torch.tensor([[[1.5, -2.0]], [[0.25, 448.0]]])
    pool.write(0, rows, -rows, torch.tensor([0, 1]))
    pool.copy_blocks([(0, 2)])
    assert torch.equal(pool.keys[0][2].float(), rows)
    assert torch.equal(pool.values[0][2].float(), -rows)
    assert not pool.keys[0][1].float().any()


def test_a_pool_of_int8_has_a_scale_for_each_head_of_a_token():
    spec = KVCacheSpec(3, 64, 32, "int8")
    assert spec.bytes_per_block(16) == 16 * 3 * (64 + 4 + 32 + 4)
    pool = KVPool([spec], 4, 16, CPU)
    assert pool.keys[0].shape == (5, 16, 3, 68) and pool.values[0].shape == (5, 16, 3, 36)
    assert pool.num_bytes == pool.keys[0].nbytes + pool.values[0].nbytes


def test_blocks_of_int8_differ_by_the_numbers_that_they_stand_for():
    pool = KVPool([KVCacheSpec(1, 2, 2, "int8")], 3, 1, CPU)
    for block, (number, scale) in enumerate([(100, 0.5), (50, 1.0), (51, 1.0)]):
        for tensor in (pool.keys[0], pool.values[0]):
            tensor[block, 0, 0, :2] = torch.tensor([number, 0])
            tensor[block, 0, 0, 2:] = torch.tensor([scale]).view(torch.int8)
    assert pool.differences([0, 0], [1, 2], 0) == pytest.approx([0, 1 / 50])
    pool.copy_blocks([(2, 0)])
    assert pool.differences([0], [2], 0) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_differences_of_blocks(dtype):
    spec = KVCacheSpec(num_kv_heads=2, head_dim_k=8, head_dim_v=4, dtype=dtype_of(dtype))
    pool = KVPool([spec] * 3, 6, 4, CPU)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.ones_like(tensor, dtype=torch.float32).to(dtype))
    pool.values[2][4, 3, 1, 0] = 3  # one of 32 numbers
    pool.keys[0][5] = float("nan")
    assert pool.differences([0, 1], [2, 2], 0) == [0, 0]
    small, broken = pool.differences([1, 1], [4, 5], 0)
    assert small == pytest.approx(2 / 32**0.5)
    assert math.isnan(broken)


@pytest.mark.parametrize("name", ["twice", "int8 with scales", "three halves"])
def test_differences_are_those_of_the_group_s_layers(name):
    """The bytes that another group left in parts without a layer are no difference."""
    pool = pool_of_parts(name)
    for tensor in pool._memory.tensors:
        tensor[1] = 9
    last = len(pool.groups.windows) - 1
    layers = [at for at, location in enumerate(pool.groups.locations) if location.group == last]
    location, spec = pool.groups.locations[layers[-1]], pool.specs[layers[-1]]
    assert location.part + 1 < location.parts
    for layer in layers:
        parts, part = pool.groups.locations[layer].parts, pool.groups.locations[layer].part
        for tensor in (pool.keys[layer], pool.values[layer]):
            for block in (0, 1, 2):
                tensor[block * parts + part] = 1
                if spec.dtype == "int8":
                    tensor[block * parts + part, ..., -4:].view(torch.float32).fill_(1.0)
    assert pool.differences([0, 0, 1], [1, 2, 2], last) == [0, 0, 0]
    pool.values[layers[-1]][2 * location.parts + location.part, 1, 0, 0] += 1
    (error,) = pool.differences([0], [2], last)
    assert error == pytest.approx((3 * spec.num_kv_heads * spec.head_dim_v) ** -0.5)
