"""Recordings of a manager: results of a replay, and files that are not recordings."""

import os
import threading
from pathlib import Path

import pytest

from pyengine.kv_cache import BlockManager, KvError, TraceError, replay
from tests.support.blocks import compute, computed, unchanged
from tests.support.processes import run_python


def record(path: Path, **settings: object) -> BlockManager:
    """A manager after a few prompts with a common prefix, and its recording."""
    manager = BlockManager(8, 4, **settings)
    manager.record(path)
    for last in range(4):
        sequence = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, last], namespace=b"tenant")
        with sequence.pin():
            sequence.reset()
    pair = [manager.sequence([9]), manager.sequence([9])]
    compute(manager, *pair)
    for token in (7, 8, 9):
        plan = manager.begin_step(4)
        plan.decode(pair)
        plan.commit([token, token])
    del sequence, pair
    manager.stop_recording()
    return manager


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.kvtrace"
    record(path)
    return path


@pytest.mark.parametrize("eviction", ["lru", "2q"])
def test_a_replay_comes_to_the_same_end(tmp_path: Path, eviction: str) -> None:
    path = tmp_path / "a.kvtrace"
    manager = record(path, eviction=eviction, events=True, in_flight_sharing=False)
    report = replay(path)
    assert report.divergence is None
    assert report.failed_check is None
    assert report.is_complete
    assert report.usage == manager.usage()
    assert report.stats.as_dict() == manager.stats().as_dict()
    assert report.stats.merged_blocks == 1
    assert report.operations["sequence"] == 6
    assert report.operations["drop_pin"] == 4
    assert report.operations["drop_sequence"] == 6
    assert "stop_recording" not in report.operations
    seed = report.settings.pop("hash_seed")
    assert isinstance(seed, int)
    assert report.settings | {"hash_seed": seed} == {
        "num_blocks": 8,
        "block_size": 4,
        "groups": (None,),
        "prefix_caching": True,
        "in_flight_sharing": False,
        "partial_reuse": True,
        "events": True,
        "eviction": eviction,
        "hash_seed": seed,
        "hash_bits": 128,
    }
    assert repr(report).startswith("<ReplayReport, ")


def test_paths_are_texts_or_paths(file: Path) -> None:
    assert replay(str(file)).operations == replay(file).operations


def test_a_used_manager_is_left_alone(tmp_path: Path) -> None:
    manager = BlockManager(8, 4)
    computed(manager, range(9)).free()
    path = tmp_path / "never"
    with unchanged(manager), pytest.raises(TraceError, match="1 sequences and 1 steps"):
        manager.record(path)
    assert not path.exists()
    manager.stop_recording()


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    manager = BlockManager(8, 4)
    manager.record(tmp_path / "first")
    with unchanged(manager), pytest.raises(TraceError, match="recorded already"):
        manager.record(tmp_path / "second")
    manager.stop_recording()
    manager.stop_recording()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    manager = BlockManager(8, 4)
    with unchanged(manager), pytest.raises(FileNotFoundError) as caught:
        manager.record(tmp_path / "no" / "folder")
    assert caught.value.filename == str(tmp_path / "no" / "folder")
    manager.record(tmp_path / "now")
    manager.stop_recording()


def test_a_disk_that_is_full() -> None:
    manager = BlockManager(8, 4)
    manager.record("/dev/full")
    sequence = computed(manager, range(9))
    with unchanged(manager), pytest.raises(OSError, match="No space left"):
        manager.stop_recording()
    assert sequence.num_computed_tokens == 9


def test_a_manager_that_is_dropped_leaves_what_it_did(tmp_path: Path) -> None:
    manager = BlockManager(8, 4)
    manager.record(tmp_path / "a")
    sequence = manager.sequence([1])
    del manager, sequence
    report = replay(tmp_path / "a")
    assert (report.operations, report.is_complete) == ({"sequence": 1}, False)


