"""The choice of a backend has a reason; it is tried out, and a failing backend is skipped."""

import logging
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from pyengine.attention import cpu, flashinfer
from pyengine.attention.choice import (
    _CANDIDATES,
    choose_backend,
    explain_backends,
    select_backend,
    try_out,
)
from pyengine.attention.gather import GatherBackend
from pyengine.attention.needs import AttentionNeeds, LayerNeeds, needs_of
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.utils.settings import choices_of, option_of
from tests.unit.attention import fake_kernels
from tests.unit.attention.families import MODELS, layers_of

pytestmark = pytest.mark.levels

CPU_NEEDS = AttentionNeeds(device=torch.device("cpu"), block_size=16, dtype="float32")
LAYER = LayerNeeds(query_heads=4, kv_heads=2, head_dim_k=64, head_dim_v=64)
LAYERS = (LAYER, replace(LAYER, window=8, softcap=2.0), replace(LAYER, sinks=True))
LAYERED_NEEDS = AttentionNeeds(device=torch.device("cpu"), layers=LAYERS, dtype="bfloat16")
FLASHINFER = frozenset({"flashinfer", "tvm_ffi", "requests"})

MACHINES = {
    "no GPU": {"device": torch.device("cpu"), "torch_version": (2, 15)},
    "float16": {
        "device": torch.device("cpu"),
        "torch_version": (2, 15),
        "dtype": "float16",
    },
    "torch 2.11": {"torch_version": (2, 11)},
    "torch 2.15": {"torch_version": (2, 15)},
    "flashinfer": {"torch_version": (2, 11), "packages": FLASHINFER},
    "flash-attn": {"torch_version": (2, 11), "packages": frozenset({"flash_attn"})},
    "flash-attn 3": {
        "torch_version": (2, 11), "packages": frozenset({"flash_attn", "flash_attn_interface"}),
    },
    "flash-attn 3 on Blackwell": {
        "torch_version": (2, 11), "packages": frozenset({"flash_attn", "flash_attn_interface"}),
        "capability": (10, 0),
    },
    "cuDNN": {"torch_version": (2, 15), "cudnn_version": 92400},
    "old GPU": {
        "torch_version": (2, 15), "capability": (7, 5), "packages": FLASHINFER,
    },
}  # fmt: skip
"""Differences from a GPU of compute capability 9.0 with bfloat16."""

TABLE = [  # model, machine, backend, block size, words of the reason
    ("llama", "no GPU", "cpu", 16, "in place, in Rust"),
    ("llama", "float16", "gather", 16, "flashinfer: it runs on cuda, the device is cpu"),
    ("gemma3_text", "float16", "gather", 16, "flex: on cpu only when asked for"),
    ("gpt_oss", "float16", "gather", 16, "serves every model"),
    ("llama", "torch 2.11", "flex", 64, "takes block tables from torch 2.12 on, this is 2.11"),
    ("gemma3_text", "torch 2.11", "flex", 64, "flashinfer-python is not installed"),
    ("gpt_oss", "torch 2.11", "flex", 64, "flash-attn is not installed"),
    ("llama", "torch 2.15", "varlen", 256, "torch's own paged kernel"),
    ("gemma3_text", "torch 2.15", "varlen", 256, "flashinfer-python is not installed"),
    ("gpt_oss", "torch 2.15", "varlen", 256, "flash-attn is not installed"),
    ("gemma2", "torch 2.15", "flex", 64, "varlen_attn has no softcap, which the model needs"),
    ("llama", "flashinfer", "flashinfer", 16, "its paged kernels serve this model"),
    ("gemma3_text", "flashinfer", "flashinfer", 16, "its paged kernels serve this model"),
    ("gpt_oss", "flashinfer", "flashinfer", 16, "its paged kernels serve this model"),
    ("gemma2", "flashinfer", "flashinfer", 16, "its paged kernels serve this model"),
    ("llama", "flash-attn", "flash-attn", 256, "flashinfer-python is not installed"),
    ("gpt_oss", "flash-attn", "flash-attn", 256, "flashinfer-python is not installed"),
    ("llama", "flash-attn 3", "flash-attn-3", 16, "its kernels for Hopper serve this model"),
    ("llama", "flash-attn 3 on Blackwell", "flash-attn", 256, "for compute capability 9.0"),
    ("llama", "cuDNN", "varlen", 256, "cudnn: on cuda only when asked for"),
    ("llama", "old GPU", "gather", 16, "needs compute capability 8.0, the GPU has 7.5"),
]


@pytest.fixture(scope="module")
def models():
    cpu = torch.device("cpu")
    return {name: needs_of(layers_of(name), cpu, "bfloat16") for name in MODELS}


def on_machine(needs, machine):
    gpu = {"device": torch.device("cuda"), "capability": (9, 0), "packages": frozenset()}
    return replace(needs, **{**gpu, **MACHINES[machine]})


