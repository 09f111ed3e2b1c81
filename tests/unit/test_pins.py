"""`LLM.pin` and `AsyncEngine.pin`: computed once, kept for a time, refused beyond the quota."""

import os
import sys
from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from pyengine.errors import InvalidRequestError, PinQuotaError
from pyengine.llm import LLM
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel

SYSTEM = list(range(10, 22))
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(monkeypatch, num_blocks=16, max_model_len=24, max_pinned_blocks=4)
    yield model
    model.close()


@pytest.fixture
def llm(model: FakeModel) -> LLM:
    return model.llm()


def flood(llm: LLM) -> None:
    """Other prompts that use all other blocks."""
    llm.generate([[50 + at] * 20 for at in range(16)], ONE, use_tqdm=False)


def num_cached(llm: LLM) -> int:
    return llm.generate([*SYSTEM, 5], ONE, use_tqdm=False)[0].num_cached_tokens


def test_a_pinned_prompt_stays_cached(llm: LLM) -> None:
    pin = llm.pin(SYSTEM)
    assert (pin.num_tokens, pin.num_blocks) == (12, 3)
    assert 290 < pin.seconds_left <= 300
    flood(llm)
    assert num_cached(llm) == 12
    pin.release()
    flood(llm)
    assert num_cached(llm) == 0
    assert pin.seconds_left == 0


def test_a_with_block_ends_the_pin(llm: LLM) -> None:
    with llm.pin(SYSTEM) as pin:
        assert llm.stats().usage.pinned == 3
    assert llm.stats().usage.pinned == 0
    pin.release()


def test_a_released_pin_leaves_nothing_until_its_end(llm: LLM) -> None:
    for _ in range(20):
        llm.pin(SYSTEM, ttl=3600).release()
    assert llm.stats().usage.pinned == 0
    assert len(llm._pins.ends) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_pin_that_is_released_in_a_fork_goes_on(llm: LLM, is_closed: bool) -> None:
    with llm.pin(SYSTEM) as pin:
        if is_closed:
            llm.close()
        if (child := os.fork()) == 0:
            status = 1
            try:
                pin.release()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pin.seconds_left > 0


def test_a_pin_of_an_idle_engine_ends_on_time(llm: LLM) -> None:
    pin = llm.pin(SYSTEM, ttl=0.3)
    assert llm.stats().usage.pinned == 3
    deadline = monotonic() + 10
    while llm.stats().usage.pinned:
        assert monotonic() < deadline, "the pin has not ended"
        sleep(0.01)
    assert pin.seconds_left == 0


def test_a_pin_goes_on_without_its_object(llm: LLM) -> None:
    llm.pin(SYSTEM)
    flood(llm)
    assert num_cached(llm) == 12


def test_a_pin_beyond_the_quota_is_refused_with_the_numbers(llm: LLM) -> None:
    with llm.pin(SYSTEM):
        with pytest.raises(PinQuotaError, match=r"takes 2 blocks, 2 .* hold 3 of its 4 blocks"):
            llm.pin([7] * 8)
        assert llm.stats().usage.pinned == 3
    with llm.pin([7] * 8) as pin:
        assert pin.num_tokens == 8


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), "5m", None, True])
def test_a_time_that_is_none_is_refused(llm: LLM, ttl: object) -> None:
    with pytest.raises(InvalidRequestError, match="ttl="):
        llm.pin(SYSTEM, ttl=ttl)  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.pin([7] * 100)


def test_a_request_with_a_priority_stays_cached_longer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, cache_priority=5)
    llm.generate(SYSTEM, params, use_tqdm=False)
    flood(llm)
    assert num_cached(llm) == 12


async def test_pins_of_an_async_engine(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        pin = await engine.pin(SYSTEM, ttl=60)
        assert (pin.num_tokens, engine.max_pinned_blocks) == (12, 4)
        salted = await engine.pin(SYSTEM[:4], ttl=60, cache_salt="tenant")
        assert engine.stats().usage.pinned == 4
        for each in (pin, salted):
            each.release()
