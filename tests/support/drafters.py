"""Drafters for tests: wrong, right, half right, broken."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

from pyengine.engine.core import Engine
from pyengine.engine.drafting import Drafting
from pyengine.request.request import SequenceState
from pyengine.speculation.drafters import Draft, Drafter
from pyengine.speculation.policy import StepSize
from tests.support.engines import add_parts
from tests.support.fake_runner import VOCAB_SIZE, continued


class EveryDraft:
    """A policy that computes every draft."""

    def keep(
        self, contexts: Sequence[SequenceState], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        return [len(draft.tokens) for draft in drafts]

    def forget(self, context: SequenceState) -> None:
        pass


def speculate(
    engine: Engine, drafter: Drafter, most: int = 5, vocab_size: int = VOCAB_SIZE
) -> None:
    """Let an engine compute every draft that it can be given."""
    policy = cast(Any, EveryDraft())
    scheduler = engine._scheduler
    add_parts(engine, Drafting(scheduler, drafter, policy, max_tokens=most, vocab_size=vocab_size))


class RandomDrafter:
    """Any tokens, of any number."""

    def __init__(self, seed: int, vocab: int = VOCAB_SIZE) -> None:
        self._random, self._vocab = Random(seed), vocab

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        return [Draft(self._tokens(self._random.randint(0, count))) for count in most]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def forget(self, context: SequenceState) -> None:
        pass


class MixedDrafter(RandomDrafter):
    """The fake model's greedy answer, often with an error."""

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        drafts = []
        for context, count in zip(contexts, most, strict=True):
            known = [*map(int, context.request.prompt_token_ids), *context.token_ids]
            tokens = continued(known, self._random.randint(0, count))
            if tokens and self._random.random() < 0.5:
                tokens[self._random.randrange(len(tokens))] = self._random.randrange(VOCAB_SIZE)
            drafts.append(Draft(tokens))
        return drafts


class AnswerDrafter:
    """Knows the answers, by (prompt, sample)."""

    def __init__(self, answers: Mapping[tuple[tuple[int, ...], int], Sequence[int]]) -> None:
        self._answers = answers

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        return [
            Draft(self._answer(context)[len(context.token_ids) :][:count])
            for context, count in zip(contexts, most, strict=True)
        ]

    def _answer(self, context: SequenceState) -> Sequence[int]:
        prompt = tuple(int(token) for token in context.request.prompt_token_ids)
        return self._answers[prompt, getattr(context, "index", 0)]

    def forget(self, context: SequenceState) -> None:
        pass
