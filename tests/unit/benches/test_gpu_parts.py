"""The parts of the first hour: a line for each step, whatever becomes of it."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benches.gpu.part_right import ended
from benches.gpu.part_runs import long_prompt
from benches.gpu.parts import PARTS, Report, run
from benches.gpu.steps import Found, NotHere, Step, Target


def fine(_target: Target, number: int) -> Found:
    return {"number": number, "table": "| a |\n| 1 |"}


def not_here(_target: Target) -> Found:
    raise NotHere("there is none")


def wrong(_target: Target) -> Found:
    raise AssertionError("3 is not 4")


def gone(_target: Target) -> Found:
    os._exit(3)


def hangs(_target: Target) -> Found:
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
    run(steps, Target("cpu", str(tmp_path)), report, minutes=5)
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


def commands(target: Target, seconds: float) -> Found:
    """A command without end, which is given so many seconds; its number is in a file."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    status, _ = ended([sys.executable, "-c", code, f"{target.folder}/pid"], seconds)
    return {"status": status}


def lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("seconds", "limit", "words"),
    [(2, 30, "done  commands: status None"), (60, 4, "ended by force")],
)
def test_a_command_ends_with_its_step(
    tmp_path: Path, seconds: float, limit: int, words: str
) -> None:
    """By itself where there was time to say what it has found, and else with its process."""
    report = Report(tmp_path / "page.md", "A part")
    step = Step("commands", commands, (seconds,), limit)
    run([step], Target("cpu", str(tmp_path)), report, minutes=5)
    report.end("Through")
    assert words in (tmp_path / "page.md").read_text()
    assert not lives(int((tmp_path / "pid").read_text()))


@pytest.mark.gpu
@pytest.mark.slow
def test_who_is_cut_off_has_a_report(tmp_path: Path) -> None:
    """A part as it is called, ended from outside in the middle of a step."""
    command = [sys.executable, "-m", "benches.gpu.parts", "right", "--device", "cpu"]
    command += ["--out", str(tmp_path), "--only", "checks: gather"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    checks = tmp_path / "checks-gather.md"
    while not checks.exists():  # its checks run
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    page = (tmp_path / "right.md").read_text()
    assert "failed  checks: gather: because cut off" in page
    assert "Cut off after" in page
    before = checks.read_text()
    time.sleep(1)
    assert checks.read_text() == before  # no process goes on


@pytest.mark.gpu
@pytest.mark.slow
def test_the_long_prompt_fits_into_the_pool_of_a_dry_run(tmp_path: Path) -> None:
    assert long_prompt(Target("cpu", str(tmp_path))) == {"prompt": 700, "equal": 3}


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    report = Report(tmp_path / "page.md", "A part")
    run([Step("late", wrong)], Target("cpu", str(tmp_path)), report, minutes=0)
    report.end("Through")
    assert "not run  late: because out of time" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_steps_that_fit_into_its_time(part: str) -> None:
    steps = importlib.import_module(f"benches.gpu.part_{part}").STEPS
    assert steps
    assert all(step.seconds <= 240 for step in steps)
