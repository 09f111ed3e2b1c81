"""Accepted tokens are distributed as the model says, whatever was drafted.

A toy model of four tokens draws sequences of three; 20,000 seeds are counted and compared with
their probabilities, in soak 200,000. Two rules that look right are not, and fail the same test.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest

from pyengine.engine.step_rows import Accepted, StepRows
from pyengine.request.prompts import Prompt
from pyengine.request.request import SequenceState
from pyengine.sampling.sampler import sample
from pyengine.sampling_params import SamplingParams
from pyengine.speculation.drafters import Draft, NgramDrafter, SuffixDrafter
from pyengine.utils.dtypes import Rows
from tests.support.drafters import RandomDrafter
from tests.support.engines import make_bench
from tests.support.soak import soak_only

NUM_SEEDS, MANY_SEEDS, AT_ONCE = 5_000, 200_000, 1000
LENGTH, VOCAB, FIRST = 3, 4, 1
CHANCES = np.array(
    [[0.55, 0.25, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.3, 0.3, 0.1], [0.05, 0.8, 0.1, 0.05]]
)
Rule: TypeAlias = Callable[[StepRows, list[int], Rows], Accepted]


def ours(rows: StepRows, drawn: list[int], _: Rows) -> Accepted:
    return rows.accept(drawn)


def always(rows: StepRows, drawn: list[int], _: Rows) -> Accepted:
    """Wrong: every draft stands."""
    accepted = Accepted([], [], set())
    for first, drafts in rows._spans:
        accepted.tokens.extend([*drafts, drawn[first + len(drafts)]])
        accepted.counts.append(1 + len(drafts))
    return accepted


def rest_from_p(rows: StepRows, drawn: list[int], chances: Rows) -> Accepted:
    """Wrong: a draft x is accepted with p(x), and otherwise drawn from p, in which x still is."""
    random, accepted = Random(0), Accepted([], [], set())
    for first, drafts in rows._spans:
        count = 0
        while count < len(drafts) and random.random() < chances[first + count, drafts[count]]:
            count += 1
        accepted.tokens.extend([*drafts[:count], drawn[first + count]])
        accepted.counts.append(1 + count)
    return accepted


class Likely(RandomDrafter):
    """The most probable token after each."""

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        drafts = []
        for context, count in zip(contexts, most, strict=True):
            tokens = [(FIRST, *context.token_ids)[-1]]
            for _ in range(count):
                tokens.append(int(CHANCES[tokens[-1]].argmax()))
            drafts.append(Draft(tokens[1:]))
        return drafts


def samples(seeds: range) -> list[SequenceState]:
    input_processor = make_bench().processor
    made = []
    for seed in seeds:
        params = SamplingParams(temperature=1, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        prompt = Prompt(token_ids=[0, FIRST, 2, 0, FIRST])
        made.append(input_processor.request(str(seed), prompt, params).sequences[0])
    return made


def logits_of(rows: StepRows, spans: Sequence[tuple[SequenceState, Sequence[int]]]) -> Rows:
    lasts = [token for item, drafts in spans for token in ((FIRST, *item.token_ids)[-1], *drafts)]
    assert len(lasts) == len(rows.sequences)
    return np.asarray(CHANCES[lasts])


def outcomes(drafter: Any, rule: Rule, num_seeds: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, num_seeds, AT_ONCE):
        left = samples(range(start, start + AT_ONCE))
        while left:
            most = [LENGTH - len(entry.token_ids) - 1 for entry in left]
            drafts = [item.tokens for item in drafter.propose(left, most)]
            for entry in left:
                entry.num_tokens = len(entry.request.prompt_token_ids) + len(entry.token_ids) + 1
            step: Any = SimpleNamespace(
                sequences=left,
                sampling_sequences=left,
                drafts={entry: each for entry, each in zip(left, drafts, strict=True) if each},
                chunks=[],
                num_bounded=0,
                decodes=tuple(left),
            )
            rows = StepRows(step)
            chances = logits_of(rows, list(zip(left, drafts, strict=True)))
            padded = np.full((len(chances), 97), -np.inf, np.float32)
            padded[:, :VOCAB] = np.log(chances)
            positions = [
                len(entry.token_ids) + at
                for entry, each in zip(left, drafts, strict=True)
                for at in range(1 + len(each))
            ]
            drawn = sample(padded, rows.batch.sampling, positions).wait().token_ids.tolist()
            accepted = rule(rows, drawn, chances)
            rest = iter(accepted.tokens)
            for entry, count in zip(left, accepted.counts, strict=True):
                for _ in range(count):
                    entry.output.append(next(rest), None)
            ended = [entry for entry in left if entry.output.finish_reason is not None]
            for sequence in ended:
                drafter.forget(sequence)
            yield from (tuple(sequence.token_ids) for sequence in ended)
            left = [entry for entry in left if entry.output.finish_reason is None]


def p_value(drafter: Any, rule: Rule, num_seeds: int = NUM_SEEDS) -> float:
    """Pearson's chi-square test of the counts against the model's probabilities."""
    expected = {(): 1.0}
    for _ in range(LENGTH):
        expected = {
            (*known, token): chance * float(CHANCES[(FIRST, *known)[-1], token])
            for known, chance in expected.items()
            for token in range(VOCAB)
        }
    found = Counter(outcomes(drafter, rule, num_seeds))
    assert found.total() == num_seeds and found.keys() <= expected.keys()
    means = {key: num_seeds * chance for key, chance in expected.items()}
    statistic = sum((found[key] - mean) ** 2 / mean for key, mean in means.items())
    return chi_square_tail(statistic, len(means) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability of a larger value, for an odd number of degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.4.4.
    """
    assert degrees % 2 == 1
    root = statistic**0.5
    density = math.exp(-statistic / 2) / math.sqrt(2 * math.pi)
    terms, term = 0.0, root
    for at in range(1, degrees - 1, 2):
        terms += term
        term *= statistic / (at + 2)
    return math.erfc(root / math.sqrt(2)) + 2 * density * terms


def test_the_tail_is_that_of_tables() -> None:
    """26.8 of the same handbook: the values of 1, 5 and 63 degrees that are exceeded."""
    for statistic, degrees, tail in ((3.84146, 1, 0.05), (20.5150, 5, 0.001)):
        assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-4)
    assert chi_square_tail(63.0, 63) == pytest.approx(0.4762, abs=0.0005)


DRAFTERS: dict[str, Any] = {
    "random": RandomDrafter(1, VOCAB),
    "likely": Likely(1),
    "ngram": NgramDrafter(shortest=1, longest=2),
    "suffix": SuffixDrafter(max_tokens=4096),  # of earlier answers
}


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [NUM_SEEDS, *soak_only([MANY_SEEDS])])
@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_accepted_has_the_distribution_of_the_model(name: str, num_seeds: int) -> None:
    assert p_value(DRAFTERS[name], ours, num_seeds) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("rule", [always, rest_from_p])
def test_a_wrong_rule_does_not_pass(rule: Rule) -> None:
    assert p_value(Likely(1), rule) < 1e-9
