"""Settings of a model folder: default sampling, tokens that end a generation."""

import json

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.config import default_sampling
from pyengine.models.loader import load_model
from tests.support.checkpoints import save_tiny
from tests.support.tokenizers import save_words


def write(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))


def test_what_the_file_sets_is_the_default_and_nothing_else(tmp_path):
    save_tiny(tmp_path)
    write(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.1,
        max_new_tokens=100,
        num_beams=1,
        max_length=20,
        transformers_version="5.0",
    )
    defaults = load_model(tmp_path, device="cpu").default_sampling
    assert dict(defaults) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_tokens": 100,
    }
    with pytest.raises(TypeError):
        defaults["temperature"] = 1.0  # type: ignore[index]


def test_defaults_of_transformers_are_not_the_models(tmp_path):
    save_tiny(tmp_path)
    assert (tmp_path / "generation_config.json").is_file()
    assert dict(load_model(tmp_path, device="cpu").default_sampling) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": None, "top_p": None}, {}),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 5, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
        ({"do_sample": True}, {}),
    ],
)
def test_a_model_that_is_not_to_be_sampled_is_greedy(tmp_path, settings, expected):
    write(tmp_path, **settings)
    assert dict(default_sampling(tmp_path)) == expected


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", "[" * 100_000])
def test_a_file_that_is_missing_or_damaged_sets_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert dict(default_sampling(tmp_path)) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 7},
        {"max_new_tokens": -1},
        {"top_k": [1]},
    ],
)
def test_values_that_no_request_could_have_are_named_with_the_file(tmp_path, settings):
    write(tmp_path, **settings)
    with pytest.raises(
        ModelLoadError, match=r"generation_config\.json sets a value that no request"
    ):
        default_sampling(tmp_path)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (-1, {3}),
        ([2, 32, 10**12, -1], {2, 3}),
        ([0, 31], {0, 3, 31}),
        (None, {3}),
    ],
)
def test_only_tokens_of_the_vocabulary_end_a_generation(tmp_path, declared, expected):
    save_tiny(tmp_path)
    save_words(tmp_path)
    write(tmp_path, eos_token_id=declared)
    assert load_model(tmp_path, device="cpu").eos_token_ids == expected
