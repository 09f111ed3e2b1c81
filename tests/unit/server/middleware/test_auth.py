"""Keys: every route but /health needs one, and keys separate caches."""

import base64
import hmac
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import (
    Client,
    error_of,
    make_client,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
LONG = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}
KEY = {"authorization": "Bearer one"}
ADMIN = {"authorization": "Bearer two"}


@pytest.fixture
def guarded(engine: AsyncEngine) -> Client:
    return make_client(engine, api_key=("one",), admin_key=("two",), cors_origin=("http://page",))


def routes(client: Client) -> list[tuple[str, str]]:
    paths = client.get("/openapi.json", headers=KEY).json()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods] + [
        ("get", "/openapi.json"),
        ("get", "/kv/stream"),
        ("get", "/not/there"),
    ]


def test_every_route_but_health_needs_a_key(guarded: Client) -> None:
    several = routes(guarded)
    assert len(several) > 10
    for method, path in several:
        response = guarded.run(lambda http, m=method, p=path: http.request(m, p))
        if path == "/health":
            assert response.status_code == 200
            continue
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/healthz", "/health/", "/health/x", "/healthmetrics", "/HEALTH", "/health%2F..%2Fkv"]
)
def test_a_path_that_begins_like_health_needs_a_key(path: str, guarded: Client) -> None:
    error_of(guarded.get(path), 401)


@pytest.mark.parametrize("key", ["Bearer one", "Bearer two", "bearer two", "BEARER  one"])
def test_each_key_is_good(key: str, guarded: Client) -> None:
    response = guarded.post(COMPLETIONS, GOOD, headers={"authorization": key})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "key",
    ["", "Bearer", "Bearer ", "Bearer on", "Bearer onetwo", "Basic one", "one", "Bearer \xff"],
)
def test_no_other_is(key: str, guarded: Client) -> None:
    response = guarded.post(COMPLETIONS, GOOD, headers=[("authorization", key.encode("latin-1"))])
    assert response.status_code == 401


def test_every_key_is_compared_whole(guarded: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    plain = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((a, b)) or plain(a, b))
    guarded.get("/version", headers=KEY)
    assert seen == [(b"one", b"one"), (b"one", b"two")]


def password(text: bytes, kind: str = "Basic") -> dict[str, str]:
    return {"authorization": f"{kind} {base64.b64encode(text).decode()}"}


def test_browsers_ask_for_the_key_of_the_page(guarded: Client) -> None:
    response = guarded.get("/kv")
    assert "as the password" in error_of(response, 401)["message"]
    assert response.headers["www-authenticate"].startswith("Basic realm=")
    for headers in (password(b"anybody:two"), password(b":two", "basic"), ADMIN):
        assert guarded.get("/kv", headers=headers).text.startswith("<!doctype html>")
    for wrong in (password(b"two:"), password(b"two"), {"authorization": "Basic ~~~"}):
        assert guarded.get("/kv", headers=wrong).status_code == 401


def test_a_password_opens_nothing_but_the_page(guarded: Client) -> None:
    """Browsers send it by themselves, even if another site makes them ask."""
    good = password(b":two")
    for path in ("/version", "/metrics", "/kv/", "/v1/models"):
        assert guarded.get(path, headers=good).status_code == 401
    assert guarded.post(COMPLETIONS, GOOD, headers=good).status_code == 401


def test_without_keys_an_empty_one_does_no_harm(client: Client) -> None:
    """As lm-eval sends it."""
    response = client.post(COMPLETIONS, GOOD, headers={"authorization": "Bearer "})
    assert response.status_code == 200


def test_a_browser_may_ask_before_it_has_a_key(guarded: Client) -> None:
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    response = guarded.run(lambda http: http.options(COMPLETIONS, headers=asks))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://page"
    response = guarded.get("/version", headers={"origin": "http://page"})
    assert response.headers["access-control-allow-origin"] == "http://page"
    response = guarded.get("/version", headers={"origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in response.headers


def test_keys_part_the_cache(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    body = {"prompt": [31, 32, 33] * 20, "max_tokens": 1}

    def cached(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        response = client.post(COMPLETIONS, {**body, **fields}, headers=headers)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") == 48
    assert cached("two") == 0
    assert cached("one", cache_salt="x") == 0
    assert cached("two", cache_salt="x") == 0
    assert cached("two", cache_salt="x") == 48


def test_a_proxy_may_take_a_prefix_away(engine: AsyncEngine) -> None:
    app = make_client(engine, api_key=("one",)).app
    client = Client(app, root_path="/llm")
    for path in ("/health", "/llm/health"):
        assert client.get(path).status_code == 200
    for path in ("/version", "/llm/version"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=KEY).status_code == 200
