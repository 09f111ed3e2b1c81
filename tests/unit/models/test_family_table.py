"""docs/reference/models.md has every family, with what the loader does with it."""

import pytest

from pyengine.models.decoder.families import TABLE
from pyengine.models.unsupported import _OWN_ONLY
from tests.support.docs import table
from tools.family_table import DOCUMENT, FALLBACK, OWN, REFUSED, families, status, with_table

PAGE = "docs/reference/models.md"
ROWS = {row[0]: (row[1], row[2]) for row in table(PAGE, "model_type", "runs as")}
_BY_HAND = {
    "llama": OWN,
    "olmo": FALLBACK,
    "glm": FALLBACK,
    "gemma3": FALLBACK,
    "qwen3_5": OWN,
    "jamba": OWN,
    "mamba2": REFUSED,
    "minimax": REFUSED,
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


def test_refusals_of_layers_say_what_is_missing() -> None:
    lines = [why for kind, why in ROWS.values() if kind == REFUSED]
    of_layers = [why for why in lines if "layers of type" in why or "recurrent state" in why]
    assert len(of_layers) > 20
    assert all("; pyengine has no " in why and _OWN_ONLY not in why for why in of_layers)


@pytest.mark.slow
@pytest.mark.skipif(not is_of_this_version(), reason="the page is of another transformers")
def test_the_page_is_what_the_code_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "python -m tools.family_table writes it"
