"""One setting, written once: defaults, help, the command line's form, checks."""

import dataclasses
import inspect
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.config import EngineSettings, takes_settings
from pyengine.errors import ConfigurationError
from pyengine.utils.settings import option_of
from tests.support.processes import run_python

FIELDS = {field.name: field for field in dataclasses.fields(EngineSettings)}


class Caller:
    """A caller.

    It takes settings.
    """

    @takes_settings
    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings


def test_every_field_has_a_default_and_a_help_text() -> None:
    assert EngineSettings() == EngineSettings(None)
    for name, field in FIELDS.items():
        help_text = option_of(field).help
        assert help_text and help_text[-1] not in ".:", name


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineSettings().seed = 3  # type: ignore[misc]


def test_a_caller_takes_the_model_by_position_and_settings_by_name() -> None:
    caller = Caller("folder", block_size=8, seed=3)
    assert caller.settings == EngineSettings(model="folder", block_size=8, seed=3)
    assert Caller().settings == EngineSettings()
    assert Caller(model=Path("x")).settings.model == Path("x")
    with pytest.raises(TypeError):
        Caller("folder", "cpu")  # type: ignore[call-arg,misc]


def test_signature_and_docstring_show_every_setting() -> None:
    parameters = inspect.signature(Caller).parameters
    assert list(parameters) == list(FIELDS)
    for name, parameter in parameters.items():
        assert parameter.default == FIELDS[name].default
    text = inspect.getdoc(Caller.__init__)
    assert text is not None
    for name, field in FIELDS.items():
        assert f"{name} (default {field.default!r}): " in " ".join(text.split())
        assert option_of(field).help in " ".join(text.split())


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"dtype": "bf16"}, "did you mean bfloat16? Use one of auto, "),
        ({"dtype": "fp16"}, "did you mean float16? Use one of auto, "),
        ({"dtype": "flaot32"}, "did you mean float32? Use one of auto, "),
        ({"dtype": "x"}, "is not known: use one of auto, float32, bfloat16, float16"),
        ({"quantization": "int-8"}, "did you mean int8? Use one of int8, "),
        ({"kv_cache_dtype": "fp8_e4"}, "did you mean fp8_e4m3? Use one of auto, "),
        ({"attention_backend": "flash_attn"}, "did you mean flash-attn? Use one of auto, "),
        ({"speculation": "n-gram"}, "did you mean ngram? Use one of ngram, "),
    ],
)
def test_a_choice_that_is_none_is_refused_with_the_nearest(
    settings: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        EngineSettings(**settings)
    assert nearest in str(error.value)


def test_the_text_of_a_dtype_of_torch_is_one_of_the_choices() -> None:
    assert EngineSettings(dtype="torch.float32").dtype == "torch.float32"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"), ("tensor_parallel", None)],
)
def test_an_unknown_setting_is_named_with_the_nearest_known(name: str, nearest: str | None) -> None:
    with pytest.raises(ConfigurationError) as error:
        Caller("m", **{name: 1})  # type: ignore[arg-type]
    assert repr(name) in str(error.value)
    assert (nearest or "tensor_parallel_size") in str(error.value)


def test_what_is_like_nothing_known_gets_the_whole_list() -> None:
    with pytest.raises(ConfigurationError, match=r"'zzz'.*known are model, revision, "):
        Caller(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"num_blocks": "5"}, ["num_blocks='5'", "integer"]),
        ({"num_blocks": True}, ["num_blocks=True", "integer"]),
        ({"num_blocks": 1.5}, ["num_blocks=1.5", "integer"]),
        ({"num_blocks": 10**5000}, ["num_blocks", "16610 bits"]),
        ({"num_blocks": -(10**5000)}, ["num_blocks", "16610 bits"]),
        ({"num_blocks": "5" * 5000}, ["num_blocks='555", "integer"]),
        ({"num_blocks": 0}, ["num_blocks=0", "at least 1"]),
        ({"block_size": 0}, ["block_size=0", "at least 1"]),
        ({"block_size": -16}, ["block_size=-16", "at least 1"]),
        ({"block_size": "big"}, ["block_size='big'", "'auto'"]),
        ({"kv_cache_memory": 0}, ["kv_cache_memory=0", "at least 1"]),
        ({"kv_cache_memory": 1, "num_blocks": 1}, ["num_blocks=1", "kv_cache_memory=1", "one of"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "at least 1"]),
        ({"max_num_seqs": None}, ["max_num_seqs=None", "integer"]),
        ({"max_num_batched_tokens": 8}, ["max_num_batched_tokens=8", "max_num_seqs=256"]),
        ({"max_model_len": 1}, ["max_model_len=1", "at least 2"]),
        ({"max_num_waiting": 0}, ["max_num_waiting=0", "at least 1"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization=nan"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization=0", "above 0"]),
        ({"gpu_memory_utilization": "0.5"}, ["gpu_memory_utilization='0.5'", "number"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size=0", "at least 1"]),
        ({"enable_prefix_caching": 1}, ["enable_prefix_caching=1", "True or False"]),
        ({"async_scheduling": "yes"}, ["async_scheduling='yes'", "True or False", "None"]),
        ({"seed": None}, ["seed=None", "integer"]),
        ({"generation_config": "mine"}, ["generation_config='mine'", "auto, none, vllm"]),
        ({"model": 5}, ["model=5"]),
        ({"revision": 5}, ["revision=5", "text"]),
        ({"eviction": None}, ["eviction=None", "text"]),
        ({"tensor_parallel_size": 2, "compile": True}, ["compile=True", "tensor_parallel_size=2"]),
        (
            {"tensor_parallel_size": 2, "async_scheduling": True},
            ["async_scheduling=True", "tensor_parallel_size=2"],
        ),
    ],
    ids=lambda value: reprlib.repr(value)[:60] if isinstance(value, list) else None,
)
def test_settings_out_of_range(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        EngineSettings(**settings)
    assert not [part for part in parts if part not in str(error.value)], error.value


def test_numbers_of_numpy_are_read_as_plain_ones() -> None:
    settings = EngineSettings(num_blocks=np.int64(5), gpu_memory_utilization=np.float32(0.5))  # type: ignore[arg-type]
    assert type(settings.num_blocks) is int and settings.num_blocks == 5
    assert type(settings.gpu_memory_utilization) is float
    assert type(EngineSettings(gpu_memory_utilization=1).gpu_memory_utilization) is float


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(EngineSettings(token="secret"))


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, pyengine.config; print({'torch', 'typer', 'rich'} & set(sys.modules))"
    done = run_python(code)
    assert done.stdout == "set()\n"