@pytest.fixture(autouse=True)
def fast_instructions(monkeypatch):
    """The choices are those of a processor that the kernel is written for."""
    monkeypatch.setattr(cpu, "CpuAttention", SimpleNamespace(is_fast=lambda: True))


def test_auto_chooses_and_says_why():
    chosen = choose_backend("auto", CPU_NEEDS)
    assert chosen.backend == "cpu"
    assert chosen.reason == "reads the blocks in place, in Rust"


def test_auto_passes_over_what_cannot_serve_and_says_why(monkeypatch):
    assert choose_backend("auto", replace(CPU_NEEDS, dtype="bfloat16")).backend == "cpu"
    half = replace(CPU_NEEDS, dtype="float16")
    chosen = choose_backend("auto", half)
    assert chosen.backend == "gather"
    assert "every model" in chosen.reason
    assert "cpu: it takes float32 and bfloat16, the model is in float16" in chosen.reason
    with pytest.raises(ConfigurationError, match="'cpu' cannot serve: it takes float32"):
        choose_backend("cpu", half)
    slow = SimpleNamespace(is_fast=lambda: False)
    monkeypatch.setattr(cpu, "CpuAttention", slow)
    assert "no AVX2" in choose_backend("auto", CPU_NEEDS).reason


def test_a_forced_choice_is_followed():
    assert choose_backend("gather", CPU_NEEDS).reason == "asked for"


@pytest.mark.parametrize(("model", "machine", "backend", "block_size", "words"), TABLE)
def test_the_choice_follows_from_model_and_machine(
    models, model, machine, backend, block_size, words
):
    needs = on_machine(models[model], machine)
    chosen = choose_backend("auto", needs)
    assert (chosen.backend, chosen.block_size) == (backend, block_size)
    assert words in chosen.reason
    verdicts = explain_backends(chosen, needs)
    assert verdicts[backend] == "chosen"
    assert len(verdicts) >= 5


def test_every_backend_is_explained(models):
    needs = on_machine(models["gemma2"], "torch 2.15")
    verdicts = explain_backends(choose_backend("auto", needs), needs)
    assert verdicts["flashinfer"] == (
        "cannot serve: the package flashinfer-python is not installed"
    )
    assert verdicts["varlen"] == ("cannot serve: varlen_attn has no softcap, which the model needs")
    assert verdicts["gather"] == "could serve"


@pytest.mark.parametrize(
    ("backend", "machine", "change", "words"),
    [
        ("flashinfer", "flashinfer", {"dtype": "float32"}, "bfloat16, the model in float32"),
        ("flashinfer", "no GPU", {}, "it runs on cuda, the device is cpu"),
        ("flashinfer", "torch 2.15", {}, "flashinfer-python is not installed"),
        ("flash-attn", "flash-attn", {"block_size": 16}, "multiple of 256 tokens, block_size=16"),
        ("cudnn", "torch 2.15", {}, "it needs cuDNN 9.24, this is 0"),
        ("cudnn", "cuDNN", {"block_size": 24}, "powers of two, block_size=24"),
        ("cudnn", "cuDNN", {"capability": (12, 0)}, "compute capability 9.0 and 10.0"),
        ("cudnn", "torch 2.11", {}, "block tables from torch 2.15 on, this is 2.11"),
        ("varlen", "torch 2.15", {"kv_dtype": "float8_e4m3fn"}, "cache in float8_e4m3fn"),
        ("flex", "torch 2.15", {"block_size": 24}, "powers of two from 16 on, block_size=24"),
        ("flex", "torch 2.15", {"kv_dtype": "float8_e4m3fn"}, "cache in float8_e4m3fn"),
    ],
)
def test_a_forced_backend_that_cannot_serve_is_an_error_with_the_reason(
    models, backend, machine, change, words
):
    needs = replace(on_machine(models["llama"], machine), **change)
    with pytest.raises(ConfigurationError, match=words):
        choose_backend(backend, needs)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"tvm_ffi"}, "needs apache-tvm-ffi beside it: pip install apache-tvm-ffi"),
        ({"tvm_ffi", "requests"}, "apache-tvm-ffi and requests beside it: pip install apache-tvm"),
    ],
)
def test_what_flashinfer_needs_beside_it_is_named(models, missing, words):
    needs = replace(on_machine(models["llama"], "flashinfer"), packages=FLASHINFER - missing)
    with pytest.raises(ConfigurationError, match=words):
        choose_backend("flashinfer", needs)
    assert words in choose_backend("auto", needs).reason


@pytest.mark.parametrize(
    ("backend", "dims", "words"),
    [
        ("flashinfer", (96, 96), "head sizes are 64, 128 and 256, the model has 96"),
        ("flashinfer", (128, 64), "one head size, those of the model are 128 and 64"),
        ("flash-attn", (264, 264), "multiples of 8 up to 256, the model has 264"),
        ("varlen", (20, 20), "multiples of 8 up to 256, the model has 20"),
        ("flex", (8, 8), "head sizes start at 16, the model has 8"),
    ],
)
def test_a_head_size_that_is_not_served_is_named(models, backend, dims, words):
    needs = on_machine(models["llama"], "torch 2.15")
    layer = replace(needs.layers[0], head_dim_k=dims[0], head_dim_v=dims[1])
    packages = FLASHINFER | {"flash_attn"}
    needs = replace(needs, layers=(needs.layers[0], layer), packages=packages)
    with pytest.raises(ConfigurationError, match=words):
        choose_backend(backend, needs)


