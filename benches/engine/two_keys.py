"""The wait of one key beside the load of another, on a real server with the embedded model.

    .venv/bin/python -m benches.engine.two_keys [MODEL] [--same-key]

from the root of the repository. The load of key B is at work when key A sends a request of 64
tokens; the time is until its last token. The control is the same beside one request of B. A's
`/tokenize` is beside 32 of B's, each of 600 kB, and beside one. With `--same-key`, A sends with B's
key: what a server would do that does not tell keys apart.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import Any

import httpx2

from pyengine.async_engine import AsyncEngine
from pyengine.server.lifetime import address_of, listening, make_server
from pyengine.server.settings import ServerSettings

_KEYS = ("of-a", "of-b")
_OUTPUT = 64
_COMPLETIONS = "/v1/completions"
_CONTROLS = ("1 request", "1 /tokenize of 600 kB")
_LONG = {"max_tokens": 400, "ignore_eos": True}


def prompts(count: int) -> list[list[int]]:
    """Different prompts of 16 tokens."""
    return [[1000 + at, *range(100, 115)] for at in range(count)]


@asynccontextmanager
async def load(client: httpx2.AsyncClient, bodies: list[Any], path: str) -> AsyncIterator[None]:
    """The requests are at work; they are cancelled at the end."""
    tasks = [asyncio.ensure_future(client.post(path, json=body)) for body in bodies]
    await asyncio.sleep(0.5)
    while path == _COMPLETIONS and (await client.get("/load")).json()["num_running"] < 1:
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.0 if path == _COMPLETIONS else 0.2)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (await client.get("/load")).json()["num_running"]:
            await asyncio.sleep(0.05)


async def seconds(client: httpx2.AsyncClient, path: str, body: Any) -> float:
    """The time of one answer."""
    start = perf_counter()
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return perf_counter() - start


async def measure(address: str, keys: tuple[str, str]) -> None:
    """Print the table."""
    limits = httpx2.Limits(max_connections=None)
    a, b = (
        httpx2.AsyncClient(
            base_url=address,
            headers={"authorization": f"Bearer {key}"},
            timeout=600,
            limits=limits,
        )
        for key in keys
    )
    mine = {"prompt": [7] * 16, "max_tokens": _OUTPUT, "ignore_eos": True}
    text = {"prompt": "some words, and more of them " * 2000}
    flood = {"prompt": "ab cde " * 90_000}
    several = [{"prompt": prompt, **_LONG} for prompt in prompts(500)]
    rows: dict[str, tuple[list[Any], str, Any]] = {
        "1 request": (several[:1], _COMPLETIONS, mine),
        "500 requests": (several, _COMPLETIONS, mine),
        "1 request of 1,024 prompts": (
            [{"prompt": prompts(1024), **_LONG}],
            _COMPLETIONS,
            mine,
        ),
        "1 /tokenize of 600 kB": ([flood], "/tokenize", text),
        "32 /tokenize of 600 kB": ([flood] * 32, "/tokenize", text),
    }
    await seconds(a, _COMPLETIONS, mine)
    control = 0.0
    for name, (bodies, path, body) in rows.items():
        async with load(b, bodies, path):
            times = [await seconds(a, path, body) for _ in range(3)]
        shown = median(times)
        control = shown if name in _CONTROLS else control
        every = ", ".join(f"{each:.3f}" for each in times)
        print(f"{name:28} {shown:8.3f} s {shown / control:6.2f} x  ({every})", flush=True)
    await a.aclose()
    await b.aclose()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--same-key", action="store_true")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most), most))
    settings = ServerSettings(port=0, api_key=_KEYS, log_format="none", max_connections=2048)
    keys = (_KEYS[1], _KEYS[1]) if options.same_key else _KEYS
    with AsyncEngine(options.model, max_num_waiting=2048) as engine, listening(settings) as bound:
        ready = threading.Event()
        server = make_server(engine, settings, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        ready.wait()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(measure(address_of(settings, bound), keys))
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
