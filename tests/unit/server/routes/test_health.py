"""The small routes: health, version, models, and the description of all."""

from pyengine.async_engine import AsyncEngine
from pyengine.utils.packaging import package_version
from tests.support.serving import MAX_MODEL_LEN, Client, error_of, make_client


def test_health_and_ping_are_empty(client: Client) -> None:
    for path in ("/health", "/ping"):
        response = client.get(path)
        assert (response.status_code, response.content) == (200, b"")


def test_head_is_as_get_without_a_body(client: Client) -> None:
    for path in ("/health", "/ping"):
        response = client.run(lambda http, path=path: http.head(path))
        assert (response.status_code, response.content) == (200, b"")


def test_the_version_is_the_distributions(client: Client) -> None:
    assert client.get("/version").json() == {"version": package_version()}


def test_the_model_has_every_name_it_was_given(engine: AsyncEngine) -> None:
    client = make_client(engine, served_model_name=("mine", "yours"))
    answer = client.get("/v1/models").json()
    assert [card["id"] for card in answer["data"]] == ["mine", "yours"]
    assert {card["root"] for card in answer["data"]} == {engine.describe()["model"]}
    assert str(engine.model_path.parent) not in client.get("/v1/models").text
    assert {card["max_model_len"] for card in answer["data"]} == {MAX_MODEL_LEN}
    for name in ("mine", "yours"):
        assert client.complete([5], model=name, max_tokens=1)["model"] == name
    assert client.complete([5], max_tokens=1)["model"] == "mine"


def test_without_a_name_it_is_the_models_own(client: Client, engine: AsyncEngine) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == engine.describe()["model"]


def test_a_model_by_its_name(engine: AsyncEngine) -> None:
    client = make_client(engine, served_model_name=("mine", "owner/yours"))
    cards = client.get("/v1/models").json()["data"]
    for card in cards:
        assert client.get(f"/v1/models/{card['id']}").json() == card
    for name in ("gpt-9", "owner", "mine/"):
        error = error_of(client.get(f"/v1/models/{name}"), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"


def test_the_description_names_every_route(client: Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/health", "/ping", "/v1/models", "/v1/completions", "/v1/chat/completions"} <= set(
        paths
    )


def test_nothing_is_loaded_from_elsewhere(client: Client) -> None:
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
