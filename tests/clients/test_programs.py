"""Programs of others, unchanged, against the server."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from pyengine.engine import AsyncEngine
from tests.support.docs import ROOT
from tests.support.serving import RunningServer, open_small_engine, save_small_model

BIN = ROOT / ".venv-clients/bin"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not BIN.exists(), reason="`make clients` makes .venv-clients"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The embedded model."""
    with AsyncEngine(max_num_waiting=1024) as engine, RunningServer(engine) as server:
        yield server


def run(*command: str) -> str:
    """What a program of .venv-clients prints."""
    path, *rest = command
    done = subprocess.run(
        [str(BIN / path), *rest], capture_output=True, text=True, check=False, cwd=ROOT
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_the_openai_client(server: RunningServer) -> None:
    printed = run("python", "tests/clients/programs/openai_client.py", server.address)
    assert "100 of 100 valid" in printed
    server.is_well()


def test_langchain(server: RunningServer) -> None:
    model = httpx2.get(f"{server.address}/v1/models").json()["data"][0]["id"]
    program = "tests/clients/programs/langchain_client.py"
    assert "is served" in run("python", program, server.address, model)


def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    """No 5xx, and answers are those of the description."""
    folder = save_small_model(tmp_path)
    with open_small_engine(folder) as engine, RunningServer(engine) as server:
        run(
            "schemathesis",
            "run",
            f"{server.address}/openapi.json",
            "--max-examples=60",
            "--seed=1",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_schema_conformance",
        )
        server.is_well()
