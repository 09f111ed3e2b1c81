"""docs/guides/slow.md: its settings, lines and messages are real."""

import inspect
import re

import pytest

from pyengine.config import EngineSettings
from pyengine.cpu import threads
from pyengine.engine import description
from pyengine.models.decoder import product_choice
from tests.support.docs import ROOT, blocks, commands, table

DOCUMENT = "docs/guides/slow.md"
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")


def test_the_lines_are_those_of_describe() -> None:
    lines = {name for row in table(DOCUMENT, "line") for name in re.findall(r"\w+", row[0])}
    assert len(lines) >= 9
    source = "".join(map(inspect.getsource, (description, threads, product_choice)))
    assert not [name for name in lines if f'"{name}"' not in source]


def test_the_message_is_that_of_the_engine() -> None:
    [message] = blocks(DOCUMENT, "text")
    source = re.sub(r'"\s+"', "", inspect.getsource(threads.StepThreads))
    for part in re.split(r"[\d.]+ s|\.\.\.", message):
        assert part.strip() in source


def test_settings_are_real() -> None:
    named = set(re.findall(r"`(?:LLM\()?(\w+)=", TEXT)) - {"GOMP_SPINCOUNT"}
    assert {"num_threads", "linear_backend"} <= named
    assert not [name for name in named if not hasattr(EngineSettings, name)]
    assert ["pyengine", "info"] in commands(DOCUMENT)


@pytest.mark.parametrize("page", ["README.md", "docs/guides/engine.md"])
def test_other_pages_link_here(page: str) -> None:
    assert "slow.md)" in (ROOT / page).read_text(encoding="utf-8")
