"""Damaged safetensors files are named before anything maps them."""

import json
import struct

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import check_weights


def safetensors(path, *, declared: int, present: int) -> int:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [declared - 4], "data_offsets": [4, declared]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * present)
    return 8 + len(text)


def test_whole_files_pass(tmp_path):
    safetensors(tmp_path / "model.safetensors", declared=100, present=100)
    check_weights(tmp_path)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path):
    head = safetensors(tmp_path / "model.safetensors", declared=100, present=60)
    with pytest.raises(ModelLoadError) as caught:
        check_weights(tmp_path)
    message = str(caught.value)
    assert "model.safetensors is truncated" in message
    assert f"{head + 100} bytes" in message
    assert f"has {head + 60}" in message


def test_a_file_that_is_too_long_is_damaged(tmp_path):
    safetensors(tmp_path / "model.safetensors", declared=100, present=101)
    with pytest.raises(ModelLoadError, match="is damaged"):
        check_weights(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        b"\xff" * 64,
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is"):
        check_weights(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"holds no \.safetensors file"):
        check_weights(tmp_path)


def test_files_that_the_index_names_must_be_there(tmp_path):
    safetensors(tmp_path / "model-1.safetensors", declared=8, present=8)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(ModelLoadError, match=r"missing weights: model-2\.safetensors"):
        check_weights(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match=r"index\.json is damaged"):
        check_weights(tmp_path)
