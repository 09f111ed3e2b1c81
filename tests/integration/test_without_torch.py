"""The CPU engine leaves torch and transformers alone, also where they are installed.

Each run is a separate process, which writes the modules that it has loaded when it ends.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from socket import create_server
from typing import Any

import httpx2
import pytest

from tests.support.docs import ROOT
from tests.support.processes import run_python
from tests.support.serving import assert_soon

pytestmark = pytest.mark.slow

FORBIDDEN = {"torch", "transformers"}
NOT_TO_OPEN_A_MODEL = {"importlib.metadata", "email", "zipfile", "llguidance", "jinja2"}
"""Modules that take a tenth of a start, and that no request has asked for."""
NUM_REQUESTS = 32
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

_AT_EXIT = """
import atexit, os, sys

def write():
    with open(os.environ["LOADED_MODULES"], "w") as file:
        file.write("\\n".join(sorted(sys.modules)))

atexit.register(write)
"""

_OFFLINE = f"""
import sys
from pyengine import LLM, SamplingParams
from pyengine.sampling_params import StructuredOutputs

schema, folder, count = {SCHEMA!r}, sys.argv[1], {NUM_REQUESTS}
for _ in range(2):  # the second one reads what the first one has stored
    store = {{"kv_cache_dir": folder, "kv_cache_disk": 1 << 28}}
    with LLM(**store, speculation="ngram", num_blocks=256) as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1)
        drawn = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=1, n=2,
                               frequency_penalty=0.5)
        keyed = SamplingParams(max_tokens=40, temperature=0,
                               structured_outputs=StructuredOutputs(json=schema))
        prompts = [f"Alice was beginning to get very tired. {{i}} {{i}}" for i in range(count)]
        kinds = [greedy, drawn, keyed]
        outputs = llm.generate(prompts, [kinds[i % 3] for i in range(count)], use_tqdm=False)
        assert len(outputs) == count and all(each.outputs[0].token_ids for each in outputs)
        message = {{"role": "user", "content": "Say hello."}}
        assert llm.chat([message], SamplingParams(max_tokens=4))[0].outputs[0].text
        llm.describe(), llm.stats()
"""


_SERVE = "from pyengine.cli import main; main()"


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python writes its modules to `tmp_path / "loaded"` at its end."""
    (tmp_path / "sitecustomize.py").write_text(_AT_EXIT)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "LOADED_MODULES": str(tmp_path / "loaded"), "PYTHONPATH": paths}


def loaded_in(environment: dict[str, str]) -> set[str]:
    """The modules of a process that has ended; it had the engine."""
    loaded = set(Path(environment["LOADED_MODULES"]).read_text().split())
    assert {"numpy", "pyengine.engine.core", "pyengine.models.decoder.cpu_kernels"} <= loaded
    return loaded


def test_opening_a_model_loads_what_it_needs(watched: dict[str, str]) -> None:
    opened = "from pyengine import LLM; LLM(num_blocks=64).generate([[1, 2]], use_tqdm=False)"
    run_python(opened, env=watched)
    assert not loaded_in(watched) & (FORBIDDEN | NOT_TO_OPEN_A_MODEL)


def test_llm_and_chat(watched: dict[str, str], tmp_path: Path) -> None:
    """With a store, drafts by n-grams, JSON schemas, log-probabilities and several samples."""
    run_python(_OFFLINE, tmp_path / "kv", env=watched)
    assert not loaded_in(watched) & FORBIDDEN


def test_serve(watched: dict[str, str], tmp_path: Path) -> None:
    """32 requests at the same time: chat and completions, streams, schemas, drafts, a store."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-c", _SERVE, "serve", "--port", str(port)),
        *("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-disk-gib", "1"),
        *("--speculation", "ngram", "--num-blocks", "512"),
    ]
    with subprocess.Popen(command, env=watched, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            assert_soon(lambda: is_ready(address), 120)
            with ThreadPoolExecutor(NUM_REQUESTS) as threads:
                answers = list(threads.map(lambda i: answer(address, i), range(NUM_REQUESTS)))
        finally:
            server.send_signal(signal.SIGTERM)
            _, said = server.communicate(timeout=60)
    assert answers == [200] * NUM_REQUESTS, said
    assert not loaded_in(watched) & FORBIDDEN


def is_ready(address: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{address}/health").status_code == 200
    return False


def answer(address: str, number: int) -> int:
    """The status of a request of one of four kinds."""
    message = {"role": "user", "content": f"Tell me about the number {number}."}
    body: dict[str, Any] = {"max_tokens": 24, "messages": [message], "temperature": 0}
    if number % 4 == 1:
        body |= {"stream": True, "logprobs": True, "top_logprobs": 2, "temperature": 0.7, "n": 2}
    if number % 4 == 2:
        form = {"name": "person", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    path = "/v1/chat/completions"
    if number % 4 == 3:
        path = "/v1/completions"
        body = {"prompt": message["content"], "max_tokens": 24, "logprobs": 3, "echo": True}
    return httpx2.post(f"{address}{path}", json=body, timeout=120).status_code
