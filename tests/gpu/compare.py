"""Log-probabilities and tokens held against an oracle's. Plain numbers, no torch.

How the bounds come about: the oracle computes the same requests in float32 and in the 16-bit
format. The largest difference between the two, `e`, is what rounding alone does to this model.
Another kernel of the same format rounds as often, only elsewhere: it may be as far from float32 as
the oracle, so `2 * e` from float32 (a maximum over other samples) and `3 * e` from the oracle of
its own format, the two together. The mean difference over the prompts' positions, which a
systematic mistake moves first, may be twice what rounding makes it. In float32, where nothing is
more exact, each bound is `FLOAT32_BOUND`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

FLOAT32_BOUND = 1e-3
"""In natural logarithms: 50 times what changing the order of sums did to these models."""
_LEAST_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one prompt, in natural logarithms of probabilities.

    `prompt` has one value per prompt token from the second on (empty if not asked for), `tokens`
    the greedy tokens, `top` for each of them the most probable tokens.
    """

    prompt: Sequence[float]
    tokens: Sequence[int]
    top: Sequence[dict[int, float]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far answers may be from the oracle of the same format, and from the float32 one.

    `mean` is for the mean difference over the positions of the prompts, from either.
    """

    same: float
    exact: float
    mean: float

    @classmethod
    def by_rounding(cls, rounding: "Comparison") -> "Bounds":
        """For a 16-bit format, by what became of the oracle in it."""
        largest = max(rounding.largest, _LEAST_ROUNDING)
        mean = max(rounding.prompt_mean, _LEAST_ROUNDING)
        return cls(same=3 * largest, exact=2 * largest, mean=2 * mean)

    @classmethod
    def float32(cls) -> "Bounds":
        """For float32, where both oracles are one."""
        return cls(FLOAT32_BOUND, FLOAT32_BOUND, FLOAT32_BOUND)


@dataclass(slots=True)
class Comparison:
    """Answers against an oracle's.

    `prompt_error` and `token_error` are the largest differences of log-probabilities, `prompt_sum`
    is the sum of those of the `num_positions` positions of the prompts that were compared.
    `near_ties` are gaps between two tokens where another one was taken; `wrong` says what cannot be
    explained.
    """

    prompt_error: float = 0.0
    prompt_sum: float = 0.0
    num_positions: int = 0
    token_error: float = 0.0
    num_answers: int = 0
    num_equal: int = 0
    num_tokens: int = 0
    near_ties: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest difference of any log-probability."""
        return max(self.prompt_error, self.token_error)

    @property
    def prompt_mean(self) -> float:
        """The mean difference over the prompts' positions; 0 if none were compared."""
        return self.prompt_sum / max(self.num_positions, 1)


def compare(
    answers: Sequence[Answer],
    oracle: Sequence[Answer],
    bound: float,
    mean_bound: float = float("inf"),
) -> Comparison:
    """Hold answers against the oracle's, position by position.

    Tokens are compared up to the first that differs, as what follows it answers something else.
    There the oracle's gap between the two tokens must be at most `bound`, as every difference must.
    The mean over the prompts' positions must be at most `mean_bound`.
    """
    found = Comparison()
    for index, (got, want) in enumerate(zip(answers, oracle, strict=True)):
        _compare_one(f"prompt {index}", got, want, bound, found)
    for name, error in (("prompt", found.prompt_error), ("sampled", found.token_error)):
        if not error <= bound:  # NaN is wrong too
            found.wrong.append(f"{name} log-probabilities differ by {error:.3g}, bound {bound:.3g}")
    if not found.prompt_mean <= mean_bound:
        found.wrong.append(
            f"prompt log-probabilities differ by {found.prompt_mean:.3g} in the mean, "
            f"bound {mean_bound:.3g}"
        )
    return found


def _compare_one(name: str, got: Answer, want: Answer, bound: float, found: Comparison) -> None:
    found.num_answers += 1
    if got.prompt and want.prompt:
        if len(got.prompt) != len(want.prompt):
            found.wrong.append(f"{name}: {len(got.prompt)} of {len(want.prompt)} positions")
        errors = _differences(got.prompt, want.prompt)
        found.prompt_error = _larger(found.prompt_error, errors)
        found.prompt_sum += sum(errors)
        found.num_positions += len(errors)
    at = first_difference(got.tokens, want.tokens)
    same = len(want.tokens) if at is None else at
    found.num_tokens += same
    own, theirs = (
        [top[token] for token, top in zip(item.tokens[:same], item.top, strict=False)]
        for item in (got, want)
    )
    found.token_error = _larger(found.token_error, _differences(own, theirs))
    if at is None:
        found.num_equal += 1
        return
    if at >= min(len(got.tokens), len(want.tokens)):
        found.wrong.append(f"{name}: {len(got.tokens)} tokens instead of {len(want.tokens)}")
        return
    gap = _gap(want.top[at], got.tokens[at], want.tokens[at])
    if gap <= bound:
        found.near_ties.append(gap)
    else:
        found.wrong.append(
            f"{name}: token {at} is {got.tokens[at]} instead of {want.tokens[at]}, "
            f"{gap:.3g} apart, bound {bound:.3g}"
        )


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """The first position at which tokens differ, or that only one has; None: they are equal."""
    pairs = enumerate(zip_longest(got, want))
    return next((at for at, (token, expected) in pairs if token != expected), None)


def _gap(top: dict[int, float], token: int, expected: int) -> float:
    """How much more probable `expected` is, by the oracle; infinite if `token` is not listed."""
    return top[expected] - top.get(token, float("-inf"))


def _differences(got: Sequence[float], want: Sequence[float]) -> list[float]:
    return [abs(item - other) for item, other in zip(got, want, strict=False)]


def _larger(largest: float, differences: Sequence[float]) -> float:
    for difference in differences:
        if not difference <= largest:  # NaN is taken, and stays
            largest = difference
    return largest


def rounded(number: float) -> float:
    """Four digits."""
    return float(f"{number:.4g}")
