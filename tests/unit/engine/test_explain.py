"""Outputs say where cached tokens came from, and why others were computed."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pyengine.engine.explain import difference
from pyengine.errors import InvalidRequestError
from pyengine.outputs import CacheExplanation
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel
from tests.support.engines import GREEDY, Bench, make_bench
from tests.support.tokenizers import byte_level, characters

ONE = replace(GREEDY, max_tokens=1)


def prompt(count: int, start: int = 3) -> list[int]:
    return [start + place % 60 for place in range(count)]


def bench_of(num_blocks: int = 64, **settings: object) -> Bench:
    bench = make_bench(num_blocks, explain=True, **settings)  # type: ignore[arg-type]
    return bench


def cache(bench: Bench, tokens: list[int], params: SamplingParams = ONE) -> CacheExplanation:
    (output,) = bench.generate([tokens], params)
    assert output.cache is not None
    assert output.cache.num_cached_tokens == output.num_cached_tokens
    return output.cache


def test_every_source_and_reason_of_a_request() -> None:
    bench = bench_of()
    first = cache(bench, prompt(14))
    assert (first.reason, first.position, first.num_cached_tokens) == ("new", 0, 0)
    assert cache(bench, prompt(14)).reason is None
    differs = cache(bench, [*prompt(10), 90, 91, 92])
    assert (differs.num_pool_tokens, differs.num_copied_tokens) == (8, 2)
    assert (differs.reason, differs.position, differs.diverged_at) == ("diverged", 8, 10)
    assert differs.diverged_tokens == tuple(prompt(12)[10:])
    assert cache(bench, [5, 6]).reason == "below_one_block"
    uncached = cache(bench, prompt(14), replace(ONE, prompt_logprobs=0))
    assert uncached.reason == "reads_disabled"


def test_an_evicted_prompt_says_how_many_tokens_were_evicted_since() -> None:
    bench = bench_of(8)
    cache(bench, prompt(12))
    cache(bench, prompt(26, start=70 - 26))
    evicted = cache(bench, prompt(12))
    assert (evicted.reason, evicted.evicted_by) == ("evicted", "lru")
    assert evicted.num_evicted_since is not None and evicted.num_evicted_since > 0
    assert f"{evicted.num_evicted_since} tokens were evicted since" in str(evicted.hint)


def test_equal_prompts_of_one_step() -> None:
    bench = bench_of()
    outputs = bench.generate([prompt(13)] * 2, ONE)
    first, second = (output.cache for output in outputs)
    assert first is not None and second is not None
    assert (first.reason, second.reason) == ("new", None)
    assert (second.num_in_flight_tokens, second.num_pool_tokens) == (12, 0)


def test_a_prompt_that_another_request_is_computing() -> None:
    bench = bench_of(in_flight_sharing=False)
    outputs = bench.generate([prompt(13), prompt(13)], ONE)
    reasons = [output.cache.reason for output in outputs if output.cache is not None]
    assert reasons == ["new", "not_yet_computed"]


def test_a_preempted_request_keeps_an_explanation() -> None:
    bench = bench_of(8)
    outputs = bench.generate([prompt(9), prompt(9, start=40)], replace(GREEDY, max_tokens=12))
    assert any(output.metrics.num_preemptions for output in outputs)
    assert all(output.cache is not None for output in outputs)


def test_without_it_outputs_have_none() -> None:
    (output,) = make_bench().generate([prompt(9)], ONE)
    assert output.cache is None


def test_texts_around_the_difference() -> None:
    tokenizer = characters()
    own, other = (tokenizer.encode(f"it is Tuesday 14:0{minute}!") for minute in (2, 1))
    hint = difference(own, 18, other[18:], tokenizer)
    assert str(hint) == (
        "the first difference is at token 18, 'y 14:02!' against 'y 14:01!': move what changes "
        "behind what does not"
    )
    as_ids = str(difference([1, 2, 3], 1, [9], None))
    assert "at token 1, [1, 2, 3] against [1, 9]: " in as_ids


class Broken:
    """A tokenizer that fails."""

    def decode(self, token_ids: list[int]) -> str:
        raise ValueError("no such token")


def test_a_tokenizer_that_fails_leaves_ids() -> None:
    assert "[1, 2] against [1, 9]" in str(difference([1, 2], 1, [9], Broken()))


def test_a_hint_is_decoded_when_it_is_read_and_travels_as_text() -> None:
    tokenizer = byte_level(300)
    bench = make_bench(256, 4, explain=True, tokenizer=tokenizer)
    differs = prompt(13)
    differs[6] = 30
    params = replace(ONE, detokenize=False)
    bench.generate([prompt(13)], params)
    explained = cache(bench, differs, params)
    assert explained.reason == "diverged" and tokenizer.num_decoded == 0
    hint = explained.hint
    assert tokenizer.num_decoded > 0 and "token 6" in str(hint)
    others = [pickle.loads(pickle.dumps(explained)), copy.deepcopy(explained)]
    num_decoded = tokenizer.num_decoded
    assert [(other, other.hint) for other in others] == [(explained, hint)] * 2
    assert tokenizer.num_decoded == num_decoded


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(monkeypatch, tokenizer=characters(), explain=True)
    yield model
    model.close()


def test_llm_explains_a_prompt_without_running_it(model: FakeModel) -> None:
    llm = model.llm()
    text = "it is Tuesday 14:01, what is the capital of Japan?"
    assert llm.explain(text).reason == "new"
    assert model.bench.manager.stats().computed_tokens == 0
    llm.generate([text], ONE, use_tqdm=False)
    explained = llm.explain(text.replace("14:01", "14:02"))
    assert explained.diverged_at == 18 and "14:02" in str(explained.hint)
    assert llm.explain({"prompt": text, "cache_salt": "other"}).reason == "new"
    with pytest.raises(InvalidRequestError):
        llm.explain({"prompt": text, "unknown": 1})
