"""The page of a recording: its answers, operation by operation, and refused requests."""

import base64
import http.client
import json
import re
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.kv_cache import BlockManager, TraceError, TracePlayer
from pyengine.server.dashboard import trace_page
from pyengine.server.dashboard.trace_page import Recording, TraceServer

STATES = ("free", "evictable", "active", "pinned", "loading")


def record(path: Path) -> list[list[str]]:
    """Records late merge, eviction and a pin; returns the state of each block after each call."""
    manager = BlockManager(4, 4)
    manager.record(path)
    states = []

    def look() -> None:
        states.append([manager.state(block) for block in range(4)])

    pair = [manager.sequence([1, 2, 3]) for _ in range(2)]
    states += [["free"] * 4] * 2
    for token in (4, 5):
        plan = manager.begin_step(8)
        look()
        if token == 4:
            for sequence in pair:
                plan.prefill(sequence, 8)
                look()
        else:
            plan.decode(pair)
            look()
        plan.commit([token, token])
        look()
    pin = pair[0].pin()
    look()
    for sequence in pair:
        sequence.free()
        look()
    pin.release()
    manager.usage()
    look()
    manager.evict_all()
    look()
    manager.stop_recording()
    look()
    return states


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.kvtrace"


def shown_states(frame: dict[str, Any]) -> list[str]:
    blocks = sum(frame["usage"].values())
    flat = zlib.decompress(base64.b64decode(frame["blocks"]))
    numbers = np.frombuffer(flat, np.uint8, blocks, 8 * blocks)
    return [STATES[number] for number in numbers]


def test_frames_are_the_states_after_each_operation_in_any_order(path: Path) -> None:
    states = record(path)
    recording = Recording(path)
    assert recording.num_operations == len(states)
    order = [*range(len(states)), *reversed(range(len(states))), 3, 1, len(states) - 1]
    for at in order:
        frame = json.loads(recording.frame(at + 1))
        assert shown_states(frame) == states[at], at
        assert (frame["time"], frame["about"]["operations"]) == (at + 1, len(states))
    assert json.loads(recording.frame(99))["time"] == len(states)
    start = json.loads(recording.frame(0))
    assert shown_states(start) == ["free"] * 4 and start["sequences"] == []
    merged = json.loads(recording.frame(9))["sequences"]
    assert merged == [[1, 5, 4, 0, [0], 1], [2, 5, 4, 0, [0], 1]]


def test_operations_come_in_parts(path: Path) -> None:
    record(path)
    recording = Recording(path)
    rows = json.loads(recording.operations(1, 1_000))
    assert [row[0] for row in rows] == list(range(1, recording.num_operations + 1))
    assert rows[0][1].startswith("sequence(tokens=[1, 2, 3]")
    assert "from block 1 to 0" in rows[8][2]
    assert json.loads(recording.operations(5, 2)) == rows[4:6]
    assert json.loads(recording.operations(99, 2)) == []


def test_the_life_of_a_block(path: Path) -> None:
    record(path)
    life = json.loads(Recording(path).life(0))
    changes = [(number, *counts) for number, _, *counts, _ in life]
    assert changes == [
        (4, "active", 1, 1, [1]),
        (9, "active", 2, 2, [1, 2]),  # the duplicate was merged into it
        (10, "active", 3, 2, [1, 2]),
        (11, "active", 2, 1, [2]),
        (12, "pinned", 1, 0, []),
        (13, "evictable", 0, 0, []),
        (14, "free", 0, 0, []),
    ]
    assert [is_cached for *_, is_cached in life] == [False, True, True, True, False, True, False]
    duplicate = json.loads(Recording(path).life(1))
    assert [(number, state) for number, _, state, *_ in duplicate] == [(5, "active"), (9, "free")]


def test_a_player_goes_to_any_place(path: Path) -> None:
    record(path)
    player = TracePlayer(path)
    assert player.settings["num_blocks"] == 4 and player.position == 0
    first = player.advance()
    assert first is not None and (first.number, first.kind, first.answer) == (1, "sequence", "1")
    assert player.seek(7) == player.position == 7
    assert player.usage().active == 2
    assert player.seek(2) == 2 and player.usage().free == 4
    end = player.seek(1_000)
    assert end == player.position and player.advance() is None
    assert player.divergence is None
    assert player.stats().merged_blocks == 1


def test_an_operation_that_is_answered_differently(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(path)

    class Parted:
        operation, call, recorded, obtained = 7, "trim(sequence=3, num_tokens=9)", "2", "1"

    class Player:
        def __init__(self, file: Path) -> None:
            self._real = TracePlayer(file)

        def __getattr__(self, name: str) -> object:
            return Parted if name == "divergence" else getattr(self._real, name)

    monkeypatch.setattr(trace_page, "TracePlayer", Player)
    about = json.loads(Recording(path).frame(0))["about"]
    assert about["divergence"] == (
        "operation 7, trim(sequence=3, num_tokens=9): recorded 2; obtained 1"
    )


@pytest.fixture
def server(path: Path) -> Iterator[TraceServer]:
    record(path)
    with TraceServer(Recording(path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def get(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_and_its_data(server: TraceServer) -> None:
    status, page = get(server.url)
    assert status == 200
    assert 'id="player"' in page and "<!--" not in page.replace("<!doctype", "")
    assert page.count("<script>") == 2
    assert json.loads(get(f"{server.url}frame?at=1")[1])["time"] == 1
    assert len(json.loads(get(f"{server.url}operations?start=1&count=3")[1])) == 3
    assert len(json.loads(get(f"{server.url}life?block=0")[1])) == 7


def test_others_are_refused(server: TraceServer) -> None:
    assert get(server.url.replace(server.path, "/"))[0] == 404
    assert get(server.url, Host="evil.example")[0] == 421
    for query in ("frame", "frame?at=x", "life?block=4", "life?block=-1", "operations?start=1"):
        assert get(server.url + query)[0] == 400, query
    assert get(f"{server.url}settings")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", server.path)
    assert connection.getresponse().status == 501
    connection.close()


def test_damaged_files(path: Path) -> None:
    record(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(TraceError, match="cut at byte"):
        Recording(path)
    path.write_bytes(b"text")
    with pytest.raises(TraceError, match="not a recording"):
        Recording(path)
    with pytest.raises(FileNotFoundError):
        Recording(path.with_name("missing"))


def test_its_scripts_declare_each_name_once(tmp_path: Path) -> None:
    """A browser does not run a script that declares a name of another one."""
    record(tmp_path / "a.kvtrace")
    with TraceServer(Recording(tmp_path / "a.kvtrace")) as server:
        page = server.page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) > 1
    declared = re.compile(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
    names = [name for script in scripts for name in declared.findall(script)]
    assert len(names) > 50 and len(names) == len(set(names)), names
