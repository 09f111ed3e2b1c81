"""The binding of attention on the CPU: its refusals and their messages."""

import threading

import numpy as np
import pytest

from pyengine.cpu import BufferError, ConfigError, CpuAttention, CpuCache, CpuStep

pytestmark = pytest.mark.levels

BLOCKS, BLOCK, HEADS, KV_HEADS, DIM_K, DIM_V = 3, 2, 4, 2, 3, 1


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def cache() -> CpuCache:
    return CpuCache(floats(BLOCKS, BLOCK, KV_HEADS, DIM_K), floats(BLOCKS, BLOCK, KV_HEADS, DIM_V))


def step(where: CpuCache, **changed: object) -> CpuStep:
    arrays: dict[str, object] = {
        "query_start_loc": np.array([0, 1], np.int32),
        "seq_lens": np.array([3], np.int32),
        "block_tables": np.array([[2, 0]], np.int32),
        "slots": np.array([0]),
    }
    return CpuStep(where, **{**arrays, **changed})  # type: ignore[arg-type]


def forward(where: CpuCache | None = None, plan: CpuStep | None = None, **changed: object):
    where = where or cache()
    arrays: dict[str, object] = {
        "query": floats(1, HEADS, DIM_K),
        "key": floats(1, KV_HEADS, DIM_K),
        "value": floats(1, KV_HEADS, DIM_V),
        "out": np.zeros((1, HEADS, DIM_V), np.float32),
        "scaling": 1.0,
    }
    arguments = {**arrays, **changed}
    CpuAttention(1).forward(plan or step(where), where, **arguments)  # type: ignore[arg-type]
    return arguments["out"]


def test_it_writes_then_attends():
    keys, values = (np.zeros((BLOCKS, BLOCK, KV_HEADS, dim), np.float32) for dim in (DIM_K, DIM_V))
    out = forward(CpuCache(keys, values), value=floats(1, KV_HEADS, DIM_V) * 9)
    assert (values[0, 0] == 9).all()
    assert (keys[0, 0] == 1).all()
    weight = np.exp(3) / (np.exp(3) + 2)  # one key of ones, two of zeros
    np.testing.assert_allclose(out, np.full((1, HEADS, DIM_V), 9 * weight), rtol=1e-6)


def halves(*shape: int) -> np.ndarray:
    """Ones in bfloat16."""
    return np.full(shape, 0x3F80, np.uint16)


def test_bfloat16_comes_as_its_bits():
    keys, values = (np.zeros((BLOCKS, BLOCK, KV_HEADS, dim), np.uint16) for dim in (DIM_K, DIM_V))
    rows = {"query": halves(1, HEADS, DIM_K), "key": halves(1, KV_HEADS, DIM_K)}
    out = np.zeros((1, HEADS, DIM_V), np.uint16)
    where = CpuCache(keys, values)
    forward(where, value=halves(1, KV_HEADS, DIM_V), out=out, **rows)
    assert (values[0, 0] == 0x3F80).all()
    weight = np.exp(3) / (np.exp(3) + 2)  # one key of ones, two of zeros
    actual = (out.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(actual, np.full((1, HEADS, DIM_V), weight), rtol=2**-8)
    with pytest.raises(BufferError, match="array query has format"):
        forward(where)
    with pytest.raises(BufferError, match="array values has format"):
        CpuCache(keys, values.astype(np.float32))


def turning(cos=None, sin=None, size=2, step=1, norm=None):
    """Two of a head's three numbers, for one row."""
    cos, sin = (floats(1, 1) if item is None else item for item in (cos, sin))
    return cos, sin, size, False, step, norm


def test_rows_may_be_parts_of_longer_ones_and_are_turned():
    keys, values = (np.zeros((BLOCKS, BLOCK, KV_HEADS, dim), np.float32) for dim in (DIM_K, DIM_V))
    product = np.arange(2 * 22, dtype=np.float32).reshape(2, 22)
    query, key, value = np.split(product[:, :20], [12, 18], axis=1)
    two = {
        "query_start_loc": np.array([0, 2], np.int32),
        "seq_lens": np.array([3], np.int32),
        "slots": np.array([5, 0]),
    }
    where, out = CpuCache(keys, values), np.zeros((2, HEADS, DIM_V), np.float32)
    quarter = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    forward(
        where,
        step(where, **two),
        query=query.reshape(2, 4, 3),
        key=key.reshape(2, 2, 3),
        value=value.reshape(2, 2, 1),
        out=out,
        rotation=turning(*quarter),
    )
    assert keys[2, 1].tolist() == [[-13, 12, 14], [-16, 15, 17]]  # (x, y, z) to (-y, x, z)
    assert values[0, 0].ravel().tolist() == [40, 41]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query_start_loc": np.array([0, 1])}, "query_start_loc has format"),
        ({"query_start_loc": np.array([0], np.int32)}, "query_start_loc has 1 elements"),
        ({"query_start_loc": np.array([0, -1], np.int32)}, r"query_start_loc\[1\]=-1"),
        ({"seq_lens": np.array([0], np.int32)}, r"seq_lens\[0\]=0"),
        ({"seq_lens": np.array([5], np.int32)}, "needs 3 blocks, block_tables has 2 columns"),
        ({"block_tables": np.array([2, 0], np.int32)}, "block_tables has 1 dimensions, not 2"),
        ({"block_tables": np.array([[2, 3]], np.int32)}, "block 3 of sequence 0"),
        ({"block_tables": np.array([[-5, 0]], np.int32)}, "block -5 of sequence 0"),
        ({"block_tables": np.array([[2, 9, 0, 9]], np.int32)[:, ::2]}, "not contiguous"),
        ({"slots": np.array([0, 0])}, "slots has 2 elements, the step has 1 tokens"),
        ({"slots": [0]}, "slots has no buffer"),
    ],
)
def test_steps_that_do_not_fit(changed, words):
    with pytest.raises(BufferError, match=words):
        step(cache(), **changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": floats(1, HEADS, DIM_K + 1)}, "query has 16 elements"),
        ({"query": np.ones((1, HEADS, DIM_K))}, 'query has format "d", not that of f32'),
        ({"query": floats(1, HEADS, DIM_K).astype(">f4")}, "query has format"),
        ({"key": floats(2, KV_HEADS, DIM_K)}, "key has 12 elements"),
        ({"value": floats(1, KV_HEADS)}, "value has 2 dimensions, not 3"),
        ({"query": floats(1, DIM_K, HEADS).transpose(0, 2, 1)}, "query has rows that are not cont"),
        ({"key": floats(1, KV_HEADS, 2 * DIM_K)[..., ::2]}, "key has rows that are not contiguous"),
        ({"rotation": turning(cos=floats(2, 1))}, "the sines has 1 elements"),
        ({"rotation": turning(cos=floats(1, 0), sin=floats(1, 0))}, "the cosines has 0 elements"),
        ({"rotation": turning(sin=halves(1, 1))}, "sin has format"),
        ({"rotation": turning(norm=(floats(2), floats(3), 0.1, 0.0))}, "queries' norm has 2"),
        ({"rotation": turning(norm=(floats(3), halves(3), 0.1, 0.0))}, "keys' norm has format"),
        ({"out": floats(1, HEADS, 2)}, "out has 8 elements"),
        ({"sinks": floats(3)}, "sinks has 3 elements"),
        ({"out": np.frombuffer(bytes(16), np.float32).reshape(1, 4, 1)}, "out is read-only"),
    ],
)
def test_arrays_that_do_not_fit(changed, words):
    with pytest.raises(BufferError, match=words):
        forward(**changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": floats(1, 3, DIM_K)}, "3 query heads cannot share 2 KV heads"),
        ({"sliding_window": 0}, "the sliding window is 0"),
        ({"sliding_window": -1}, "sliding_window=-1"),
        ({"softcap": 0.0}, "softcap=0"),
        ({"rotation": turning(size=4)}, "rotation of 4 of 3 numbers by every 1th angle"),
        ({"rotation": turning(step=0)}, "the step at least 1"),
    ],
)
def test_settings_that_cannot_be(changed, words):
    with pytest.raises(ConfigError, match=words):
        forward(**changed)
    with pytest.raises(ConfigError, match="threads is 0"):
        CpuAttention(0)
    with pytest.raises(ConfigError, match=r"threads could not be started: /no/such/libgomp\.so: "):
        CpuAttention(2, "/no/such/libgomp.so")


