"""The command that compares answers by bits: it sees every kind of difference."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benches.engine import same_bits
from benches.engine.same_bits import Answer, Comparison, compare, lines, requests

ANSWER = Answer([5, 6], [(5, 1), (6, 2)], [-0.25, -1.5, -1.75])
NEXT = -0.25000003
"""The next number in float32."""


def test_equal_answers() -> None:
    comparison = compare("a way", [ANSWER, ANSWER], [ANSWER, replace(ANSWER)])
    assert (comparison.answers, comparison.tokens, comparison.logprobs, comparison.largest) == (
        2,
        0,
        0,
        0.0,
    )
    assert comparison.is_same


@pytest.mark.parametrize(
    ("changed", "counts", "largest"),
    [
        ({"tokens": [5, 7]}, (1, 0), 0.0),
        ({"tokens": [5]}, (1, 0), 0.0),
        ({"numbers": [NEXT, -1.5, -1.75]}, (0, 1), 3e-8),
        ({"numbers": [-0.25, float("nan"), -1.75]}, (0, 1), 0.0),
        ({"places": [(5, 1), (6, 3)]}, (0, 1), 0.0),
        ({"places": [(5, 1)], "numbers": [-0.25, -0.25]}, (0, 1), 0.0),
    ],
)
def test_every_difference_is_seen(
    changed: dict[str, Any], counts: tuple[int, int], largest: float
) -> None:
    comparison = compare("a way", [ANSWER, replace(ANSWER, **changed)], [ANSWER, ANSWER])
    assert (comparison.tokens, comparison.logprobs) == counts and not comparison.is_same
    assert comparison.largest == pytest.approx(largest, rel=0.1)


def test_a_way_that_was_not_taken_is_no_proof() -> None:
    comparison = Comparison("preempted", 9, 0, 0, 0.0, 1.0, "0 preemptions")
    assert not comparison.is_same and replace(comparison, counted="3 preemptions").is_same


def test_requests_are_the_same_each_time_and_of_many_kinds() -> None:
    first, again = requests(200), requests(200)
    assert first == again
    lengths = {len(prompt) for prompt in first.prompts}
    assert min(lengths) < 5 and max(lengths) > same_bits.SHARED
    assert max(lengths) + same_bits.MAX_TOKENS <= same_bits.LONGEST
    beginnings = [tuple(prompt[:33]) for prompt in first.prompts if len(prompt) > 33]
    assert len(set(beginnings)) < len(beginnings) - 5
    kinds = {(params.temperature > 0, params.prompt_logprobs) for params in first.params}
    assert len(kinds) == 6 and len({params.seed for params in first.params}) == 200


@pytest.mark.parametrize(("logprobs", "status"), [(0, 0), (1, 1)])
def test_the_command(
    logprobs: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_ways(*_: Any) -> Iterator[tuple[Comparison, list[Answer]]]:
        yield Comparison("alone", 1, 0, 0, 0.0, 1.0), [ANSWER]
        yield Comparison("batched", 1, 0, logprobs, 3e-8 * logprobs, 1.0), [ANSWER]

    monkeypatch.setattr(same_bits, "run_ways", run_ways)
    file = tmp_path / "answers.json"
    monkeypatch.setattr(sys, "argv", ["same_bits", "--prompts", "1", "--write", str(file)])
    assert same_bits.main() == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| batched | 1 | 0 | {logprobs} |")
    text = file.read_text()
    for content, expected in ((text, status), (text.replace("-1.5", "-1.25"), 1)):
        file.write_text(content)
        monkeypatch.setattr(sys, "argv", ["same_bits", "--against", str(file)])
        assert same_bits.main() == expected


def test_its_table() -> None:
    rows = list(lines({"cpu": "one"}, iter([Comparison("a way", 1000, 2, 3, 3.8e-6, 7.2, "")])))
    assert rows[-1] == "| a way | 1,000 | 2 | 3 | 3.8e-06 | 7 |  |"
