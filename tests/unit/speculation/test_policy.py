"""Drafts are computed where they gain time, and nowhere else."""

from collections.abc import Sequence
from random import Random

import pytest

from pyengine.speculation.drafters import Draft
from pyengine.speculation.policy import Curve, DraftPolicy, StepCosts, StepSize
from tests.unit.speculation.test_ngram import Text

LINEAR = StepCosts(Curve([1, 2, 33], [0.045, 0.0468, 0.0468 + 31 * 0.0018]))
"""45 ms for a row and 1.8 ms for each more."""


def test_costs_are_straight_lines_that_never_fall() -> None:
    costs = Curve([1, 4, 8, 16], [2.0, 1.0, 4.0, 8.0])
    found = [costs.between(size, size).item() for size in (31, 1, 3, 4, 6, 16)]
    assert found == [15, 1, 1, 1, 2.5, 8]
    assert costs.between(6, 9).tolist() == [2.5, 3.25, 4, 4.5]


def trained(right: float, *, steps: int, costs: StepCosts = LINEAR, batch: int = 1) -> list[int]:
    """Drafts kept per step, of 7 each that are right so often, for `batch` requests."""
    random, policy = Random(1), DraftPolicy(costs)
    texts = [Text([1, 2]) for _ in range(batch)]
    kept: list[int] = []
    for _ in range(steps):
        drafts = [Draft([7] * 7, 3) for _ in texts]
        counts = policy.keep(texts, drafts, StepSize(batch, batch))
        kept.append(sum(counts))
        for text, count in zip(texts, counts, strict=True):
            for _ in range(count + 1):
                is_right = random.random() < right
                text.token_ids.append(7 if is_right else 8)
                if not is_right:
                    break
    return kept


@pytest.mark.parametrize(
    ("right", "batch", "least", "most"),
    [
        (1.0, 1, 6.5, 7),
        (0.0, 1, 0, 0.5),
        (0.5, 1, 2, 5),  # a draft pays that is reached and right in 4 % of the cases: 0.5 ** 4
        (0.9, 32, 2 * 32, 4 * 32),  # time is worth more when most are right: 0.9 ** 3 is the last
        (0.5, 32, 0, 32),  # ... in 57 %: none, or the first where it went well for a while
        (0.1, 32, 0, 3),
    ],
)
def test_as_many_are_kept_as_pay(right: float, batch: int, least: float, most: float) -> None:
    kept = trained(right, steps=200, batch=batch)[100:]
    assert least <= sum(kept) / len(kept) <= most


def test_where_rows_cost_as_much_as_steps_nothing_is_kept_for_long() -> None:
    costs = StepCosts(Curve([1, 2], [1.0, 2.0]))
    assert sum(trained(0.9, steps=100, costs=costs)) == 0


def test_it_comes_back_when_drafts_are_right_again() -> None:
    """Drafts that were not computed are compared with the tokens, too."""
    policy, text = DraftPolicy(LINEAR), Text([1, 2])

    def step(token: int) -> int:
        (count,) = policy.keep([text], [Draft([7] * 7, 3)], StepSize(1, 1))
        text.token_ids.append(token)
        return count

    for _ in range(100):
        step(8)
    assert step(8) == 0
    assert [step(7) for _ in range(60)][-1] >= 4


def test_a_request_with_good_drafts_is_served_before_one_with_bad_ones() -> None:
    policy = DraftPolicy(LINEAR)
    good, bad = Text([1]), Text([2])
    counts: Sequence[int] = ()
    for _ in range(100):
        counts = policy.keep([good, bad], [Draft([7] * 7, 3)] * 2, StepSize(2, 2))
        good.token_ids += [7] * (1 + counts[0])
        bad.token_ids += [8]
    assert counts[0] == 7 and counts[1] <= 1
    policy.forget(good)
    policy.forget(bad)
    assert not policy._records


