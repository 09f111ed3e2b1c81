"""docs/reference/models.md has every family, with what the loader does with it."""

import pytest

from pyengine.models.decoder.families import TABLE
from tests.support.docs import table
from tools.family_table import DOCUMENT, FALLBACK, OWN, REFUSED, families, status, with_table

PAGE = "docs/reference/models.md"
ROWS = {row[0]: (row[1], row[2]) for row in table(PAGE, "model_type", "runs as")}
_BY_HAND = {
    "llama": OWN,
    "olmo": FALLBACK,
    "glm": FALLBACK,
    "gemma3": FALLBACK,
    "qwen3_5": REFUSED,
    "bert": REFUSED,
    "bart": REFUSED,
    "rwkv": REFUSED,
    "bloom": REFUSED,
}


def is_of_this_version() -> bool:
    import transformers

    return f"transformers {transformers.__version__} has " in DOCUMENT.read_text(encoding="utf-8")


def test_the_page_has_each_family_once() -> None:
    names = [row[0] for row in table(PAGE, "model_type", "runs as")]
    assert len(names) == len(set(names)) > 150
    assert {name for name, (kind, _) in ROWS.items() if kind == OWN} == set(TABLE)
    if is_of_this_version():
        assert names == families(), "python -m tools.family_table writes it"


@pytest.mark.parametrize("family", _BY_HAND)
def test_a_family_runs_as_the_page_says(family: str) -> None:
    assert status(family)[0] == ROWS[family][0] == _BY_HAND[family]


@pytest.mark.slow
@pytest.mark.skipif(not is_of_this_version(), reason="the page is of another transformers")
def test_the_page_is_what_the_code_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "python -m tools.family_table writes it"
