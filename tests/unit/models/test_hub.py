"""The Hugging Face hub, played by a server on the loopback: its requests and our messages."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.checkpoints import save_tiny
from tests.support.processes import run_python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK_THERE = "Visit http://hub/owner/gated to ask for access."
_RESOLVE = """
import sys
from pyengine.errors import PyEngineError
from pyengine.models.source import resolve_source
try:
    name, revision, token = sys.argv[1:]
    print(resolve_source(name, revision=revision or None, token=token or None).folder)
except PyEngineError as error:
    print(type(error).__name__, error)
"""


class Hub(BaseHTTPRequestHandler):
    """Serves the folder of its server as `owner/model`; `owner/gated` wants the token "right"."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        files: dict[str, bytes] = self.server.files  # type: ignore[attr-defined]
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        name = self.path.split("/api/models/")[-1].strip("/").split("/")[:2]
        if name[1] == "gated" and self.headers.get("Authorization") != "Bearer right":
            return self._send(
                403, b"", with_body, {"X-Error-Code": "GatedRepo", "X-Error-Message": ASK_THERE}
            )
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": p, "size": len(b), "oid": "0" * 40}
                for p, b in files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), with_body, {})
        if self.path.startswith("/api/"):
            if "/revision/" in self.path and not self.path.split("?")[0].endswith(
                ("/main", "/v2", COMMIT)
            ):
                return self._send(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
            about = {
                "id": "/".join(name),
                "sha": COMMIT,
                "siblings": [{"rfilename": p} for p in files],
            }
            return self._send(200, json.dumps(about).encode(), with_body, {})
        path = self.path.split(f"/resolve/{COMMIT}/")[-1].split("?")[0]
        self._send(200, files[path], with_body, {"ETag": f'"{path}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    save_tiny(tmp_path / "model")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    copies = {f"original/{name}": content for name, content in files.items()}
    server.files = {**files, **copies, "consolidated.safetensors": b"twice", "evil.py": b"1/0"}  # type: ignore[attr-defined]
    server.requests = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(
    hub: ThreadingHTTPServer, home: Path, name: str, revision: str = "", token: str = ""
) -> str:
    done = run_python(
        *(_RESOLVE, name, revision, token),
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        },
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_weights_are_fetched_once_and_no_code(hub, tmp_path):
    folder = Path(resolve(hub, tmp_path, "owner/model"))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors"} <= files
    assert [name for name in files if name.endswith((".safetensors", ".py"))] == [
        "model.safetensors"
    ]


@pytest.mark.slow
def test_a_revision_is_asked_for_and_one_that_is_not_there_is_named(hub, tmp_path):
    assert COMMIT in resolve(hub, tmp_path, "owner/model", "v2")
    assert any("/revision/v2" in path for path in hub.requests)
    said = resolve(hub, tmp_path, "owner/model", "nosuch")
    assert said.startswith("ModelLoadError the model 'owner/model, revision nosuch'")


@pytest.mark.slow
def test_a_gated_model_says_where_to_ask_and_takes_a_token(hub, tmp_path):
    said = resolve(hub, tmp_path, "owner/gated")
    assert said.startswith("ModelLoadError") and ASK_THERE in said and "HF_TOKEN" in said
    assert COMMIT in resolve(hub, tmp_path, "owner/gated", token="right")
