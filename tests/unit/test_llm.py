"""`LLM` with several callers: threads, interleaved streams, Ctrl-C, prompts in every form."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, zip_longest
from random import Random
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from pyengine.errors import EngineClosedError, InvalidRequestError, RequestFailedError
from pyengine.llm import LLM
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel, Gate
from tests.support.engines import GREEDY
from tests.support.fake_runner import continued
from tests.support.tokenizers import Decoder, Fast, byte_level
from tests.support.without_torch import tensors

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=190)


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(
        monkeypatch, num_blocks=512, max_num_seqs=16, max_model_len=200, depth=request.param
    )
    yield model
    model.bench.assert_all_free()
    assert not model.bench.engine.has_work
    model.close()


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def ctrl_c() -> None:
    """Interrupt the main thread, as a terminal does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def at_a_step(model: FakeModel, number: int, act: Callable[[], object]) -> None:
    """Do something within the `number`-th step, in the engine's thread."""
    run, numbers = model.bench.runner.run, count()

    def acts(*step: Any) -> Any:
        if next(numbers) == number:
            act()
        return run(*step)

    model.bench.runner.run = acts  # type: ignore[method-assign]


class Messages:
    """Counts the messages to an engine's thread."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        enqueue = llm._engine_loop.enqueue

        def counted(message: Callable[[], object]) -> None:
            enqueue(message)
            self.count += 1

        monkeypatch.setattr(llm._engine_loop, "enqueue", counted)

    def wait_for(self, count: int) -> None:
        """Wait until `count` have been sent."""
        deadline = monotonic() + 10
        while self.count < count:
            assert monotonic() < deadline
            sleep(0.001)


class Ends:
    """An observer of the ends of requests."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        """Tokens of each request, by the first of its prompt."""

    def on_arrival(self, request: Any) -> None: ...

    def on_step(self, result: Any) -> None: ...

    def on_finish(self, request: Any) -> None:
        (output,) = request.output().outputs
        self.lengths[request.prompt_token_ids[0]] = len(output.token_ids)


def test_each_of_two_streams_has_its_own_answer(model: FakeModel) -> None:
    llm = model.llm()
    streams = llm.stream([1, 2], GREEDY), llm.stream([5], GREEDY)
    results: tuple[list[Any], list[Any]] = [], []
    for pair in zip_longest(*streams):
        for items, item in zip(results, pair, strict=True):
            items.extend([item] if item is not None else [])
    for items, prompt in zip(results, ([1, 2], [5]), strict=True):
        expected = continued(prompt, 8)
        for (tokens,) in map(tokens_of, ([item] for item in items)):
            assert tokens == expected[: len(tokens)]
        assert items[-1].finished and tokens_of([items[-1]]) == [expected]


def test_a_stream_goes_on_while_nobody_reads_it(model: FakeModel) -> None:
    """The reader gets the output since its last item as one item."""
    llm, gate = model.llm(), Gate(model.bench, 3)
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=8, output_kind=RequestOutputKind.DELTA
    )
    stream = llm.stream([1, 2], params)
    first = next(stream)
    assert gate.is_held.wait(10)
    gate.is_open.set()
    (whole,) = llm.generate([[7, 7]], GREEDY, use_tqdm=False)
    assert tokens_of([whole]) == [continued([7, 7], 8)]
    (rest,) = list(stream)
    assert rest.finished
    assert tokens_of([first])[0] + tokens_of([rest])[0] == continued([1, 2], 8)


def test_a_stream_that_is_left_ends_its_request_and_no_other(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, ends = model.llm(), Ends()
    llm.observe(ends)
    messages = Messages(llm, monkeypatch)
    at_a_step(model, 2, lambda: messages.wait_for(2))  # of the second stream
    at_a_step(model, 6, lambda: messages.wait_for(3))  # of its end
    kept, left = llm.stream([1, 2], GREEDY), llm.stream([5], LONG)
    next(kept), next(left)
    left.close()
    assert tokens_of([list(kept)[-1]]) == [continued([1, 2], 8)]
    assert ends.lengths[1] == 8 > ends.lengths[5]
    assert llm.stats().num_running == 0


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
        results = list(pool.map(generate, prompts))
    assert results == [continued(prompt, 8) for prompt in prompts]


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


@pytest.mark.parametrize("number", [0, 1, 5])
def test_ctrl_c_ends_this_callers_requests_and_nobody_elses(
    number: int, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, gate, ends = model.llm(), Gate(model.bench, 3), Ends()
    llm.observe(ends)
    messages = Messages(llm, monkeypatch)
    other = llm.stream([90, 2], LONG)
    next(other)
    assert gate.is_held.wait(10)

    def interrupted() -> None:
        ctrl_c()
        messages.wait_for(3)  # the abort

    at_a_step(model, 0, lambda: messages.wait_for(2))
    at_a_step(model, 1 + number, interrupted)
    gate.is_open.set()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[at] for at in range(40)], GREEDY, use_tqdm=False)
    ended = {first: ends.lengths[first] for first in ends.lengths if first < 40}  # 90 may have, too
    assert ended.keys() == set(range(40))  # it has waited for that
    assert max(ended.values()) < 8
    assert tokens_of([list(other)[-1]]) == [continued([90, 2], 190)]


def test_a_second_ctrl_c_does_not_wait_and_leaves_none_of_50_000(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, goes_on = model.llm(), threading.Event()
    messages = Messages(llm, monkeypatch)

    def interrupted() -> None:
        ctrl_c()
        messages.wait_for(2)
        ctrl_c()
        assert goes_on.wait(10)

    at_a_step(model, 2, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[at % 90, at % 7] for at in range(50_000)], GREEDY, use_tqdm=False)
    goes_on.set()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_the_engines_thread_does_not_wait_for_itself(model: FakeModel) -> None:
    """As an observer or a finalizer does."""
    llm, results = model.llm(), list[Any]()

    def call() -> None:
        results.append(llm.stats().num_running)
        with pytest.raises(RuntimeError, match="cannot wait for its own steps"):
            llm.generate([[5]], GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="cannot wait for its own steps"):
            next(llm.stream([5], GREEDY))

    at_a_step(model, 1, call)
    assert tokens_of(llm.generate([[1]], GREEDY, use_tqdm=False)) == [continued([1], 8)]
    assert results == [1]


def test_a_signal_handler_may_generate(model: FakeModel) -> None:
    llm, results = model.llm(), list[Any]()
    previous = signal.signal(
        signal.SIGUSR1, lambda *_: results.extend(llm.generate([[5]], GREEDY, use_tqdm=False))
    )
    main = threading.main_thread().ident or 0
    at_a_step(model, 3, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        outputs = llm.generate([[1]], LONG, use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert tokens_of(outputs) == [continued([1], 190)]
    assert tokens_of(results) == [continued([5], 8)]


def test_a_closed_llm_aborts_what_runs_and_takes_no_more(model: FakeModel) -> None:
    llm, gate = model.llm(), Gate(model.bench, 3)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    assert gate.is_held.wait(10)
    closing = threading.Thread(target=llm.close)
    closing.start()
    while llm._engine_loop._error is None:
        sleep(0.001)
    gate.is_open.set()
    closing.join(10)
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    llm.close()
    for use in (lambda: llm.generate([[5]], use_tqdm=False), lambda: next(llm.stream([5]))):
        with pytest.raises(EngineClosedError, match="was closed"):
            use()
    assert llm.stats().num_running == 0


def test_one_that_is_dropped_leaves_no_thread(model: FakeModel) -> None:
    llm = model.llm()
    thread = llm._engine_loop._thread
    stream = llm.stream([1, 2], LONG)
    next(stream)
    del llm, stream
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_of_the_engine_reaches_everybody(model: FakeModel) -> None:
    import torch

    llm, gate = model.llm(), Gate(model.bench, 3)
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    assert gate.is_held.wait(10)

    def broken(*step: Any) -> Any:
        raise torch.AcceleratorError("the device is gone")

    model.bench.runner.run = broken  # type: ignore[method-assign]
    gate.is_open.set()
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
    model.fail_on(96)
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
        *tensors([3, 4, 5]),
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

    monkeypatch.setattr("tqdm.tqdm", never)
    llm = model.llm()
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1
    with pytest.raises(AssertionError, match="a bar was made"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=True)


@pytest.mark.parametrize(
    ("seconds", "lines"), [(1e-9, ["1 of 2 prompts, ", "2 of 2 prompts, "]), (10, [])]
)
def test_progress_in_a_file_is_whole_lines(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    lines: list[str],
) -> None:
    """And none for a call that ends before the first is due."""
    monkeypatch.setattr("pyengine.utils.progress._BETWEEN_LINES", seconds)
    model.llm().generate([[1], [2]], GREEDY)
    written = capsys.readouterr().err
    assert "\r" not in written
    assert "%" not in written.replace("% cached", "")
    assert all(line in written for line in lines)
    assert bool(written) == bool(lines)


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
