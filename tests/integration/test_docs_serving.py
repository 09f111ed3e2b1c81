"""docs/guides/serving.md and its like: their commands run, nothing is left out."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.sampling_params import SamplingParams
from pyengine.server.app import create_app
from pyengine.server.schemas.requests import ChatCompletionRequest, CompletionRequest
from pyengine.server.settings import ServerSettings
from tests.support.docs import ROOT, blocks, table
from tests.support.processes import run_program
from tests.support.serving import RunningServer, open_small_engine, save_small_model

DOCUMENT = "docs/guides/serving.md"
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
FIELDS = ROOT / "docs/reference/request-fields.md"
REFERENCE = "docs/reference/server.md"
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")


def curls(document: str) -> list[str]:
    """The curl commands of a document."""
    lines = "".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    assert all(line.startswith("curl ") for line in lines)
    return lines


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The embedded model, as `pyengine serve` serves it."""
    with AsyncEngine(num_blocks=256) as engine, RunningServer(engine) as server:
        yield server


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("document", ["docs/tutorial/serve.md", DOCUMENT])
def test_curl_gets_answers(document: str, server: RunningServer) -> None:
    commands = curls(document)
    assert len(commands) >= 2
    for command in commands:
        asked = command.replace("localhost:8000", server.address)
        assert asked != command
        done = run_program(["bash", "-c", asked])
        lines = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        if '"stream": true' in command:
            assert lines.pop() == "[DONE]"
        items: list[Any] = [json.loads(line) for line in lines]
        assert items and not [item for item in items if "error" in item]
        if "chat" in command:
            assert "Tokyo" in items[0]["choices"][0]["message"]["content"]


def test_every_route_is_there(tmp_path: Path) -> None:
    with open_small_engine(save_small_model(tmp_path)) as engine:
        paths = create_app(engine, ServerSettings()).openapi()["paths"]
    assert len(paths) > 10
    assert {*paths, "/openapi.json"} <= {row[0] for row in table(REFERENCE, "route")}


@pytest.mark.parametrize("form", [CompletionRequest, ChatCompletionRequest])
def test_every_field_is_named_or_one_of_the_sampling_parameters(form: Any) -> None:
    plain = {"model", "messages", "stream", "max_completion_tokens"}
    known = {*SAMPLING, *plain}
    own = set(form.model_fields) - known
    text = TEXT + FIELDS.read_text(encoding="utf-8")
    assert not [name for name in own if f"`{name}`" not in text]


def test_every_sampling_parameter_can_be_sent() -> None:
    of_the_server = {"output_kind"}
    of_python = {"logits_processors", "return_hidden_states", "stop_when"}
    for form in (CompletionRequest, ChatCompletionRequest):
        assert SAMPLING - set(form.model_fields) == of_the_server | of_python


def test_the_readme_links_here() -> None:
    assert "docs/guides/serving.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
