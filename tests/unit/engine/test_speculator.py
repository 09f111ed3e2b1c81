"""Drafters that misbehave cost their samples the drafts, and are named in the log once."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pyengine.engine.drafting import Drafting
from pyengine.request.request import SequenceState
from pyengine.speculation.drafters import Draft
from tests.support.drafters import EveryDraft
from tests.unit.speculation.test_ngram import Text

VOCAB = 50


class Given:
    """Gives what a function of the sample says."""

    def __init__(self, draft: Callable[[SequenceState, int], Draft]) -> None:
        self._draft = draft

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        return [self._draft(context, count) for context, count in zip(contexts, most, strict=True)]

    def forget(self, context: SequenceState) -> None:
        raise RuntimeError("who is that?")


def named(name: str) -> Text:
    text = Text([1, 2])
    text.request.request_id = name
    return text


def drafting(drafter: Any) -> Drafting:
    no_scheduler: Any = None
    return Drafting(no_scheduler, drafter, EveryDraft(), max_tokens=3, vocab_size=VOCAB)


def broken(context: SequenceState, most: int) -> Draft:
    if context.request.request_id == "bad":
        raise ValueError("out of ideas")
    return Draft([7] * most)


BAD = {
    "it raises": (broken, r"out of ideas"),
    "past the vocabulary": (
        lambda item, most: Draft([VOCAB if item.request.request_id == "bad" else 7]),
        r"token id 50 was drafted, the vocabulary has 50",
    ),
    "a negative id": (
        lambda item, most: Draft([-1 if item.request.request_id == "bad" else 7]),
        r"token id -1 was drafted",
    ),
    "too many": (
        lambda item, most: Draft([7] * (99 if item.request.request_id == "bad" else most)),
        r"99 tokens were drafted, at most 3 were asked for",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_sample_whose_drafter_fails_goes_on_without(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    draft, words = BAD[what]
    speculator = drafting(Given(draft))
    good, bad = named("good"), named("bad")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            first, second = speculator.propose([good, bad], [5, 5])
            assert set(first.tokens) == {7} and not second.tokens
    (record,) = caplog.records
    assert "'bad' goes on without drafts" in record.getMessage()
    assert re.search(words, record.getMessage())
    speculator.finished([bad])


def test_a_wrong_number_of_drafts_is_looked_into_one_by_one() -> None:
    class Short(Given):
        def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
            return super().propose(contexts, most)[:1]

    speculator = drafting(Short(lambda item, most: Draft([7] * most)))
    drafts = speculator.propose([named("a"), named("b"), named("c")], [3, 0, 1])
    assert [list(draft.tokens) for draft in drafts] == [[7, 7, 7], [], [7]]
