"""Damaged or hostile folders are refused by a `ModelLoadError`, soon and by name."""

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pyengine.errors import ModelLoadError
from pyengine.models.config import read_config
from pyengine.models.loader import load_model
from pyengine.models.tokenizer import fallback
from tests.support.checkpoints import save_tiny
from tests.support.forked import run_forked
from tests.support.tokenizers import save_words
from tests.support.without_torch import needs_torch
from tests.unit.models.test_unsupported import save, set_config
from tests.unit.models.tiny_gguf import write_tiny_gguf

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_tiny(folder)
    save_words(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def refused(folder, match=None):
    with pytest.raises(ModelLoadError, match=match) as caught:
        load_model(folder, device="cpu")
    assert len(str(caught.value)) < 4000
    return str(caught.value)


def loaded_or_refused(folder):
    """Load: a loaded model computes, a refusal has a name. Returns whether it was loaded."""
    try:
        loaded = load_model(folder, device="cpu")
    except ModelLoadError as error:
        said = str(error)
        assert str(folder) in said or "config.json" in said, said
        assert len(said) < 4000
        return False
    assert loaded.vocab_size > 0
    assert loaded.layers
    return True


HUGE = (10**12, 10**30, 1e30)
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", HUGE)
def test_sizes_that_the_weights_cannot_have_are_refused_before_anything_is_built(
    folder, name, value
):
    set_config(folder, **{name: value})
    said = refused(folder, rf"config\.json says {name}=.*cannot have")
    assert str(value) in said


@needs_torch
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", HUGE)
def test_such_sizes_are_refused_before_transformers_reads_the_configuration(folder, name, value):
    set_config(folder, **{name: value})
    with pytest.raises(ModelLoadError, match=rf"config\.json says {name}="):
        read_config(folder)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, 0, "12", "many", None, [3], {}, True, 2.5, float("nan")])
def test_values_of_any_kind_are_loaded_or_refused(folder, name, value):
    """transformers may read `null` or `"12"` in its way: there is no other error."""
    set_config(folder, **{name: value})
    loaded_or_refused(folder)


@pytest.mark.parametrize("value", [0, -1])
def test_a_model_without_layers_is_refused(folder, value):
    set_config(folder, num_hidden_layers=value)
    refused(folder, f"num_hidden_layers={value}: it must be an integer of at least 1")


def test_layers_that_the_files_do_not_have_are_refused_before_they_are_built(folder):
    set_config(folder, num_hidden_layers=20_000)
    refused(folder, r"num_hidden_layers=20000, which these weights cannot have: .* 21 tensors")


def test_huge_sizes_in_nested_settings_are_refused(folder):
    set_config(folder, vision_config={"deep": [{"hidden_size": 10**15}]})
    refused(folder, "hidden_size=1000000000000000")


def test_settings_that_the_family_does_not_have_are_named(folder):
    set_config(folder, n_routed_experts=256)
    refused(folder, r"n_routed_experts=256, which pyengine does not know .* delete it")


def test_a_model_that_is_larger_than_its_files_is_refused(folder):
    set_config(folder, vocab_size=2**24, hidden_size=4096, num_attention_heads=2)
    refused(folder, r"embed_tokens.* have the shape \[32, 16\], .* asks for \[16777216, 4096\]")


def test_a_layer_that_the_configuration_does_not_count_is_refused(folder):
    set_config(folder, num_hidden_layers=1)
    refused(folder, r"model\.layers\.1\..* and 8 more, which config\.json does not ask for")


def test_tensors_that_are_not_used_are_named(folder):
    change_weights(folder, lambda tensors: tensors.update(extra=np.zeros(2, np.float32)))
    refused(folder, "have extra, which config.json does not ask for")


def test_a_missing_tensor_is_named(folder):
    change_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    refused(folder, r"lack model\.norm\.weight")


