"""Rotary settings of all kinds in older and newer forms mean what transformers reads in them.

transformers writes what it read in its newest form; both forms give one spec, or the older one is
refused by name. Logits of the newest form are compared in `test_keys.py` and `test_rotary.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import spec_of
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.transformers_calls import quiet_transformers
from tests.support.without_torch import needs_torch
from tests.unit.models.decoder.tiny_models import Tiny, text_of, with_text

_THETA = 500.0
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32}
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", {**_LLAMA3, "original_max_position_embeddings": 32}),
    ("yarn", _YARN),
    ("yarn", {"factor": 4.0}),
    ("yarn", {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    ("yarn", {**_YARN, "attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2}),
    ("proportional", {"partial_rotary_factor": 0.5}),
)


def forms(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration with its rotary settings in each kind and form."""
    if text_of(values) is not values:
        yield from (with_text(values, text) for text in forms(text_of(values)))
        return
    base = {key: value for key, value in values.items() if key != "rope_parameters"}
    yield base
    yield {**base, "rope_theta": _THETA}
    yield {**base, "rope_theta": _THETA, "rope_local_base_freq": 77.0}
    for kind, section in _KINDS:
        rope = {"rope_type": kind, **section}
        yield {**base, "rope_theta": _THETA, "rope_scaling": rope}
        yield {**base, "rope_theta": _THETA, "rope_scaling": {"type": kind, **section}}
        yield {**base, "rope_theta": _THETA, "rope_parameters": rope}
        yield {**base, "rope_scaling": {**rope, "rope_theta": _THETA}}
        yield {**base, "rope_parameters": {**rope, "rope_theta": _THETA}}
        yield {**base, "rope_theta": _THETA, "rope_scaling": rope, "partial_rotary_factor": 0.5}
        types = {"full_attention": {**rope, "rope_theta": _THETA}, "sliding_attention": rope}
        yield {**base, "rope_theta": _THETA, "rope_parameters": types}
        types["sliding_attention"] = {"rope_type": "default", "rope_theta": 90.0}
        yield {**base, "rope_parameters": types}


def newest(values: dict[str, Any]) -> dict[str, Any]:
    """The form that transformers writes after it has read these; its errors pass."""
    from transformers import CONFIG_MAPPING

    with quiet_transformers():
        row: Any = CONFIG_MAPPING[values["model_type"]]
        config = row.from_dict(json.loads(json.dumps(values)))
        written = json.loads(config.to_json_string(use_diff=False))
        form: dict[str, Any] = row._decode_special_floats(written)  # as when it reads a file
    return form


def configuration(tiny: Tiny) -> dict[str, Any]:
    return newest({**tiny.configuration, "model_type": tiny.family})


@needs_torch
@pytest.mark.parametrize("family", sorted(TABLE.keys() - {"gpt2"}))
def test_each_form_means_what_transformers_reads(family: str, first_of_family: list[Tiny]) -> None:
    values = configuration(next(tiny for tiny in first_of_family if tiny.family == family))
    specs, actual = set[DecoderSpec](), spec_of(values, "config.json")
    for form in forms(values):
        try:
            written = newest(form)
        except Exception:  # transformers refuses by errors of all kinds
            continue
        try:
            actual = spec_of(form, "config.json")
        except ModelLoadError as error:
            assert "config.json" in str(error)
            continue
        expected = spec_of(written, "newest")
        text = text_of(form)
        rope = {key: value for key, value in text.items() if "rope" in key or "rota" in key}
        assert actual == replace(expected, saved_dtype=actual.saved_dtype), rope
        specs.add(actual)
    rotates = any(getattr(layer.attention, "rotary", None) for layer in actual.layers)
    assert len(specs) >= (3 if rotates else 1), "most forms were refused: the test saw nothing"


_TYPES = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 9000.0, **_YARN},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "type='linear'"),
        (
            {
                "rope_parameters": {
                    **_TYPES,
                    "full_attention": {**_TYPES["full_attention"], "truncate": False},
                }
            },
            "truncate=False",
        ),
        (
            {"rope_parameters": _TYPES, "original_max_position_embeddings": 48},
            "original_max_position_embeddings=48",
        ),
    ],
)
def test_what_transformers_passes_over_is_refused(
    family: str, rope: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        spec_of({"model_type": family, **rope}, "config.json")


def test_scaled_kinds_of_mimo_say_how_much_of_a_head_rotates() -> None:
    values = {"model_type": "mimo_v2_flash", "rope_parameters": _TYPES}
    with pytest.raises(ModelLoadError, match="rope_type='yarn': partial_rotary_factor is needed"):
        spec_of(values, "config.json")
