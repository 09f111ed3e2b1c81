"""Beam search against a search over all continuations of the fake model, without an engine."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pyengine.errors import ContextLengthError, InvalidRequestError, RequestFailedError
from pyengine.llm import LLM
from pyengine.outputs import BeamSearchOutput
from pyengine.sampling_params import BeamSearchParams, SamplingParams
from tests.support import tokenizers
from tests.support.callers import FakeModel
from tests.support.engines import EOS
from tests.support.fake_runner import VOCAB_SIZE, continued, logits_of

PROMPTS = [[at, 7, 9, at, 3, 5] for at in range(5, 9)]
Found = list[tuple[list[int], float, str]]


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(monkeypatch, num_blocks=400, depth=request.param)
    yield model
    model.bench.assert_all_free()


def searched(prompt: list[int], params: BeamSearchParams) -> Found:
    """vLLM's search over the whole vocabulary."""
    beams, completed = [(0.0, prompt)], []

    def score(total: float, length: int) -> float:
        return total / float(length**params.length_penalty)

    for _ in range(params.max_tokens):
        extended = []
        for total, tokens in beams:
            row = logits_of(tokens).astype(np.float64)
            logprobs = row - row.max() - math.log(np.exp(row - row.max()).sum())
            for token in np.argsort(-logprobs, kind="stable")[: 2 * params.beam_width].tolist():
                extended.append((total + logprobs[token], [*tokens, token]))
        ends = [item for item in extended if item[1][-1] == EOS and not params.ignore_eos]
        shown = slice(None if params.include_stop_str_in_output else -1)
        completed += [
            (score(total, len(tokens) - 1), tokens[shown], "stop") for total, tokens in ends
        ]
        going_on = [item for item in extended if item not in ends]
        beams = sorted(going_on, key=lambda item: -item[0])[: params.beam_width]
    completed += [(score(total, len(tokens)), tokens, "length") for total, tokens in beams]
    best = sorted(completed, key=lambda item: -item[0])[: params.beam_width]
    return [(tokens, total, reason) for total, tokens, reason in best]


def assert_same(output: BeamSearchOutput, prompt: list[int], params: BeamSearchParams) -> None:
    expected = searched(prompt, params)
    assert [item.tokens for item in output.sequences] == [tokens for tokens, *_ in expected]
    for item, (tokens, score, reason) in zip(output.sequences, expected, strict=True):
        length = len(tokens) - (reason == "stop" and params.include_stop_str_in_output)
        assert item.cum_logprob == pytest.approx(score * length**params.length_penalty, abs=1e-4)
        assert item.finish_reason == reason
        assert item.stop_reason == (EOS if reason == "stop" else None)
        num_steps = length - len(prompt) + (reason == "stop")
        assert len(item.logprobs) == num_steps


@pytest.mark.parametrize("shows_end", [False, True])
@pytest.mark.parametrize(
    ("width", "length", "penalty"), [(2, 8, 1.0), (5, 7, 0.0), (5, 7, -1.0), (60, 3, 3.0)]
)
def test_the_best_sequences_are_found(
    model: FakeModel, width: int, length: int, penalty: float, shows_end: bool
) -> None:
    params = BeamSearchParams(
        width, length, length_penalty=penalty, include_stop_str_in_output=shows_end
    )
    with model.llm() as llm:
        outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.sequences) == width
        assert_same(output, prompt, params)


def test_some_sequences_end_and_others_do_not(model: FakeModel) -> None:
    params = BeamSearchParams(20, 9)
    with model.llm() as llm:
        outputs = llm.beam_search(PROMPTS, params)
        endless = llm.beam_search(PROMPTS, BeamSearchParams(20, 9, ignore_eos=True))
    reasons = {item.finish_reason for output in outputs for item in output.sequences}
    assert reasons == {"stop", "length"}
    for prompt, output in zip(PROMPTS, endless, strict=True):
        assert {len(item.tokens) for item in output.sequences} == {len(prompt) + 9}
        assert_same(output, prompt, BeamSearchParams(20, 9, ignore_eos=True))


