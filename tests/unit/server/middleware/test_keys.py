"""Rights of client keys and admin keys; other origins and hosts."""

import asyncio
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings
from tests.support.serving import GOOD, Client, error_of, make_client

COMPLETIONS = "/v1/completions"
LONG = {**GOOD, "max_tokens": 900, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def tenants(engine: AsyncEngine) -> Client:
    return make_client(engine, api_key=("one", "two"), admin_key=("root",))


def cached(client: Client, key: str, prompt: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1}
    usage = client.post(COMPLETIONS, body, headers=bearer(key)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", ["/kv", "/kv/stream"])
def test_the_page_needs_the_admin_key(path: str, tenants: Client) -> None:
    for key in ("one", "two"):
        response = tenants.get(path, headers=bearer(key))
        assert error_of(response, response.status_code)["code"] == "admin_key_needed"
    if path == "/kv":
        assert tenants.get(path, headers=bearer("root")).status_code == 200


@pytest.mark.parametrize("keys", [("one", "two"), ("one",)])
def test_a_single_key_is_the_operators(keys: tuple[str, ...], engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=keys)
    assert (client.get("/kv", headers=bearer("one")).status_code == 200) is (len(keys) == 1)


@pytest.mark.usefixtures("slow_steps")
async def test_an_admin_ends_any_request_and_a_client_its_own(tenants: Client) -> None:
    async with tenants.open() as http:
        body = {**LONG, "request_id": "mine"}
        first = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=bearer("one")))
        while not tenants.context.live:
            await asyncio.sleep(0.001)
        answers = []
        for key in ("two", "root"):
            ids = {"request_ids": ["mine"]}
            answer = await http.post("/abort_requests", json=ids, headers=bearer(key))
            answers.append(answer.json()["aborted"])
        await first
    assert answers == [[], ["mine"]]


def test_a_client_resets_what_its_own_key_has_cached(tenants: Client) -> None:
    prompt = [21, 22, 23] * 20
    for key in ("one", "two"):
        assert (cached(tenants, key, prompt), cached(tenants, key, prompt)) == (0, 48)
    assert tenants.post("/reset_prefix_cache", None, headers=bearer("one")).status_code == 200
    assert (cached(tenants, "one", prompt), cached(tenants, "two", prompt)) == (0, 48)
    assert tenants.post("/reset_prefix_cache", None, headers=bearer("root")).status_code == 200
    assert (cached(tenants, "one", prompt), cached(tenants, "two", prompt)) == (0, 0)


def test_where_keys_share_the_cache_the_admin_resets_it(engine: AsyncEngine) -> None:
    client = make_client(
        engine, api_key=("one", "two"), admin_key=("root",), share_prefix_cache=True
    )
    response = client.post("/reset_prefix_cache", None, headers=bearer("one"))
    assert error_of(response, 403)["code"] == "admin_key_needed"
    assert client.post("/reset_prefix_cache", None, headers=bearer("root")).status_code == 200


def test_an_admin_may_give_any_priority(tenants: Client) -> None:
    body = {**GOOD, "priority": -1e9}
    assert tenants.post(COMPLETIONS, body, headers=bearer("root")).status_code == 200
    error_of(tenants.post(COMPLETIONS, body, headers=bearer("one")), 400)


def test_keys_are_in_the_environment_of_every_server(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that `create_app` makes, in a program or on Ray."""
    monkeypatch.setenv("PYENGINE_API_KEY", "one two")
    monkeypatch.setenv("PYENGINE_ADMIN_KEY", "root")
    client = make_client(engine)
    assert client.get("/version").status_code == 401
    for key in ("one", "two", "root"):
        assert client.get("/version", headers=bearer(key)).status_code == 200
    settings = ServerSettings(api_key=("three",))
    assert (settings.api_key, settings.admin_key) == (("three",), ("root",))


def test_a_key_is_a_clients_or_an_admins() -> None:
    with pytest.raises(ConfigurationError, match="in common"):
        ServerSettings(api_key=("one", "two"), admin_key=("two",))


def get(client: Client, **headers: str) -> int:
    return int(client.get("/version", headers=headers).status_code)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "10.1.2.3:8000"),
        *("[::1]:8000", "page.localhost", "localhost."),
    ],
)
def test_an_open_server_is_known_by_addresses_and_localhost(host: str, client: Client) -> None:
    assert get(client, host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.a", "["]
)
def test_it_answers_to_no_other_name(host: str, client: Client, engine: AsyncEngine) -> None:
    error = error_of(client.get("/version", headers={"host": host}), 421)
    assert error["code"] == "unknown_host" and "--allowed-host" in error["message"]
    assert client.get("/health", headers={"host": host}).status_code == 200
    assert get(make_client(engine, allowed_host=("*",)), host=host) == 200
    assert get(make_client(engine, uds="/nowhere"), host=host) == 200


def test_names_that_are_allowed(engine: AsyncEngine) -> None:
    client = make_client(engine, allowed_host=("llm.example",), api_key=("one",))
    for host, status in (("llm.example:80", 200), ("localhost", 200), ("other.example", 421)):
        assert get(client, host=host, **bearer("one")) == status
    keyed = make_client(engine, api_key=("one",))
    assert get(keyed, host="any", **bearer("one")) == 200


OF_ANOTHER_SITE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost"},
]
OF_THIS_SITE: list[dict[str, str]] = [
    {},
    {"origin": "http://localhost"},
    {"origin": "http://page"},
    {"sec-fetch-site": "cross-site", "origin": "http://page"},
    {"sec-fetch-site": "same-origin", "origin": "https://llm.example"},
    {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/abort_requests", COMPLETIONS])
def test_no_page_of_another_site_changes_anything(path: str, engine: AsyncEngine) -> None:
    client = make_client(engine, cors_origin=("http://page",))
    body = GOOD if path == COMPLETIONS else {"request_ids": []}
    for headers in OF_ANOTHER_SITE:
        assert error_of(client.post(path, body, headers=headers), 403)["code"] == "cross_site"
        assert client.get("/version", headers=headers).status_code == 200
    assert client.context.num_resets == 0
    for headers in OF_THIS_SITE:
        assert client.post(path, body, headers=headers).status_code == 200


def test_a_simple_request_from_anywhere_is_refused(client: Client) -> None:
    """As a form sends it: no preflight, so CORS does not stop it."""
    headers = {"content-type": "text/plain", "origin": "http://evil.example"}
    assert client.send("/reset_prefix_cache", b"", **headers).status_code == 403
    assert client.context.num_resets == 0
