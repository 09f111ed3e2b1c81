"""Errors of the engine as a client sees them."""

import json
from typing import Any

import pytest

from pyengine.errors import EngineDeadError, RequestFailedError
from tests.support.serving import (
    Client,
    error_of,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
LONG = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}


def test_an_engine_that_is_dead_is_not_healthy(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: Any) -> None:
        raise EngineDeadError("the device failed")

    monkeypatch.setattr(client.context.engine, "check_health", dead)
    monkeypatch.setattr(client.context.engine, "submit", dead)
    for response in (client.get("/health"), client.get("/ping"), client.post(COMPLETIONS, GOOD)):
        assert error_of(response, 503)["code"] == "engine_dead"


def test_a_request_on_which_the_model_fails(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, submit = client.context.engine, client.context.engine.submit

    def failing(requests: Any) -> Any:
        stream = submit(requests)
        requests[0].sink.fail(RequestFailedError("the model failed on it"))
        return stream

    monkeypatch.setattr(engine, "submit", failing)
    error = error_of(client.post(COMPLETIONS, LONG), 500)
    assert (error["message"], error["type"]) == ("the model failed on it", "server_error")
    response = client.post(COMPLETIONS, {**LONG, "stream": True})
    assert response.status_code == 200
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the model failed on it"
    assert done == "data: [DONE]"


def test_a_defect_is_told_to_the_log_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(client.context.engine, "submit", broken)
    error = error_of(client.post(COMPLETIONS, GOOD), 500)
    assert "secret" not in error["message"]
    assert "a secret" in caplog.text
