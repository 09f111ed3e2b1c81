"""Replicas on Ray, each a process: the same answers, one killed, one more, none left behind.

`make cluster-test` runs this.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.docs import ROOT
from tests.support.processes import is_running, processes_with, wait_for_end, workers_of
from tests.support.replicas import read
from tests.support.serving import alone, events_of, save_small_model

ray = pytest.importorskip("ray", reason="Ray is not installed: say `make cluster-test`")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, and its sockets
    pytest.mark.timeout(500),
]

GREEDY = SamplingParams(
    temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
FOREVER = SamplingParams(
    temperature=0, max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16}
SERVE = "from pyengine.cli import main; main()"
REPLICA = "ServeReplica:pyengine:engines"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    left = wait_for_end(processes_with("ray::", "raylet/raylet", "gcs_server"), 20)
    assert left == []


def with_replicas(settings: EngineSettings, use: Callable[[Any], Awaitable[None]]) -> None:
    """Call `use` on an engine of two replicas that are up."""
    from pyengine.cluster.ray_local import local_replicas

    async def main() -> None:
        await until(lambda: current(engine) == 2)
        await use(engine)

    with local_replicas(settings, 2) as engine:
        asyncio.run(main())


@pytest.fixture
def engine(small_model: Path) -> Iterator[Any]:
    """An engine of two replicas, which come up meanwhile."""
    from pyengine.cluster.ray_local import local_replicas

    with local_replicas(EngineSettings(small_model, num_blocks=512, **SMALL), 2) as engine:
        yield engine


def current(engine: Any) -> int:
    router = engine.replicas.router
    return 0 if router is None else sum(replica.is_current for replica in router.replicas())


def routed(engine: Any) -> dict[str, int]:
    return {replica.name: replica.num_routed for replica in engine.replicas.router.replicas()}


async def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


async def through_gate(engine: Any, prompts: list[list[int]], most: int) -> list[Any]:
    gate = asyncio.Semaphore(most)

    async def answer(prompt: list[int]) -> Any:
        async with gate:
            return await read(engine, prompt, GREEDY)

    return await asyncio.gather(*map(answer, prompts))


def test_families_stay_together_and_answers_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 families of 1,024-token prefixes, 160 requests; a replica has room for four of them."""
    from itertools import count

    from pyengine.cluster.fleet import Fleet

    save_small_model(tmp_path, max_position_embeddings=2048)
    random = Random(3)
    order = [family for _ in range(20) for family in random.sample(range(8), 8)]
    prompts = [
        [*([5 + family, 17 + family] * 512), *(20 + (number * each) % 200 for each in range(1, 9))]
        for number, family in enumerate(order)
    ]
    settings = EngineSettings(tmp_path, num_blocks=4 * 64 + 48, **SMALL)
    with AsyncEngine(tmp_path, num_blocks=2000, **SMALL) as single:
        wanted = [alone(single, prompt, GREEDY).outputs[0].token_ids for prompt in prompts]
    figures: dict[str, tuple[int, float]] = {}

    async def ours(engine: Any) -> None:
        done = await through_gate(engine, prompts, 4)
        assert [tokens for _, tokens in done] == wanted
        counts = [replica.num_routed for replica in engine.replicas.router.replicas()]
        cached = sum(item.num_cached_tokens for item, _ in done)
        figures["ours"] = cached, max(counts) / sum(counts)
        stats = engine.replicas.router.stats
        assert stats.real_hits == cached
        assert stats.expected_hits == pytest.approx(cached, rel=0.1)

    async def in_turn(engine: Any) -> None:
        numbers = count()

        def route(self: Fleet, request: Any, among: Any) -> str:
            names = sorted(among)
            return str(names[next(numbers) % len(names)])

        with monkeypatch.context() as patched:
            patched.setattr(Fleet, "route", route)
            done = await through_gate(engine, prompts, 4)
        assert [tokens for _, tokens in done] == wanted
        figures["round robin"] = sum(item.num_cached_tokens for item, _ in done), 0.5

    with_replicas(settings, ours)
    with_replicas(settings, in_turn)
    print(figures)
    assert figures["ours"][0] >= 1.8 * figures["round robin"][0]
    assert figures["ours"][1] <= 0.65


