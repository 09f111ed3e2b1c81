"""`pyengine cache ls|verify|prune`."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.kv_cache import KVBlocks, KVStore, kv_fingerprint
from tests.support.processes import run_python

ROOT = Path(__file__).parents[3]
MODELS = [kv_fingerprint([("model", name)]) for name in (b"small", b"large")]
NAMES = [model.hex()[:16] for model in MODELS]
SIZE = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three entries of one model and one of another."""
    folder = tmp_path / "store"
    store = KVStore(folder, max_bytes=2**26)
    tensor = np.arange(4 * SIZE).reshape(4, SIZE).astype(np.uint8)
    for at, count in ((0, 3), (1, 1)):
        prefix = store.prefix(range(count), 1, fingerprints=[MODELS[at]])  # type: ignore[arg-type]
        blocks = [(i, 0, i) for i in range(count)]
        assert len(prefix.store(KVBlocks([tensor], [[0]]), blocks)) == count
    assert store.close(60)
    return folder


@pytest.fixture
def writer(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that writes to the folder."""
    code = """if True:
        import sys
        from pyengine.kv_cache import KVStore
        store = KVStore(sys.argv[1], max_bytes=2**26, access="write")
        print("ready", flush=True)
        sys.stdin.read()"""
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate("")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def refusal(result: Result) -> str:
    """The sentence with which a command was refused before it did anything."""
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


def num_entries(folder: Path) -> dict[str, int]:
    store = KVStore(folder, max_bytes=2**26, access="read")
    return {row[0].hex()[:16]: row[1] for row in store.fingerprints()}


def test_ls_shows_models_and_totals(folder: Path) -> None:
    result = run("ls", folder)
    assert result.exit_code == 0, result.output
    today = time.strftime("%Y-%m-%d")
    first, second = result.stdout.splitlines()[1:3]
    assert re.fullmatch(rf"  {NAMES[0]}  3 entries, 3\.\d KiB, last written {today} ..:..", first)
    assert re.fullmatch(rf"  {NAMES[1]}  1 entry, 1\.\d KiB, last written {today} ..:..", second)
    assert re.search(r"^  entries +4$", result.stdout, re.MULTILINE)
    files = sum(path.stat().st_size for path in folder.glob("0*"))
    shown = re.search(r"^  size of all files +(.*) KiB$", result.stdout, re.MULTILINE)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(files / 1024, abs=0.06)
    assert re.search(r"^  free on the disk +\S+ GiB$", result.stdout, re.MULTILINE)


def test_ls_of_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    result = run("ls", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search(r"^  entries +0$", result.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_verify_of_whole_entries(folder: Path) -> None:
    result = run("verify", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch(r"4 entries whole, 0 damaged, \d+\.\d s\n", result.stdout)


def damage(folder: Path) -> None:
    """Change the last byte of the last entry."""
    path = folder / "00000000.data"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_names_damaged_entries_and_leaves_them(folder: Path) -> None:
    damage(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = run("verify", folder)
    assert result.exit_code == 1
    named = re.fullmatch(
        r"damaged: ([0-9a-f]{64})\n3 entries whole, 1 damaged, .*\n", result.stdout
    )
    assert named is not None
    assert f"entry {named[1]} has a payload with a wrong checksum" in result.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_prune_all(folder: Path) -> None:
    result = run("prune", folder, "--all")
    assert result.exit_code == 0, result.output
    pattern = r"4 entries removed, 0 entries left; files: \d\.\d KiB before, 0 bytes now\n"
    assert re.fullmatch(pattern, result.stdout)
    assert num_entries(folder) == {}
    assert list(folder.glob("0*")) == []
    assert run("prune", folder, "--all").stdout == "no entries\n"


@pytest.mark.parametrize("digits", [MODELS[1].hex(), NAMES[1], NAMES[1][:4].upper()])
def test_prune_by_fingerprint(folder: Path, digits: str) -> None:
    result = run("prune", folder, "--fingerprint", digits)
    assert result.stdout.startswith("1 entry removed, 3 entries left; "), result.output
    assert num_entries(folder) == {NAMES[0]: 3}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", "1h"], {0: 3, 1: 1}),
        (["--older-than", "1s"], {}),
        (["--older-than", "1s", "--fingerprint", NAMES[0]], {1: 1}),
        (["--older-than", "1h", "--fingerprint", NAMES[0]], {0: 3, 1: 1}),
    ],
)
def test_prune_by_age(folder: Path, arguments: list[str], left: dict[int, int]) -> None:
    time.sleep(3)  # times are whole seconds
    result = run("prune", folder, *arguments)
    assert result.exit_code == 0, result.output
    assert num_entries(folder) == {NAMES[at]: count for at, count in left.items()}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "say what to remove: either --all, or one or both of --older-than and --fingerprint"),
        (["--all", "--older-than", "7d"], "say what to remove: either --all, or one or both"),
        (["--older-than", "7"], "--older-than 7 is no age; give a number with a unit: 90s, 30m"),
        (["--older-than", "-1d"], "--older-than -1d is no age"),
        (["--fingerprint", "xyz"], "--fingerprint xyz is that of 0 models; `pyengine cache ls`"),
    ],
)
def test_prune_needs_a_choice(folder: Path, arguments: list[str], sentence: str) -> None:
    assert refusal(run("prune", folder, *arguments)).startswith(sentence)
    assert sum(num_entries(folder).values()) == 4


def test_beside_a_writer(folder: Path, writer: "subprocess.Popen[str]") -> None:
    assert run("ls", folder).exit_code == 0
    assert run("verify", folder).exit_code == 0
    sentence = refusal(run("prune", folder, "--all"))
    assert sentence.startswith(f"{folder} is written by process {writer.pid}; close it")
    assert sum(num_entries(folder).values()) == 4


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["prune", "--all"]])
def test_folders_that_are_no_store(tmp_path: Path, folder: Path, command: list[str]) -> None:
    missing, file, link, other = (tmp_path / name for name in ("missing", "file", "link", "other"))
    file.write_text("")
    link.symlink_to(folder)
    other.mkdir(mode=0o700)
    (other / "holiday.jpg").write_text("")

    def said(path: Path) -> str:
        return refusal(run(command[0], path, *command[1:]))

    assert said(missing) == f"{missing} is not a folder: give the folder of a KV store"
    assert said(file) == f"{file} is not a folder: give the folder of a KV store"
    assert said(link) == f"{link} is a symbolic link; name the folder itself"
    assert said(other).startswith(f"{other} is not empty and not a KV store")
    folder.chmod(0o755)
    assert said(folder) == (
        f"{folder} is accessible to other users (mode 755); run: chmod 700 {folder}"
    )
    for mode in (0o755, 0o1777):
        other.chmod(mode)
        assert said(other).startswith(f"{other} is not empty and not a KV store")
    folder.chmod(0o700)
    (folder / "format").write_text("pyengine kv-store\nformat 9\n")
    assert "is a KV store of format" in said(folder)
    assert not missing.exists()
    assert os.listdir(other) == ["holiday.jpg"]


def test_torch_is_not_loaded(folder: Path) -> None:
    code = """if True:
        import sys
        from pyengine.cli import main
        sys.argv = ["pyengine", "cache", "ls", sys.argv[1]]
        try:
            main()
        except SystemExit as left:
            assert not left.code
        print("torch" in sys.modules, "pyengine.kv_cache" in sys.modules)"""
    assert run_python(code, folder).stdout.endswith("False True\n")