def test_a_cut_names_its_place(file: Path) -> None:
    whole = file.read_bytes()
    calls = set()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        try:
            assert not replay(file).is_complete
        except TraceError as error:
            assert f"cut at byte {size}, in " in str(error)
            calls.add(str(error).split("in ", 1)[1].split(";")[0])
    assert {"its header", "operation 1", "operation 9"} <= calls


def test_files_that_are_no_recordings(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + b"\x07" + whole[9:])
    with pytest.raises(
        TraceError, match=r"format 7, this version reads format 5; version \S+ wrote it"
    ):
        replay(file)
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(TraceError, match=r"damaged at byte \d+, in operation \d+"):
        replay(file)
    file.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(KvError, match="not a recording"):
        replay(file)
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        replay(tmp_path)


def test_a_file_that_blocks_blocks_nobody_else(tmp_path: Path) -> None:
    """A pipe without a reader: the recording thread waits, the others go on."""
    manager, pipe = BlockManager(8, 4), tmp_path / "pipe"
    os.mkfifo(pipe)
    recording = threading.Thread(target=manager.record, args=(pipe,), daemon=True)
    recording.start()
    recording.join(0.1)
    assert recording.is_alive()
    looking = threading.Thread(target=manager.usage, daemon=True)
    looking.start()
    looking.join(10)
    waited = looking.is_alive()
    with pipe.open("rb") as reader:
        recording.join(10)
        manager.stop_recording()
        assert reader.read().startswith(b"kvtrace")
    assert not waited


FILLS = """
import resource, sys
from pathlib import Path
from pyengine.kv_cache import BlockManager
from tests.support.blocks import computed

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
manager = BlockManager(64, 4)
manager.record(sys.argv[1])
for at in range(2000):
    computed(manager, range(at * 7 % 50, at * 7 % 50 + 10)).free()
manager.check()
try:
    manager.stop_recording()
except OSError as error:
    print(error)
computed(manager, range(30)).free()
manager.check()
"""


def test_a_disk_that_fills_is_said_at_the_end_of_a_recording(tmp_path: Path) -> None:
    """By a limit of the size of files; the manager goes on."""
    done = run_python(FILLS, tmp_path / "recording", timeout=60)
    assert done.stderr == ""
    assert "File too large" in done.stdout


PIPE = """
import os, sys, threading
from pyengine.kv_cache import BlockManager
from tests.support.blocks import computed

path = sys.argv[1]
os.mkfifo(path)
reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
manager = BlockManager(64, 4)
manager.record(path)
for _ in range(int(sys.argv[2])):
    manager.sequence([4_000_000_000] * 100_000).free()
computed(manager, range(30)).free()
manager.check()
if sys.argv[3] == "read":
    os.set_blocking(reading, True)
    with open(reading, "rb") as pipe, open(path + ".kvtrace", "wb") as file:
        reader = threading.Thread(target=lambda: file.write(pipe.read()), daemon=True)
        reader.start()
        manager.stop_recording()
        reader.join()
else:
    try:
        manager.stop_recording()
    except OSError as error:
        print(error)
print("the manager goes on")
"""


def record_to_a_pipe(path: Path, sequences: int, end: str) -> str:
    done = run_python(PIPE, path, sequences, end, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_a_pipe_that_the_same_process_reads(tmp_path: Path) -> None:
    """Nobody reads while calls record more than a pipe holds, or until the recording is stopped."""
    said = record_to_a_pipe(tmp_path / "pipe", 10, "read")
    assert said == "the manager goes on\n"
    report = replay(tmp_path / "pipe.kvtrace")
    assert report.is_complete and report.divergence is None
    assert report.operations["sequence"] == 11


def test_an_unread_recording_ends_and_the_manager_goes_on(tmp_path: Path) -> None:
    said = record_to_a_pipe(tmp_path / "pipe", 100, "unread")
    assert "the recording ended before operation" in said and "MiB" in said
    assert said.endswith("the manager goes on\n")
