"""The stream of /kv: no work without viewers, and shared work for many."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from time import monotonic
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pyengine.async_engine import AsyncEngine
from pyengine.engine import offloading
from pyengine.kv_cache import KVStore
from pyengine.sampling_params import SamplingParams
from pyengine.server.dashboard import page as page_module
from pyengine.server.dashboard.page import EngineBroadcaster, page_router
from pyengine.server.errors import handle_errors
from tests.support.callers import FakeModel
from tests.support.serving import error_of
from tests.unit.engine.test_offloading import with_store

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)


async def next_frame(stream: AsyncIterator[str]) -> dict[str, Any]:
    async for event in stream:
        if event.startswith("event: pool\ndata: "):
            assert event.endswith("\n\n") and event.count("\n") == 3
            frame: dict[str, Any] = json.loads(event.split("data: ")[1])
            return frame
    raise AssertionError("the stream has ended")


async def exhausted(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


async def test_nothing_is_computed_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        await exhausted(engine.generate([3, 4, 5], LONG))
        assert broadcaster.num_polls == 0
        stream = broadcaster.stream()
        frame = await next_frame(stream)
        assert frame["usage"]["evictable"] > 0
        assert frame["about"]["model"] == "tiny"
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(2 * page_module.FRAME_SECONDS)
        polls = broadcaster.num_polls
        await asyncio.sleep(3 * page_module.FRAME_SECONDS)
        assert broadcaster.num_polls == polls


async def test_several_share_a_look_and_there_are_four_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=16)
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        busy = [asyncio.create_task(exhausted(engine.generate([3, at], LONG))) for at in range(16)]
        streams = [broadcaster.stream() for _ in range(5)]
        start = monotonic()
        for _ in range(4):
            frames = [await next_frame(stream) for stream in streams]
            assert len({frame["time"] for frame in frames}) <= 2
            await exhausted_if_done(busy, engine)
        span = monotonic() - start
        assert broadcaster.num_polls <= 2 + span / page_module.FRAME_SECONDS
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.gather(*busy)


async def exhausted_if_done(busy: list[asyncio.Task[None]], engine: AsyncEngine) -> None:
    """Keep the engine at work, so that there is something new."""
    if all(task.done() for task in busy):
        busy.append(asyncio.create_task(exhausted(engine.generate([9, len(busy) % 90], LONG))))


async def test_a_stream_without_news_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "HEARTBEAT_SECONDS", 0.3)
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        stream = EngineBroadcaster(engine, model_name="tiny").stream()
        events = [await anext(stream) for _ in range(4)]
        assert events[0].startswith("retry:") and events[1].startswith("event: pool")
        assert events[2] == events[3] == ": nothing new\n\n"
        await stream.aclose()  # type: ignore[attr-defined]


async def test_who_comes_later_gets_a_frame_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        first = broadcaster.stream()
        await next_frame(first)
        start = monotonic()
        second = broadcaster.stream()
        await next_frame(second)
        assert monotonic() - start < 0.2
        for stream in (first, second):
            await stream.aclose()  # type: ignore[attr-defined]


async def test_a_server_that_stops_ends_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        stream = broadcaster.stream()
        await next_frame(stream)
        rest = asyncio.create_task(exhausted(stream))
        await asyncio.sleep(0.05)
        await broadcaster.close()
        await asyncio.wait_for(rest, 1)


async def test_a_look_that_fails_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        monkeypatch.setattr(broadcaster, "_frames", None)
        with pytest.raises(AttributeError):
            await next_frame(broadcaster.stream())


async def test_frames_name_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame has every field that the page reads, here for a store on disk."""
    monkeypatch.setattr(offloading, "_SHORT", 8)
    model = FakeModel(monkeypatch)
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    offloader = with_store(model.bench, store)
    model._built.description.update({"kv_cache_tier": "disk", **offloader.describe()})
    async with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        await exhausted(engine.generate([*range(3, 23)], LONG))
        assert offloader.flush(10)
        stream = broadcaster.stream()
        frame = await next_frame(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    about, used = frame["about"], names_in_page()
    assert (about["store_tier"], about["store_bytes"]) == ("disk", 64 << 20)
    assert used["store"] >= {"hits", "hit_bytes", "stored", "stored_bytes", "evicted", "loads"}
    assert used["store"] <= frame["store"].keys()
    assert used["about"] <= about.keys()
    assert used["counters"] <= frame["counters"].keys()
    assert frame["store"]["stored"] > 0 < frame["store"]["stored_bytes"]


def names_in_page() -> dict[str, set[str]]:
    """Fields of frames that the page reads."""
    html = files("pyengine.server.dashboard").joinpath("kv.html").read_text(encoding="utf-8")
    names = ("store", "about", "counters")
    fields = {name: set(re.findall(rf"\b{name}\.(\w+)", html)) for name in names}
    assert all(fields.values())
    return fields


def test_the_page_is_there_without_data_and_guards_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(monkeypatch)
    with model.async_engine() as engine:
        broadcaster = EngineBroadcaster(engine, model_name="tiny")
        app = FastAPI()
        app.include_router(page_router(lambda _: broadcaster))
        handle_errors(app)
        client = TestClient(app)
        answer = client.get("/kv")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
        assert broadcaster.num_polls == 0
        monkeypatch.setattr(page_module, "MAX_VIEWERS", 0)
        assert error_of(client.get("/kv/stream"), 503)["code"] == "too_many_pages"
