"""The server over several replicas of this process: the same answers, one cache to the eye."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest

from pyengine.cluster.fleet import Fleet
from pyengine.cluster.observers import ClusterObservers
from pyengine.cluster.remote_engine import RemoteEngine
from pyengine.cluster.replica import Replica
from pyengine.engine import offloading
from pyengine.errors import EngineClosedError, InvalidRequestError, NoReplicaError, ReplicaLostError
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server.app import create_app
from pyengine.server.settings import ServerSettings
from tests.support.replicas import LocalReplicas, read, small_replica
from tests.support.serving import Client, events_of, open_small_engine

GREEDY = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
STREAMED = SamplingParams(
    temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
FAMILIES = [[family + 5] * 256 for family in range(4)]


@pytest.fixture
def two(small_model: Path) -> Iterator[tuple[Replica, Replica]]:
    both = small_replica("a", small_model), small_replica("b", small_model)
    yield both
    for replica in both:
        replica.close()


@asynccontextmanager
async def over(
    replicas: tuple[Replica, ...],
) -> AsyncIterator[tuple[LocalReplicas, RemoteEngine, httpx2.AsyncClient]]:
    """A server of these replicas: it, its engine and a client."""
    async with LocalReplicas(*replicas) as local:
        engine = RemoteEngine(local, replicas[0].about())
        async with Client(create_app(engine, ServerSettings(), ClusterObservers)).open() as client:
            yield local, engine, client


async def until_followed(local: LocalReplicas, replicas: tuple[Replica, ...]) -> None:
    """Until the router's picture is what is held: the last events go a longer way than tokens."""
    router = local.fleet.router
    assert router is not None
    async with asyncio.timeout(10):
        for replica in replicas:
            while router.cached_hashes(replica.info.name) != set(replica.engine.cached_hashes()):
                await asyncio.sleep(0.01)


async def test_answers_are_those_of_one_engine_and_families_stay_together(
    two: tuple[Replica, Replica], small_model: Path
) -> None:
    prompts = [[*FAMILIES[n % 4], *range(n, n + 9)] for n in range(40)]
    with open_small_engine(small_model) as one_engine:
        expected = [(await read(one_engine, prompt, GREEDY))[1] for prompt in prompts]

    async with over(two) as (local, engine, _):
        gate = asyncio.Semaphore(6)

        async def answer(prompt: list[int]) -> Any:
            async with gate:
                return await read(engine, prompt, GREEDY)

        done = await asyncio.gather(*map(answer, prompts))
        assert [tokens for _, tokens in done] == expected
        counts = [replica.num_requests for replica in local.there.values()]
        assert sum(counts) == 40 and max(counts) <= 0.65 * 40
        router = local.fleet.router
        assert router is not None
        assert router.stats.real_hits == sum(item.num_cached_tokens for item, _ in done)
        assert router.stats.expected_hits == pytest.approx(router.stats.real_hits, rel=0.2)
        await until_followed(local, two)
        async with asyncio.timeout(10):
            while any(replica.num_requests for replica in router.replicas()):
                await asyncio.sleep(0.01)