@pytest.mark.parametrize("shape", [(16, 25), (24, 16)])
def test_a_tensor_of_another_shape_is_named_with_both(folder, shape):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))
    refused(folder, rf"{name} .*the shape \[{shape[0]}, {shape[1]}\], and .* asks for \[16, 24\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(folder, value):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value

    change_weights(folder, spoil)
    refused(folder, r"model\.layers\.1\.mlp\.up_proj\.weight .* NaN or infinity, in float32")


@pytest.mark.slow
def test_weights_that_one_process_has_are_refused_by_all(folder):
    from pyengine.executor.tensor_parallel.distributed import WorkerGroup

    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][23, 3] = float("nan")  # of the second process

    change_weights(folder, spoil)
    with pytest.raises(ModelLoadError, match="hold NaN or infinity"):
        WorkerGroup(folder, device="cpu", size=2)


@pytest.mark.slow
def test_a_gguf_file_is_loaded_by_all_processes(tmp_path):
    from pyengine.executor.tensor_parallel.distributed import WorkerGroup

    write_tiny_gguf(tmp_path / "tiny.gguf")
    with WorkerGroup(tmp_path / "tiny.gguf", device="cpu", size=2) as worker_group:
        assert worker_group.loaded.name == "tiny"
    worker_group.close()


@needs_torch
def test_weights_beyond_float16_are_named_with_the_dtype_that_holds_them(folder):
    def grow(tensors):
        tensors["model.norm.weight"][0] = 1e6

    change_weights(folder, grow)
    with pytest.raises(ModelLoadError, match=r"in torch\.float16: .*dtype='bfloat16'"):
        load_model(folder, device="cpu", dtype="float16")
    assert load_model(folder, device="cpu").dtype == "float32"


def test_complex_weights_are_refused(folder):
    def turn(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.complex64)

    change_weights(folder, turn)
    refused(folder, r"model\.norm\.weight .* are C64: they are not floats")


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_, np.uint8])
def test_integers_without_a_quantisation_are_refused(folder, dtype):
    def turn(tensors):
        tensors["model.norm.weight"] = np.ones(16, dtype)

    change_weights(folder, turn)
    refused(folder, r"model\.norm\.weight .* are [IBU]\w+: they are not floats")


@pytest.mark.parametrize("dtype", ["float64", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_other_floating_point_numbers_are_loaded(folder, dtype):
    import torch
    from safetensors import torch as files

    tensors = files.load_file(folder / WEIGHTS)
    turned = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    files.save_file(turned, folder / WEIGHTS, metadata={"format": "pt"})
    assert load_model(folder, device="cpu").dtype == "float32"


@pytest.mark.parametrize(
    "name", ["kernels-community/flash-attn", "someone/evil", "flash_attention_2", 5]
)
def test_an_implementation_of_attention_in_the_folder_is_not_looked_for(folder, name):
    set_config(folder, attn_implementation=name, experts_implementation=name)
    assert load_model(folder, device="cpu").vocab_size == 32


def test_pickles_are_never_opened(folder):
    import torch

    ran = folder / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    (folder / WEIGHTS).unlink()
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    refused(folder, r"as pickles \(pytorch_model\.bin\).* never opened; .*save_pretrained")
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", 5, None]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(folder, name):
    shutil.copy(folder / WEIGHTS, folder.parent / WEIGHTS)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), name)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    refused(folder, r"index\.json (names weights outside of its folder|is damaged)")


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', "[" * 10**5]
)
def test_an_index_of_another_form_is_refused(folder, content):
    (folder / f"{WEIGHTS}.index.json").write_text(content)
    refused(folder, r"index\.json is damaged")


def test_weights_by_a_link_are_loaded(folder, original):
    """As in the hub's own cache, where every file of a snapshot is a link out of it."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(original / WEIGHTS)
    assert load_model(folder, device="cpu").vocab_size == 32


def test_a_link_that_leads_nowhere_or_in_a_circle_is_refused(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    refused(folder, r"holds no \.safetensors file")


@pytest.mark.parametrize(
    "file", [WEIGHTS, "config.json", "tokenizer.json", "generation_config.json"]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, file):
    (folder / file).unlink()
    os.mkfifo(folder / file)
    refused(folder, f"{file} is not a regular file|no .safetensors file|no config.json")


_LOAD = """
import ctypes, os, sys
from pyengine.errors import ModelLoadError
from pyengine.models.loader import load_model
if os.geteuid() == 0:  # drop root's right to read everything: see capset(2)
    head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(head, none) == 0