def test_an_8_bit_cache_goes_to_a_backend_that_reads_it(models):
    fp8 = {"kv_dtype": "float8_e4m3fn"}
    needs = replace(on_machine(models["llama"], "flashinfer"), **fp8)
    assert choose_backend("auto", needs).backend == "flashinfer"
    chosen = choose_backend("auto", replace(on_machine(models["gpt_oss"], "flashinfer"), **fp8))
    assert chosen.backend == "gather"
    assert "does not read an 8-bit KV cache with heads of size 64" in chosen.reason
    assert choose_backend("gather", replace(CPU_NEEDS, **fp8)).backend == "gather"


def test_the_caller_may_say_the_block_size(models):
    needs = on_machine(models["llama"], "torch 2.15")
    assert choose_backend("auto", replace(needs, block_size=512)).block_size == 512
    other = choose_backend("auto", replace(needs, block_size=32))
    assert (other.backend, other.block_size) == ("flex", 32)
    assert "several cannot make up a page" in other.reason


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(
        ConfigurationError, match="'warp' is not known: use one of auto, cpu, flashinfer"
    ):
        choose_backend("warp", CPU_NEEDS)


@pytest.mark.parametrize("requested", ["auto", "gather"])
def test_a_backend_that_cannot_serve_says_why(requested):
    needs = AttentionNeeds(device=torch.device("meta"), block_size=16, dtype="float32")
    with pytest.raises(ConfigurationError, match="the device is meta"):
        choose_backend(requested, needs)


def test_every_name_is_one_that_can_be_asked_for():
    assert "gather" in _CANDIDATES
    for name in _CANDIDATES:
        try:
            assert choose_backend(name, CPU_NEEDS).backend == name
        except ConfigurationError as error:
            assert "cannot serve" in str(error)


@pytest.fixture
def on_cpu(monkeypatch):
    """flashinfer as if it ran on the CPU, and nothing of ours there."""
    for name, obstacle in (("flashinfer", None), ("cpu", "it is left out")):
        here = replace(_CANDIDATES[name], devices=("cpu",), obstacle=lambda _, why=obstacle: why)
        monkeypatch.setitem(_CANDIDATES, name, here)
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE", 1024)


def test_the_oracle_passes_for_every_kind_of_layer():
    assert try_out(GatherBackend, LAYERED_NEEDS, 16) is None


def test_every_kind_of_layer_is_tried():
    seen = []

    class Watching(GatherBackend):
        def metadata(self, inputs):
            metadata = super().metadata(inputs)
            forward = metadata.forward

            def watched(layer, rows, options):
                seen.append((len(rows[0]), options.sliding_window, options.sinks is not None))
                return forward(layer, rows, options)

            metadata.forward = watched
            return metadata

    assert try_out(Watching, replace(LAYERED_NEEDS, layers=LAYERS * 5), 16) is None
    kinds = [(None, False), (8, False), (None, True)]
    assert seen == [(n, *kind) for n in (3, 1) for kind in kinds]


def test_what_works_is_chosen(on_cpu, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
    with caplog.at_level(logging.INFO):
        assert select_backend("auto", LAYERED_NEEDS).backend == "flashinfer"
    assert "attention backend flashinfer: its paged kernels serve this model" in caplog.text


def test_a_package_that_does_not_import_gives_way_with_a_warning(on_cpu, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    chosen = select_backend("auto", LAYERED_NEEDS)
    assert chosen.backend == "gather"
    assert "flashinfer: it was tried and failed with ModuleNotFoundError" in chosen.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "flashinfer: it was tried and failed with ModuleNotFoundError" in caplog.text


def test_kernels_that_do_not_compile_are_an_error_where_they_were_asked_for(on_cpu, monkeypatch):
    class Broken(fake_kernels.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, **settings):
            raise RuntimeError("ninja:\n nvcc was not found")

    package = type(sys)("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = fake_kernels.BatchDecodeWithPagedKVCacheWrapper
    package.BatchPrefillWithPagedKVCacheWrapper = Broken
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    with pytest.raises(ConfigurationError, match="failed with RuntimeError: ninja: nvcc was not"):
        select_backend("flashinfer", LAYERED_NEEDS)
    assert "nvcc was not found" in select_backend("auto", LAYERED_NEEDS).reason


def test_the_setting_knows_every_backend() -> None:
    (setting,) = [each for each in fields(EngineSettings) if each.name == "attention_backend"]
    assert choices_of(setting) == ("auto", *_CANDIDATES)
    assert all(name in option_of(setting).help for name in choices_of(setting))
