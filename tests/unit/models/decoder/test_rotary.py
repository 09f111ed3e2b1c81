"""Frequencies are those of transformers, from settings as files of all years have them."""

from typing import Any

import numpy as np
import pytest
import torch

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.loading import spec_of
from pyengine.models.decoder.rotary import angles, frequencies
from pyengine.models.decoder.spec import Rotary

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
_SCALED: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5, "beta_fast": 20, "beta_slow": 3},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * index for index in range(16)],
        "long_factor": [2.0] * 16,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "proportional", "factor": 2.0},
]


def rotary_of(values: dict[str, Any]) -> Rotary:
    mixer = spec_of({**_LLAMA, **values}, "config.json").layers[0].mixer
    assert mixer.rotary is not None
    return mixer.rotary


@pytest.mark.parametrize("scaled", _SCALED, ids=lambda scaled: "-".join(map(str, scaled))[:40])
def test_frequencies_are_those_of_transformers(scaled: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 50000.0, **scaled}
    config = LlamaConfig(**_LLAMA, rope_parameters=dict(parameters))
    expected = LlamaRotaryEmbedding(config)
    actual, factor = frequencies(rotary_of({"rope_parameters": parameters}))
    expected_frequencies: Any = expected.inv_freq
    assert np.allclose(actual, expected_frequencies.numpy(), rtol=3e-7, atol=0)
    assert factor == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize("scaled", _SCALED[1:], ids=lambda scaled: "-".join(map(str, scaled))[:40])
def test_older_files_say_the_same_in_other_keys(scaled: dict[str, Any]) -> None:
    newer = rotary_of({"rope_parameters": {"rope_theta": 50000.0, **scaled}})
    older = {**scaled, "type": scaled["rope_type"]}
    assert rotary_of({"rope_theta": 50000.0, "rope_scaling": older}) == newer
    del older["rope_type"]
    assert rotary_of({"rope_theta": 50000.0, "rope_scaling": older}) == newer


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"a": 1}}, "rope_sc"),
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": 8.0}}, "rope_theta=9"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "type": "yarn"}}, "type='yarn'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor=-2"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor=nan"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "2"}}, "factor='2'"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"head_dim": 1}, "1 numbers|even|rotate"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "factor": 2.0}},
            "short_factor has 1 numbers",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        rotary_of(values)


def test_longrope_runs_up_to_its_trained_positions() -> None:
    spec = spec_of({**_LLAMA, "rope_parameters": _SCALED[-2]}, "config.json")
    assert spec.max_positions == 1024
    assert spec_of(_LLAMA, "config.json").max_positions == 4096


def test_angles_are_cosines_and_sines_of_positions() -> None:
    rotary = Rotary(size=8, theta=100.0, exponent_size=8, turned=3)
    cosines, sines = angles(np.array([0, 5]), *frequencies(rotary))
    inverse = 1 / 100.0 ** torch.tensor([0.0, 0.25, 0.5])
    assert np.allclose(cosines[1, :3], torch.cos(5 * inverse))
    assert np.allclose(sines[1, :3], torch.sin(5 * inverse))
    assert cosines[:, 3].tolist() == [1, 1] and sines[0].tolist() == [0, 0, 0, 0]
