"""Many streams at once: the engine without a server, and where a server's event loop is at work.

    python -m benches.engine.crowd MODEL_FOLDER DTYPE POOL_GIB < request.json

A `GenerateRequest` of `serve.py` comes on standard input. A task for each of its prompts reads an
answer from one `AsyncEngine`, all at the same time; a line has the times between the items of a
stream in milliseconds. Other prompts come before, to warm the engine: a server does not have these
in its cache either. `serving.py` runs it.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from benches.engine.serve import GenerateRequest

PLACES = (
    ("httptools and uvicorn: HTTP", ("httptools/", "uvicorn/")),
    ("pydantic and json", ("pydantic/", "pydantic_core/", "json/")),
    ("starlette and fastapi", ("starlette/", "fastapi/", "anyio/")),
    ("pyengine/server: chunks of answers", ("pyengine/server/",)),
    ("pyengine/engine: outputs to streams", ("pyengine/engine/",)),
    ("uvloop: the next event, and its callback", ("asyncio/", "uvloop/")),
)
"""Where the innermost frame of a sample lies that is of any of these."""
OTHER = "else"
ENGINE, LOOP = "pyengine-engine", "MainThread"


async def read(engine: Any, prompt: Any, request: GenerateRequest) -> list[float]:
    """Milliseconds between one item and the next."""
    from pyengine import RequestOutputKind, SamplingParams

    params = SamplingParams(**request.settings(), output_kind=RequestOutputKind.DELTA)
    times = [perf_counter() async for _ in engine.generate(prompt, params)]
    return [1000 * (b - a) for a, b in pairwise(times)]


async def crowd(engine: Any, request: GenerateRequest) -> list[float]:
    """All prompts at once."""
    streams = await asyncio.gather(*(read(engine, prompt, request) for prompt in request.prompts))
    return [gap for gaps in streams for gap in gaps]


def profile(pid: int, seconds: float, folder: Path) -> dict[str, Any]:
    """How much of a core the event loop and the engine's thread take, and the loop for what.

    By py-spy: shares of samples in which the thread was at work. Raises `RuntimeError` where it
    cannot look into the process.
    """
    raw, rate = folder / "stacks", 200
    options = ["--threads", "--format", "raw", "--rate", f"{rate}", "--duration", f"{seconds:.0f}"]
    command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", f"{pid}"]
    done = subprocess.run(
        [*command, *options, "--output", str(raw)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"py-spy: {done.stderr.strip().splitlines()[-1:]}")
    return shares(raw.read_text(), round(seconds) * rate)


def shares(stacks: str, samples: int) -> dict[str, Any]:
    """From py-spy's raw format, a line for each stack: frames from the outermost, and a count."""
    loop: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        thread = next((name for name in (ENGINE, LOOP) if name in frames.partition(";")[0]), OTHER)
        threads[thread] += int(count)
        if thread == LOOP:
            loop[place_of(frames.split(";"))] += int(count)
    whole = max(1, loop.total())
    return {
        "threads": {name: threads[name] / samples for name in (LOOP, ENGINE, OTHER)},
        "loop": {name: loop[name] / whole for name in [*dict(PLACES), OTHER]},
    }


def place_of(frames: list[str]) -> str:
    """Of the innermost frame that has one."""
    for frame in reversed(frames):
        for name, parts in PLACES:
            if any(f"({part}" in frame or f"/{part}" in frame for part in parts):
                return name
    return OTHER


def main() -> None:
    """The engine alone."""
    from pyengine import AsyncEngine

    folder, dtype, pool = sys.argv[1:]
    request = GenerateRequest(**json.load(sys.stdin))
    settings: dict[str, Any] = {"compile": True, "max_num_seqs": len(request.prompts)}
    settings["kv_cache_memory"] = int(pool) << 30
    with AsyncEngine(folder, device="cpu", dtype=dtype, **settings) as engine:
        others = [" ".join(reversed(str(text).split())) for text in request.prompts]
        asyncio.run(crowd(engine, replace(request, prompts=others, max_tokens=4)))
        print(json.dumps(asyncio.run(crowd(engine, request))))


if __name__ == "__main__":
    main()
