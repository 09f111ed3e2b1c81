"""Hostile files: each garbage value is refused by name, or means something, soon.

No other exception than a `ModelLoadError`, no hang, and no memory beyond that of the file.
"""

import json
import os
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pyengine.errors import ModelLoadError
from pyengine.models.config import default_sampling
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import family_of, open_model, spec_of
from pyengine.models.tokenizer.ends import eos_token_ids
from tests.unit.models.decoder.test_keys import changed
from tests.unit.models.decoder.tiny_models import MODELS, Folders, Tiny, configuration_in

SECONDS = 20
MAX_BYTES = 200 << 20


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


GARBAGE: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**63, 10**30, 10**400, -(2**70)),
    *(float("nan"), float("inf"), float("-inf"), -1e-30, 5e-324, 1e300),
    *("", "no such word", "1", "\ud800", "ä" * 1000, True, False),
    *([], {}, [[]], [None], {"": {}}, {"a": nested(200)}, nested(900), list(range(10_000))),
)


@contextmanager
def bounded() -> Iterator[None]:
    """Inside, the memory of the process and the processor time are bounded."""
    before, started = _peak(), time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert _peak() - before < MAX_BYTES


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def paths(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each key, those of objects inside too."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


def refused_or_right(values: dict[str, Any], key: str) -> None:
    try:
        spec_of(values, "config.json")
    except ModelLoadError as error:
        said = str(error)
        assert "config.json" in said and len(said) < 2000, (key, said)


@pytest.mark.parametrize("family", sorted(TABLE))
def test_each_key_of_a_configuration_may_have_any_value(
    family: str, saved_folder: Folders, first_of_family: list[Tiny]
) -> None:
    folder = saved_folder(next(tiny for tiny in first_of_family if tiny.family == family))
    values = configuration_in(folder)
    values.setdefault("num_nextn_predict_layers", 0)
    with bounded():
        for path in paths(values):
            for value in GARBAGE:
                refused_or_right(changed(values, path, value), ".".join(path))


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", "gpt2"])
def test_a_folder_of_any_configuration_is_opened_or_refused(
    name: str, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(next(tiny for tiny in MODELS if tiny.name == name))
    values = configuration_in(folder)
    values.setdefault("num_nextn_predict_layers", 0)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with bounded():
        for path in paths(values):
            for value in (0, 2**24, 2**63, [nested(900)]):
                (tmp_path / "config.json").write_text(json.dumps(changed(values, path, value)))
                with suppress(ModelLoadError):
                    open_model(tmp_path)


@pytest.mark.parametrize("what", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
)
def test_each_key_of_rotary_settings_may_have_any_value(what: str, kind: str) -> None:
    keys = (
        *("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "truncate"),
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "short_factor"),
        *("long_factor", "full_attention", "sliding_attention", "llama_4_scaling_beta"),
    )
    full: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if kind == "llama3":
        full |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        full |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    with bounded():
        for family in (
            "llama",
            "phi3",
            "gemma3_text",
            "ministral3",
            "deepseek_v3",
            "mimo_v2_flash",
        ):
            for key in keys:
                for value in GARBAGE:
                    refused_or_right({"model_type": family, what: {**full, key: value}}, key)


_CONTENTS = [
    *(b"", b"{", b"[]", b"null", b"5", b'"x"', b"[" * 100_000, b'{"a":' * 100_000),
    *(b"\xff\xfe", b"\0" * 100, b"\xef\xbb\xbf{}", b'{"model_type": "\\ud800"}'),
    *(b'{"model_type": ["llama"]}', b'{"model_type": {}}', b'{"model_type": 1e999}'),
    b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
    b'{"model_type": "llama", "a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
]


@pytest.mark.parametrize("content", _CONTENTS, ids=range(len(_CONTENTS)))
def test_a_configuration_of_any_form_is_refused(
    content: bytes, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes(content)
    with bounded(), pytest.raises(ModelLoadError, match=r"config\.json"):
        open_model(tmp_path)


def test_files_that_are_no_files_are_not_waited_for(saved_folder: Folders, tmp_path: Path) -> None:
    folder = saved_folder(MODELS[0])
    os.mkfifo(tmp_path / "config.json")
    for read in (family_of, open_model):
        with bounded(), pytest.raises(ModelLoadError, match=r"config\.json is not a regular file"):
            read(tmp_path)
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with bounded(), pytest.raises(ModelLoadError, match=r"config\.json has 1099511627776 bytes"):
        family_of(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    os.mkfifo(tmp_path / "a.safetensors")
    with bounded(), pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        open_model(tmp_path)
    os.mkfifo(tmp_path / "generation_config.json")
    with bounded():
        assert default_sampling(tmp_path) == {}


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


_NORM = "model.norm.weight"


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets", "more", None])
def test_each_key_of_a_header_of_weights_may_have_any_value(
    key: str | None, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    whole = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    own = header[_NORM]
    start, end = own["data_offsets"]
    lists = (
        *([-48], [48.0], ["48"], [True], [48, 1], [2**62, 4], [2**63], [2**64, 2**64], [0, 0]),
        *([start], [start, end, 0], [None, end], [str(start), end], [end, start], [start + 2, end]),
        *([start, end + 4], [-4, end], [start, 2**63], [float(start), end], ["F32"], [[]]),
        *("F64", "BF16", "I64", "U8", "F4", "C64", "f32"),
    )
    with bounded():
        for value in (*GARBAGE, *lists, None):
            changed = value if key is None else {**own, key: value}
            if changed == own:
                continue
            write_header(tmp_path / "model.safetensors", {**header, _NORM: changed}, data)
            with pytest.raises(ModelLoadError) as caught:
                open_model(tmp_path)
            said = str(caught.value)
            assert str(tmp_path) in said and len(said) < 2000, (key, value, said)


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63, 2**64 - 1, 101_000_000])
def test_lengths_of_headers_that_lie_are_refused(
    value: int, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", value))
        file.truncate(1 << 33)
    with bounded(), pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        open_model(tmp_path)


@pytest.mark.parametrize("key", ["weight_map", "metadata", None])
def test_an_index_may_have_any_value(
    key: str | None, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "a.safetensors").symlink_to(folder / "model.safetensors")
    whole = {"metadata": {}, "weight_map": {_NORM: "a.safetensors"}}
    more: tuple[Any, ...] = ({_NORM: 5}, {_NORM: ["a"]}, {_NORM: "../a"}, {_NORM: "/etc/passwd"})
    with bounded():
        for value in (*GARBAGE, *more):
            changed = value if key is None else {**whole, key: value}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
            try:
                open_model(tmp_path)
            except ModelLoadError as error:
                assert str(tmp_path) in str(error)
            else:
                assert key == "metadata"


def test_the_files_of_the_model_are_read_and_no_copies(
    saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(
        {"layers.0.attention.wq.weight": np.ones(2, np.float32)},
        tmp_path / "consolidated.safetensors",
    )
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    open_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1-of-1.safetensors")
    index = {"weight_map": {_NORM: "model-1-of-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    open_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"layers\.0\.attention\.wq"):
        open_model(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "copy.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"both have .*holds the weights twice"):
        open_model(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors"])
def test_each_key_of_a_quantization_may_have_any_value(
    method: str, saved_folder: Folders, tmp_path: Path
) -> None:
    folder = saved_folder(MODELS[0])
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    values = configuration_in(folder)
    group = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    whole: dict[str, Any] = {
        "quant_method": method,
        "bits": 4,
        "group_size": 32,
        "version": "gemm",
        "checkpoint_format": "gptq",
        "desc_act": False,
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "format": "pack-quantized",
        "config_groups": {"group_0": {**group, "targets": ["Linear"], "input_activations": None}},
        "sparsity_config": {"format": "dense"},
    }
    with bounded():
        for path in paths(whole):
            for value in GARBAGE:
                packed = changed(whole, path, value)
                (tmp_path / "config.json").write_text(
                    json.dumps({**values, "quantization_config": packed})
                )
                with pytest.raises(ModelLoadError) as caught:  # the weights are floats
                    open_model(tmp_path)
                assert len(str(caught.value)) < 2000


def test_each_key_of_a_generation_configuration_may_have_any_value(tmp_path: Path) -> None:
    keys = (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
        *("do_sample", "eos_token_id", "bos_token_id", "stop_strings", "bad_words_ids"),
    )
    with bounded():
        for key in keys:
            for value in GARBAGE:
                (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
                try:
                    default_sampling(tmp_path)
                except ModelLoadError as error:
                    said = str(error)
                    assert "generation_config.json" in said and len(said) < 2000
                assert eos_token_ids(tmp_path, None, 101, default=value) <= set(range(101))
