"""`pyengine trace replay`."""

import resource
import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pyengine.cli import recordings
from pyengine.cli.app import app
from pyengine.kv_cache import BlockManager
from tests.support.blocks import computed
from tests.support.processes import run_python


@pytest.fixture
def file(tmp_path: Path) -> Path:
    manager = BlockManager(64, 4, hash_seed=5)
    path = tmp_path / "a.kvtrace"
    manager.record(path)
    for _ in range(4):
        computed(manager, range(10)).free()
    manager.stop_recording()
    return path


def run(file: Path) -> Result:
    return CliRunner().invoke(app, ["trace", "replay", str(file)])


def rows(result: Result) -> dict[str, str]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    return {name: value.strip() for name, value in (line[2:].split("  ", 1) for line in lines)}


def test_what_happened_is_printed(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.output
    shown = rows(result)
    assert shown["num blocks"] == "64"
    assert shown["hash seed"] == "5"
    assert (shown["sequence"], shown["commit"], shown["free"]) == ("4", "4", "62")
    assert (shown["prompt tokens"], shown["prompt tokens cached"]) == ("40", "24")
    assert (shown["hit rate"], shown["tokens computed"]) == ("60.0%", "16")
    assert (shown["evictable"], shown["blocks merged"], shown["blocks evicted"]) == ("2", "0", "0")
    assert float(shown["seconds"]) < 10
    assert result.stdout.endswith("20 operations, all results as recorded\n")


def test_a_recording_of_nothing(tmp_path: Path) -> None:
    manager = BlockManager(8, 4)
    manager.record(tmp_path / "empty")
    manager.stop_recording()
    result = run(tmp_path / "empty")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("0 operations, all results as recorded\n")


def test_a_recording_without_an_end_says_so(file: Path) -> None:
    whole = file.read_bytes()
    sizes = range(len(whole) - 1, 0, -1)
    results = (_cut(file, whole[:size]) for size in sizes)
    result = next(result for result in results if result.exit_code == 0)
    assert "20 operations" in result.stdout
    assert "not closed by stop_recording()" in result.stdout


def _cut(file: Path, data: bytes) -> Result:
    file.write_bytes(data)
    return run(file)


def test_where_recording_and_this_version_part(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parted:
        operation = 7
        call = "trim(sequence=3, num_tokens=9)"
        recorded = "2"
        obtained = "refused, this sequence was freed; make a new one"

    class Report:
        def __init__(self, path: Path) -> None:
            self._real = recorded_replay(path)

        def __getattr__(self, name: str) -> object:
            return Parted if name == "divergence" else getattr(self._real, name)

    recorded_replay = recordings.replay
    monkeypatch.setattr(recordings, "replay", Report)
    result = run(file)
    assert result.exit_code == 1
    assert result.stderr == (
        "operation 7 returned a different result\n"
        "  call      trim(sequence=3, num_tokens=9)\n"
        "  recorded  2\n"
        "  obtained  refused, this sequence was freed; make a new one\n"
    )
    assert rows(result)["sequence"] == "4"
    assert "all answered" not in result.stdout


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"kvtrace\n\x05\x40", "is cut at byte 10, in its header; end one with stop_recording()"),
        (
            b"kvtrace\n\x07",
            "format 7, this version reads format 5; replay it with the version that",
        ),
        (b"{}", "is not a recording of a BlockManager; give a file that record() has written"),
    ],
)
def test_files_that_cannot_be_replayed(tmp_path: Path, data: bytes, said: str) -> None:
    file = tmp_path / "bad"
    file.write_bytes(data)
    result = run(file)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {file}: ")
    assert said in line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        result = run(path)
        assert result.exit_code == 2
        assert result.stderr == f"error: cannot read {path}: {reason}; give a recording\n"


@pytest.mark.parametrize("start", [b"", b"kvtrace\n", b"kvtrace\n\x05"])
def test_a_huge_file_takes_no_memory_of_its_size(tmp_path: Path, start: bytes) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as out:
        out.write(start)
        out.truncate(64 << 30)  # sparse: zeros that use no disk space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run(huge).exit_code == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


BASE_INSTALL = (
    "import sys; sys.modules.update(dict.fromkeys(['torch', 'typer', 'click', 'rich', 'tqdm']))\n"
    "from pyengine.cli import main\n"
    "sys.argv = ['pyengine', 'trace', 'replay', *sys.argv[1:]]; main()"
)
"""A process in which only what the base install brings can be imported."""


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(BASE_INSTALL, *arguments, timeout=60, status=None)


def test_the_base_install_replays(file: Path) -> None:
    """The block manager needs neither torch nor typer, nor does a recording of it."""

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("  seconds")]

    bare, whole = run_bare(str(file)), run(file)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert lines(bare.stdout) == lines(whole.stdout)


def test_the_base_install_says_what_is_wrong(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no recording")
    bare, whole = run_bare(str(tmp_path / "text")), run(tmp_path / "text")
    assert (bare.returncode, bare.stderr) == (whole.exit_code, whole.stderr) != (0, "")
    bare = run_bare(str(tmp_path / "none"))
    assert bare.returncode == 2 and "cannot read" in bare.stderr
    for arguments in ((), (str(file), str(file)), ("--nothing", str(file))):
        bare = run_bare(*arguments)
        assert bare.returncode == 2 and "usage: pyengine" in bare.stderr
    assert run_bare("--help").returncode == 0


def test_torch_is_not_imported(file: Path) -> None:
    code = (
        "import sys; from pyengine.cli import main\n"
        f"sys.argv = ['pyengine', 'trace', 'replay', {str(file)!r}]\n"
        "try: main()\n"
        "except SystemExit as left: print(left.code, 'torch' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "0 False"
