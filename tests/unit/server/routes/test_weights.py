"""Weights and memory of a server's engine, behind the admin's key."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.checkpoints import read_weights, save_weights
from tests.support.serving import GOOD, Client, error_of, make_client, open_small_engine

KEY = {"authorization": "Bearer one"}
ADMIN = {"authorization": "Bearer two"}
UPDATE = "/update_weights_from_disk"
ROUTES = [
    ("post", UPDATE),
    ("post", "/sleep"),
    ("post", "/wake_up"),
    ("get", "/is_sleeping"),
    ("get", "/weights_version"),
]


@pytest.fixture
def own_engine(small_model: Path) -> Iterator[AsyncEngine]:
    with open_small_engine(small_model) as engine:
        yield engine


@pytest.fixture
def own_client(own_engine: AsyncEngine) -> Client:
    return make_client(own_engine, api_key=("one",), admin_key=("two",))


def text_of(client: Client) -> str:
    response = client.post("/v1/completions", GOOD, headers=KEY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_clients_key_is_not_enough(method: str, path: str, own_client: Client) -> None:
    body = {"json": {"model_path": "x"}} if path == UPDATE else {}
    response = own_client.run(lambda http: http.request(method, path, headers=KEY, **body))
    assert error_of(response, 403)["code"] == "admin_key_needed"


def test_what_the_engine_was_not_started_for_is_the_callers_fault(own_client: Client) -> None:
    body = {"lora_name": "a", "lora_path": "x"}
    response = own_client.post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert error_of(response, 400)["code"] == "not_configured"
    assert "enable_lora" in error_of(response, 400)["message"]


def test_an_update_and_what_is_refused(
    own_client: Client, small_model: Path, tmp_path: Path
) -> None:
    before = text_of(own_client)
    other = tmp_path / "other"
    other.mkdir()
    for file in small_model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = read_weights(small_model)
    random = np.random.default_rng(0)
    for name, numbers in weights.items():
        weights[name] = random.standard_normal(numbers.shape, np.float32)
    save_weights(other / "model.safetensors", weights, "float32")
    body = {"model_path": str(other), "mode": "finish"}
    assert own_client.post(UPDATE, body, headers=ADMIN).json() == {"weights_version": 1}
    assert own_client.get("/weights_version", headers=ADMIN).json() == {"weights_version": 1}
    assert text_of(own_client) != before
    nowhere = own_client.post(UPDATE, {"model_path": "/nonexistent"}, headers=ADMIN)
    assert error_of(nowhere)["code"] == "weights_refused"
    for wrong in ({"model_path": str(other), "mode": "wait"}, {"model_path": ""}, {}):
        assert own_client.post(UPDATE, wrong, headers=ADMIN).status_code == 400
    assert own_client.post(UPDATE, {"model_path": str(small_model)}, headers=ADMIN).json() == {
        "weights_version": 2
    }
    assert text_of(own_client) == before


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(level: int, own_client: Client) -> None:
    before = text_of(own_client)
    assert own_client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert own_client.post(f"/sleep?level={level}", None, headers=ADMIN).status_code == 200
    assert own_client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    response = own_client.post("/v1/completions", GOOD, headers=KEY)
    assert error_of(response, 503)["code"] == "asleep"
    assert response.headers["retry-after"]
    assert own_client.post("/wake_up?tags=everything", None, headers=ADMIN).status_code == 400
    assert own_client.post("/wake_up", None, headers=ADMIN).status_code == 200
    assert text_of(own_client) == before
    for wrong in ("level=3", "level=x", "mode=keep"):
        assert own_client.post(f"/sleep?{wrong}", None, headers=ADMIN).status_code == 400
