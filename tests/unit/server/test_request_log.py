"""One line per request, as text or JSON, and never prompts or answers."""

import io
import json

import pytest

from pyengine.sampling_params import SamplingParams
from pyengine.server.request_log import LogFormat, RequestLog
from tests.support.callers import FakeModel
from tests.support.engines import GREEDY


def logged(
    patch: pytest.MonkeyPatch, format: LogFormat, names: list[str], *, aborted: bool = False
) -> list[str]:
    model = FakeModel(patch)
    llm, stream = model.llm(), io.StringIO()
    log = RequestLog(format, stream)
    llm.observe(log)
    model.bench.submit({name: [*range(3, 20), 77] for name in names})
    if aborted:
        model.bench.abort(names)
    model.bench.run()
    log.close()
    return stream.getvalue().splitlines()


def test_a_line_says_who_how_much_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = map(json.loads, logged(monkeypatch, "json", ["a", "b"]))
    assert (first["id"], second["id"]) == ("a", "b")
    assert first["status"] == "length"
    assert (first["prompt_tokens"], first["cached_tokens"]) == (18, 0)
    assert second["cached_tokens"] == 16
    assert first["output_tokens"] == GREEDY.max_tokens
    assert 0 <= first["queue_s"] <= first["first_token_s"] <= first["total_s"]
    assert first["time"].count("T") == 1


def test_text_is_one_line_whatever_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    nasty = 'a b\n\x1b[31m"=\u2028'
    [line] = logged(monkeypatch, "text", [nasty])
    assert f" id={json.dumps(nasty)} status=length prompt_tokens=18 " in line
    assert "\x1b" not in line and "\u2028" not in line
    [line] = logged(monkeypatch, "json", [nasty])
    assert json.loads(line)["id"] == nasty


def test_what_was_aborted_while_it_waited_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = logged(monkeypatch, "json", ["a"], aborted=True)
    entry = json.loads(line)
    assert (entry["status"], entry["output_tokens"]) == ("abort", 0)
    assert entry["queue_s"] is entry["first_token_s"] is None
    assert entry["total_s"] >= 0


def test_no_token_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    llm, stream = model.llm(), io.StringIO()
    log = RequestLog("json", stream)
    llm.observe(log)
    model.bench.submit({"a": [77, 78, 79]}, SamplingParams(temperature=0, max_tokens=2))
    model.bench.run()
    log.close()
    assert not {"77", "78", "79"} & {str(value) for value in json.loads(stream.getvalue()).values()}
