"""Explanations over HTTP: a field of the request, and GET /v1/requests/{id}/cache."""

from collections.abc import Iterator
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.outputs import CacheExplanation
from pyengine.server.explanations import Disclosure, RecentExplanations
from tests.support.serving import Client, make_client

VICTIM, ATTACKER = "of-the-victim", "of-the-attacker"
BLOCK = 16


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def prompt(length: int, start: int = 0) -> list[int]:
    return [2 + (start + index) % 290 for index in range(length)]


@pytest.fixture
def exact(engine: AsyncEngine) -> Client:
    return make_client(engine, exact_cached_tokens=True)


@pytest.fixture
def two_keys(engine: AsyncEngine) -> Iterator[Client]:
    yield make_client(engine, api_key=(VICTIM, ATTACKER), exact_cached_tokens=True)


def completed(client: Client, body: Any, key: str = "") -> Any:
    headers = bearer(key) if key else {}
    fields = {"max_tokens": 1, "temperature": 0, **body}
    response = client.post("/v1/completions", fields, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def cache_of(answer: Any) -> Any:
    return answer["usage"]["prompt_tokens_details"]["cache"]


def test_usage_says_why_if_asked(exact: Client) -> None:
    salted = {"cache_salt": "usage", "explain_cache": True}
    (first,) = cache_of(completed(exact, {"prompt": prompt(40), **salted}))
    assert (first["reason"], first["position"], first["pool_tokens"]) == ("new", 0, 0)
    changed = [*prompt(20), 1, *prompt(19, start=21)]
    hit, differs = cache_of(completed(exact, {"prompt": [prompt(40), changed], **salted}))
    assert hit["pool_tokens"] == 32 and hit["reason"] is None and hit["hint"] is None
    assert (differs["reason"], differs["diverged_at"], differs["position"]) == ("diverged", 20, 16)
    assert (differs["pool_tokens"], differs["copied_tokens"]) == (16, 4)
    assert "the first difference is at token 20" in differs["hint"]
    plain = completed(exact, {"prompt": prompt(40), "cache_salt": "usage"})
    assert "cache" not in plain["usage"]["prompt_tokens_details"]


def test_a_stream_says_it_with_its_usage(exact: Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello, whoever you are, and good morning"}],
        "max_tokens": 1,
        "explain_cache": True,
        "stream_options": {"include_usage": True},
    }
    *_, last = exact.events("/v1/chat/completions", body)
    (cache,) = cache_of(last)
    assert cache["reason"] in ("new", "diverged", None)


def test_a_request_is_found_by_its_own_id_and_by_the_response(exact: Client) -> None:
    body = {"prompt": [prompt(20), prompt(5)], "request_id": "mine", "cache_salt": "found"}
    answer = completed(exact, body)
    for name in (answer["id"], answer["id"].removeprefix("cmpl-"), "mine"):
        response = exact.get(f"/v1/requests/{name}/cache")
        assert response.status_code == 200, response.text
        explained = response.json()
        assert explained["id"] == name
        assert [cache["reason"] for cache in explained["prompts"]] == ["new", "below_one_block"]
    completed(exact, body)
    newest = exact.get("/v1/requests/mine/cache").json()
    assert newest["prompts"][0]["reason"] is None


def test_another_key_gets_the_answer_of_an_unknown_id(two_keys: Client) -> None:
    answer = completed(two_keys, {"prompt": prompt(40), "request_id": "theirs"}, VICTIM)
    for name in (answer["id"], "theirs"):
        path = f"/v1/requests/{name}/cache"
        assert two_keys.get(path, headers=bearer(VICTIM)).status_code == 200
        other = two_keys.get(path, headers=bearer(ATTACKER))
        unknown = two_keys.get("/v1/requests/unknown/cache", headers=bearer(ATTACKER))
        assert other.status_code == unknown.status_code == 404
        assert other.text == unknown.text.replace("unknown", name)
        assert two_keys.get(path).status_code == 401


def test_a_thousand_probes_learn_nothing_of_another_key(two_keys: Client) -> None:
    """The same answers before and after the victim's requests, with its own prompts among them."""
    probes = [prompt(1 + number % 90, start=number // 90 * 7) for number in range(1000)]

    def answers(salt: str) -> list[Any]:
        several = [probes[first : first + 50] for first in range(0, len(probes), 50)]
        fields = {"cache_salt": salt, "explain_cache": True}
        bodies = [{"prompt": prompt, **fields} for prompt in several]
        explanations = [cache_of(completed(two_keys, body, ATTACKER)) for body in bodies]
        return [_in_pool(cache) for caches in explanations for cache in caches]

    before = answers("before")
    for length in (90, 50, 33):
        completed(two_keys, {"prompt": prompt(length)}, VICTIM)
        completed(two_keys, {"prompt": prompt(length), "cache_salt": "after"}, VICTIM)
    assert answers("after") == before
    assert len({cache["reason"] for cache in before}) > 2  # they are not all alike


def _in_pool(cache: Any) -> Any:
    """Without the split between the pool and the same step, which depends on time alone."""
    reused = cache["pool_tokens"] + cache["in_flight_tokens"]
    return {**cache, "pool_tokens": reused, "in_flight_tokens": 0}


def explanation(**fields: Any) -> CacheExplanation:
    parts = {"num_in_flight_tokens": 0, "num_copied_tokens": 0, "num_restored_tokens": 0}
    return CacheExplanation(**{"num_pool_tokens": 0, **parts, **fields})


def test_whole_blocks_unless_exact() -> None:
    differs = explanation(
        num_pool_tokens=32,
        num_copied_tokens=9,
        position=32,
        reason="diverged",
        diverged_at=41,
        diverged_tokens=(7,),
        _hint="'secret' against 'secrets'",
    )
    shown = Disclosure(BLOCK, is_exact=False, has_neighbours=False).of(differs)
    assert (shown.pool_tokens, shown.copied_tokens, shown.reason) == (32, 0, "new")
    assert shown.diverged_at is None and "secret" not in str(shown.hint)
    new = explanation(num_pool_tokens=32, position=32, reason="new")
    assert Disclosure(BLOCK, is_exact=False, has_neighbours=False).of(new) == shown
    whole_hit = explanation(num_pool_tokens=31)
    shown = Disclosure(BLOCK, is_exact=False, has_neighbours=False).of(whole_hit)
    assert shown.pool_tokens == 16 and shown.hint is None
    assert Disclosure(BLOCK, is_exact=True, has_neighbours=True).of(differs).diverged_at == 41


@pytest.mark.parametrize("is_exact", [False, True])
def test_others_do_not_show_in_the_number_of_evicted_tokens(is_exact: bool) -> None:
    evicted = explanation(
        position=0, reason="evicted", evicted_by="lru", num_evicted_since=4711, _hint="4711 tokens"
    )
    shown = Disclosure(BLOCK, is_exact, has_neighbours=True).of(evicted)
    assert shown.reason == "evicted" and "4711" not in shown.to_json()
    alone = Disclosure(BLOCK, is_exact, has_neighbours=False).of(evicted)
    assert (alone.evicted_by, alone.evicted_since) == ("lru", 4711)
    assert "4711" in str(alone.hint)


def test_keys_that_share_blocks_get_no_texts(engine: AsyncEngine) -> None:
    client = make_client(
        engine, api_key=(VICTIM, ATTACKER), exact_cached_tokens=True, share_prefix_cache=True
    )
    assert not client.context.disclosure.is_exact
    assert client.context.disclosure.has_neighbours


def test_the_oldest_request_of_the_same_key_is_forgotten() -> None:
    recent = RecentExplanations()
    own, rules = explanation(), Disclosure(BLOCK, is_exact=True, has_neighbours=False)
    recent.put(b"other", "first", None, 0, own)
    for number in range(257):
        recent.put(b"own", f"call-{number}", None, 1, own)
    assert recent.find(b"own", "cmpl-call-0", rules) is None
    request = recent.find(b"own", "chatcmpl-call-1", rules)
    assert request is not None and request.prompts == [None, rules.of(own)]
    assert (
        recent.find(b"other", "first", rules) is not None
        and recent.find(b"own", "first", rules) is None
    )