async def test_a_killed_replica_and_its_replacement(engine: Any) -> None:
    await until(lambda: current(engine) == 2)
    router = engine.replicas.router

    async def stream(number: int) -> tuple[str, bool]:
        """How it ended, and whether anything had come before."""
        reader = engine.submit([engine.request([5 + number] * 20, FOREVER)])
        has_begun = False
        try:
            async for item in reader:
                has_begun = True
                if item.finished:
                    return "whole", has_begun
        except Exception as error:
            return type(error).__name__, has_begun
        finally:
            reader.close()
        return "nothing", has_begun

    streams = [asyncio.create_task(stream(number)) for number in range(8)]
    before = set(engine.replicas.names())
    await until(lambda: engine.stats().num_running >= 6)
    wholes = [asyncio.create_task(read(engine, [40 + n] * 50, GREEDY)) for n in range(8)]
    await until(lambda: sum(replica.num_requests for replica in router.replicas()) >= 12)
    victim = processes_with(REPLICA)[0]
    os.kill(victim, signal.SIGKILL)
    start = monotonic()
    done = await asyncio.wait_for(asyncio.gather(*wholes), 60)
    assert all(item.finished and len(tokens) == 8 for item, tokens in done)
    ends = await asyncio.wait_for(asyncio.gather(*streams), 60)
    kinds = {kind for kind, _ in ends}
    assert kinds <= {"whole", "ReplicaLostError"} and "ReplicaLostError" in kinds
    assert all(begun for kind, begun in ends if kind == "ReplicaLostError")
    print(f"all had ended {monotonic() - start:.1f} s after the kill: {sorted(ends)}")
    await until(lambda: current(engine) == 2 and set(engine.replicas.names()) != before, 120)
    [newcomer] = set(engine.replicas.names()) - before
    await through_gate(engine, [[100 + n] * 64 for n in range(12)], 6)
    states = {replica.name: replica for replica in router.replicas()}
    assert states[newcomer].num_routed > 0
    assert not is_running(victim)


def test_models_that_are_divided_are_each_in_a_placement_group(tmp_path: Path) -> None:
    """Two replicas of three processes; one is killed, and its processes go with it."""
    from ray.util import placement_group_table

    save_small_model(tmp_path, hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    prompts = [[*([5 + n % 4] * 200), *range(40, 48 + n)] for n in range(16)]
    with AsyncEngine(tmp_path, num_blocks=512, **SMALL) as single:
        wanted = [alone(single, prompt, GREEDY).outputs[0].token_ids for prompt in prompts]

    async def use(engine: Any) -> None:
        groups = [
            group for group in placement_group_table().values() if group["state"] == "CREATED"
        ]
        assert [group["bundles"] for group in groups] == [{0: {"CPU": 3.0}}] * 2
        replicas = processes_with(REPLICA)
        workers = {pid: workers_of(pid) for pid in replicas}
        assert [len(worker) for worker in workers.values()] == [2, 2]  # beside the replica itself
        done = await through_gate(engine, prompts, 4)
        assert [tokens for _, tokens in done] == wanted
        assert sum(item.num_cached_tokens > 0 for item, _ in done) >= 8
        before = set(engine.replicas.names())
        os.kill(replicas[0], signal.SIGKILL)
        assert wait_for_end(workers[replicas[0]], 30) == []
        await until(lambda: current(engine) == 2 and set(engine.replicas.names()) != before, 120)
        done = await through_gate(engine, prompts, 4)
        assert [tokens for _, tokens in done] == wanted
        everybody.extend(pid for parent in processes_with(REPLICA) for pid in workers_of(parent))

    everybody: list[int] = []
    settings = EngineSettings(tmp_path, num_blocks=512, tensor_parallel_size=3, **SMALL)
    with_replicas(settings, use)
    assert len(everybody) == 4 and wait_for_end(everybody, 30) == []


def test_replicas_become_more_under_load_and_fewer_after(small_model: Path) -> None:
    """Each ingress follows each replica, which Serve counts as a request: three are two."""
    from ray import serve

    from pyengine.cluster.ray_app import RayReplicas, engines
    from pyengine.cluster.remote_engine import RemoteEngine

    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 3,
        **{"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 0.5},
        "look_back_period_s": 2,
    }

    async def use(engine: RemoteEngine) -> None:
        replicas = engine.replicas
        await until(lambda: current(engine) == 1)
        is_over = False

        async def load(number: int) -> None:
            while not is_over:
                item, _ = await read(engine, [5 + number] * 40, FOREVER)
                assert item.finished

        callers = [asyncio.create_task(load(number)) for number in range(8)]
        await until(lambda: current(engine) == 2, 120)
        assert replicas.router is not None
        newcomer = replicas.router.replicas()[1].name  # in the order of joining
        await until(lambda: routed(engine)[newcomer] > 2)
        is_over = True
        await asyncio.gather(*callers)  # nothing was lost on the way up
        await until(lambda: len(replicas.names()) == 1, 120)
        item, _ = await read(engine, [9] * 40, GREEDY)
        assert item.finished and len(routed(engine)) == 1

    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="Disabled")
        settings = {"model": str(small_model), "num_blocks": 512, **SMALL}
        app = engines(settings, autoscaling_config=scaling)
        handle = serve.run(app, name="pyengine", route_prefix=None)
        about = handle.about.remote().result()
        asyncio.run(use(RemoteEngine(RayReplicas(handle), about)))
    finally:
        serve.shutdown()
        ray.shutdown()


async def test_a_reader_that_goes_ends_what_runs(engine: Any) -> None:
    await until(lambda: current(engine) == 2)
    stream = engine.submit([engine.request([5] * 20, FOREVER)])
    await anext(aiter(stream))
    stream.close()
    router = engine.replicas.router
    await until(lambda: all(replica.num_requests == 0 for replica in router.replicas()))
    await until(lambda: all(replica.load.num_running == 0 for replica in router.replicas()))
    reader = engine.submit([engine.request([6] * 20, FOREVER, "mine")])
    items = aiter(reader)
    await anext(items)
    assert await engine.abort("mine")
    assert [item.outputs[0].finish_reason async for item in items][-1] == "abort"


