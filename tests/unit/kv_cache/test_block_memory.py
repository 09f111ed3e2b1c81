"""Blocks between a pool and a store, with a device whose copies are queued."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.kv_cache import KVStore, StoreError, block_memory, kv_fingerprint
from pyengine.kv_cache.block_memory import Block, CopyStream, DeviceBlocks, HostBlocks
from pyengine.utils import host_copy
from pyengine.utils.tensors import array_of
from tests.support.kernels import run_apart
from tests.support.late_cuda import LateCuda

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 12, 4
GROUPS = [[0, 1, 3], [0, 2]]
"""Two layer groups that share a tensor; the rows of the last one are of odd length."""
BLOCK_BYTES = [4 * 2 * 8 * 2 + 4 * 16 * 4 + 21, 4 * 2 * 8 * 2 + 4 * 24]
FINGERPRINTS = [kv_fingerprint([("group", bytes([group]))]) for group in range(2)]
TOKENS = list(range(BLOCK_SIZE * 5))


def tensors(seed: int) -> list[torch.Tensor]:
    """Of 16-bit, 32-bit and 8-bit floats, and of bytes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (NUM_BLOCKS, *shape), generator=generator, dtype=torch.uint8)

    return [
        random(BLOCK_SIZE, 2, 16).view(torch.bfloat16),
        random(BLOCK_SIZE, 64).view(torch.float32),
        random(BLOCK_SIZE, 24).view(torch.float8_e4m3fn),
        random(21),
    ]


def bits(pool: list[torch.Tensor], block: int, group: int) -> list[bytes]:
    return [pool[at][block].reshape(-1).view(torch.uint8).numpy().tobytes() for at in GROUPS[group]]


