"""The parts of the first hour: a line for each step, whatever becomes of it."""

import importlib
import os
import time
from pathlib import Path

import pytest

from benches.gpu.parts import PARTS, Report, run
from benches.gpu.steps import Found, NotHere, Spot, Step


def fine(_spot: Spot, number: int) -> Found:
    return {"number": number, "table": "| a |\n| 1 |"}


def not_here(_spot: Spot) -> Found:
    raise NotHere("there is none")


def wrong(_spot: Spot) -> Found:
    raise AssertionError("3 is not 4")


def gone(_spot: Spot) -> Found:
    os._exit(3)


def hangs(_spot: Spot) -> Found:
    time.sleep(60)
    return {}


def test_every_step_has_its_line(tmp_path: Path) -> None:
    steps = [
        Step("fine", fine, (7,), 30),
        Step("not here", not_here, seconds=30),
        Step("wrong", wrong, seconds=30),
        Step("gone", gone, seconds=30),
        Step("hangs", hangs, seconds=1),
        Step("fine again", fine, (8,), 30, beside="pair"),
        Step("and beside it", fine, (9,), 30, beside="pair"),
    ]
    report = Report(tmp_path / "page.md", "A part")
    run(steps, Spot("cpu", str(tmp_path)), report, minutes=5)
    report.end("Through")
    page = (tmp_path / "page.md").read_text()
    for words in (
        "done  fine: number 7, took",
        "| a |\n| 1 |",
        "not here  not here: because there is none",
        "AssertionError: 3 is not 4",
        "ended with status 3",
        "ended by force: not done after 1 s",
        "done  fine again: number 8",
        "done  and beside it: number 9",
        "; 3 failed.",
    ):
        assert words in page


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    report = Report(tmp_path / "page.md", "A part")
    run([Step("late", wrong)], Spot("cpu", str(tmp_path)), report, minutes=0)
    report.end("Through")
    assert "not run  late: because out of time" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_steps_that_fit_into_its_time(part: str) -> None:
    steps = importlib.import_module(f"benches.gpu.part_{part}").STEPS
    assert steps
    assert all(step.seconds <= 240 for step in steps)
