"""Every backend on every family against the gather oracle; the oracle against transformers."""

from time import perf_counter
from typing import Any

import pytest

from tests.gpu.answers import (
    GREEDY,
    WITH_PROMPT,
    ask,
    oracle,
    plain_prompt_logprobs,
    prompts,
)
from tests.gpu.compare import FLOAT32_BOUND, Answer, compare, rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import FAMILIES, ORACLE, WINDOW, Place, backends

DTYPE = "bfloat16"
CHUNK = 96
"""Tokens of a step: prompts are computed in chunks, beside decodes."""
Numbers = dict[str, Any]


@pytest.mark.parametrize("backend", backends())
def test_the_first_use_of_a_backend(in_child: InChild, backend: str) -> None:
    in_child(first_use, backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_transformers_own_forward_pass(in_child: InChild, family: str) -> None:
    in_child(oracle_is_right, family)


def test_a_window_that_is_too_small_by_one_is_noticed(in_child: InChild) -> None:
    in_child(narrow_window_is_noticed)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_what_the_engine_chooses_by_itself(in_child: InChild, family: str) -> None:
    in_child(choice, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", backends())
def test_a_backend_is_the_oracle_up_to_rounding(
    in_child: InChild, backend: str, family: str
) -> None:
    in_child(backend_is_right, family, backend)


def first_use(place: Place, backend: str) -> Numbers:
    """Seconds until the first answer, and of the same again: what compiles, compiles now."""
    folder, seconds = place.model("llama"), []
    start = perf_counter()
    _, llm = place.first_served(lambda dtype: place.llm(folder, dtype, backend))
    for _ in range(2):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
        seconds.append(rounded(perf_counter() - start))
        start = perf_counter()
    return {"first_seconds": seconds[0], "again_seconds": seconds[1]}


def oracle_is_right(place: Place, family: str) -> Numbers:
    """The float32 oracle against a plain forward pass, and what rounding does to it."""
    expected = oracle(place, family, DTYPE)
    plain = [Answer(logprobs, (), ()) for logprobs in plain_prompt_logprobs(place, family)]
    ours = [Answer(item.prompt, (), ()) for item in expected.exact]
    found = compare(ours, plain, FLOAT32_BOUND)
    assert not found.wrong, found.wrong
    assert found.num_positions > 0
    return {
        "error": rounded(found.prompt_error),
        "bound": FLOAT32_BOUND,
        "rounding": rounded(expected.rounding.largest),
    }


def narrow_window_is_noticed(place: Place) -> Numbers:
    """If not, the bounds are worth nothing."""
    expected = oracle(place, "mistral", DTYPE)
    narrow = place.model("mistral", "narrow", sliding_window=WINDOW - 1)
    answers = ask(place.llm(narrow, DTYPE, ORACLE, block_size=16), WITH_PROMPT)
    found, _ = expected.compare(answers)
    assert found.wrong
    return {"error": rounded(found.largest), "bound": rounded(expected.bounds.same)}


def choice(place: Place, family: str) -> Numbers:
    """The backend and why, the format, what runs ahead."""
    from pyengine import LLM

    expected = LLM(place.model(family), device=place.device, max_num_seqs=4).describe()
    assert expected["attention_backend"] in backends()
    wanted = ("attention_reason", "block_size", "dtype", "async_scheduling", "cuda_graphs")
    return {key: expected[key] for key in ("attention_backend", *wanted) if key in expected}


def backend_is_right(place: Place, family: str, backend: str) -> Numbers:
    """All positions of the prompts in chunks beside decodes, then the same out of the cache."""
    folder = place.model(family)
    dtype, llm = place.first_served(
        lambda kind: place.llm(folder, kind, backend, max_num_batched_tokens=CHUNK)
    )
    expected = oracle(place, family, dtype)
    found = [expected.compare(ask(llm, params)) for params in (WITH_PROMPT, GREEDY)]
    same, exact = zip(*found, strict=True)
    numbers = {
        "dtype": dtype,
        "error": rounded(max(item.largest for item in same)),
        "bound": rounded(expected.bounds.same),
        "error_float32": rounded(max(item.largest for item in exact)),
        "bound_float32": rounded(expected.bounds.exact),
        "mean_float32": rounded(exact[0].prompt_mean),
        "bound_mean": rounded(expected.bounds.mean),
        "near_ties": sum(len(item.near_ties) for item in same),
    }
    for against, ones in (("the oracle", same), ("float32", exact)):
        wrong = [words for comparison in ones for words in comparison.wrong]
        assert not wrong, f"against {against}: {wrong}; {numbers}"
    assert all(item.num_tokens > 0 for item in same)
    assert llm.stats().counters["cached_tokens"] > 0
    return numbers
