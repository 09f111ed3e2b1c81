"""The tokens that end an answer, by the files of a folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from pyengine.models.decoder.families import TABLE
from pyengine.models.tokenizer import eos_token_ids
from pyengine.models.tokenizer.ends import FAMILY_ENDS

ANY_SIZE = 10**6
CONFIG, GENERATION = "config.json", "generation_config.json"


@pytest.mark.parametrize("family", TABLE)
def test_defaults_of_families_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": family}))
    expected = CONFIG_MAPPING[family]().get_text_config().eos_token_id
    expected = {*(expected if isinstance(expected, list) else [expected])} - {None}
    assert eos_token_ids(tmp_path, None, ANY_SIZE) == expected
    assert FAMILY_ENDS.keys() <= TABLE.keys()


@pytest.mark.parametrize(
    ("files", "default", "expected"),
    [
        ({CONFIG: {"eos_token_id": 5}, GENERATION: {"eos_token_id": [6, 7]}}, None, {6, 7}),
        ({CONFIG: {"eos_token_id": [5, 8]}, GENERATION: {"eos_token_id": None}}, None, set()),
        ({CONFIG: {"eos_token_id": [5, 8]}, GENERATION: {"top_k": 3}}, None, {5, 8}),
        ({CONFIG: {"model_type": "llama"}, GENERATION: {"top_k": 3}}, None, set()),
        ({CONFIG: {"model_type": "llama"}, GENERATION: {"top_k": 3}}, 9, {9}),
        ({CONFIG: {"model_type": "llama", "eos_token_id": None}}, None, set()),
        ({CONFIG: {"text_config": {"eos_token_id": 4}, "eos_token_id": 5}}, None, {4}),
        ({CONFIG: {"text_config": {}, "eos_token_id": 5}}, None, {5}),
        ({CONFIG: {"eos_token_id": -1}}, None, set()),
        ({CONFIG: {"eos_token_id": [True, "2", 3.0, 99]}}, None, set()),
        ({}, 9, {9}),
    ],
)
def test_files_in_their_order(
    files: dict[str, Any], default: Any, expected: set[int], tmp_path: Path
) -> None:
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert eos_token_ids(tmp_path, None, 20, default=default) == expected
    tokenizer = SimpleNamespace(eos_token_id=11)
    assert eos_token_ids(tmp_path, tokenizer, 20, default=default) == {*expected, 11}