@pytest.mark.parametrize("slot", [-2, BLOCKS * BLOCK])
def test_a_slot_beyond_the_cache(slot):
    where = cache()
    out = np.full((1, HEADS, DIM_V), 5, np.float32)
    with pytest.raises(BufferError, match=f"slot {slot} of row 0"):
        forward(where, step(where, slots=np.array([slot])), out=out)
    assert (out == 5).all()


def test_caches_that_do_not_fit():
    with pytest.raises(BufferError, match="differ in more than the last dimension"):
        CpuCache(floats(3, 2, 2, 3), floats(3, 1, 2, 3))
    with pytest.raises(BufferError, match="keys has 3 dimensions, not 4"):
        CpuCache(floats(3, 2, 2), floats(3, 2, 2, 1))
    larger = CpuCache(floats(4, 2, 2, 3), floats(4, 2, 2, 1))
    with pytest.raises(BufferError, match="the cache has 4 blocks of 2, the step was made for 3"):
        forward(larger, step(cache()))


def test_arrays_that_share_memory():
    keys = floats(BLOCKS, BLOCK, KV_HEADS, DIM_K)
    with pytest.raises(BufferError, match="keys and values share memory"):
        CpuCache(keys, keys)
    where = CpuCache(keys, floats(BLOCKS, BLOCK, KV_HEADS, DIM_V))
    with pytest.raises(BufferError, match="keys and query share memory"):
        forward(where, query=keys.reshape(-1)[12:24].reshape(1, HEADS, DIM_K))
    with pytest.raises(BufferError, match="out and keys share memory"):
        forward(where, out=keys.reshape(-1)[:4].reshape(1, HEADS, DIM_V))
    query = floats(1, HEADS, DIM_K)
    with pytest.raises(BufferError, match="out and query share memory"):
        forward(where, query=query, out=query.reshape(-1)[:4].reshape(1, HEADS, DIM_V))


def test_two_threads_never_write_to_one_cache():
    """One of them is refused, or they come one after the other; the numbers are right."""
    where = cache()
    seen: list[str] = []

    def work() -> None:
        for _ in range(200):
            try:
                assert (forward(where) == 1).all()
            except BufferError as error:
                seen.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) <= {"another thread attends over this cache"}


@pytest.mark.parametrize("name", ["order", "prefixes"])
def test_what_is_shared_is_told_whole_or_not_at_all(name):
    shared = {"order": np.zeros(1, np.int32), "prefixes": np.zeros((0, 5), np.int32)}
    where = cache()
    step(where, **shared)
    with pytest.raises(BufferError, match="order and prefixes is missing: give both or neither"):
        step(where, **{name: shared[name]})
