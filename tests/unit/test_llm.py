"""`LLM` with several callers: threads, interleaved streams, Ctrl-C, prompts in every form."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pyengine import llm as llm_module
from pyengine.errors import InvalidRequestError, RequestFailedError
from pyengine.llm import LLM
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel
from tests.support.engines import GREEDY
from tests.support.fake_runner import continued
from tests.support.tokenizers import Decoder, Fast, byte_level


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(
        monkeypatch, num_blocks=512, max_num_seqs=16, max_model_len=200, depth=request.param
    )
    yield model
    model.bench.assert_all_free()
    assert not model.bench.engine.has_work


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_each_of_two_streams_has_its_own_answer(model: FakeModel) -> None:
    llm = model.llm()
    streams = llm.stream([1, 2], GREEDY), llm.stream([5], GREEDY)
    found: tuple[list[Any], list[Any]] = [], []
    for pair in zip_longest(*streams):
        for items, item in zip(found, pair, strict=True):
            items.extend([item] if item is not None else [])
    for items, prompt in zip(found, ([1, 2], [5]), strict=True):
        expected = continued(prompt, 8)
        for (tokens,) in map(tokens_of, ([each_item] for each_item in items)):
            assert tokens == expected[: len(tokens)]
        assert len(items) >= 7
        assert items[-1].finished and tokens_of([items[-1]]) == [expected]


def test_a_stream_goes_on_after_a_batch_in_between(model: FakeModel) -> None:
    llm = model.llm()
    stream = llm.stream([1, 2], GREEDY)
    first = next(stream)
    (whole,) = llm.generate([[7, 7]], GREEDY, use_tqdm=False)
    assert tokens_of([whole]) == [continued([7, 7], 8)]
    rest = list(stream)
    assert len(tokens_of([first])[0]) < 8
    assert rest[-1].finished
    assert tokens_of([rest[-1]]) == [continued([1, 2], 8)]


def test_what_was_not_read_meanwhile_is_one_item(model: FakeModel) -> None:
    llm = model.llm()
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=8, output_kind=RequestOutputKind.DELTA
    )
    stream = llm.stream([1, 2], params)
    first = next(stream)
    llm.generate([[7, 7]], GREEDY, use_tqdm=False)
    rest = list(stream)
    assert len(rest) == 1
    assert tokens_of([first])[0] + tokens_of(rest)[0] == continued([1, 2], 8)


def test_a_stream_that_is_left_ends_its_request_and_no_other(model: FakeModel) -> None:
    llm = model.llm()
    kept, left = llm.stream([1, 2], GREEDY), llm.stream([5], GREEDY)
    next(kept), next(left)
    left.close()
    assert model.bench.scheduler.num_running == 1
    assert tokens_of([list(kept)[-1]]) == [continued([1, 2], 8)]


def test_final_only_is_one_item(model: FakeModel) -> None:
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY
    )
    (item,) = model.llm().stream([1, 2], params)
    assert (item.finished, tokens_of([item])) == (True, [continued([1, 2], 8)])


def test_several_threads_each_get_their_own(model: FakeModel) -> None:
    llm = model.llm()
    prompts = [[at, at + 1] for at in range(24)]

    def generate(prompt: list[int]) -> list[int]:
        return tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(generate, prompts))
    assert found == [continued(prompt, 8) for prompt in prompts]


def test_threads_stream_batch_and_leave_at_once(model: FakeModel) -> None:
    llm = model.llm()

    def call(number: int) -> None:
        random = Random(number)
        for _ in range(6):
            prompt = [random.randrange(97) for _ in range(random.randint(1, 12))]
            match random.choice(["batch", "stream", "leave"]):
                case "batch":
                    several = [prompt, [*prompt, 1], prompt]
                    outputs = llm.generate(several, GREEDY, use_tqdm=False)
                    assert tokens_of(outputs) == [continued(value, 8) for value in several]
                case "stream":
                    *_, last = llm.stream(prompt, GREEDY)
                    assert tokens_of([last]) == [continued(prompt, 8)]
                case "leave":
                    stream = llm.stream(prompt, GREEDY)
                    item = next(stream)
                    length = len(item.outputs[0].token_ids)
                    assert item.outputs[0].token_ids == continued(prompt, 8)[:length]
                    stream.close()

    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(call, number) for number in range(12)]:
            done.result(timeout=60)
    llm.stats()  # does what was put off


def test_generate_iter_gives_each_as_it_ends(model: FakeModel) -> None:
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in (9, 2, 5)
    ]
    prompts = [[1], [2], [3]]
    outputs = list(model.llm().generate_iter(prompts, params))
    assert [output.index for output in outputs] == [1, 2, 0]
    for output in outputs:
        count = params[output.index].max_tokens
        assert output.outputs[0].token_ids == continued(prompts[output.index], count or 0)


def test_ctrl_c_ends_this_callers_requests_and_nobody_elses(model: FakeModel) -> None:
    llm = model.llm()
    other = llm.stream([1, 2], GREEDY)
    next(other)
    run, raised = model.bench.runner.run, []

    def interrupted(*step: Any) -> Any:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return run(*step)

    model.bench.runner.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[at] for at in range(40)], GREEDY, use_tqdm=False)
    assert model.bench.scheduler.num_running + model.bench.scheduler.num_waiting == 1
    assert tokens_of([list(other)[-1]]) == [continued([1, 2], 8)]


def test_a_second_ctrl_c_while_50_000_are_taken_out_leaves_none(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is taken out in constant time, and what an interrupt leaves is done next."""
    llm, finish, calls = model.llm(), model.bench.scheduler.finish, []

    def interrupted(jobs: Any) -> None:
        calls.append(1)
        if len(calls) == 20_000:
            raise KeyboardInterrupt
        finish(jobs)

    monkeypatch.setattr(model.bench.scheduler, "finish", interrupted)
    prompts = [[at % 90, at % 7] for at in range(50_000)]
    results = llm.generate_iter(prompts, GREEDY)
    next(results)
    with pytest.raises(KeyboardInterrupt):
        results.close()
    assert llm.stats().num_waiting == 0
    assert len(calls) >= 50_000 - 20


