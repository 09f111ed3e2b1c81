"""What `pyengine serve` says when it is ready."""

import socket
from dataclasses import replace

import pytest

from pyengine.cli.announcement import announcement
from pyengine.config import EngineSettings
from pyengine.server.lifetime import is_local
from pyengine.server.settings import ServerSettings

ABOUT: dict[str, object] = {
    "model": "SmolLM2-135M-Instruct",
    "device": "cpu",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_blocks": 11_649,
    "max_model_len": 8192,
    "kv_cache_dir": "none",
}
ENGINE = EngineSettings()


def said(
    server: ServerSettings, *, is_local: bool = True, replicas: int = 1, **about: object
) -> list[str]:
    return announcement(
        "http://127.0.0.1:8000", ABOUT | about, ENGINE, server, is_local=is_local, replicas=replicas
    )


def test_six_lines() -> None:
    lines = said(ServerSettings())
    assert lines == [
        "serving on http://127.0.0.1:8000",
        "  model   SmolLM2-135M-Instruct: bfloat16 on cpu",
        "  fits    186,384 tokens of KV; 256 sequences of up to 8,192 tokens at a time",
        "  access  programs of this machine, without a key",
        "  pages   /kv (the pool) and /metrics; /openapi.json (the API)",
        "  store   none: the KV cache ends with the server (--kv-cache-dir DIR keeps it)",
    ]


def test_replicas_hold_as_much_each() -> None:
    lines = said(ServerSettings(served_model_name=("small", "fast")), replicas=2)
    assert lines[1] == "  model   small, fast: bfloat16 on 2 replicas on cpu"
    assert lines[2].startswith("  fits    372,768 tokens of KV; 512 sequences of up to")


@pytest.mark.parametrize(
    ("server", "is_local", "access", "pages"),
    [
        (
            ServerSettings(api_key=("a",)),
            True,
            "programs of this machine, with the key",
            "/metrics with the key;",
        ),
        (
            ServerSettings(host="0.0.0.0", api_key=("a", "b"), admin_key=("c",)),
            False,
            "all machines that reach the address, with one of 3 keys",
            "/metrics with an admin key;",
        ),
        (
            ServerSettings(host="0.0.0.0", api_key=("a", "b")),
            False,
            "all machines that reach the address, with one of 2 keys",
            "/metrics need an --admin-key;",
        ),
        (
            ServerSettings(host="0.0.0.0", insecure=True),
            False,
            "all machines that reach the address, without a key",
            "/metrics;",
        ),
        (
            ServerSettings(uds="/run/a"),
            True,
            "programs that may open the socket, without a key",
            "/metrics;",
        ),
    ],
)
def test_who_may_ask(server: ServerSettings, is_local: bool, access: str, pages: str) -> None:
    lines = said(server, is_local=is_local)
    assert lines[3] == f"  access  {access}"
    assert pages in lines[4]


def test_keys_are_not_shown() -> None:
    lines = said(replace(ServerSettings(), api_key=("secret-1",), admin_key=("secret-2",)))
    assert "secret" not in "".join(lines)


def test_the_store() -> None:
    store = {"kv_cache_store_bytes": 10 << 30, "kv_cache_entries": 1234, "kv_cache_access": "write"}
    (line,) = said(ServerSettings(), kv_cache_dir="/var/kv", **store)[5:]
    assert line == "  store   /var/kv: 1,234 entries, up to 10.0 GiB; access: write"
    (line,) = said(ServerSettings(), **store)[5:]
    assert line == "  store   up to 10.0 GiB of host memory"


def test_addresses_that_other_machines_do_not_reach() -> None:
    for family, address, expected in (
        (socket.AF_INET, ("127.0.0.1", 0), True),
        (socket.AF_INET, ("0.0.0.0", 0), False),
        (socket.AF_UNIX, None, True),
    ):
        with socket.socket(family) as server:
            if address is not None:
                server.bind(address)
            assert is_local(server) is expected
