"""KV of a folder or of host memory: restored prefixes give the bits that computed ones gave."""

import json
import os
import shutil
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.config import STORE_KEY_VARIABLE
from pyengine.cpu import CpuAttention
from pyengine.engine import builder, offloading
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.kv_cache import block_memory, pool
from pyengine.kv_cache.block_memory import DeviceBlocks
from pyengine.server.metrics import EngineMetrics
from tests.support.checkpoints import FAMILIES, read_weights, save_random, save_weights
from tests.support.processes import run_python
from tests.support.read_only import read_only

GIB = 1 << 30
WITH_LOGPROBS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, logprobs=5)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)


def tokens(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, 32) for _ in range(length)]


def answer(llm: LLM, prompt: Any) -> tuple[list[Any], int]:
    """Tokens with their log-probabilities, to the bit, and how many tokens were restored."""
    (output,) = llm.generate([prompt], WITH_LOGPROBS, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    bits = [
        {token: value.logprob.hex() for token, value in each.items()}
        for each in completion.logprobs
    ]
    return [completion.token_ids, bits], output.num_restored_tokens


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take the way that they take on a device, few at a time."""

    import torch

    def blocks(arrays: Any, groups: Any) -> DeviceBlocks:
        return DeviceBlocks([torch.from_numpy(array) for array in arrays], groups)

    monkeypatch.setattr(pool, "HostBlocks", blocks)
    monkeypatch.setattr(block_memory, "_STAGING_BYTES", 1 << 14)
    monkeypatch.setattr(builder, "resolve_device", lambda _device: torch.device("cuda"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_restored_and_computed_are_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    check_bits(name, dtype, tmp_path)


def test_a_warm_start_allocates_the_memory_of_what_is_stored(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    populated: list[int | None] = []
    monkeypatch.setattr(
        pool.KVPool, "populate", lambda _, num_blocks=None: populated.append(num_blocks)
    )
    for _ in range(2):
        with LLM(tiny_folder, block_size=4, kv_cache_dir=tmp_path / "kv", device="cpu") as llm:
            answer(llm, tokens(20))
    (num_blocks,) = populated  # an empty folder needs no memory
    assert num_blocks is not None and num_blocks >= 5


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gemma3_text", "float32")])
def test_the_way_of_a_device_changes_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    check_bits(name, dtype, tmp_path)


@pytest.mark.usefixtures("device")
def test_host_memory_has_what_the_pool_has_evicted(tiny_folder: Path) -> None:
    settings: dict[str, Any] = {"block_size": 4, "kv_cache_host_memory": GIB, "device": "cpu"}
    with LLM(tiny_folder, **settings) as llm:
        about = llm.describe()
        assert (about["kv_cache_tier"], about["kv_cache_access"]) == ("host", "write")
        assert 0 < int(str(about["kv_cache_store_bytes"])) < GIB
        prompt = tokens(50)
        computed, restored = answer(llm, prompt)
        again, _ = answer(llm, prompt)
        assert restored == 0
        assert llm._offloader is not None
        deadline = monotonic() + 60
        while restored < 48 and monotonic() < deadline:  # once it is stored
            llm._manager.evict_all()
            evicted, restored = answer(llm, prompt)
        assert restored >= 48 and evicted[0] == computed[0] == again[0]
        found = [
            (sample.name, sample.labels["tier"])
            for family in EngineMetrics(llm, model_name="tiny").collect()
            for sample in family.samples
            if "tier" in sample.labels
        ]
        assert ("vllm:kv_offload_load_bytes_total", "host") in found
        assert ("pyengine:kv_store_restored_tokens_total", "host") in found
    with LLM(tiny_folder, **settings) as llm:
        assert answer(llm, prompt)[1] == 0  # it has ended with the process


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_in_int8_is_restored_and_read_by_no_other_dtype(dtype: str, tmp_path: Path) -> None:
    check_bits("llama", dtype, tmp_path, kv_cache_dtype="int8")
    settings: dict[str, Any] = {"dtype": dtype, "block_size": 4, "kv_cache_dir": tmp_path / "kv"}
    with LLM(tmp_path / "model", **settings) as llm:
        assert answer(llm, tokens(50))[1] == 0
    with LLM(tmp_path / "model", **settings, kv_cache_dtype="int8") as llm:
        assert answer(llm, tokens(50))[1] >= 48


def check_bits(name: str, dtype: str, tmp_path: Path, **others: Any) -> None:
    """Compute, restart, restore."""
    model = tmp_path / "model"
    save_random(model, name, **FAMILIES[name])
    settings: dict[str, Any] = {
        "dtype": dtype,
        "block_size": 4,
        "linear_backend": "pyengine",
        "partial_reuse": False,  # what is computed beside the cached blocks is the same
        "num_threads": 2,  # not fewer when processors are taken: torch divides sums by threads
        "kv_cache_dir": tmp_path / "kv",
        "kv_cache_disk": GIB,
        **others,
    }
    prompt = tokens(50)
    with LLM(model, **settings) as llm:
        computed, restored = answer(llm, prompt)
        assert restored == 0
        # A block that is pinned to be stored keeps its KV when another request computes it again.
        assert llm._offloader is not None and llm._offloader.flush(60)
        again, _ = answer(llm, prompt)  # cached in the pool
    with LLM(model, **settings) as llm:
        from_disk, restored = answer(llm, prompt)
        assert restored >= 48
    assert llm.stats().store["restored_tokens"] >= 48  # closed, and still there to be read
    assert from_disk == again
    if dtype == "float32" and name != "gpt_oss":  # a row has the same bits in every batch
        assert from_disk == computed
    assert from_disk[0] == computed[0]


def test_the_embedded_model_after_a_restart(tmp_path: Path) -> None:
    """In processes of their own, as a user has it."""
    code = """
import json, sys
from pyengine import LLM, SamplingParams
text = "The capital of France is Paris. The capital of Japan is Tokyo. " * 25
with LLM(kv_cache_dir=sys.argv[1], kv_cache_disk=1 << 30, dtype=sys.argv[2],
         kv_cache_memory=1 << 28, max_num_seqs=8) as llm:
    [output] = llm.generate([text + "The capital of Italy is"],
                            SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    computed = llm.stats().counters["computed_tokens"]
print(json.dumps([output.outputs[0].text, output.num_restored_tokens, computed]))
"""
    for dtype in ("float32", "bfloat16"):
        found = []
        for _ in range(2):
            done = run_python(code, tmp_path / "kv", dtype)
            found.append(json.loads(done.stdout))
        (first, restored, computed), (second, restored_now, computed_now) = found
        assert "Rome" in first and second == first
        assert restored == 0 and restored_now > 300
        assert computed_now <= 16 + 4 < 300 < computed


def test_other_weights_and_types_share_nothing(tmp_path: Path) -> None:
    """The same folder, the same configuration: by content, not by name."""
    model, prompt = tmp_path / "model", tokens(50)
    settings: dict[str, Any] = {
        "block_size": 4,
        "kv_cache_dir": tmp_path / "kv",
        "kv_cache_disk": GIB,
    }
    save_random(model, "llama")
    with LLM(model, dtype="float32", **settings) as llm:
        answer(llm, prompt)
    with LLM(model, dtype="bfloat16", **settings) as llm:
        assert answer(llm, prompt)[1] == 0
    weights = read_weights(model)
    next(iter(weights.values())).flat[-1] += 1
    save_weights(model / "model.safetensors", weights)
    with LLM(model, dtype="float32", **settings) as llm:
        assert answer(llm, prompt)[1] == 0
        assert llm.describe()["kv_cache_entries"] >= 24


def test_a_second_engine_reads_what_the_first_one_writes(tiny_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "block_size": 4,
        "kv_cache_dir": tmp_path / "kv",
        "kv_cache_disk": GIB,
    }
    with LLM(tiny_folder, **settings) as writer, LLM(tiny_folder, **settings) as reader:
        assert writer.describe()["kv_cache_access"] == "write"
        assert reader.describe()["kv_cache_access"] == "read: another process writes"
        prompt = tokens(50)
        expected, _ = answer(writer, prompt)
        writer._offloader._store.flush(10)  # type: ignore[union-attr]
        deadline = monotonic() + 60
        restored = 0
        while monotonic() < deadline:  # a reader looks once a second
            found, restored = answer(reader, [*prompt, 5])
            if restored:
                break
            reader._manager.evict_all()
            sleep(0.1)
        assert restored >= 48
        assert found[0] == answer(writer, [*prompt, 5])[0][0]
        assert answer(reader, prompt)[0][0] == expected[0]


def refusal(tiny_folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        LLM(tiny_folder, **settings)
    return str(raised.value)


def test_folders_that_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "notes.txt").write_text("mine")
    assert "not empty and not a KV store" in refusal(tiny_folder, kv_cache_dir=mine)
    assert (mine / "notes.txt").read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(tiny_folder, kv_cache_dir=link)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    os.chmod(open_to_all, 0o755)
    said = refusal(tiny_folder, kv_cache_dir=open_to_all)
    assert "accessible to other users" in said and "chmod" not in said
    (open_to_all / "notes.txt").write_text("mine")
    said = refusal(tiny_folder, kv_cache_dir=open_to_all)
    assert "not a KV store" in said and "chmod" not in said
    assert "Not a directory" in refusal(tiny_folder, kv_cache_dir=mine / "notes.txt")


def test_a_key_of_the_environment_authenticates_entries(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = tmp_path / "kv", tokens(50)
    monkeypatch.setenv(STORE_KEY_VARIABLE, "ab" * 32)
    for expected in (0, 48):
        with LLM(tiny_folder, block_size=4, kv_cache_dir=folder, kv_cache_disk=GIB) as llm:
            assert answer(llm, prompt)[1] >= expected
    monkeypatch.setenv(STORE_KEY_VARIABLE, "cd" * 32)
    assert "another authentication key" in refusal(tiny_folder, kv_cache_dir=folder)
    monkeypatch.setenv(STORE_KEY_VARIABLE, "secret")
    message = refusal(tiny_folder, kv_cache_dir=folder)
    assert "64 hexadecimal digits" in message and "secret" not in message
    monkeypatch.delenv(STORE_KEY_VARIABLE)
    assert "another authentication key" in refusal(tiny_folder, kv_cache_dir=folder)


def test_settings_that_do_not_go_together(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    for settings, words in (
        ({"kv_cache_disk": GIB}, "kv_cache_dir"),
        ({"kv_cache_access": "read"}, "kv_cache_access='read' is the use of kv_cache_dir"),
        ({"kv_cache_dir": folder, "kv_cache_access": "r"}, "write_or_read"),
        ({"kv_cache_dir": folder, "kv_cache_access": "read"}, "No such file or directory"),
        (
            {"kv_cache_dir": folder, "kv_cache_access": "read", "kv_cache_disk": GIB},
            "kv_cache_disk",
        ),
        ({"kv_cache_dir": folder, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_cache_dir": folder, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"kv_cache_dir": folder, "kv_cache_disk": (64 << 20) - 1}, "at least 67108864 bytes"),
        ({"kv_cache_dir": folder, "kv_cache_host_memory": GIB}, "kv_cache_host_memory"),
        ({"kv_cache_host_memory": GIB, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_cache_host_memory": GIB, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"kv_cache_host_memory": GIB, "device": "cpu"}, "is for GPUs"),
    ):
        assert words in refusal(tiny_folder, **settings)
    assert not folder.exists()
    with LLM(tiny_folder, kv_cache_dir=folder, kv_cache_disk=64 << 20) as llm:
        assert llm.describe()["kv_cache_access"] == "write"


def test_a_warm_folder_on_a_read_only_mount_is_read(tiny_folder: Path, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "kv", tokens(50)
    settings: dict[str, Any] = {
        "block_size": 4,
        "linear_backend": "pyengine",
        "kv_cache_dir": folder,
    }
    with LLM(tiny_folder, **settings) as llm:
        expected, restored = answer(llm, prompt)
        assert restored == 0
    with read_only(folder):
        message = refusal(tiny_folder, **settings)
        assert "cannot be written" in message and 'access "read"' in message
        with LLM(tiny_folder, kv_cache_access="read", **settings) as llm:
            assert llm.describe()["kv_cache_access"] == "read"
            assert answer(llm, prompt) == (expected, 48)
            assert answer(llm, tokens(50, seed=1))[1] == 0  # computed, and not stored
            figures = llm._offloader.stats()  # type: ignore[union-attr]
            assert (figures["stored"], figures["write_errors"], figures["read_errors"]) == (0, 0, 0)
    with LLM(tiny_folder, kv_cache_access="read", **settings) as reader:
        with LLM(tiny_folder, kv_cache_access="write", **settings) as writer:
            assert writer.describe()["kv_cache_access"] == "write"
            message = refusal(tiny_folder, kv_cache_access="write", **settings)
            assert "is written by process" in message
        assert reader.describe()["kv_cache_access"] == "read"


@pytest.mark.usefixtures("device")
def test_host_memory_that_is_not_there_or_too_little(tiny_folder: Path) -> None:
    assert "are available" in refusal(tiny_folder, kv_cache_host_memory=1 << 60)
    assert "four segments" in refusal(tiny_folder, kv_cache_host_memory=1000)


def test_what_is_refused_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "notes.txt").write_text("mine")
    no_model = tmp_path / "nothing"
    assert "not a KV store" in refusal(no_model, kv_cache_dir=mine)
    assert "is for GPUs" in refusal(no_model, kv_cache_host_memory=GIB, device="cpu")


def test_a_store_is_closed_if_the_model_cannot_be_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with pytest.raises(ModelLoadError) as raised:
        LLM(tmp_path / "nothing", kv_cache_dir=folder, kv_cache_disk=GIB)
    with LLM(tiny_folder, kv_cache_dir=folder, kv_cache_disk=GIB) as llm:
        assert llm.describe()["kv_cache_access"] == "write"
    assert raised.value  # with its traceback, to the frames that had the store


def test_a_folder_that_vanishes_costs_hits_alone(tiny_folder: Path, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "kv", tokens(50)
    settings: dict[str, Any] = {
        "block_size": 4,
        "linear_backend": "pyengine",  # the same bits, also if blocks are still pinned and hit
        "kv_cache_dir": folder,
        "kv_cache_disk": GIB,
    }
    with LLM(tiny_folder, **settings) as llm:
        expected, _ = answer(llm, prompt)
        llm._offloader._store.flush(10)  # type: ignore[union-attr]
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        for _ in range(2):
            llm._manager.evict_all()
            found, restored = answer(llm, prompt)
            assert (found, restored) == (expected, 0)


def test_what_fails_after_the_last_step_is_in_the_log(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(offloading, "_CHECK", 1e9)  # the first step looks, and no other
    folder = tmp_path / "kv"
    with LLM(tiny_folder, block_size=4, kv_cache_dir=folder, kv_cache_disk=GIB) as llm:
        shutil.rmtree(folder)
        answer(llm, tokens(50))
    assert sum("a write failed" in message for message in caplog.messages) == 1
