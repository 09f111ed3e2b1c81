"""The bytes of a block, and how many blocks fit into the memory or into a budget."""

from types import SimpleNamespace

import pytest

from pyengine.errors import ConfigurationError
from pyengine.kv_cache import pool_size
from pyengine.kv_cache.pool import KVCacheSpec, bytes_per_block, resolve_kv_cache_dtype
from pyengine.kv_cache.pool_size import PoolSettings, resolve_num_blocks
from pyengine.utils.devices import CPU
from tests.support.processes import run_python

GIB = 1 << 30
SPEC = KVCacheSpec(num_kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")
LAYERS = [SPEC] * 4  # 4 layers * 2 heads * (8 + 8) * 4 bytes = 512 bytes per token


@pytest.fixture
def memory(monkeypatch):
    def available(num_bytes: int) -> None:
        monkeypatch.setattr(pool_size, "available_memory", lambda device: num_bytes)

    available(16 * GIB)
    return available


def test_importing_the_cache_imports_no_torch():
    code = (
        "import sys, pyengine.kv_cache, pyengine.kv_cache.pool; assert 'torch' not in sys.modules"
    )
    run_python(code)


def test_bytes_of_a_block():
    assert SPEC.bytes_per_block(16) == 16 * 2 * 16 * 4
    assert bytes_per_block(LAYERS, 16) == 8192
    wide = KVCacheSpec(1, 20, 10, "bfloat16")
    assert bytes_per_block([SPEC, wide], 1) == 128 + 60


def test_the_number_asked_for_is_given_with_its_bytes(memory):
    size = resolve_num_blocks(PoolSettings(block_size=16, num_blocks=9), LAYERS, CPU)
    assert (size.num_blocks, size.num_bytes) == (9, 10 * 8192)


def test_a_budget_pays_for_the_null_block_too(memory):
    settings = PoolSettings(block_size=16, kv_cache_memory=10 * 8192 + 1)
    assert resolve_num_blocks(settings, LAYERS, CPU).num_blocks == 9


def test_the_default_is_a_quarter_of_the_memory_and_at_most_four_gib(memory):
    settings = PoolSettings(block_size=16, max_num_seqs=10**6)
    memory(8 * GIB)
    assert resolve_num_blocks(settings, LAYERS, CPU).num_bytes == 2 * GIB
    memory(100 * GIB)
    assert resolve_num_blocks(settings, LAYERS, CPU).num_bytes == 4 * GIB


def test_the_default_on_cuda_is_the_share_of_what_is_free(memory):
    settings = PoolSettings(block_size=16, max_num_seqs=10**6, gpu_memory_utilization=0.5)
    size = resolve_num_blocks(settings, LAYERS, SimpleNamespace(type="cuda", index=0))
    assert size.num_bytes == 8 * GIB
    assert "50%" in size.reason


def test_the_default_never_exceeds_what_the_sequences_can_use(memory):
    settings = PoolSettings(block_size=16, max_num_seqs=3, max_model_len=33)
    assert resolve_num_blocks(settings, LAYERS, CPU).num_blocks == 9


def test_layer_groups_count_what_their_sequences_take(memory):
    settings = PoolSettings(block_size=16, max_num_seqs=3, max_model_len=33, blocks_per_seq=5)
    size = resolve_num_blocks(settings, LAYERS[:2], CPU)
    assert (size.num_blocks, size.num_bytes) == (15, 16 * 4096)


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(memory):
    memory(GIB)
    with pytest.raises(ConfigurationError) as caught:
        resolve_num_blocks(PoolSettings(block_size=16, num_blocks=10**9), LAYERS, CPU)
    message = str(caught.value)
    assert "num_blocks=1000000000" in message
    assert "7629.39 GiB" in message
    assert "1.00 GiB are available on cpu" in message
    assert f"at most num_blocks={GIB // 8192 - 1}" in message
    with pytest.raises(ConfigurationError, match=f"kv_cache_memory={2 * GIB}"):
        resolve_num_blocks(PoolSettings(block_size=16, kv_cache_memory=2 * GIB), LAYERS, CPU)


def test_what_would_fit_does_fit(memory):
    memory(GIB)
    largest = PoolSettings(block_size=16, num_blocks=GIB // 8192 - 1)
    assert resolve_num_blocks(largest, LAYERS, CPU).num_bytes == GIB


def test_a_budget_below_two_blocks_is_refused(memory):
    with pytest.raises(ConfigurationError, match="take 16384 bytes"):
        resolve_num_blocks(PoolSettings(block_size=16, kv_cache_memory=16383), LAYERS, CPU)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"kv_cache_memory": -1}, "kv_cache_memory=-1"),
        ({"num_blocks": 1, "kv_cache_memory": 1}, "both set"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization=0\.0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1\.5"),
    ],
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        PoolSettings(**{"block_size": 16, **fields})


def test_the_dtype_of_the_cache_has_a_name():
    assert resolve_kv_cache_dtype("auto", "float16") == "float16"
    assert resolve_kv_cache_dtype("int8", "float16") == "int8"
    for name in ("fp8", "fp8_e4m3"):
        assert resolve_kv_cache_dtype(name, "float16") == "float8_e4m3fn"
    with pytest.raises(ConfigurationError, match="kv_cache_dtype='int4' is not known"):
        resolve_kv_cache_dtype("int4", "float16")


def test_memory_that_something_else_limits(memory):
    memory(16 * GIB)
    limited = PoolSettings(block_size=16, num_blocks=10, available_memory=1 << 14)
    with pytest.raises(ConfigurationError, match=r"0\.00 GiB are available"):
        resolve_num_blocks(limited, LAYERS, CPU)
    roomy = PoolSettings(block_size=16, num_blocks=10, available_memory=1 << 20)
    assert resolve_num_blocks(roomy, LAYERS, CPU).num_blocks == 10
