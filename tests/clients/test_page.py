"""The page in headless Chromium: what it shows is what the engine has, and it stays usable."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.cluster.observers import ClusterObservers
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.engine import offloading
from pyengine.engine.stats import EngineView
from pyengine.sampling_params import SamplingParams
from pyengine.server.app import create_app
from pyengine.server.settings import ServerSettings
from tests.support.browser import CHROMIUM, Served, browser, errors_of
from tests.support.callers import FakeModel
from tests.support.replicas import LocalReplicas, read, small_replica
from tests.support.serving import open_small_engine, save_small_model

Error = pytest.importorskip("playwright.sync_api").Error

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
STATES = ("free", "evictable", "active", "pinned", "loading")
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
FIRST_REQUEST = """id =>
    document.querySelector("#requests tr[aria-rowindex='2'] td")?.innerText === id"""
SHOWN = """() => ({
    frame: document.documentElement.dataset.frame,
    states: Object.fromEntries([...document.querySelectorAll("[data-state]")].map(
        item => [item.dataset.state, Number(item.textContent.replaceAll(",", ""))])),
    cells: ["free", "evictable", "active", "pinned", "loading"].map(
        (_, at) => blocks?.state.reduce((sum, one) => sum + (one === at), 0)),
    running: Number(document.getElementById("running").textContent.replaceAll(",", "")),
})"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


class ServedPage:
    """An engine behind a server, with a note of every look that was taken of it."""

    def __init__(self, engine: AsyncEngine, **settings: Any) -> None:
        self.engine = engine
        self.seen: dict[str, EngineView] = {}
        self.broadcaster, app = serve_page(engine, **settings)
        make = self.broadcaster._frames.frame

        def frame(view: EngineView) -> str:
            text: str = make(view)
            self.seen[text.split(":", 1)[1].split(",", 1)[0]] = view
            return text

        self.broadcaster._frames.frame = frame
        self.served = Served(app)

    def __enter__(self) -> "ServedPage":
        self.served.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.served.submit(self.broadcaster.close()).result()
        self.served.__exit__(*exc_info)


def serve_page(engine: AsyncEngine, **settings: Any) -> Any:
    from fastapi import FastAPI

    from pyengine.server.dashboard.page import EngineBroadcaster, page_router

    broadcaster, app = EngineBroadcaster(engine, model_name="tiny", **settings), FastAPI()
    app.include_router(page_router(lambda _: broadcaster))
    return broadcaster, app