def test_an_error_of_the_engine_reaches_everybody(model: FakeModel) -> None:
    llm = model.llm()
    stream = llm.stream([1, 2], GREEDY)
    next(stream)

    def broken(*step: Any) -> Any:
        raise torch.AcceleratorError("the device is gone")

    model.bench.runner.run = broken  # type: ignore[method-assign]
    errors: list[str] = []

    def caller() -> None:
        with pytest.raises(Exception, match="the device is gone") as raised:
            llm.generate([[5]], GREEDY, use_tqdm=False)
        errors.append(type(raised.value).__name__)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with pytest.raises(Exception, match="the device is gone"):
        list(stream)
    assert errors == ["EngineDeadError"] * 4


def test_a_request_that_fails_is_raised_with_the_outputs_of_all(model: FakeModel) -> None:
    run = model.bench.runner.run

    def poisoned(sizes: Any, *step: Any) -> Any:
        if 96 in model.bench.runner.arrays["input_ids"][: sizes[0]]:
            raise ValueError("token 96")
        return run(sizes, *step)

    model.bench.runner.run = poisoned  # type: ignore[method-assign]
    prompts = [item for item in ([at, 3] for at in range(80)) if 96 not in continued(item, 8)][:5]
    with pytest.raises(RequestFailedError, match=r"1 of 6 .* position 2: ValueError: token 96") as (
        raised
    ):
        model.llm().generate([*prompts[:2], [96], *prompts[2:]], GREEDY, use_tqdm=False)
    outputs = raised.value.outputs
    assert [output.error is None for output in outputs] == [True, True, False, True, True, True]
    good = [output for output in outputs if output.error is None]
    assert tokens_of(good) == [continued(prompt, 8) for prompt in prompts]


