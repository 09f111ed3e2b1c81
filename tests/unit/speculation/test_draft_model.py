"""A second model as a drafter: what it computes in a step, and what it copies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyengine.executor.executor import Executor
from pyengine.kv_cache import BlockManager
from pyengine.request.prompts import Prompt
from pyengine.speculation.draft_model import DraftModel
from tests.support.drafters import speculate
from tests.support.engines import GREEDY, Sink, add_request, make_bench
from tests.support.fake_runner import FakeRunner, continued
from tests.support.requests import make_request

MOST = 32


class Text:
    is_drawn = False

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.request = make_request("a", prompt)
        self.token_ids = list(output)

    def continued(self, count: int) -> list[int]:
        return continued([*self.request.prompt_token_ids, *self.token_ids], count)


class Model:
    """The fake model as a drafter: it is always right."""

    def __init__(self, num_blocks: int = 256, *, most: int = MOST, longest: int = 1000) -> None:
        self.manager = BlockManager(num_blocks, 4)
        self.runner = FakeRunner(num_blocks, 4)
        self.drafter = DraftModel(
            Executor(self.runner), self.runner, self.manager, most=most, longest=longest
        )

    def step(self, budget: int, texts: Sequence[Text], most: int = 3) -> list[list[int]]:
        """The drafts of a step of the engine that leaves so many tokens."""
        self.drafter.begin_step(budget)
        drafts = self.drafter.propose(texts, [most] * len(texts))
        self.manager.check()
        return [list(draft.tokens) for draft in drafts]

    def taken(self) -> list[int]:
        """Tokens of each forward pass since it was last called."""
        taken, self.runner.computed = self.runner.computed, []
        return taken


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    for context in list(model.drafter._sequences):
        model.drafter.forget(context)
    usage = model.manager.usage()
    assert (usage.active, usage.pinned) == (0, 0)


def test_a_prompt_is_computed_in_chunks_within_the_budget(model: Model) -> None:
    text = Text([*range(3, 90)], [5])  # 87 tokens before the last
    assert model.step(30, [text]) == [[]] and model.taken() == [28]  # whole blocks
    assert model.step(0, [text]) == [[]] and model.taken() == []
    assert model.step(500, [text]) == [[]] and model.taken() == [MOST]
    expected = text.continued(3)
    assert model.step(500, [text]) == [expected] and model.taken() == [87 - 28 - MOST, 1, 1, 1]


def test_a_text_may_grow_while_it_is_computed(model: Model) -> None:
    text = Text([*range(3, 50)], [5])
    for _ in range(4):
        assert model.step(10, [text]) == [[]]
        text.token_ids += text.continued(2)
    assert model.taken() == [8] * 4
    assert model.step(MOST, [text]) == [text.continued(3)]
    assert model.taken() == [47 + 1 + 8 - 1 - 32, 1, 1, 1]


def test_those_that_lack_few_tokens_do_not_wait_for_a_long_prompt(model: Model) -> None:
    long, short = Text([*range(3, 90)], [5]), Text([7, 8, 9], [1])
    for number in range(3):
        expected = short.continued(3)
        assert model.step(20, [long, short]) == [[], expected]
        assert 16 < model.taken()[0] <= 20, number
        short.token_ids += expected
    while not model.step(20, [long])[0]:
        assert 16 < sum(model.taken()) <= 20


class Counted(list[int]):
    """Token ids that count how many of them were read."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for token in super().__iter__():
            Counted.read += 1
            yield token

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Counted.read += len(found) if isinstance(place, slice) else 1
        return found

    def __len__(self) -> int:
        return super().__len__()


def test_no_step_copies_a_text_again(model: Model) -> None:
    prompt = Counted(range(3, 90))
    text = Text(prompt)
    text.token_ids = Counted([5])
    while not model.step(MOST, [text])[0]:
        pass
    Counted.read = 0
    for _ in range(10):
        text.token_ids.append(9)
        assert model.step(MOST, [text])[0]
    assert Counted.read <= 10 * 3


def test_prompts_may_be_arrays_and_of_one_token(model: Model) -> None:
    texts = [Text(np.array([3, 4, 5])), Text(np.array([3])), Text(np.array([3]), [4])]  # type: ignore[arg-type]
    expected = [texts[0].continued(3), [], texts[2].continued(3)]
    assert model.step(MOST, texts) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_holds_no_stream_up(depth: int) -> None:
    """Both models together compute no more in a step than the largest step of the engine has.

    The drafts themselves come on top, two for each of two samples.
    """
    bench = make_bench(512, 4, max_num_batched_tokens=MOST, depth=depth)
    model = Model(512, most=MOST)
    speculate(bench.engine, model.drafter, most=2)
    sink, prompt = Sink(), [*range(3, 93), *range(3, 93), *range(3, 93)]
    params = replace(GREEDY, max_tokens=60)
    stream = add_request(bench, "stream", Prompt(token_ids=[1, 2, 3]), params, sink=sink)
    bench.requests["stream"] = stream
    while not stream.sequences[0].token_ids:
        bench.engine.step()
    bench.submit({"long": prompt})
    most, done = 0, {}
    bench.runner.computed, model.runner.computed = [], []
    while bench.engine.has_work:
        bench.engine.step()
        done.update(bench.take_finished())
        ours, theirs = bench.runner.computed, model.taken()
        prefills = sum([count for count in theirs if count > 2])
        most = max(most, prefills + sum(ours))
        bench.runner.computed = []
    assert MOST // 2 < most <= MOST * depth + 4
    assert done["long"].outputs[0].token_ids == continued(prompt, 8)
    assert done["stream"].outputs[0].token_ids == continued([1, 2, 3], 60)
    assert bench.engine.stats().counters["accepted_draft_tokens"] > 10