def test_one_beam_is_greedy(model: FakeModel) -> None:
    with model.llm() as llm:
        (output,) = llm.beam_search([1, 2], BeamSearchParams(1, 20, ignore_eos=True))
    assert output.sequences[0].tokens == [1, 2, *continued([1, 2], 20)]
    assert output.sequences[0].text is None


def test_it_is_the_same_with_preemptions_and_other_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(monkeypatch, num_blocks=14, max_num_seqs=8, depth=2)
    params = BeamSearchParams(6, 20)
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)
    with model.llm() as llm, ThreadPoolExecutor(3) as pool:
        free = pool.submit(llm.generate, PROMPTS, long, use_tqdm=False)
        outputs = list(pool.map(lambda prompt: llm.beam_search(prompt, params)[0], PROMPTS))
        others = free.result()
    assert model.bench.scheduler.num_preemptions > 0
    for prompt, output, other in zip(PROMPTS, outputs, others, strict=True):
        assert_same(output, prompt, params)
        assert other.outputs[0].token_ids == continued(prompt, 30)
    model.bench.assert_all_free()


def test_beams_share_the_blocks_of_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, num_blocks=400, block_size=4)
    prompt = [at % 90 for at in range(64)]
    peaks: list[int] = []
    with model.llm() as llm:
        llm.observe(Peaks(model, peaks))
        llm.beam_search(prompt, BeamSearchParams(8, 12, ignore_eos=True))
    # 16 blocks of the prompt, once; each beam has at most 3 and the one that it computes.
    assert max(peaks) <= 16 + 8 * 4
    computed = sum(model.bench.runner.computed)
    assert computed <= 64 + 12 * 8 * 4
    model.bench.assert_all_free()


class Peaks:
    """The active blocks in each step."""

    def __init__(self, model: FakeModel, peaks: list[int]) -> None:
        self._manager, self._peaks = model.bench.manager, peaks
        prepare = model.bench.runner.prepare

        def prepared(plan: Any, **options: Any) -> Any:
            self._peaks.append(self._manager.usage().active)
            return prepare(plan, **options)

        model.bench.runner.prepare = prepared  # type: ignore[method-assign]

    def on_arrival(self, request: Any) -> None: ...

    def on_finish(self, request: Any) -> None: ...

    def on_step(self, result: Any) -> None: ...


async def test_searches_on_an_event_loop(model: FakeModel) -> None:
    params = BeamSearchParams(4, 9)
    async with model.async_engine() as engine:
        outputs = await asyncio.gather(
            *(engine.beam_search(prompt, params, tenant=bytes(prompt)) for prompt in PROMPTS)
        )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same(output, prompt, params)


def test_the_context_ends_the_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, max_model_len=12)
    with model.llm() as llm:
        (output,) = llm.beam_search([1, 2, 3], BeamSearchParams(3, 100, ignore_eos=True))
        assert {len(item.tokens) for item in output.sequences} == {12}
        with pytest.raises(ContextLengthError):
            llm.beam_search([1] * 12, BeamSearchParams(3, 100))
    model.bench.assert_all_free()


def test_the_text_is_that_of_prompt_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers.characters()
    model = FakeModel(monkeypatch, tokenizer=tokenizer)
    with model.llm() as llm:
        (output,) = llm.beam_search("abc", BeamSearchParams(2, 4, ignore_eos=True))
    for item in output.sequences:
        assert item.text == tokenizer.decode(item.tokens, skip_special_tokens=False)
        assert item.text is not None and item.text.startswith("abc")


def test_a_step_that_fails_fails_the_search_alone(model: FakeModel) -> None:
    (_, token, *_) = continued(PROMPTS[0], 3)
    model.fail_on(token)
    with model.llm() as llm:
        with pytest.raises(RequestFailedError, match=f"token {token}"):
            llm.beam_search(PROMPTS[0], BeamSearchParams(2, 5, ignore_eos=True))
        assert alive(llm)


def alive(llm: LLM) -> bool:
    return bool(llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 1.5}, r"beam_width=1\.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": 1.0}, r"temperature=1\.0"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"width": 3}, "there is no beam search parameter 'width'"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})


def test_other_parameters_are_refused(model: FakeModel) -> None:
    with model.llm() as llm, pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        llm.beam_search([1], SamplingParams())  # type: ignore[arg-type]
    assert VOCAB_SIZE < 2 * 60