def test_priorities_come_first_then_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, max_num_seqs=1)
    outputs = list(
        model.llm().generate_iter([[at] for at in range(5)], GREEDY, priority=[0, 5, -1, 0, 2.5])
    )
    assert [output.index for output in outputs] == [2, 0, 3, 4, 1]


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None)])
def test_prompts_of_different_salts_share_nothing(
    salts: tuple[str, str | None], model: FakeModel
) -> None:
    llm, prompt = model.llm(), list(range(20))
    first, second = ({"prompt_token_ids": prompt, "cache_salt": salt} for salt in salts)
    llm.generate(first, GREEDY, use_tqdm=False)
    (again,) = llm.generate(first, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 19
    (other,) = llm.generate(second, GREEDY, use_tqdm=False)
    assert other.num_cached_tokens == 0
    assert tokens_of([again, other]) == [continued(prompt, 8)] * 2


def test_prompts_in_every_form(model: FakeModel) -> None:
    llm = model.llm()
    expected = [continued([3, 4, 5], 4)]
    for prompt in (
        [3, 4, 5],
        (3, 4, 5),
        np.array([3, 4, 5]),
        np.array([3, 4, 5], dtype=np.uint16),
        torch.tensor([3, 4, 5]),
        [np.int32(3), 4, np.uint8(5)],
        range(3, 6),
        {"prompt_token_ids": np.array([3, 4, 5])},
        {"prompt_token_ids": [3, 4, 5], "prompt": "three four five", "cache_salt": None},
        np.array([[3, 4, 5]]),
    ):
        outputs = llm.generate(prompt, use_tqdm=False)  # type: ignore[arg-type]
        assert tokens_of(outputs) == expected
        assert outputs[0].prompt_token_ids == [3, 4, 5]
    assert len(llm.generate(np.array([[3, 4], [5, 6]]), use_tqdm=False)) == 2
    assert llm.generate([], use_tqdm=False) == []


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "bytes": (b"hello", "b'hello' .bytes. is no prompt"),
    "text in a mapping": ({"prompt": 5}, "'prompt' is 5 .int.: it must be text"),
    "text and a number": (["a", 1], "text and this model has no tokenizer|is no prompt"),
    "a number": (5, "5 .int. is no prompt"),
    "numbers and a text": ([1, "a"], "found 'a' .str. at position 1"),
    "a set": ({1, 2}, ".set. is no prompt"),
    "bools": ([True, False], "True .bool. is no prompt"),
    "a bool among ints": ([1, True], "found True .bool. at position 1"),
    "floats": ([1.0, 2.0], "1.0 .float. is no prompt"),
    "an array of floats": (np.array([1.0]), "an array of float64 and shape .1,. is no prompt"),
    "three dimensions": (np.zeros((1, 1, 1), int), "shape .1, 1, 1."),
    "no prompt at all": ({}, "has 'prompt' or 'prompt_token_ids'"),
    "an unknown key": ({"prompt_token_ids": [1], "multi_modal_data": 1}, "'multi_modal_data' in a"),
    "an empty salt": ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt='' .str."),
    "a salt of bytes": ({"prompt_token_ids": [1], "cache_salt": b"a"}, "cache_salt=b'a' .bytes."),
    "beyond int64": ([1, 2**70], "at position 1 of the prompt is outside of any vocabulary"),
    "beyond int64, unsigned": (np.array([2**63], np.uint64), "outside of any vocabulary"),
    "a mapping as ids": ({"prompt_token_ids": {1: 2}}, ".dict. is no prompt"),
    "a text as ids": ({"prompt_token_ids": "12"}, "'12' .str. is no prompt"),
    "an empty prompt": ([[]], "the prompt is empty"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_what_is_no_prompt_is_refused_and_nothing_ran(
    prompt: Any, message: str, model: FakeModel
) -> None:
    before = model.bench.manager.usage()
    with pytest.raises(InvalidRequestError, match=message):
        model.llm().generate(prompt, GREEDY, use_tqdm=False)
    assert model.bench.manager.usage() == before
    assert model.bench.runner.computed == []


@pytest.mark.parametrize("params", [{"temperature": 0}, [GREEDY, 5], "greedy"])
def test_parameters_of_another_type_are_refused(params: Any, model: FakeModel) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        model.llm().generate([[1], [2]], params, use_tqdm=False)


@pytest.mark.parametrize("priority", ["first", None, True, float("nan"), [1]])
def test_a_priority_that_is_no_number_is_refused(priority: Any, model: FakeModel) -> None:
    with pytest.raises(InvalidRequestError, match="priorit"):
        model.llm().generate([[1], [2]], GREEDY, use_tqdm=False, priority=priority)


def test_without_parameters_the_models_own_serve(model: FakeModel) -> None:
    llm: LLM = model.llm()
    assert llm.get_default_sampling_params().max_tokens == 4
    assert tokens_of(llm.generate([[1]], use_tqdm=False)) == [continued([1], 4)]


def test_without_a_bar_nothing_of_it_is_made(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tqdm starts a thread with its first bar."""

    def never(**_: Any) -> None:
        raise AssertionError("a bar was made")

    monkeypatch.setattr(llm_module, "tqdm", never)
    llm = model.llm()
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1
    with pytest.raises(AssertionError, match="a bar was made"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=True)


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_megabytes_of_text_are_refused(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, tokenizer=Fast(byte_level(260)))
    with pytest.raises(InvalidRequestError, match=r"the prompt has \d+ tokens; .* shorten"):
        model.llm().generate(["a b " * 250_000 * megabytes], GREEDY, use_tqdm=False)
    assert model.bench.runner.computed == []


class Adding(Decoder):
    """A tokenizer that adds a token before each text, if it may."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + super().encode(text)


def test_an_llm_has_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Adding(byte_level(300).tokenizer)
    llm = FakeModel(monkeypatch, tokenizer=tokenizer).llm()
    assert llm.get_tokenizer() is tokenizer
    text = "Tokyo is , in Japan . "
    ids = tokenizer.encode(text)
    assert llm.encode(text) == ids
    assert llm.encode(text, add_special_tokens=False) == ids[1:]
    assert llm.decode(ids) == f"<|end|>{text}"
    assert llm.decode(np.array(ids), skip_special_tokens=True) == text
    assert llm.decode([]) == ""
    bad: Any
    for bad in ("text", [1.5], [-1], None):
        with pytest.raises(InvalidRequestError):
            llm.decode(bad)
    for bad in (5, [1], "\ud800"):
        with pytest.raises(InvalidRequestError):
            llm.encode(bad)


def test_without_a_tokenizer_texts_are_refused(model: FakeModel) -> None:
    llm = model.llm()
    assert llm.get_tokenizer() is None
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.encode("text")
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.decode([1])
