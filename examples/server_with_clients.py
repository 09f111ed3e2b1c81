"""The server and its clients: concurrent streams, usage, metrics, a clean shutdown.

The clients use the standard library, to show the HTTP requests. The openai package works as well:
`OpenAI(base_url="http://127.0.0.1:PORT/v1", api_key="none")`.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

COUNTRIES = ["France", "Japan", "Italy", "Egypt"]


def free_port() -> int:
    """An unused port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts requests."""
    while server.poll() is None:
        try:
            urlopen(f"{url}/health").close()
            return
        except URLError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def ask(url: str, country: str) -> tuple[str, int]:
    """Stream one chat. Returns its text and the number of chunks."""
    question = f"What is the capital of {country}? Answer with one word."
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
    }
    request = Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    text, chunks = "", 0
    with urlopen(request) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    text += choice["delta"].get("content") or ""
                    chunks += 1
    return text, chunks


def metric(url: str, name: str) -> float:
    """The value of one metric."""
    with urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def main() -> None:
    """Start a server, call it from four clients at once, and stop it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    program = Path(sys.executable).with_name("pyengine")
    command = [str(program), "serve", "--port", str(port), "--log-format", "none"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(url, server)
        with ThreadPoolExecutor(len(COUNTRIES)) as clients:
            answers = list(clients.map(lambda country: ask(url, country), COUNTRIES))
        for country, (text, chunks) in zip(COUNTRIES, answers, strict=True):
            print(f"{country}: {text!r}, in {chunks} chunks")
        print(f"tokens generated: {metric(url, 'vllm:generation_tokens_total'):.0f}")
    finally:
        server.send_signal(signal.SIGTERM)  # running requests finish, then the server ends
        print(f"the server ended with status {server.wait()}")


if __name__ == "__main__":
    main()