def test_replicas_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    from pyengine.cluster.ray_local import local_replicas

    with (
        pytest.raises(ConfigurationError, match="could not be started"),
        local_replicas(EngineSettings(tmp_path / "nowhere"), 2),
    ):
        raise AssertionError


def wait_for_health(address: str, process: "subprocess.Popen[str]") -> None:
    end = monotonic() + 120
    while monotonic() < end:
        assert process.poll() is None
        try:
            if httpx2.get(f"{address}/health").status_code == 200:
                return
        except httpx2.TransportError:
            sleep(0.2)
    raise AssertionError("it never came up")


def test_serve_with_replicas_and_its_end(small_model: Path) -> None:
    """The command: completions, streams, metrics of both, the page; then SIGTERM."""
    options = "--replicas 2 --port 8377 --num-blocks 512 --device cpu --dtype float32"
    command = [sys.executable, "-c", SERVE, "serve", str(small_model), *options.split()]
    command += ["--block-size", "16"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    address = "http://127.0.0.1:8377"
    try:
        wait_for_health(address, process)
        body = {"prompt": [5, 6, 7] * 30, "max_tokens": 6, "temperature": 0}
        first, again = (
            httpx2.post(f"{address}/v1/completions", json=body, timeout=60).json() for _ in range(2)
        )
        assert first["choices"] == again["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80
        stream = httpx2.post(f"{address}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert events_of(stream.text)[-1]["choices"][0]["finish_reason"]
        bad = httpx2.post(f"{address}/v1/completions", json={"prompt": [5], "frobs": 1})
        assert bad.status_code == 400
        text = httpx2.get(f"{address}/metrics").text
        names = {
            line.split('engine="')[1].split('"')[0]
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running")
        }
        assert len(names) == 2
        assert "pyengine:router_routed_total" in text
        with httpx2.stream("GET", f"{address}/kv/stream", timeout=30) as page:
            data = next(line for line in page.iter_lines() if line.startswith("data: "))
        frame = json.loads(data.removeprefix("data: "))
        assert {replica["name"] for replica in frame["replicas"]} == names
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr is not None
        print(process.stderr.read()[-3000:])


def test_replicas_share_a_folder_over_a_restart(small_model: Path, tmp_path: Path) -> None:
    """One writes, both read, each in a separate process; so do those of the next start."""
    from pyengine.cluster.fleet import Fleet

    store: dict[str, Any] = {"kv_cache_dir": tmp_path / "kv", "kv_cache_disk": 1 << 30}
    settings = EngineSettings(small_model, num_blocks=64, **SMALL, **store)  # a prompt and a half
    prompts = [[*([5 + family, 17 + family] * 256), family] for family in range(6)]
    with AsyncEngine(small_model, num_blocks=512, **SMALL) as single:
        wanted = [alone(single, prompt, GREEDY).outputs[0].token_ids for prompt in prompts]
    route = Fleet.route

    async def ask(engine: Any, replica: str) -> list[int]:
        """Restored tokens of each prompt; every answer is that of an engine without a store."""

        def to_replica(self: Fleet, request: Any, among: Any) -> str:
            return route(self, request, {replica})

        found = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Fleet, "route", to_replica)
            for prompt, tokens in zip(prompts, wanted, strict=True):
                item, given = await read(engine, prompt, GREEDY)
                assert given == tokens
                found.append(item.num_restored_tokens)
        return found

    async def store_and_restore(engine: Any) -> None:
        async with asyncio.timeout(120):
            for name in sorted(routed(engine)):  # a reader looks once a second
                while sum(await ask(engine, name)) < 480:
                    await asyncio.sleep(0.5)

    async def restore(engine: Any) -> None:
        for name in sorted(routed(engine)):
            assert (await ask(engine, name))[0] >= 480  # it sees it for the first time

    with_replicas(settings, store_and_restore)
    with_replicas(settings, restore)


def test_the_application_of_a_config_file(small_model: Path) -> None:
    """The ingress as a deployment: Serve's own proxy in front of the same routes."""
    from ray import serve

    from pyengine.cluster.ray_app import application

    engine = {"model": str(small_model), "num_blocks": 512, **SMALL}
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8378})
        arguments = {"engine": engine, "replicas": {"num_replicas": 2}, "server": {}}
        serve.run(application(arguments), name="pyengine")
        address = "http://127.0.0.1:8378"
        assert httpx2.get(f"{address}/health").status_code == 200
        body = {"prompt": [5, 6, 7] * 30, "max_tokens": 6, "temperature": 0}
        for _ in range(4):
            answer = httpx2.post(f"{address}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80
        stream = httpx2.post(f"{address}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert events_of(stream.text)[-1]["choices"][0]["finish_reason"]
    finally:
        serve.shutdown()
        ray.shutdown()
