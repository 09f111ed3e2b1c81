"""The page of a recording in headless Chromium."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine.server.dashboard.trace_page import Recording, TraceServer
from tests.support.browser import CHROMIUM, browser, errors_of
from tests.unit.server.dashboard.test_trace_page import record

pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
NAMES = ("free", "evictable", "active", "pinned", "loading")
AT = "at => Number(document.getElementById('number').value) === at && wanted === null"
CELLS = f"() => [...blocks.state].map(state => {list(NAMES)}[state])"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[TraceServer, list[list[str]]]]:
    states = record(tmp_path / "a.kvtrace")
    with TraceServer(Recording(tmp_path / "a.kvtrace")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server, states
        server.shutdown()
        thread.join(10)


def test_it_goes_forwards_and_back_and_follows_a_block(
    served: tuple[TraceServer, list[list[str]]],
) -> None:
    server, states = served
    with browser() as chromium:
        page: Any = chromium.new_page(viewport={"width": 1400, "height": 1400})
        errors = errors_of(page)
        page.goto(server.url)
        page.wait_for_function(AT, arg=0)
        page.wait_for_function("() => frame !== null")
        assert page.locator("#back").is_disabled()
        for at, expected in enumerate(states, start=1):
            page.locator("#forward").click()
            page.wait_for_function(AT, arg=at)
            assert page.evaluate(CELLS) == expected
        assert page.locator("#forward").is_disabled()
        for at in range(len(states) - 1, 0, -1):
            page.keyboard.press("ArrowLeft")
            page.wait_for_function(AT, arg=at)
            assert page.evaluate(CELLS) == states[at - 1]
        page.locator("#number").fill("9")
        page.locator("#number").press("Enter")
        page.wait_for_function(AT, arg=9)
        assert page.locator("#call").inner_text().startswith("9 commit(")
        assert "from block 1 to 0" in page.locator("#answer").inner_text()
        page.locator("#blocks").click(position={"x": 5, "y": 5})
        page.wait_for_selector("#life tbody tr")
        assert page.locator("#life tbody tr").first.inner_text().split()[:2] == ["4", "active"]
        assert page.locator("#life tr[aria-current=true]").inner_text().split()[0] == "9"
        assert page.locator("#life-title").inner_text() == "Life of block 0"
        page.locator("#life tbody tr").nth(4).locator("button").click()
        page.wait_for_function(AT, arg=12)
        assert page.locator("#life tr[aria-current=true]").inner_text().split()[1] == "pinned"
        page.locator("#operations tbody tr").first.locator("button").click()
        page.wait_for_function(AT, arg=1)
        assert errors == []
        page.close()
