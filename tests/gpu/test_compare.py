"""Near-ties and bounds of the comparisons, by numbers that can be checked by hand."""

import math
from dataclasses import replace

import pytest

from tests.gpu.compare import Answer, Bounds, Comparison, compare, first_difference

ORACLE = Answer(
    prompt=[-1.0, -2.0, -3.0],
    tokens=[5, 6, 7],
    top=[{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.75}, {7: -0.2, 1: -2.0}],
)


def test_equal_answers() -> None:
    found = compare([ORACLE], [ORACLE], 0.0, 0.0)
    assert (found.largest, found.prompt_mean, found.wrong) == (0, 0, [])
    assert (found.num_answers, found.num_equal, found.num_tokens) == (1, 1, 3)


@pytest.mark.parametrize(("bound", "is_wrong"), [(0.3, False), (0.2, True)])
def test_the_largest_difference_of_a_prompt(bound: float, is_wrong: bool) -> None:
    found = compare([replace(ORACLE, prompt=[-1.0, -2.25, -2.95])], [ORACLE], bound)
    assert found.prompt_error == pytest.approx(0.25)
    assert found.prompt_mean == pytest.approx(0.1)
    assert bool(found.wrong) is is_wrong


def test_the_mean_has_a_bound_of_its_own() -> None:
    shifted = [replace(ORACLE, prompt=[-1.1, -2.1, -3.1])]
    assert not compare(shifted, [ORACLE], 0.5, 0.11).wrong
    assert compare(shifted, [ORACLE], 0.5, 0.09).wrong == [
        "prompt log-probabilities differ by 0.1 in the mean, bound 0.09"
    ]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    found = compare([replace(ORACLE, prompt=[-1.0, value, -3.0])], [ORACLE], 100.0)
    assert found.wrong


def test_a_near_tie_ends_the_comparison_of_tokens() -> None:
    other = replace(ORACLE, tokens=[5, 8, 3], top=[{5: -0.12}, {8: -0.7, 6: -0.72}, {3: -9.0}])
    found = compare([other], [ORACLE], 0.1)
    assert found.near_ties == [pytest.approx(0.05)]
    assert (found.num_equal, found.num_tokens, found.wrong) == (0, 1, [])
    assert found.token_error == pytest.approx(0.02)  # of the token before it alone


def test_another_token_than_a_near_tie_is_wrong() -> None:
    other = replace(ORACLE, tokens=[5, 8, 3], top=[{5: -0.1}, {8: -0.1}, {3: -9.0}])
    assert compare([other], [ORACLE], 0.04).wrong == [
        "prompt 0: token 1 is 8 instead of 6, 0.05 apart, bound 0.04"
    ]
    unheard_of = replace(other, tokens=[5, 4, 3], top=[{5: -0.1}, {4: -0.1}, {3: -9.0}])
    assert "inf apart" in compare([unheard_of], [ORACLE], 0.04).wrong[0]


def test_too_few_tokens_and_positions_are_wrong() -> None:
    short = Answer(prompt=[-1.0], tokens=[5], top=[{5: -0.1}])
    assert compare([short], [ORACLE], 1.0).wrong == [
        "prompt 0: 1 of 3 positions",
        "prompt 0: 1 tokens instead of 3",
    ]


@pytest.mark.parametrize(
    ("got", "want", "at"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference(got: list[int], want: list[int], at: int | None) -> None:
    assert first_difference(got, want) == at


def test_bounds_follow_from_rounding() -> None:
    rounding = Comparison(prompt_error=0.2, token_error=0.3, prompt_sum=4.0, num_positions=100)
    bounds = Bounds.by_rounding(rounding)
    assert (bounds.same, bounds.exact, bounds.mean) == pytest.approx((0.9, 0.6, 0.08))
    assert Bounds.by_rounding(Comparison()).exact > 0  # a model that does not round is no excuse
