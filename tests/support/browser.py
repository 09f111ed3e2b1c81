"""Headless Chromium, as Debian packages it, and a server in a thread for it to look at."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

CHROMIUM = shutil.which("chromium")


class Served:
    """An application that answers on a port of this machine, on a separate event loop."""

    def __init__(self, app: FastAPI) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = f"http://127.0.0.1:{port}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve())

    def submit(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Let something run on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def __enter__(self) -> "Served":
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            assert self._thread.is_alive(), "the server has not come up"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server has not gone down"
        self._loop.close()


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; a page of it fails its test by an error on the console."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield chromium
        finally:
            chromium.close()


def errors_of(page: Any) -> list[str]:
    """Errors and warnings on the page's console."""
    errors: list[str] = []
    page.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors
