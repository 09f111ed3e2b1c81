"""Seconds from the start of a process to its first token, and to a server that is ready.

    .venv/bin/python -m benches.engine.starts FILE [--rounds 5] [--python .venv-light/bin/python]

This engine, llama.cpp and mistral.rs start with the same GGUF file, in turns. Each start is a new
process that answers a short prompt with one token. The first round is not counted: then the file
and the programs are in the page cache. Modules are compiled in the first round, too, unless
PYTHONDONTWRITEBYTECODE is set. With an environment that uv has just made, this measures starts
without bytecode.

`--python` is a Python that has pyengine, by default this one. llama.cpp and mistral.rs are looked
for in `.venv-llama` and `.venv-mistral` (see `end_to_end.py`), or at `LLAMA_PYTHON` and
`MISTRAL_PYTHON`. Prints a table in markdown: the median and the worst of the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import create_server
from statistics import median
from time import perf_counter, sleep
from urllib.error import URLError
from urllib.request import urlopen

from benches.engine.child import LLAMA_PYTHON, MISTRAL_PYTHON
from benches.peers.report import machine

PATIENCE = 120.0
"""Seconds that a server has to become ready."""

PROMPT = "The capital of France is"

OURS = f"""
import sys
from pyengine import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
[output] = LLM(sys.argv[1], device="cpu").generate({PROMPT!r}, params, use_tqdm=False)
print(len(output.outputs[0].token_ids), flush=True)
"""
LLAMA = f"""
import os, sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=1024, n_threads=os.cpu_count(), verbose=False)
print(llm({PROMPT!r}, max_tokens=1, temperature=0)["usage"]["completion_tokens"], flush=True)
"""
MISTRAL = f"""
import os, sys
from mistralrs import CompletionRequest, Runner, Which
folder, name = os.path.split(sys.argv[1])
runner = Runner(which=Which.GGUF(quantized_model_id=folder, quantized_filename=name))
request = CompletionRequest(prompt={PROMPT!r}, model=name, max_tokens=1, temperature=0.0)
print(runner.send_completion_request(request).usage.completion_tokens, flush=True)
"""
PROGRAMS = {"pyengine": OURS, "llama.cpp": LLAMA, "mistral.rs": MISTRAL}
"""The code that each engine runs; the argument is the file."""


def first_token(python: Path, program: str, file: Path) -> float:
    """Start an engine; seconds until it has given a token."""
    start = perf_counter()
    process = subprocess.Popen(
        [str(python), "-c", program, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    assert process.stdout is not None
    seconds = None
    for line in process.stdout:  # mistral.rs logs there, too
        if line == b"1\n":
            seconds = perf_counter() - start
    process.wait()
    if seconds is None:
        raise RuntimeError(f"{python} gave no token")
    return seconds


def ready_server(python: str, file: Path) -> float:
    """Start `pyengine serve`; seconds until it accepts requests."""
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code = "import sys; from pyengine.cli import main; sys.argv[0] = 'pyengine'; main()"
    start = perf_counter()
    process = subprocess.Popen(
        [python, "-c", code, "serve", str(file), "--port", str(port), "--device", "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        while process.poll() is None and perf_counter() < start + PATIENCE:
            with suppress(URLError, ConnectionError):
                urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
                return perf_counter() - start
            sleep(0.005)
        raise RuntimeError(f"{python}: the server was not ready")
    finally:
        process.terminate()
        process.wait()


def measure(file: Path, python: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each start, by its name. Engines that are not installed are left out."""
    peers = {"llama.cpp": LLAMA_PYTHON, "mistral.rs": MISTRAL_PYTHON}
    pythons = {"pyengine": Path(python), **peers}
    here = {name: path for name, path in pythons.items() if path.exists()}
    seconds: dict[str, list[float]] = {}
    for turn in range(-1, rounds):
        starts = {
            f"{name}, first token": first_token(path, PROGRAMS[name], file)
            for name, path in here.items()
        }
        starts["pyengine serve, ready"] = ready_server(python, file)
        for name, value in starts.items():
            seconds.setdefault(name, []).extend([value] * (turn >= 0))
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args(arguments)
    starts = measure(options.file.resolve(), options.python, options.rounds)
    bytecode = "not written" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "written"
    print(json.dumps(machine() | {"bytecode": bytecode}))
    print(f"\n| {options.file.name}, {options.rounds} starts | median | worst |\n|---|---:|---:|")
    for name, seconds in starts.items():
        print(f"| {name} | {median(seconds):.2f} s | {max(seconds):.2f} s |")


if __name__ == "__main__":
    main()