async def test_the_routes_are_the_servers(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, engine, client):
        body = {"prompt": [[5, 6, 7], [8]], "max_tokens": 4, "temperature": 0, "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert "choices" in answer, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 16
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        stream = await client.post(
            "/v1/completions",
            json={"prompt": [5], "max_tokens": 6, "stream": True, "ignore_eos": True},
        )
        assert len(events_of(stream.text)) >= 1
        logprobs = {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 1, "echo": True}
        found = (await client.post("/v1/completions", json=logprobs)).json()
        assert len(found["choices"][0]["logprobs"]["tokens"]) == 4
        refused: list[dict[str, Any]] = [
            {"prompt": []},
            {"prompt": [5], "n": 10**6},
            {"prompt": [10**7]},
        ]
        for bad in refused:
            assert (await client.post("/v1/completions", json=bad)).status_code == 400
        for path in ("/health", "/v1/models", "/load", "/version"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/load")).json()["num_running"] == 0
        assert engine.describe()["event_hash_seed"] == 0


async def test_salts_separate(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, _, client):

        async def cached(salt: str | None) -> int:
            body = {"prompt": FAMILIES[0], "max_tokens": 1, "cache_salt": salt}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await cached("one") == 0
        assert await cached("two") == 0
        assert await cached("one") > 200
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert await cached("one") == 0


async def test_what_an_engine_refuses_is_refused_here(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, engine, _):
        salted = {"prompt_token_ids": [5, 6], "cache_salt": "one"}
        for checked in (engine, two[0].engine):
            with pytest.raises(InvalidRequestError, match="cache_salt='two' and another one"):
                checked.request(salted, GREEDY, cache_salt="two")
            assert checked.request(salted, GREEDY, cache_salt="one").namespace == b"one"
            twice = [checked.request([5], GREEDY, "same"), checked.request([6], GREEDY, "same")]
            with pytest.raises(InvalidRequestError, match="'same' is in use"):
                checked.submit(twice)
            stream = checked.submit(twice[:1])
            with pytest.raises(InvalidRequestError, match="'same' is in use"):
                checked.submit(twice[1:])
            stream.close()


async def test_a_lost_replica_before_and_after_the_first_token(
    two: tuple[Replica, Replica],
) -> None:
    async with over(two) as (local, engine, client):
        router = local.fleet.router
        assert router is not None
        streams = [engine.submit([engine.request([n] * 30, STREAMED)]) for n in range(5, 9)]
        readers = [aiter(stream) for stream in streams]
        for stream in readers:
            await anext(stream)  # each has begun
        whole = [asyncio.create_task(read(engine, [n] * 40, GREEDY)) for n in range(20, 24)]
        await asyncio.sleep(0)
        counts = {replica.name: replica.num_requests for replica in router.replicas()}
        assert min(counts.values()) > 0
        local.lose("a")
        done = await asyncio.gather(*whole)
        assert all(item.finished and len(tokens) == 12 for item, tokens in done)

        async def rest(reader: Any) -> str:
            try:
                while True:
                    item = await anext(reader)
                    if item.finished:
                        return "whole"
            except ReplicaLostError:
                return "lost"

        ends = await asyncio.gather(*map(rest, readers))
        assert sorted(set(ends)) == ["lost", "whole"]
        assert (await client.get("/health")).status_code == 200
        local.lose("b")
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": [5]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "no_replica"


@pytest.mark.usefixtures("slow_steps")
async def test_a_request_that_was_lost_in_its_stream_says_so_and_can_be_sent_again(
    small_model: Path,
) -> None:
    replica, other = small_replica("a", small_model), small_replica("a-2", small_model)

    with closing(replica), closing(other):
        async with over((replica,)) as (local, _, client):

            async def stream() -> list[Any]:
                body = {"prompt": [5], "max_tokens": 900, "stream": True, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body)
                return events_of(answer.text)

            asked = asyncio.create_task(stream())
            while not replica.engine.stats().num_new_tokens:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            local.lose("a")
            events = await asked
            assert events[-1]["error"]["code"] == "replica_lost"
            local.come_back(other)
            await local.until_current()
            answer = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
            assert answer.status_code == 200
            assert local.there["a-2"].num_requests == 1


@pytest.mark.usefixtures("slow_steps")
async def test_whoever_stops_reading_ends_what_runs(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (local, engine, client):
        streams = [engine.submit([engine.request([n] * 30, STREAMED)]) for n in range(5, 9)]
        for stream in streams:
            await anext(aiter(stream))
            stream.close()
        async with asyncio.timeout(20):
            while any(replica.engine.stats().num_running for replica in two):
                await asyncio.sleep(0.005)
        body = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "request_id": "mine"}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        while not sum(replica.engine.stats().num_running for replica in two):
            await asyncio.sleep(0.005)
        ended = await client.post("/abort_requests", json={"request_ids": ["mine", "other"]})
        assert ended.json()["aborted"] == ["mine"]
        assert (await asked).json()["choices"][0]["finish_reason"] == "abort"
        async with asyncio.timeout(20):
            while any(replica.engine.stats().usage.active for replica in two):
                await asyncio.sleep(0.01)
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        router = local.fleet.router
        assert router is not None and all(
            replica.num_requests == 0 for replica in router.replicas()
        )


async def test_a_drain_lets_what_runs_end(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, engine, _):
        asked = asyncio.create_task(read(engine, [5] * 20, GREEDY))
        await asyncio.sleep(0)
        assert await engine.drain(20)
        assert (await asked)[0].finished
        with pytest.raises(EngineClosedError):
            engine.submit([engine.request([5], GREEDY)])


async def test_a_drain_that_takes_too_long_aborts(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, engine, _):
        stream = engine.submit([engine.request([5] * 20, STREAMED)])
        reader = aiter(stream)
        await anext(reader)
        assert not await engine.drain(0)
        reasons = [item.outputs[0].finish_reason async for item in reader]
        assert reasons[-1] == "abort"


async def test_a_replica_of_another_kind_gets_no_request(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = small_replica("a", small_model), small_replica("b", small_model, event_hash_seed=9)
    with closing(good), closing(bad):
        async with LocalReplicas(good) as local:
            local.come_back(bad)
            async with asyncio.timeout(20):
                while "b" not in local.fleet.refused:
                    await asyncio.sleep(0.01)
            assert "hash_seed=9" in caplog.text and "hash_seed=0" in caplog.text
            engine = RemoteEngine(local, good.about())
            for n in range(5, 11):
                await read(engine, [n] * 20, GREEDY)
            assert local.there["b"].num_requests == 0


async def test_a_router_that_starts_again_is_right_after_snapshots(
    two: tuple[Replica, Replica],
) -> None:
    async with over(two) as (local, engine, _):
        for number in range(6):
            await read(engine, [*FAMILIES[number % 3], number], GREEDY)
        running = engine.submit([engine.request([7] * 30, STREAMED)])
        reader = aiter(running)
        await anext(reader)
        before = local.fleet.router
        local.fleet.close()
        local.fleet = Fleet()
        local.fleet.update(local.there)
        with pytest.raises(NoReplicaError):  # no replica has joined yet
            await read(engine, [5], GREEDY)
        await local.until_current()
        assert [item async for item in reader][-1].finished
        router = local.fleet.router
        assert router is not None and router is not before
        item, _tokens = await read(engine, [*FAMILIES[0], 99], GREEDY)
        assert item.num_cached_tokens == 256 and router.stats.expected_hits == 256
        await until_followed(local, two)


async def test_a_clock_that_jumps_changes_nothing(
    two: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)
    monkeypatch.setattr("time.time", lambda: random.uniform(-1e12, 1e12))
    monkeypatch.setattr("time.time_ns", lambda: random.randrange(1 << 62))

    async with over(two) as (local, _, client):
        router = local.fleet.router
        assert router is not None
        for number in range(8):
            body = {"prompt": [*FAMILIES[number % 2], number], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert router.stats.real_hits == router.stats.expected_hits == 6 * 256
        assert router.stats.num_gaps == 0
        await until_followed(local, two)


async def test_without_a_replica_nothing_is_taken(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (local, engine, _):
        request = engine.request([5], GREEDY)
        local.lose("a")
        local.lose("b")
        with pytest.raises(NoReplicaError):
            engine.submit([request])


async def test_replicas_on_a_folder_restore_what_one_of_them_computed(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller sees the tokens that were restored, and the router counts them."""
    monkeypatch.setattr(offloading, "_GAIN", 1e6)  # a tiny model computes faster than any disk
    store = {"kv_cache_dir": tmp_path / "kv", "kv_cache_disk": 1 << 30}
    two = small_replica("a", small_model, **store), small_replica("b", small_model, **store)
    first, second = [replica.info.store for replica in two]
    assert first is not None and second is not None
    assert (first.is_writer, second.is_writer) == (True, False)
    assert first.folder == second.folder and first.num_blocks > 1000
    prompt = [7] * 512

    async def ask_b(local: LocalReplicas, engine: RemoteEngine, at: int) -> Any:
        route = local.fleet.route
        with monkeypatch.context() as patched:
            patched.setattr(local.fleet, "route", lambda request, among: route(request, {"b"}))
            return (await read(engine, [*prompt, at], GREEDY))[0]

    with closing(two[0]), closing(two[1]):
        async with over(two) as (local, engine, _):
            item, _ = await read(engine, prompt, GREEDY)
            assert item.num_restored_tokens == 0
            restored, at = 0, 8
            async with asyncio.timeout(60):
                while not restored:  # a reader looks once a second
                    await asyncio.sleep(0.2)
                    restored, at = (await ask_b(local, engine, at)).num_restored_tokens, at + 1
                    two[1].engine._engine_loop._engine._manager.evict_all()
            assert restored >= 496
            router = local.router
            assert router is not None
            choice = router.choose([*prompt, 5], among={"b"})
            assert choice.num_hits + choice.num_restorable >= 31
            assert choice.restore_cost <= 1


async def test_metrics_and_page_of_all(two: tuple[Replica, Replica]) -> None:
    async with over(two) as (_, engine, client):
        for number in range(4):
            await read(engine, [*FAMILIES[number % 2], number], GREEDY)
        text = (await client.get("/metrics")).text
        for name in ("a", "b"):
            assert f'vllm:generation_tokens_total{{engine="{name}"' in text
        assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
        assert 'pyengine:router_routed_total{model_name="' in text
        assert "pyengine:router_real_hit_tokens_total" in text
        for path in ("/kv/stream", "/kv/stream?replica=b"):
            broadcaster = ClusterObservers(
                engine, ServerSettings(), "m", lambda: False
            )._broadcaster("b" if "=b" in path else None)
            stream = broadcaster.stream()
            await anext(stream)
            event = await anext(stream)
            frame = json.loads(event.split("data: ", 1)[1])
            assert frame["replica"] == ("b" if "=b" in path else "a")
            assert [replica["name"] for replica in frame["replicas"]] == ["a", "b"]
            assert sum(replica["sent"] for replica in frame["replicas"]) == 4
            await stream.aclose()  # type: ignore[attr-defined]
        assert (await client.get("/kv")).status_code == 200
        missing = await client.get("/kv/stream", params={"replica": "c"})
        assert missing.status_code == 503 and "'c'" in missing.text


async def test_replicas_explain_and_take_hints(two: tuple[Replica, Replica]) -> None:
    system = "You answer in one word, and you never say why. " * 3
    mark = {"type": "ephemeral", "ttl": "60s"}

    def body(question: str, **more: Any) -> dict[str, Any]:
        part = {"type": "text", "text": system, "cache_control": mark}
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
        return {"messages": messages, "max_tokens": 2, "temperature": 0, **more}

    async with over(two) as (local, _, client):
        path = "/v1/chat/completions"
        first = await client.post(path, json=body("Why is it 14:01?"))
        assert "x-pyengine-ignored" not in first.headers
        await until_followed(local, two)
        asked = body("Why is it 14:02?", explain_cache=True)
        second = (await client.post(path, json=asked)).json()
        [shown] = second["usage"]["prompt_tokens_details"]["cache"]
        kept = (await client.get(f"/v1/requests/{second['id']}/cache")).json()
        pinned = [replica.engine.stats().usage.pinned for replica in two]
    assert sorted(pinned)[0] == 0 and sorted(pinned)[1] >= len(system) // 2 // 16
    assert shown["pool_tokens"] >= 16 * sorted(pinned)[1]
    assert kept["prompts"] == [shown]
    assert shown["reason"] == "new", "texts are for exact_cached_tokens alone"


async def test_a_replica_says_where_prompts_differ(two: tuple[Replica, Replica]) -> None:
    texts = [f"It is Tuesday, 14:0{minute}, and the sun shines. " * 2 for minute in (1, 2)]

    async with over(two) as (local, engine, _):
        await read(engine, texts[0], GREEDY)
        await until_followed(local, two)
        output, _ = await read(engine, texts[1], GREEDY)
    assert output.cache.reason == "diverged"
    place = output.cache.diverged_at
    differs = output.prompt_token_ids[place : place + 6]
    assert repr(two[0].engine.tokenizer.decode(differs))[1:-1] in output.cache.hint
