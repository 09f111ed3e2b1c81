"""Programs of others, unchanged, against the server."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from benches.engine.float_model import float_folder
from pyengine.async_engine import AsyncEngine
from tests.support.clients import needs_clients, run
from tests.support.serving import RunningServer, open_small_engine, save_small_model

pytestmark = [pytest.mark.clients, needs_clients]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The embedded model."""
    with AsyncEngine(max_num_waiting=1024) as engine, RunningServer(engine) as server:
        yield server


def test_the_openai_client(server: RunningServer) -> None:
    printed = run("python", "tests/clients/programs/openai_client.py", server.address)
    assert "100 of 100 valid" in printed
    server.is_well()


def name_of(server: RunningServer) -> str:
    return str(httpx2.get(f"{server.address}/v1/models").json()["data"][0]["id"])


def test_langchain(server: RunningServer) -> None:
    program = "tests/clients/programs/langchain_client.py"
    assert "is served" in run("python", program, server.address, name_of(server))


def test_litellm(server: RunningServer) -> None:
    program = "tests/clients/programs/litellm_client.py"
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = run("../litellm/bin/python", program, server.address, name_of(server), **local)
    assert "is served" in said


def test_guidellm(server: RunningServer, tmp_path: Path) -> None:
    """Eight requests of made-up text, four at a time; it counts the tokens itself."""
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={server.address}",
        "--profile=kind=concurrent,streams=4",
        "--constraint=kind=max_requests,count=8",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--tokenizer=kind=huggingface_auto,model={float_folder()}",
        f"--output=kind=json,path={report}",
        "--disable-progress",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert metrics["output_token_count"]["successful"]["mean"] == 8
    server.is_well()


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