@pytest.mark.parametrize("seed", range(12))
def test_what_a_request_loses_whose_drafts_are_never_right_is_bounded(seed: int) -> None:
    """Whatever steps cost, and however well the drafts of others do: 1 % and a few tokens."""
    random, length = Random(seed), 400
    sizes = [1, *sorted(random.sample(range(2, 300), 6))]
    seconds = sorted(random.uniform(0.02, 0.2) for _ in sizes)
    costs = StepCosts(Curve(sizes, seconds), Curve([0, 9], [0.0, random.uniform(0, 0.01)]))
    policy = DraftPolicy(costs)
    bad = [Text([1]) for _ in range(random.choice([1, 2, 8, 32]))]
    good = [Text([2]) for _ in range(random.choice([0, 1, 8]))]
    everybody = [*bad, *good]
    for text in everybody:
        text.is_drawn = random.random() < 0.5
    num_drawn = sum(text.is_drawn for text in everybody)
    random.shuffle(everybody)
    alone = len(everybody)
    lost, largest = dict.fromkeys(bad, 0.0), dict.fromkeys(bad, 0.0)
    for _ in range(length):
        size = StepSize(alone, alone, num_drawn)
        counts = policy.keep(everybody, [Draft([7] * 7, 3)] * alone, size)
        draws = sum(count for text, count in zip(everybody, counts, strict=True) if text.is_drawn)
        computing = costs.tokens.between(alone, alone + sum(counts))
        drawing = costs.drawn.between(num_drawn, num_drawn + draws)
        for text, count in zip(everybody, counts, strict=True):
            each = (computing[-1] - computing[0]) / max(1, sum(counts))
            each += text.is_drawn * (drawing[-1] - drawing[0]) / max(1, draws)
            text.token_ids += [7] * (1 + count) if text in good else [8]
            if text in lost:
                lost[text] += each * count
                largest[text] = max(largest[text], each * count)
    token = (computing[0] + drawing[0]) / alone
    for text in bad:
        assert lost[text] <= token * (1 + 0.01 * length) + largest[text] + 1e-9
    assert sum(lost.values()) > 0


def test_a_draft_that_is_drawn_is_charged_for_it() -> None:
    """Where drawing a row takes as long as computing two, fewer of the same drafts pay."""
    costs = StepCosts(LINEAR.tokens, Curve([0, 8], [0.0, 8 * 0.0036]))
    policy, draft = DraftPolicy(costs), Draft([7] * 7, 3)
    greedy, drawn = Text([1]), Text([2])
    drawn.is_drawn = True
    few, many = policy.keep([drawn, greedy], [draft] * 2, StepSize(2, 2, 1))
    assert 0 < few < many
    ratio = policy._records[drawn].penalty / few / (policy._records[greedy].penalty / many)
    assert ratio == pytest.approx(3, rel=0.01)
    alone = DraftPolicy(costs)
    assert alone.keep([drawn], [draft], StepSize(1, 1, 1))[0] < 7
    assert alone.keep([drawn], [Draft()], StepSize(1, 1, 1)) == [0]


def test_drawn_rows_make_time_cheaper_for_all() -> None:
    """A step that takes longer anyway may be made longer by a greedy draft."""
    costs = StepCosts(Curve([1, 2], [1.0, 1.5]), Curve([0, 1], [0.0, 4.0]))
    draft = [Draft([7], 3)]
    assert DraftPolicy(costs).keep([Text([1])], draft, StepSize(2, 2, 0)) == [0]
    assert DraftPolicy(costs).keep([Text([1])], draft, StepSize(2, 2, 1)) == [1]


def test_a_prompt_beside_it_does_not_make_time_cheap() -> None:
    """Rows that are free in a small step are not in one that computes a prompt."""
    costs = StepCosts(Curve([1, 16, 64, 128], [1.0, 1.0, 4.0, 8.0]))
    policy = DraftPolicy(costs)
    text, draft = Text([1]), Draft([7] * 7, 3)
    assert policy.keep([text], [draft], StepSize(1, 1)) == [7]
    (beside,) = policy.keep([text], [draft], StepSize(101, 1))
    assert 1 <= beside < 7
    assert policy.keep([], [], StepSize(5, 0)) == []
    assert policy.keep([text], [Draft()], StepSize(5, 1)) == [0]