try:
    load_model(sys.argv[1], device="cpu")
except ModelLoadError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(original, file):
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(original, Path(name) / "model")
        Path(name).chmod(0o755)
        (folder / file).chmod(0)
        done = run_forked(_LOAD, str(folder))
    assert done.stderr == ""
    assert str(folder) in done.stdout and "ermission denied" in done.stdout


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "5", '"x"', "[" * 10**5, "\ufeff{}", "{}", '{"model_type": 5}'),
        *('{"model_type": null}', '{"model_type": ["llama"]}', '{"model_type": "llama"}'),
        '{"model_type": "llama", "rope_parameters": 5}',
        '{"model_type": "llama", "rope_parameters": {"rope_type": "nosuch"}}',
        '{"model_type": "llama", "layer_types": 7}',
        '{"model_type": "llama", "hidden_act": "nosuch"}',
        '{"model_type": "llama", "text_config": 5}',
        '{"model_type": "llama", "dtype": "nosuch"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "t5"}',
        '{"model_type": "clip"}',
    ],
)
def test_a_configuration_of_any_form_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"\0" * 100,
        pytest.param(b'{"model_type": "\\ud800"}', marks=needs_torch),  # no family of ours
    ],
)
def test_a_configuration_that_is_no_text_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, r"config\.json cannot be used")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", "5", "{}", "[" * 10**5])
def test_a_tokenizer_of_any_form_is_loaded_or_refused(folder, name, content):
    (folder / name).write_text(content)
    loaded_or_refused(folder)


@needs_torch
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "Evil", 5, "AutoModel", "os"])
def test_a_tokenizer_without_its_files_is_refused(folder, tokenizer_class):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    refused(folder, "the tokenizer in .* has no vocabulary|tokenizer in .* could not")


def test_a_tokenizer_that_only_transformers_reads_names_the_extra(folder, monkeypatch):
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(fallback, "is_installed", lambda _: False)
    said = refused(folder, r"the tokenizer in .* \(it has no tokenizer\.json\) needs transformers")
    assert "[engine,torch]" in said


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        safetensors({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]}}),
        safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, bytes(8)),
        safetensors({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)),
        safetensors({"a": {"dtype": "XX", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}),
        safetensors({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}, bytes(8)),
        safetensors({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, bytes(8)),
        safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}}, bytes(8)),
        safetensors(b'{"a":' * 50_000),
        safetensors(b"[" * 50_000),
        safetensors(b"\xff" * 100),
        struct.pack("<Q", 2**63) + b"{}",
    ],
)
def test_a_header_that_lies_is_refused(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    refused(folder)


def test_damaged_files_never_raise_anything_else(folder, original):
    """Every file of the folder cut or with bytes changed: a model or a `ModelLoadError`."""
    import random

    random.seed(0)
    whole = {path.name: path.read_bytes() for path in sorted(original.iterdir())}
    num_loaded = 0
    for turn in range(40):
        name, content = random.choice(list(whole.items()))
        spoiled = bytearray(content)
        if turn % 4 == 0:
            del spoiled[random.randrange(len(spoiled)) :]
        for _ in range(random.randrange(1, 4)):
            if spoiled:
                spoiled[random.randrange(min(len(spoiled), 3000))] = random.randrange(256)
        (folder / name).write_bytes(spoiled)
        num_loaded += loaded_or_refused(folder)
        (folder / name).write_bytes(content)
    assert 0 < num_loaded < 40


def test_experts_are_counted_too(tmp_path):
    save(tmp_path, "mixtral", num_local_experts=4)
    set_config(tmp_path, num_local_experts=10**9)
    refused(tmp_path, "num_local_experts=1000000000")
