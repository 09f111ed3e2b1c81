"""Every backend on every family against the gather oracle; the oracle against transformers."""

from collections.abc import Iterator
from functools import partial

from benches.gpu_check.answers import (
    GREEDY,
    MAX_TOKENS,
    ORACLE,
    WITH_PROMPT,
    ask,
    family_folder,
    oracle,
    plain_prompt_logprobs,
    small_llm,
)
from benches.gpu_check.compare import FLOAT32_BOUND, Answer, Comparison, compare
from benches.gpu_check.first_use import first_served
from benches.gpu_check.models import WINDOW, save_small_model
from benches.gpu_check.names import backends, families
from benches.gpu_check.rows import Part, Row, Setup, checked, rounded
from pyengine import LLM

DTYPE = "bfloat16"
_CHUNK = 96
"""Tokens of a step: prompts are computed in chunks, beside decodes."""
_CONTROL = "mistral"
_SLOW = ("flex",)


def parts(setup: Setup) -> list[Part]:
    """Family by family; what compiles for each of them, or is slow, comes when the rest is done."""
    found: list[Part] = []
    slow: list[Part] = []
    for family in families(setup):
        found.append((f"{family}: oracle", partial(_oracle, setup, family)))
        for backend in backends(setup):
            part: Part = (f"{family}: {backend}", partial(_backend, setup, family, backend))
            (slow if backend in _SLOW else found).append(part)
        if family == _CONTROL:
            found.append(("control", partial(_control, setup)))
    return found + slow


def _oracle(setup: Setup, family: str) -> Iterator[Row]:
    """The float32 oracle against a plain forward pass, and what rounding does to it."""
    folder = family_folder(setup, family)
    told = oracle(folder, setup.device, DTYPE)
    plain = [Answer(logprobs, (), ()) for logprobs in plain_prompt_logprobs(folder, setup.device)]
    ours = [Answer(one.prompt, (), ()) for one in told.exact]
    found = compare(ours, plain, FLOAT32_BOUND)
    numbers = {
        "family": family,
        "error": rounded(found.prompt_error),
        "bound": FLOAT32_BOUND,
        "rounding": rounded(told.rounding.largest),
    }
    yield checked(f"{family}: the oracle in float32 against transformers", _wrong(found), numbers)


def _backend(setup: Setup, family: str, backend: str) -> Iterator[Row]:
    """All positions of the prompts, then the same prompts out of the cache."""
    check = f"{family}: {backend}"
    folder = family_folder(setup, family)

    def build(dtype: str) -> LLM:
        return small_llm(folder, setup, dtype, backend, max_num_batched_tokens=_CHUNK)

    served = first_served(setup, check, build)
    if isinstance(served, Row):
        yield served
        return
    dtype, llm = served
    told = oracle(folder, setup.device, dtype)
    found = [told.compare(ask(llm, params)) for params in (WITH_PROMPT, GREEDY)]
    same = [pair[0] for pair in found]
    exact = [pair[1] for pair in found]
    wrong = [_wrong(one, of) for pair in found for one, of in zip(pair, _ORACLES, strict=True)]
    numbers = {
        "family": family,
        "backend": backend,
        "dtype": dtype,
        "error": rounded(max(one.largest for one in same)),
        "bound": rounded(told.bounds.same),
        "error_float32": rounded(max(one.largest for one in exact)),
        "bound_float32": rounded(told.bounds.exact),
        "mean_float32": rounded(exact[0].prompt_mean),
        "bound_mean": rounded(told.bounds.mean),
        "tokens": sum(one.num_tokens for one in same),
        "of_tokens": sum(one.num_answers for one in same) * MAX_TOKENS,
        "near_ties": sum(len(one.near_ties) for one in same),
        "cached_tokens": llm.stats().counters["cached_tokens"],
    }
    yield checked(check, "; ".join(filter(None, wrong)), numbers)


_ORACLES = ("against the oracle", "against float32")


def _wrong(found: Comparison, against: str = "") -> str:
    """The first few of what is wrong."""
    if not found.wrong:
        return ""
    more = f" and {len(found.wrong) - 3} more" if len(found.wrong) > 3 else ""
    return f"{against} {'; '.join(found.wrong[:3])}{more}".strip()


def _control(setup: Setup) -> Iterator[Row]:
    """A window that is too small by one must be told apart, or the bounds are worth nothing."""
    told = oracle(family_folder(setup, _CONTROL), setup.device, DTYPE)
    narrow = setup.path("models") / "narrow"
    save_small_model(narrow, _CONTROL, sliding_window=WINDOW - 1)
    answers = ask(small_llm(narrow, setup, DTYPE, ORACLE, block_size=16), WITH_PROMPT)
    found, _ = told.compare(answers)
    numbers = {"error": rounded(found.largest), "bound": rounded(told.bounds.same)}
    unseen = "" if found.wrong else "the comparison did not notice it"
    yield checked("control: a window that is too small by one is noticed", unseen, numbers)
