"""Servers whose disk is slow or hangs, one after the other in forks: how long each takes to end.

Run under `LD_PRELOAD` of `faulty_disk.c`. Arguments: a model's folder, a folder for the caches.
Reads a case a line (JSON), starts four at a time, and prints when each got SIGTERM and when it
ended.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from pyengine.async_engine import AsyncEngine
from pyengine.server.lifetime import listening, make_server
from pyengine.server.settings import ServerSettings
from tests.support.serving import open_small_engine

HUNG = 3600.0
SLOW = 0.3
NEW = [7] * 400
STORED = [9] * 400


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def prepare(engine: AsyncEngine, client: httpx2.Client, case: dict[str, Any]) -> None:
    """Bring the server into the state of the case, then let its disk be slow."""
    offloader = engine._offloader
    assert offloader is not None
    client.post("/v1/completions", json=body(STORED, 1)).raise_for_status()
    assert offloader.flush(30)
    if case["state"] == "loading":
        engine._manager.evict_all()
    seconds = HUNG if case["speed"] == "hung" else SLOW
    Path(os.environ["FAULTY_DISK"]).write_text(f"{case['operation']} {seconds}")
    if case["state"] == "idle":
        client.post("/v1/completions", json=body(NEW, 1)).raise_for_status()
        return
    prompts = {"loading": [[*STORED, 5]], "queued": [NEW, [*NEW, 5], [*NEW, 6]]}[case["state"]]
    for prompt in prompts:

        def post(prompt: list[int] = prompt) -> None:
            own = httpx2.Client(base_url=str(client.base_url), timeout=60)
            with own, suppress(httpx2.HTTPError):
                own.post("/v1/completions", json=body(prompt, 600))

        threading.Thread(target=post, daemon=True).start()
    time.sleep(0.5)


def serve(model: Path, folder: Path, case: dict[str, Any]) -> None:
    os.environ["FAULTY_DISK"] = str(folder.with_suffix(".fault"))
    Path(os.environ["FAULTY_DISK"]).write_text("- 0")
    engine = open_small_engine(model, kv_cache_dir=folder, kv_cache_disk=1 << 30, max_num_seqs=1)
    settings = ServerSettings(port=0, drain_timeout=case["drain_timeout"])
    with listening(settings) as bound:
        port = bound.getsockname()[1]

        def drive() -> None:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                prepare(engine, client, case)
            say({**case, "signal": time.monotonic()})
            os.kill(os.getpid(), signal.SIGTERM)

        on_ready = threading.Thread(target=drive, daemon=True).start
        make_server(engine, settings, on_ready).run(sockets=[bound])
    engine.close()


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    ended = 0
    cases = [json.loads(line) for line in sys.stdin]
    children: dict[int, int] = {}
    for number, case in enumerate(cases):
        while len(children) - ended >= 4:
            ended += wait(children)
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            serve(model, folder / str(number), {**case, "number": number})
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(0)  # freeing what a fork shares with its parent takes seconds
        children[child] = number
    while ended < len(cases):
        ended += wait(children)


def wait(children: dict[int, int]) -> int:
    """Print the end of the next child."""
    child, status = os.wait()
    ended = {"number": children[child], "end": time.monotonic(), "status": status}
    say(ended)
    return 1


def say(item: dict[str, Any]) -> None:
    """A line of JSON at once: several processes write to the same pipe."""
    os.write(1, json.dumps(item).encode() + b"\n")


if __name__ == "__main__":
    main()
