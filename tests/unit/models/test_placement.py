"""Devices and number formats by name; over how many processes a model can be divided."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError
from pyengine.models import placement
from pyengine.models.placement import (
    bfloat16_instructions,
    check_tensor_parallel,
    choose_dtype,
    kv_shards,
    resolve_device,
    resolve_first_device,
)
from pyengine.utils.devices import CPU
from tests.support.without_torch import MISSING, needs_torch

pytestmark = pytest.mark.levels

HAS_TORCH = "torch" not in MISSING
if HAS_TORCH:
    import torch

    CUDA: Any = torch.device("cuda", 0)
else:
    CUDA = SimpleNamespace(type="cuda", index=0)


@needs_torch
def test_auto_takes_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == CUDA
    assert resolve_device("cuda") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigurationError, match=r"'cuda:2'.*sees 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("is_installed", "drivers", "is_imported"),
    [(True, ["/dev/null"], True), (True, ["/dev/none"], False), (False, ["/dev/null"], False)],
)
def test_torch_is_imported_only_where_a_gpu_may_be(monkeypatch, is_installed, drivers, is_imported):
    imports = []
    monkeypatch.setattr(placement, "loaded_torch", lambda: None)
    monkeypatch.setattr(placement, "is_installed", lambda _: is_installed)
    monkeypatch.setattr(placement, "_DRIVERS", drivers)
    monkeypatch.setattr(placement, "_num_cuda_devices", lambda: imports.append("torch") or 0)
    assert resolve_device("auto") is CPU
    assert resolve_device("cpu") is CPU
    assert bool(imports) == is_imported


def test_cuda_without_torch_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    words = r"device='cuda' needs torch, of the extra 'torch': .*pip install .*\[engine,torch\]"
    with pytest.raises(ConfigurationError, match=words):
        resolve_device("cuda")


@needs_torch
def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="sees 0 CUDA devices; use device='cpu'"):
        resolve_device("cuda")


@pytest.mark.parametrize("device", ["gpu", "", "meta", "mps:0", "cuda:x"])
def test_other_devices_are_refused(device):
    with pytest.raises(ConfigurationError, match="device="):
        resolve_device(device)


FLOAT, BRAIN, HALF = "float32", "bfloat16", "float16"
HALVES = [torch.float16] if HAS_TORCH else []


@pytest.mark.parametrize(
    ("dtype", "saved", "device", "instructions", "expected", "reason"),
    [
        ("auto", BRAIN, CPU, "AMX", BRAIN, "as the model was saved, and this CPU has AMX"),
        ("auto", BRAIN, CPU, None, FLOAT, "no instructions .AMX or AVX-512 BF16."),
        ("auto", HALF, CPU, "AMX", FLOAT, "saved in float16"),
        ("auto", FLOAT, CPU, "AMX", FLOAT, "saved in float32"),
        ("auto", None, CPU, "AMX", FLOAT, "saved without a dtype"),
        ("auto", HALF, CUDA, None, HALF, "as the model was saved"),
        ("auto", FLOAT, CUDA, None, BRAIN, "saved in float32"),
        ("auto", None, CUDA, None, BRAIN, "without a dtype"),
        ("bfloat16", FLOAT, CPU, "AMX", BRAIN, "^asked for$"),
        ("bfloat16", FLOAT, CUDA, None, BRAIN, "^asked for$"),
        *[(dtype, FLOAT, CPU, None, HALF, "^asked for$") for dtype in HALVES],
    ],
)
def test_dtypes(monkeypatch, dtype, saved, device, instructions, expected, reason):
    monkeypatch.setattr(placement, "bfloat16_instructions", lambda: instructions)
    choice = choose_dtype(dtype, saved, device)
    assert choice.dtype == expected
    assert re.search(reason, choice.reason), choice.reason


def test_bfloat16_on_a_cpu_without_it_is_slower_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(placement, "bfloat16_instructions", lambda: None)
    choice = choose_dtype("bfloat16", FLOAT, CPU)
    assert choice.dtype == BRAIN
    assert "float32 would be faster" in choice.reason
    assert [record.message for record in caplog.records] == [
        "dtype='bfloat16': this CPU has no instructions for bfloat16 (AMX or AVX-512 BF16): "
        "float32 would be faster"
    ]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("amx", "AMX"), ("avx512_bf16", "AVX-512 BF16"), ("avx512", None), ("avx2", None)],
)
def test_the_kernels_say_which_instructions_they_use(monkeypatch, level, expected):
    monkeypatch.setattr(placement, "CpuAttention", SimpleNamespace(isa=lambda: level))
    assert bfloat16_instructions() == expected


def test_a_level_that_is_hidden_does_not_count(monkeypatch):
    monkeypatch.setenv("PYENGINE_CPU_ISA", "plain")
    assert CpuAttention.isa() == "plain"
    assert bfloat16_instructions() is None


@pytest.mark.parametrize("dtype", ["float8", "f32", "None", *([torch.int8] if HAS_TORCH else [])])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigurationError, match="dtype="):
        choose_dtype(dtype, None, CPU)


@needs_torch
@pytest.mark.parametrize(
    ("count", "device", "size", "expected"),
    [(0, "auto", 2, CPU), (0, "cpu", 3, CPU), (2, "auto", 2, CUDA), (4, "cuda:0", 2, CUDA)],
)
def test_the_processes_of_a_model_start_at_the_first_device(
    monkeypatch, count, device, size, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert resolve_first_device(device, size) == expected


@needs_torch
@pytest.mark.parametrize(
    ("device", "size", "words"),
    [
        ("auto", 4, "torch sees 2 CUDA devices .* use tensor_parallel_size=2 or less"),
        ("cuda:1", 2, "from cuda:0 on.*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_devices_that_processes_cannot_have(monkeypatch, device, size, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=words):
        resolve_first_device(device, size)


@needs_torch
def test_transformers_divides_over_cuda_devices_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_first_device("cpu", 2) == CPU
    words = "the 2 CUDA devices that torch sees.*CUDA_VISIBLE_DEVICES"
    with pytest.raises(ConfigurationError, match=words):
        check_tensor_parallel(config("llama", **LLAMA), 2, CPU)
    check_tensor_parallel(config("llama", **LLAMA), 2, CUDA)


LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
MOE: dict[str, Any] = {**LLAMA, "moe_intermediate_size": 30, "num_experts": 4}


def config(family: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **settings)


@pytest.mark.parametrize(
    ("family", "settings", "size"),
    [
        ("llama", LLAMA, 1),
        ("llama", LLAMA, 2),
        ("llama", LLAMA, 4),
        ("llama", SMOLLM2, 3),
        ("llama", {**LLAMA, "vocab_size": 97}, 1),
        ("qwen3_moe", MOE, 2),
    ],
)
def test_what_divides_is_taken(family: str, settings: dict[str, Any], size: int) -> None:
    check_tensor_parallel(config(family, **settings), size, CPU)


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        (SMOLLM2, 2, ["9 query heads", "3 KV heads", "use 3"]),
        (SMOLLM2, 9, ["divide 3 KV heads", "use 3"]),
        (LLAMA, 8, ["divide 4 KV heads", "use 2 or 4"]),
        (LLAMA, 3, ["4 KV heads", "8 query heads", "use 2 or 4"]),
        ({**LLAMA, "vocab_size": 97}, 2, ["97 tokens in the vocabulary", "only", "=1 does"]),
        ({**LLAMA, "intermediate_size": 90}, 4, ["90 of intermediate_size", "use 2"]),
    ],
)
def test_what_does_not_divide_is_named(
    settings: dict[str, Any], size: int, words: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size={size}") as caught:
        check_tensor_parallel(config("llama", **settings), size, CPU)
    for word in words:
        assert word in str(caught.value)


def test_experts_count_too() -> None:
    with pytest.raises(ConfigurationError, match="30 of moe_intermediate_size"):
        check_tensor_parallel(config("qwen3_moe", **MOE), 4, CPU)


def test_a_family_without_a_plan_is_refused() -> None:
    opt = config("opt", hidden_size=64, num_attention_heads=4, vocab_size=96)
    check_tensor_parallel(opt, 1, CPU)
    with pytest.raises(ConfigurationError, match="no tensor-parallel plan for models of type opt"):
        check_tensor_parallel(opt, 2, CPU)


@pytest.mark.parametrize(
    ("family", "shards"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 2), ("olmo2", 1), ("opt", 1)]
)
def test_kv_heads_are_divided_where_the_plan_divides_the_keys(family: str, shards: int) -> None:
    assert kv_shards(config(family), 2) == shards
    assert kv_shards(config(family), 1) == 1
