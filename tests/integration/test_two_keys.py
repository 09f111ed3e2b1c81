"""Two keys on one real server: neither reads the other's prompts, by counts or by time."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.sampling import grammar as grammars
from tests.support.serving import RunningServer, assert_soon, open_small_engine, save_small_model

KEYS = ("of-the-victim", "of-the-attacker")
PIN = "48159263"
KNOWN = "The PIN of the safe in the cellar is "
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder: Path = save_small_model(tmp_path_factory.mktemp("two"), max_position_embeddings=4096)
    with open_small_engine(folder) as engine:
        yield engine


class Tenant:
    """A client of a server with its own key."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client

    def usage(self, prompt: Any, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        response = self.client.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]

    def status(self, prompt: Any, **fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        return int(self.client.post(COMPLETIONS, json=body).status_code)

    def cached(self, prompt: Any, **fields: Any) -> int:
        return int(self.usage(prompt, **fields)["prompt_tokens_details"]["cached_tokens"])

    def seconds(self, prompt: Any) -> float:
        start = perf_counter()
        self.usage(prompt)
        return perf_counter() - start


@contextmanager
def tenants(engine: AsyncEngine, **settings: Any) -> Iterator[tuple[Tenant, Tenant]]:
    """The victim and the attacker, on a server with a key for each."""
    with ExitStack() as ends:
        server = RunningServer(engine, api_key=KEYS, log_format="none", **settings)
        address = ends.enter_context(server).address
        victim, attacker = (
            Tenant(ends.enter_context(httpx2.Client(base_url=address, headers=item, timeout=60)))
            for item in ({"authorization": f"Bearer {key}"} for key in KEYS)
        )
        yield victim, attacker


def digits_by_counts(cached: Callable[[str], int]) -> str:
    """The digits that follow `KNOWN` in a cached prompt, as far as `cached` gives them away."""
    found = ""
    for _ in PIN:
        cached(f"{KNOWN}{found}??")  # what is found below is not the guess before
        counts = {digit: cached(f"{KNOWN}{found}{digit}?") for digit in "0123456789"}
        best = max(counts.values())
        digits = [digit for digit, count in counts.items() if count == best]
        if len(digits) != 1:
            break
        found += digits[0]
    return found


def test_a_pin_is_not_read_by_another_key(engine: AsyncEngine) -> None:
    with tenants(engine) as (victim, attacker):
        prompt = f"{KNOWN}{PIN}, do not tell anybody about it."
        assert victim.usage(prompt)["prompt_tokens"] > 40
        assert attacker.cached(prompt) == 0
        assert digits_by_counts(attacker.cached) == ""
        assert victim.cached(prompt) > 0


def test_cached_tokens_are_reported_in_whole_blocks(engine: AsyncEngine) -> None:
    """So that users behind one key do not read each other's prompts either."""
    with tenants(engine) as (victim, _):
        victim.usage(f"{KNOWN}{PIN}, and so it was.")
        assert digits_by_counts(victim.cached) == ""
        counts = [victim.cached([7] * length) for length in range(30, 60)]
        assert {count % 16 for count in counts} == {0} and max(counts) >= 32
        whole = victim.usage([[7] * 40, [7] * 39])["prompt_tokens_details"]["cached_tokens"]
        assert whole == 64  # 39 and 38 tokens, each in whole blocks


def streamed_counts(tenant: Tenant, prompt: Any) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    text = tenant.client.post(COMPLETIONS, json=body).text
    return [int(part.split("}")[0]) for part in text.split('"cached_tokens":')[1:]]


def test_so_it_is_in_streams(engine: AsyncEngine) -> None:
    with tenants(engine) as (victim, attacker):
        prompt = [11] * 57
        victim.usage(prompt)
        assert set(streamed_counts(victim, prompt)) == {48}
        assert set(streamed_counts(attacker, prompt)) == {0}


@pytest.mark.parametrize("salt", ["x", None])
def test_a_salt_does_not_lead_to_another_keys_prompts(
    engine: AsyncEngine, salt: str | None
) -> None:
    with tenants(engine) as (victim, attacker):
        fields = {"cache_salt": salt}
        prompt = [13, len(salt or "")] * 30
        victim.usage(prompt, **fields)
        assert attacker.cached(prompt, **fields) == 0
        assert victim.cached(prompt, **fields) == 48


def shorter_share(right: list[float], wrong: list[float]) -> float:
    """How often a right guess takes less time than a wrong one; half, where time tells nothing."""
    pairs = [(item, other) for item in right for other in wrong]
    return sum([item < other for item, other in pairs]) / len(pairs)


def times_of_guesses(victim: Tenant, attacker: Tenant, seed: int) -> float:
    """`shorter_share` of an attacker's guesses at prompts that the victim has just sent."""
    choice = random.Random(seed)
    right, wrong = [], []
    for _ in range(20):
        secret, other = ([choice.randrange(2, 290) for _ in range(3000)] for _ in range(2))
        victim.usage(secret)
        for guess, times in choice.sample([(secret, right), (other, wrong)], 2):
            times.append(attacker.seconds(guess))
    return shorter_share(right, wrong)


def test_time_does_not_tell_another_keys_prompts(engine: AsyncEngine) -> None:
    with tenants(engine) as (victim, attacker):
        assert 0.15 < times_of_guesses(victim, attacker, seed=1) < 0.85


def test_slow_grammars_of_one_key_do_not_make_another_wait(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = grammars._Checker.ask

    def slowly(checker: Any, question: Any, limit: float) -> Any:
        if isinstance(question, list) and "slow" in question[1]:
            sleep(0.5)
            return {"error": "too slow", "is_passing": "yes"}
        return ask(checker, question, limit)

    with tenants(engine) as (attacker, victim), ThreadPoolExecutor(60) as threads:
        monkeypatch.setattr(grammars._Checker, "ask", slowly)
        forms = [{"choice": [f"slow {place}"]} for place in range(60)]
        sent = [threads.submit(attacker.status, [5], structured_outputs=form) for form in forms]
        assert_soon(lambda: any(each.done() for each in sent))  # those that are too many
        begin = perf_counter()
        victim.usage([5], structured_outputs={"choice": ["fast"]})
        assert perf_counter() - begin < 3
        victim.usage([5])
        statuses = Counter(each.result() for each in sent)
    assert set(statuses) == {400, 429} and 20 <= statuses[429] <= 28


def test_where_keys_share_by_setting_both_attacks_succeed(engine: AsyncEngine) -> None:
    """The tests above would see an attack that works."""
    with tenants(engine, share_prefix_cache=True, exact_cached_tokens=True) as (victim, attacker):
        victim.usage(f"{KNOWN}{PIN}, as everybody knows.")
        found = digits_by_counts(attacker.cached)
        assert len(found) >= 3 and PIN.startswith(found)
        assert times_of_guesses(victim, attacker, seed=2) > 0.85


def test_where_keys_share_whole_blocks_give_no_token_away(engine: AsyncEngine) -> None:
    with tenants(engine, share_prefix_cache=True) as (victim, attacker):
        victim.usage(f"{KNOWN}{PIN}, or so they say.")
        assert digits_by_counts(attacker.cached) == ""
