"""The simulated device sees wrong KV, and the page lists all cases."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bug_zoo.bugs import BUGS
from tests.bug_zoo.simulation import Pool
from tests.support.docs import ROOT

ROW = re.compile(r"^\|.*\| `(test_\w+)` \|$", re.MULTILINE)
LINK = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([^)]+)\)")


def test_wrong_kv_is_seen(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(1, 2, 3, 4, 5)
    pool.compute(request)
    step = pool.begin()
    step.decode(request)
    pool.slots[request.table[0] * 4 + 2] = b"", (1, 2, 9)
    with pytest.raises(AssertionError, match="position 2 of"):
        step.commit(6)
    step.rollback()


def test_the_page_has_a_row_for_each_case() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.bug_zoo.{file.stem}")
    page = (ROOT / "docs/explanation/bug-zoo.md").read_text(encoding="utf-8")
    rows = {}
    for row in ROW.finditer(page):
        links = LINK.findall(row[0])
        for repository, number, path in links:
            assert path in (f"{repository}/issues/{number}", f"{repository}/pull/{number}")
        rows[row[1]] = tuple(path for _, _, path in links)
    assert rows == BUGS
    assert len(rows) >= 12
