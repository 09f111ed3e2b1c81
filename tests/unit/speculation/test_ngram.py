"""Prompt look-up against a search of all positions."""

import tracemalloc
from collections.abc import Sequence
from random import Random
from time import thread_time

import numpy as np
import pytest

from pyengine.speculation.drafters import NgramDrafter
from tests.support.requests import make_request


class Text:
    def __init__(self, prompt: Sequence[int], output: list[int] | None = None) -> None:
        self.request = make_request("a", prompt)
        self.token_ids = output or []
        self.output = self.request.sequences[0].output

    @property
    def is_drawn(self) -> bool:
        return self.output.sampling.is_drawn

    @is_drawn.setter
    def is_drawn(self, is_drawn: bool) -> None:
        self.output.sampling.is_drawn = is_drawn


def searched(tokens: list[int], most: int, lengths: range) -> list[int]:
    """The same by looking everywhere."""
    for length in reversed(lengths):
        end = tokens[-length:]
        for start in reversed(range(len(tokens) - length)):
            if len(end) == length and tokens[start : start + length] == end:
                following = tokens[start + length :]
                return (following * most)[:most]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_finds(seed: int) -> None:
    random = Random(seed)
    shortest = random.randint(1, 3)
    lengths = range(shortest, shortest + random.randint(1, 3))
    drafter = NgramDrafter(shortest=lengths[0], longest=lengths[-1])
    texts = [Text([random.randrange(3) for _ in range(random.randint(1, 30))]) for _ in range(3)]
    found = 0
    for _ in range(40):
        most = [random.randint(0, 6) for _ in texts]
        drafts = drafter.propose(texts, most)
        for text, count, draft in zip(texts, most, drafts, strict=True):
            tokens = [*text.request.prompt_token_ids, *text.token_ids]
            assert list(draft.tokens) == searched(tokens, count, lengths)
            assert draft.match_length in (0, *lengths)
            found += len(draft.tokens) > 0
            text.token_ids += [random.randrange(3) for _ in range(random.randint(0, 3))]
    assert found > 10


def test_it_forgets() -> None:
    drafter, text = NgramDrafter(), Text([1, 2, 3, 1, 2])
    assert list(drafter.propose([text], [2])[0].tokens) == [3, 1]
    drafter.forget(text)
    drafter.forget(text)
    assert not drafter._histories


LONG = 1 << 17


@pytest.mark.parametrize("vocab_size", [1, 300, 50_000])
def test_no_step_of_a_long_prompt_takes_long(vocab_size: int) -> None:
    """Also not the first one, which sees all of it: 5 ms of processor time at 128k tokens."""
    random = Random(0)
    prompt = np.array([random.randrange(vocab_size) for _ in range(LONG)])
    times: list[list[float]] = []
    for _ in range(3):  # the machine is shared: the quickest of three counts, step by step
        drafter, text, taken = NgramDrafter(), Text(prompt), []
        for _ in range(10):
            begin = thread_time()
            drafter.propose([text], [7])
            taken.append(thread_time() - begin)
            text.token_ids.append(random.randrange(vocab_size))
        begin = thread_time()
        drafter.forget(text)
        times.append([*taken, thread_time() - begin])
    assert max(map(min, zip(*times, strict=True))) < 0.005


def test_a_long_prompt_takes_no_memory_of_an_index() -> None:
    prompt = np.arange(LONG)
    tracemalloc.start()
    try:
        drafter = NgramDrafter()
        drafter.propose([Text(prompt, [7])], [7])
        assert tracemalloc.get_traced_memory()[1] < 16 * LONG
    finally:
        tracemalloc.stop()
