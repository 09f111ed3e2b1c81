"""`make help` and `make help-all`: six targets, all targets, with the time of each."""

import re

from tests.support.docs import ROOT
from tests.support.processes import run_program

TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
SHOWN = re.compile(r"^  make (?P<target>[a-z0-9-]+) +(?P<time>\d+ (?:s|min)|minutes|hours)  \S")


def targets(command: str) -> list[str]:
    """The targets that a command shows, each with its time."""
    done = run_program(["make", "--silent", command])
    lines = [line for line in done.stdout.splitlines() if line.startswith("  make ")]
    shown = [SHOWN.match(line) for line in lines if "make help-all has" not in line]
    assert all(shown), lines
    return [match["target"] for match in shown if match]


def test_help_shows_six_targets() -> None:
    assert targets("help") == ["hello", "serve", "quick", "test", "check", "docs"]


def test_all_targets_are_shown_under_headings() -> None:
    described = re.findall(r"^([a-z0-9-]+):.*## ", TEXT, re.MULTILINE)
    assert targets("help-all") == described
    assert len(re.findall(r"^##@ ", TEXT, re.MULTILINE)) == 5


def test_no_target_is_taken_for_a_file() -> None:
    phony = {name for line in re.findall(r"^\.PHONY: (.*)", TEXT, re.M) for name in line.split()}
    assert set(re.findall(r"^([a-z0-9-]+):(?!=)", TEXT, re.MULTILINE)) == phony
