"""A local page of a recording: the `/kv` page, operation by operation.

It needs NumPy only. The page shows tokens of prompts, so it answers on this machine alone, and only
below an address that others cannot guess.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pyengine.kv_cache import KvError, TracePlayer
from pyengine.server.dashboard import PAGE_POLICY
from pyengine.server.dashboard.frames import pool_columns

MAX_OPERATIONS = 1_000
"""Operations in one answer."""
_KEPT_FRAMES = 64
_SHOWN_BLOCKS = 64
"""Blocks of a table in a frame."""
_CHANGE = attrgetter(
    *("operation", "call", "state", "refs", "seq_refs", "sequences", "is_registered")
)
"""A change of a block as the page takes it."""


class Recording:
    """A recording as the page asks for it: operations, frames, the life of a block.

    Any thread may call it. Going back replays the file from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._player = TracePlayer(path)
        self._reader = TracePlayer(path)
        self._frames: OrderedDict[int, str] = OrderedDict()
        counter = TracePlayer(path)
        self.num_operations = counter.seek(1 << 63)
        self.divergence = counter.divergence
        self._about = {
            "model": f"{path.name}, recorded by {counter.recorded_by}",
            "block_size": counter.settings["block_size"],
            "operations": self.num_operations,
            "divergence": self._differs(),
        }

    def _differs(self) -> str | None:
        """The operation at which the replay ended early, as text."""
        if self.divergence is None:
            return None
        return (
            f"operation {self.divergence.operation}, {self.divergence.call}: "
            f"recorded {self.divergence.recorded}; obtained {self.divergence.obtained}"
        )

    def operations(self, start: int, count: int) -> str:
        """`count` operations from number `start` on: number, call, answer."""
        rows: list[tuple[int, str, str]] = []
        with self._lock:
            self._reader.seek(max(0, start - 1))
            while len(rows) < min(count, MAX_OPERATIONS):
                operation = self._reader.advance()
                if operation is None:
                    break
                rows.append((operation.number, operation.call, operation.answer))
        return json.dumps(rows)

    def frame(self, position: int) -> str:
        """The pool after `position` operations, as a frame of the `/kv` page; and the sequences."""
        position = max(0, min(position, self.num_operations))
        with self._lock:
            known = self._frames.get(position)
            if known is not None:
                return known
            frame = self._frames[position] = self._frame(position)
            if len(self._frames) > _KEPT_FRAMES:
                self._frames.popitem(last=False)
            return frame

    def _frame(self, position: int) -> str:
        player = self._player
        player.seek(position)
        sequences = [
            (
                sequence.id,
                sequence.num_tokens,
                sequence.num_computed_tokens,
                sequence.num_cached_tokens,
                sequence.block_table[:_SHOWN_BLOCKS],
                len(sequence.block_table),
            )
            for sequence in player.sequences()
        ]
        message = {
            "time": position,
            "about": self._about,
            "counters": player.stats().as_dict(),
            "store": {},
            "running": len(sequences),
            "waiting": 0,
            "preemptions": 0,
            "tokens": 0,
            "requests": [],
            "sequences": sequences,
        } | pool_columns(player.snapshot(), player.usage())[0]
        return json.dumps(message, separators=(",", ":"))

    def life(self, block: int) -> str:
        """The operations that changed a block: number, call, state, counters, sequences, cached."""
        changes = TracePlayer(self._path).follow(block)
        return json.dumps([*map(_CHANGE, changes)])


class TraceServer(ThreadingHTTPServer):
    """Serves the page of a recording at `url`, on this machine only."""

    daemon_threads = True

    def __init__(self, recording: Recording, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.recording = recording
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.url = f"http://127.0.0.1:{self.server_port}{self.path}"
        folder = files("pyengine.server.dashboard")
        page, player = (
            folder.joinpath(name).read_text(encoding="utf-8") for name in ("kv.html", "trace.html")
        )
        controls, script = player.split("<!-- script -->\n")
        page = page.replace("<!-- player -->\n", controls).replace("</body>", script + "</body>")
        self.page = page


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET` below the server's path."""

    server: TraceServer

    def do_GET(self) -> None:
        """Answer the page, or what it asks for."""
        url = urlsplit(self.path)
        # A page of another site that resolves to this machine has another host.
        if self.headers.get("Host") not in self.server.hosts:
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        if not url.path.startswith(self.server.path):
            return self.send_error(HTTPStatus.NOT_FOUND)
        name = url.path.removeprefix(self.server.path)
        if not name:
            return self._answer(self.server.page, "text/html; charset=utf-8")
        recording = self.server.recording
        answers: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
            "operations": (recording.operations, ("start", "count")),
            "frame": (recording.frame, ("at",)),
            "life": (recording.life, ("block",)),
        }
        if name not in answers:
            return self.send_error(HTTPStatus.NOT_FOUND)
        answer, names = answers[name]
        try:
            query = parse_qs(url.query)
            text = answer(*(int(query[name][0]) for name in names))
        except (KeyError, ValueError, KvError) as error:
            return self.send_error(HTTPStatus.BAD_REQUEST, explain=str(error))
        return self._answer(text, "application/json")

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": PAGE_POLICY,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
