"""GGUF files: refused when they are none, converted once when they are."""

import json
import os
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.engine.chat_template import ChatOptions, render_chat
from pyengine.errors import InvalidRequestError, ModelLoadError
from pyengine.models import gguf
from pyengine.models.checkpoint_files import build_once, cache_root, check_weights
from pyengine.models.gguf import converted_gguf
from pyengine.models.gguf_header import read_header
from pyengine.models.loader import load_model
from tests.support.forked import run_forked
from tests.support.versions import IS_TRANSFORMERS_5_17
from tests.unit.models.tiny_gguf import VOCAB, write_tiny_gguf


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 40])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file") as caught:
        converted_gguf(path)
    assert repr(content[:4]) in str(caught.value)


def test_an_unknown_version_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 99, 0, 0))
    with pytest.raises(ModelLoadError, match="version 99"):
        read_header(path)


def test_a_truncated_gguf_is_refused_and_leaves_no_folder(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelLoadError, match=r"model\.gguf is damaged: .* was cut short"):
        converted_gguf(path)
    assert not (tmp_path / "cache" / "models").exists()


def test_a_gguf_is_converted_once_and_again_when_it_changes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    conversions = []
    monkeypatch.setattr(gguf, "_convert", lambda source, *others: conversions.append(source))
    monkeypatch.setattr(gguf, "_is_damaged", lambda folder: False)
    first = converted_gguf(path)
    assert converted_gguf(path) == first
    assert conversions == [path]
    assert first.name.startswith("tiny-")
    progress = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0].split(" (")[0] for line in progress] == [
        "pyengine: preparing tiny.gguf",
        f"pyengine: tiny.gguf is ready in {first}",
    ]
    os.utime(path, ns=(1, 1))
    assert converted_gguf(path) != first
    assert len(conversions) == 2


def test_weights_and_tokenizer_come_through(tmp_path):
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert (loaded.name, loaded.max_model_len, loaded.vocab_size) == ("tiny", 48, VOCAB)
    assert loaded.eos_token_ids == ({0, 1} if IS_TRANSFORMERS_5_17 else {1})  # it names 0 itself
    assert loaded.tokenizer.encode("abc") == [5, 4]
    layer = loaded.model.model.layers[0]
    embedding = loaded.model.model.embed_tokens.weight
    assert np.array_equal(embedding.detach().numpy(), tensors["token_embd.weight"])
    down = layer.mlp.down_proj.weight.detach().numpy()
    assert np.array_equal(down, tensors["blk.0.ffn_down.weight"])
    assert not hasattr(loaded.config, "quantization_config")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}abc"
BY_NAME = [{"name": name, "template": text} for name, text in (("default", "abc"), ("rag", "c"))]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for message in messages %}abc{% endfor %}", [5, 4]),
        (BY_NAME, [5, 4]),
        (BY_NAME[1:], "this model has no chat template"),
        (ENDLESS, r"still at work after 0\.5 seconds"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{% for %}", "does not take this conversation"),
    ],
)
def test_chat_templates_of_a_file_are_kept_as_those_of_folders(tmp_path, template, expected):
    write_tiny_gguf(tmp_path / "tiny.gguf", template=template)
    tokenizer = load_model(tmp_path / "tiny.gguf", device="cpu").tokenizer
    messages, options = [{"role": "user", "content": "a"}], ChatOptions(seconds=0.5)
    if isinstance(expected, list):
        assert render_chat(messages, tokenizer, options) == expected
    else:
        with pytest.raises(InvalidRequestError, match=expected):
            render_chat(messages, tokenizer, options)


@pytest.mark.parametrize(
    ("kind", "stored", "declared"),
    [
        ("F32", "F32", "float32"),
        ("F16", "F16", "float16"),
        ("BF16", "BF16", "bfloat16"),
        ("Q8_0", "F16", "bfloat16"),
        ("Q4_1", "F16", "bfloat16"),
    ],
)
def test_the_number_format_is_that_of_the_file(tmp_path, kind, stored, declared, capsys):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    folder = converted_gguf(tmp_path / "tiny.gguf")
    headers = check_weights(folder).tensors
    assert {header.dtype for header in headers.values()} == {stored}
    assert json.loads((folder / "config.json").read_text())["dtype"] == declared
    num_bytes = 2 * 10_592 * (2 if stored == "F32" else 1)
    assert f"({num_bytes / 1e3:.1f} kB of" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