def everything(pool: list[torch.Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in pool]


def on_host(pool: list[torch.Tensor]) -> HostBlocks:
    return HostBlocks([array_of(tensor.view(torch.uint8)) for tensor in pool], GROUPS)


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    yield store
    store.close(5)


@pytest.fixture(params=[1, 3 * sum(BLOCK_BYTES), 8 << 20])
def staging(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time, some, all."""
    monkeypatch.setattr(block_memory, "_STAGING_BYTES", request.param)


def prefix_of(store: KVStore) -> Any:
    return store.prefix(TOKENS, BLOCK_SIZE, fingerprints=FINGERPRINTS)


def blocks_of(random: Random) -> list[Block]:
    """Every block of both groups, anywhere in the pool."""
    ids = random.sample(range(NUM_BLOCKS), 10)
    keys = [(index, group) for index in range(5) for group in range(2)]
    random.shuffle(keys)
    return [(index, group, block) for (index, group), block in zip(keys, ids, strict=True)]


@pytest.mark.usefixtures("staging")
@pytest.mark.parametrize("seed", range(5))
def test_what_a_device_stores_a_host_restores_and_back(seed: int, store: KVStore) -> None:
    random, stored, target = Random(seed), tensors(seed), tensors(seed + 100)
    source, goal = blocks_of(random), blocks_of(random)
    sides: Any = [on_host, lambda pool: DeviceBlocks(pool, GROUPS)]
    random.shuffle(sides)
    storing, loading = sides[0](stored), sides[1](target)
    assert [storing.block_bytes(group) for group in range(2)] == BLOCK_BYTES
    assert [loading.block_bytes(group) for group in range(2)] == BLOCK_BYTES
    before = everything(stored)
    assert len(storing.store(prefix_of(store), source)) == 10
    assert everything(stored) == before
    assert store.flush(10)
    untouched = {block for block in range(NUM_BLOCKS) if block not in {b for *_, b in goal}}
    kept = [[tensor[block].clone() for block in sorted(untouched)] for tensor in target]
    assert len(loading.load(prefix_of(store), goal, loading.mark())) == 10
    by_key = {(index, group): block for index, group, block in source}
    for index, group, block in goal:
        assert bits(target, block, group) == bits(stored, by_key[index, group], group)
    for tensor, rows in zip(target, kept, strict=True):
        for block, row in zip(sorted(untouched), rows, strict=True):
            assert torch.equal(tensor[block].view(torch.uint8), row.view(torch.uint8))


@pytest.mark.usefixtures("staging")
def test_a_load_ends_at_the_first_block_that_is_missing(store: KVStore) -> None:
    stored, target = tensors(1), tensors(2)
    DeviceBlocks(stored, GROUPS).store(prefix_of(store), [(0, 0, 1), (1, 0, 2), (3, 0, 3)])
    assert store.flush(10)
    memory = DeviceBlocks(target, GROUPS)
    rest = [bits(target, block, 0) for block in (7, 8)]
    goal = [(0, 0, 5), (1, 0, 6), (2, 0, 7), (3, 0, 8)]
    assert len(memory.load(prefix_of(store), goal, memory.mark())) == 2
    assert [bits(target, block, 0) for block in (5, 6)] == [bits(stored, b, 0) for b in (1, 2)]
    assert [bits(target, block, 0) for block in (7, 8)] == rest
    assert len(memory.load(prefix_of(store), [], memory.mark())) == 0


@pytest.mark.usefixtures("staging")
def test_a_store_ends_at_the_first_block_that_is_dropped() -> None:
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20, queue_bytes=1)
    memory = DeviceBlocks(tensors(1), GROUPS)
    assert len(memory.store(prefix_of(store), [(0, 0, 1), (1, 0, 2)])) == 0
    store.close(5)


@pytest.fixture
def late(request: Any, monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    """A device on which work runs late, or with a seed of a test's, any time."""
    seed = getattr(request, "param", None)
    device = LateCuda(None if seed is None else Random(seed))
    device.install(monkeypatch)
    monkeypatch.setattr(block_memory, "_HostStream", lambda: CopyStream(CPU))
    return device


SEEDS = pytest.mark.parametrize("late", [None, *range(20)], indirect=True)


@SEEDS
@pytest.mark.usefixtures("staging")
def test_copies_are_complete_when_a_call_returns(late: LateCuda, store: KVStore) -> None:
    """A store has the bytes of before the next write; a load is there for the next read."""
    random = Random(3)
    stored, target = tensors(1), tensors(2)
    source, goal = blocks_of(random), blocks_of(random)
    expected = {(index, group): bits(stored, block, group) for index, group, block in source}
    memory = DeviceBlocks(stored, GROUPS)
    assert len(memory.store(prefix_of(store), source)) == 10
    for tensor in stored:  # the blocks are free, and others write to them
        tensor.view(torch.uint8).zero_()
    assert store.flush(10)
    memory = DeviceBlocks(target, GROUPS)
    for _ in range(2):  # staging memory that was used before
        for tensor in target:
            tensor.view(torch.uint8).zero_()
        assert len(memory.load(prefix_of(store), goal, memory.mark())) == 10
        for index, group, block in goal:
            assert bits(target, block, group) == expected[index, group]
    assert len(late.streams) == 5  # that of the steps, and one each way
    assert all(stream.num_done == len(stream.queue) for stream in late.streams)


@SEEDS
@pytest.mark.usefixtures("staging")
def test_a_load_comes_after_a_step_that_still_writes(late: LateCuda, store: KVStore) -> None:
    """As one that was rolled back on the host while the device runs it."""
    stored, target = tensors(1), tensors(2)
    DeviceBlocks(stored, GROUPS).store(prefix_of(store), [(0, 0, 1)])
    assert store.flush(10)
    memory = DeviceBlocks(target, GROUPS)
    with late.using(late.steps):
        late.queue(target[1][7].zero_)
    mark = memory.mark()
    with late.using(late.steps):
        late.queue(target[1][8].zero_)
    next_step = target[1][8].clone()
    assert len(memory.load(prefix_of(store), [(0, 0, 7)], mark)) == 1
    late.steps.run_up_to(1)
    assert bits(target, 7, 0) == bits(stored, 1, 0)
    if late._random is None:  # the load has waited for no later step
        assert torch.equal(target[1][8], next_step)


def test_an_error_of_the_device_fails_the_transfer_after_its_copies(
    late: LateCuda, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tensors(1)
    memory = DeviceBlocks(pool, GROUPS)
    memory.store(prefix_of(store), [(0, 0, 1), (1, 0, 2)])
    assert store.flush(10)
    scatter, calls = torch.Tensor.index_copy_, []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("as if memory were short")
        return scatter(*args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fail)
    with pytest.raises(StoreError, match="as if memory were short"):
        memory.load(prefix_of(store), [(0, 0, 7)], memory.mark())
    assert all(stream.num_done == len(stream.queue) for stream in late.streams)


class CudaCopies(TorchDispatchMode):
    """Checks copies between host and device for what overlaps with steps, and counts them."""

    def __init__(self, cuda: LateCuda, pinned: set[int], fake: Any) -> None:
        super().__init__()
        self.cuda, self.pinned, self.fake = cuda, pinned, fake
        self.numbers = {"to device": 0, "to host": 0}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
        if func is torch.ops.aten._to_copy.default and "device" in kwargs:
            assert (devices, kwargs["device"].type) == ({"cpu"}, "cuda")
            self.check("to device", args[0], kwargs)
            with self.fake:
                return torch.empty(args[0].shape, dtype=args[0].dtype, device="cuda")
        elif func is torch.ops.aten.copy_.default and len(devices) == 2:
            assert args[0].device.type == "cpu"
            self.check("to host", args[0], {"non_blocking": len(args) > 2 and args[2]})
            return args[0]
        else:
            assert len(devices) < 2, f"{func} mixes {devices}"
        return func(*args, **kwargs)

    def check(self, way: str, host: torch.Tensor, kwargs: Any) -> None:
        self.numbers[way] += 1
        assert kwargs.get("non_blocking"), f"the host waits for the copy {way}"
        assert host.untyped_storage().data_ptr() in self.pinned, "pageable memory"
        assert self.cuda.current in self.cuda.streams[1:], "in the stream of the steps"


def run_on_fake_cuda() -> None:
    """Tensors on "cuda" that have no bytes: what is asked of the device, not what it does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.support.cuda_lowering import pretend_cuda

    pretend_cuda()
    monkeypatch, cuda, pinned = pytest.MonkeyPatch(), LateCuda(), set[int]()
    kept = []
    zeros = torch.zeros

    def pinned_zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        zeroed = zeros(*args, **kwargs)
        return pin(zeroed) if pin_memory else zeroed

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def copied_and_pinned(tensor: torch.Tensor) -> torch.Tensor:
        return pin(tensor.clone())

    cuda.install_streams(monkeypatch)
    monkeypatch.setattr(torch, "zeros", pinned_zeros)
    monkeypatch.setattr(torch.Tensor, "pin_memory", copied_and_pinned)
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    fake = FakeTensorMode()
    with fake:
        pool = [fake.from_tensor(tensor).to("cuda") for tensor in tensors(1)]
    memory = DeviceBlocks(pool, GROUPS)
    copies = CudaCopies(cuda, pinned, fake)
    source: list[Block] = [(0, 0, 1), (0, 1, 2), (1, 0, 3)]
    with copies:
        assert len(memory.store(prefix_of(store), source)) == 3
        assert copies.numbers == {"to device": 2, "to host": 5}
        assert store.flush(10)
        assert len(memory.load(prefix_of(store), source, memory.mark())) == 3
    assert copies.numbers == {"to device": 2 + 2 + 5, "to host": 5}
    store.close(5)
    wait_for_a_step_without_tokens(cuda, fake)


def wait_for_a_step_without_tokens(cuda: LateCuda, fake: Any) -> None:
    """What is committed was computed: a store waits for no step."""
    from pyengine.sampling.sampler import sample

    has_run: list[bool] = []
    with cuda.using(cuda.steps):
        cuda.queue(lambda: has_run.append(True))
    with fake:
        logits = torch.empty(0, 50, device="cuda")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_copy, "_pinned_copy", lambda tensor: torch.zeros(len(tensor)))
        sampled = sample(logits, [])
    assert not has_run
    sampled.wait()
    assert has_run


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")
def test_what_is_asked_of_cuda(tmp_path: Path) -> None:
    run_apart(__name__, "run_on_fake_cuda", TRITON_CACHE_DIR=str(tmp_path))
