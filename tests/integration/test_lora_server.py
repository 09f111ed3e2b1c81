"""LoRA adapters of a server: `model` names them, an admin loads and unloads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import AdapterError
from pyengine.server.app import create_app
from pyengine.server.settings import ServerSettings
from tests.support.adapters import save_adapter
from tests.support.serving import Client, open_small_engine, save_small_model

KEYS = {"api_key": ("client",), "admin_key": ("admin",)}
HEADERS = {name: {"authorization": f"Bearer {name}"} for name in ("client", "admin")}


@pytest.fixture(name="model")
def a_model(tmp_path: Path) -> Path:
    """A small model with a tokenizer."""
    return save_small_model(tmp_path / "model", initializer_range=0.3)


@pytest.fixture(name="client")
def a_client(tmp_path: Path, model: Path) -> Iterator[Client]:
    """A server with one adapter."""
    adapter = save_adapter(tmp_path / "first", model)
    settings = ServerSettings(
        served_model_name=("base",), lora_modules=(f"first={adapter}",), **KEYS
    )
    with open_small_engine(model, enable_lora=True, dtype="float32") as engine:
        yield Client(create_app(engine, settings))


def post(client: Client, path: str, body: Any, key: str = "admin") -> Any:
    return client.post(path, body, headers=HEADERS[key])


def text_of(client: Client, model: str | None, **body: Any) -> Any:
    """The answer of a completion, or its error."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, **body}
    answer = post(client, "/v1/completions", body, "client").json()
    return answer if "error" in answer else (answer["model"], answer["choices"][0]["text"])


def test_the_model_of_a_request_names_an_adapter(tmp_path: Path, model: Path) -> None:
    adapter = save_adapter(tmp_path / "first", model)
    settings = ServerSettings(served_model_name=("base",), lora_modules=(f"first={adapter}",))
    with open_small_engine(model, enable_lora=True, dtype="float32") as engine:
        client = Client(create_app(engine, settings))
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("base", None),
            ("first", "base"),
        ]
        assert client.get("/v1/models/first").json()["parent"] == "base"
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        answers = [
            client.post("/v1/completions", {**body, "model": name}).json()
            for name in ("base", "first")
        ]
        assert [answer["model"] for answer in answers] == ["base", "first"]
        assert answers[0]["choices"] != answers[1]["choices"]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
        answers = [
            client.post("/v1/chat/completions", {**chat, "model": name}).json()
            for name in ("base", "first")
        ]
        assert answers[0]["choices"] != answers[1]["choices"]


def test_an_admin_loads_and_unloads_adapters(tmp_path: Path, model: Path, client: Client) -> None:
    other = str(save_adapter(tmp_path / "other", model, seed=1))
    load = {"lora_name": "other", "lora_path": other}
    assert post(client, "/v1/load_lora_adapter", load, "client").status_code == 403
    assert text_of(client, "other")["error"]["code"] == "model_not_found"
    assert post(client, "/v1/load_lora_adapter", load).status_code == 200
    first, second = text_of(client, "first"), text_of(client, "other")
    assert first[0] == "first" and second[0] == "other" and first[1] != second[1]
    again = post(client, "/v1/load_lora_adapter", load)
    assert again.status_code == 400 and "unload it first" in again.text
    replace = {**load, "lora_name": "first", "load_inplace": True}
    assert post(client, "/v1/load_lora_adapter", replace).status_code == 200
    assert text_of(client, "first")[1] == second[1]
    unload = {"lora_name": "other"}
    assert post(client, "/v1/unload_lora_adapter", unload, "client").status_code == 403
    assert post(client, "/v1/unload_lora_adapter", unload).status_code == 200
    assert post(client, "/v1/unload_lora_adapter", unload).status_code == 404
    assert text_of(client, "other")["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "path"), [("../x", ""), ("a/b", ""), ("base", ""), ("x", "/none"), ("x", "")]
)
def test_what_cannot_be_loaded_gets_400(client: Client, name: str, path: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    answer = post(client, "/v1/load_lora_adapter", body)
    assert answer.status_code == 400, answer.text
    assert text_of(client, "base")[0] == "base"


def test_a_module_that_cannot_be_loaded_ends_the_start(model: Path) -> None:
    settings = ServerSettings(lora_modules=("first=/none",))
    with open_small_engine(model, enable_lora=True) as engine, pytest.raises(AdapterError):
        create_app(engine, settings)