def test_float16_holds_what_was_quantised(tmp_path, kind):
    """The error of storing is small beside the error of quantising."""
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    exact = dequantized(tmp_path / "tiny.gguf", "blk.0.ffn_down.weight")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu", dtype="float32")
    stored = loaded.model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    quantising = np.abs(exact - tensors["blk.0.ffn_down.weight"]).max()
    assert 0 < np.abs(stored - exact).max() < quantising / 8


def test_weights_beyond_float16_become_bfloat16(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0", scale=1e5)
    headers = check_weights(converted_gguf(tmp_path / "tiny.gguf")).tensors
    assert {header.dtype for header in headers.values()} == {"BF16"}


def dequantized(path, name):
    from gguf import GGUFReader, dequantize

    tensor = next(
        each_tensor for each_tensor in GGUFReader(path).tensors if each_tensor.name == name
    )
    return dequantize(tensor.data, tensor.tensor_type)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", scale=np.nan)
    with pytest.raises(ModelLoadError, match="hold NaN or infinity"):
        converted_gguf(tmp_path / "tiny.gguf")


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=60 << 20))
    with pytest.raises(ModelLoadError, match=r"takes 42\.4 kB.* 62\.9 MB are free.*PYENGINE_CACHE"):
        converted_gguf(tmp_path / "tiny.gguf")
    assert list((cache_root() / "models").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
    ],
)
def test_a_damaged_result_is_made_again(tmp_path, damage, capsys):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = converted_gguf(tmp_path / "tiny.gguf")
    damage(folder)
    capsys.readouterr()
    assert load_model(tmp_path / "tiny.gguf", device="cpu").path == folder
    assert "was damaged, it is made again" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == [folder]


def test_other_damage_names_the_folder_to_delete(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = converted_gguf(tmp_path / "tiny.gguf")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=f"delete the folder {folder}, and it is made again"):
        load_model(tmp_path / "tiny.gguf", device="cpu")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path, ending):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom pyengine.models import gguf\n"
        "def convert(path, folder, *others):\n"
        "    (folder / 'half').write_bytes(bytes(1000))\n"
        "    print('half', flush=True)\n    time.sleep(60)\n"
        "gguf._convert = convert\n"
        "gguf.converted_gguf(Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        left = [path.name for path in (cache_root() / "models").iterdir()]
        assert len(left) == 1 and left[0].startswith(".tiny-")
        process.send_signal(ending)
    assert [path.name for path in (cache_root() / "models").iterdir()] == left
    folder = converted_gguf(tmp_path / "tiny.gguf")
    assert list(folder.parent.iterdir()) == [folder]


def test_a_disk_that_fills_meanwhile_is_named_and_nothing_is_left(tmp_path):
    """By a limit of the size of files, at which writing fails as on a full disk."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom pyengine.models import gguf\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n    gguf.converted_gguf(Path(sys.argv[1]))\n"
        "except gguf.ModelLoadError as error:\n    print(error)\n"
    )
    done = run_forked(code, str(tmp_path / "tiny.gguf"))
    assert "tiny.gguf cannot be stored in" in done.stdout and "PYENGINE_CACHE" in done.stdout
    assert list((cache_root() / "models").iterdir()) == []


def test_a_conversion_that_runs_is_left_alone(tmp_path):
    target = tmp_path / "first"

    def build(workshop):
        build_once(tmp_path / "second", lambda folder: None)
        assert workshop.is_dir()

    build_once(target, build)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"declared": 3}, r"declares 3 layers .* holds the tensors of 1"),
        ({"layers": 2, "declared": 1}, r"declares 1 layers .* holds the tensors of 2"),
        ({"declared": 2**31}, r"declares 2147483648 layers"),
        ({"left_out": ("blk.0.ffn_down.weight",)}, r"lacks the weights of model\.layers\.0\.mlp"),
        ({"left_out": ("token_embd.weight",)}, "lacks the weights of"),
    ],
)
def test_a_gguf_that_does_not_hold_what_it_declares_is_refused(tmp_path, file, message):
    write_tiny_gguf(tmp_path / "tiny.gguf", **file)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "tiny.gguf", device="cpu")
    cache = cache_root() / "models"
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.soak
def test_processes_that_convert_at_once_do_not_disturb_each_other(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys\nfrom pyengine.models.loader import load_model\n"
        "print(load_model(sys.argv[1], device='cpu').path)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.gguf")]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=300)[0].strip() for process in several}
    assert [process.returncode for process in several] == [0, 0, 0]
    (folder,) = (cache_root() / "models").iterdir()
    assert said == {str(folder)}
