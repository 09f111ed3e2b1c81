"""Each operation of the overhead benchmark, once; no times are checked."""

from itertools import islice

import pytest

from benches.engine import overhead
from benches.engine.overhead import GOALS, GREEDY, SIZES, SMALL, prompts, rows, table, tokenizer
from benches.engine.service import Service, Size
from pyengine.sampling_params import SamplingParams

GREEDY_PARAMS = SamplingParams(**GREEDY, max_tokens=3, ignore_eos=True)


def test_every_goal_has_its_row() -> None:
    assert set(GOALS) <= set(rows(SIZES))


def test_requests_come_are_read_and_go() -> None:
    service = Service(Size(count=4, longest=64, vocab_size=SMALL, tokenizer=tokenizer(SMALL)))
    for number, prompt in enumerate(prompts(4, 20, SMALL)):
        service.take_in(str(number), prompt, GREEDY_PARAMS, streams=number % 2 == 0)
    seen = []
    for _ in range(3):
        service.step()
        seen.append(service.num_running)
    assert seen == [4, 4, 0]
    service.take_in("again", [3, 4, 5], GREEDY_PARAMS)
    service.step()
    service.abort(["again"])
    assert service.num_running == 0


def test_the_small_tokenizer_has_whole_words_alone() -> None:
    words = [tokenizer(SMALL).decode([index]) for index in range(SMALL)]
    assert all(word[0] == " " and word[1:].isprintable() and len(word) > 1 for word in words)


@pytest.mark.parametrize("name", ["greedy, text, read", "top-p", "top-k", "greedy, others waiting"])
def test_steps_are_timed(name: str) -> None:
    stream = rows((2,))[f"{name}, 2 running"]()
    assert all(wall > 0 and processor > 0 for wall, processor in islice(stream, 2))


def test_parts_arrivals_and_taking_in_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "RUNNING", 3)
    parts = next(overhead.parts(2, {**GREEDY, "detokenize": True}))
    assert len(parts) == len(overhead.PARTS) and min(parts) > 0
    for stream in (overhead.arrivals(), rows((1,))["accept 8,192 from a list"]()):
        assert min(next(stream)) > 0


def test_a_table_has_a_column_for_each_run() -> None:
    [goal] = [name for name in GOALS if name.startswith("abort")]
    column = {goal: {"processor": {"median": 1711.2}, "wall": {"median": 2000.0}}}
    lines = list(table({"before": column, "now": {goal: {"processor": {"median": 7.25}}}}))
    assert f"| {goal} | 1,711 | 7.2 | 10 |" in lines