async def exhausted(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


async def load(engine: AsyncEngine, count: int, params: SamplingParams) -> None:
    """So many requests at once; each third has its own namespace, all share a beginning."""
    common = "You are a helpful assistant. Answer in one short sentence and say nothing else. " * 2
    await asyncio.gather(
        *(
            exhausted(
                engine.generate(
                    f"{common} Question {at % 7}: what comes after {at}?",
                    params,
                    f"request {at}",
                    cache_salt=f"salt {at % 3}" if at % 3 else None,
                )
            )
            for at in range(count)
        )
    )


@pytest.mark.slow
def test_the_counts_on_it_are_those_of_the_pool(chromium: Any) -> None:
    with (
        AsyncEngine(num_blocks=900, max_num_seqs=24, seed=0) as engine,
        ServedPage(engine) as page_server,
    ):
        page = chromium.new_page()
        errors = errors_of(page)
        page.goto(f"{page_server.served.url}/kv")
        work = page_server.served.submit(load(engine, 120, LONG))
        frames, running = set(), 0
        while not work.done():
            page.wait_for_timeout(200)
            shown = page.evaluate(SHOWN)
            if shown["frame"] is None:
                continue
            frames.add(shown["frame"])
            view = page_server.seen[shown["frame"]]
            usage = {name: getattr(view.stats.usage, name) for name in STATES}
            assert shown["states"] == usage
            assert shown["cells"] == [usage[name] for name in STATES]
            assert sum(usage.values()) == 900
            assert shown["running"] == view.stats.num_running
            running = max(running, view.stats.num_running)
        work.result()
        assert len(frames) > 5 and running > 8
        page.wait_for_function(
            f"() => Number(document.querySelector('[data-state=active]').textContent) === 0"
            f" && {engine.stats().usage.evictable} === "
            "Number(document.querySelector('[data-state=evictable]')"
            ".textContent.replaceAll(',', ''))"
        )
        assert errors == []
        page.close()


def test_it_stays_usable_with_1000_requests_and_100000_blocks(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(monkeypatch, num_blocks=100_000, max_num_seqs=256, max_model_len=4000)
    forever = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3900)

    async def crowd(engine: AsyncEngine) -> None:
        prompts = [[3, 4, 5, 6, 7, 8, at % 90, at // 90] for at in range(1000)]
        await asyncio.gather(*(exhausted(engine.generate(prompt, forever)) for prompt in prompts))

    with model.async_engine() as engine, ServedPage(engine) as page_server:
        work = page_server.served.submit(crowd(engine))
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        errors = errors_of(page)
        page.goto(f"{page_server.served.url}/kv")
        page.wait_for_function("() => frame && frame.requests.length === 1000")
        times = page.evaluate(
            """async () => {
                const times = [], plain = take;
                take = async next => {
                    const start = performance.now();
                    await plain(next);
                    times.push(performance.now() - start);
                };
                while (times.length < 8) await new Promise(done => setTimeout(done, 50));
                take = plain;
                return times;
            }"""
        )
        assert sorted(times)[len(times) // 2] < 200, times  # milliseconds, of 250
        page.locator("#scroll").evaluate("it => it.scrollTo(0, it.scrollHeight)")
        page.wait_for_selector("#requests tr[aria-rowindex='1001']")
        assert page.locator("#requests tbody tr").count() < 60
        for name in ("sharing", "age", "space"):
            page.locator(f"#colour input[value={name}]").check(force=True)
        page.locator("#order input[value=prefix]").check(force=True)
        page.locator("#tree button").first.hover()
        page.locator("#blocks").hover()
        assert page.locator("#tip b").inner_text().startswith("Block ")
        assert errors == []
        page.close()
        work.cancel()


def test_keys_and_tables_say_what_the_pictures_show(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(monkeypatch, num_blocks=200)
    with model.async_engine() as engine, ServedPage(engine) as page_server:
        page_server.served.submit(exhausted(engine.generate([*range(3, 15)], LONG))).result()
        page = chromium.new_page(color_scheme="dark", reduced_motion="reduce")
        errors = errors_of(page)
        page.goto(f"{page_server.served.url}/kv")
        page.wait_for_function("() => frame !== null")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.locator("#blocks").focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert (
            page.locator("#said").inner_text().startswith("Block 1: state evictable, sequences on")
        )
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        page.locator("summary").click()
        usage = engine.stats().usage
        rows = page.locator("#table-states tbody tr").all_inner_texts()
        assert [row.split() for row in rows] == [
            [name, str(getattr(usage, name))] for name in STATES
        ]
        assert f"{usage.evictable} evictable" in (
            page.locator("#blocks").get_attribute("aria-label") or ""
        )
        polls = page_server.broadcaster.num_polls
        page.locator("#pause").click()
        page.wait_for_timeout(800)
        polls = page_server.broadcaster.num_polls
        page.wait_for_timeout(800)
        assert page_server.broadcaster.num_polls == polls
        assert errors == []
        page.close()


def test_the_tiers_are_those_of_the_store(
    chromium: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)
    settings: dict[str, Any] = {"kv_cache_dir": tmp_path / "kv", "kv_cache_disk": 1 << 30}
    with (
        open_small_engine(save_small_model(tmp_path / "model"), **settings) as engine,
        ServedPage(engine) as page_server,
    ):
        page_server.served.submit(exhausted(engine.generate([*range(3, 83)], LONG))).result()
        offloader = engine._offloader
        assert offloader is not None and offloader.flush(10)
        page = chromium.new_page()
        errors = errors_of(page)
        page.goto(f"{page_server.served.url}/kv")
        page.wait_for_function("() => frame !== null")
        pool, disk = page.locator("#tiers tbody tr").all_inner_texts()
        assert pool.split()[0] == "Pool" and disk.startswith("Disk\tat most 1.0 GiB\t0 (0 B)")
        stored = int(engine.stats().store["stored"])
        assert stored >= 5 and f"\t{stored} (" in disk
        assert page.locator("#loads").inner_text() == "0 tokens restored in 0 loads, 0 loads failed"
        assert errors == []
        page.close()


def test_a_click_on_a_request_shows_where_it_left_the_cached_prefix(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(monkeypatch, num_blocks=4000, max_model_len=4000, explain=True)
    forever = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3900)
    common = [*range(3, 15)]

    async def both(engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(exhausted(engine.generate([*common, 40], forever, "first")))
        while engine.stats().counters["committed_steps"] < 5:
            await asyncio.sleep(0.01)
        await exhausted(engine.generate([*common[:9], 90, 91, 92, 93], forever, "leaves"))
        await first

    with model.async_engine() as engine, ServedPage(engine) as page_server:
        work = page_server.served.submit(both(engine))
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        errors = errors_of(page)
        page.goto(f"{page_server.served.url}/kv")
        page.wait_for_function("() => frame && frame.requests.some(row => row[10]?.[2])")
        for name, words in (
            ("leaves", "leaves: left the cached prefix at token 8: the nearest cached prompt"),
            ("first", "first: left the cached prefix at token 0: no cached prompt"),
        ):
            page.locator("#requests td:first-child", has_text=name).click()
            assert page.locator("#why").inner_text().startswith(words)
            assert page.locator("#tree button[aria-pressed=true]").count() == (name == "leaves")
        page.locator("#requests td:first-child", has_text="first").click()
        assert page.locator("#why").inner_text().startswith("Click a request")
        assert errors == []
        work.cancel()
        page.close()


def test_it_takes_the_key_that_the_browser_asks_for_and_believes_no_id(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_small_model(tmp_path_factory.mktemp("served"), max_position_embeddings=4096)
    nasty = "<img src=x onerror=alert(1)>"
    with open_small_engine(folder) as engine:
        app = create_app(engine, ServerSettings(api_key=("secret",), log_format="none"))
        with Served(app) as served:
            with (
                closing(chromium.new_context()) as context,
                pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"),
            ):
                context.new_page().goto(f"{served.url}/kv")  # there is no password prompt
            wrong = {"username": "", "password": "wrong"}
            with closing(chromium.new_context(http_credentials=wrong)) as context:
                answer = context.new_page().goto(f"{served.url}/kv")
                assert answer is not None and answer.status == 401
            context = chromium.new_context(http_credentials={"username": "", "password": "secret"})
            page = context.new_page()
            errors = errors_of(page)
            page.goto(f"{served.url}/kv")
            page.wait_for_function("() => frame !== null")
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000)
            work = served.submit(exhausted(engine.generate("once", params, nasty)))
            page.wait_for_function(FIRST_REQUEST, arg=nasty)
            assert page.locator("#requests img").count() == 0
            work.cancel()
            assert errors == []
            page.goto(f"{served.url}/kv".replace("://", "://:secret@"))
            page.wait_for_function("() => frame !== null")
            assert errors == []
            served.submit(app.state.observers.close()).result()
            context.close()


def test_replicas_stand_side_by_side(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A line for each, the pool of one below; its name leads to another; one that goes, goes."""
    folder = save_small_model(tmp_path_factory.mktemp("replicas"))
    names = ("a", "b")
    replicas = [small_replica(name, folder) for name in names]
    local = LocalReplicas(*replicas)
    engine = RemoteEngine(local, replicas[0].about())
    app = create_app(engine, ServerSettings(log_format="none"), ClusterObservers)
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4)
    with Served(app) as served:
        served.submit(local.__aenter__()).result()
        for number in range(8):
            prompt = [*([5 + number % 2] * 160), number]
            served.submit(read(engine, prompt, greedy)).result()
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        errors = errors_of(page)
        page.goto(f"{served.url}/kv")
        page.wait_for_selector("#replicas tbody tr:nth-child(2)")
        lines = page.locator("#replicas tbody tr")
        assert [line.split()[0] for line in lines.all_inner_texts()] == [*names]
        for at, replica in enumerate(replicas):
            current = page.locator("#replicas tbody tr[aria-current=true]")
            assert current.inner_text().split()[0] == names[at]
            held = f"{replica.engine.stats().usage.evictable}"
            page.wait_for_function(
                f"() => document.querySelector('[data-state=evictable]').textContent === '{held}'"
            )
            page.locator("#replicas tbody tr:nth-child(2) a").click()
            page.wait_for_function("() => frame && frame.replica === 'b'")
        served.submit(_lose(local, "a")).result()
        page.wait_for_function(
            "() => document.querySelectorAll('#replicas tbody tr').length === 1", timeout=10_000
        )
        assert errors == []
        page.close()
        served.submit(app.state.observers.close()).result()
        served.submit(local.__aexit__()).result()
    for each in replicas:
        each.close()


async def _lose(local: LocalReplicas, name: str) -> None:
    local.lose(name)
