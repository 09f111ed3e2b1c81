"""docs/explanation/one-call.md: its functions are those that a call enters, in that order."""

import re
import sys

import pytest

from pyengine.cpu import CpuAttention
from tests.support.docs import ROOT, table
from tests.support.processes import run_program

PAGE = "docs/explanation/one-call.md"
NUMBERS = re.compile(r"(\d+) functions of (\d+) classes in (\d+) files")


def numbers(text: str) -> list[int]:
    """Functions, classes and files of the first such sentence."""
    match = NUMBERS.search(text)
    assert match is not None
    return [int(number) for number in match.groups()]


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="other functions without the CPU kernels")
def test_a_call_enters_the_functions_of_the_page_in_its_order() -> None:
    done = run_program([sys.executable, "tools/call_walk.py", "--list"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("pyengine/")]
    entered = [line.split(": ")[1] for line in lines]
    named = [row[1] for row in table(PAGE, "stage", "function")]
    assert len(named) >= 30
    assert [name for name in named if name not in entered] == []
    assert named == sorted(named, key=entered.index)
    found, stated = numbers(done.stdout), numbers((ROOT / PAGE).read_text(encoding="utf-8"))
    assert all(number <= most for number, most in zip(found, stated, strict=True)), done.stdout
