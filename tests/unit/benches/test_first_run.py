"""The first run on a GPU: parts as child processes, what comes back, what is taken along."""

import ast
import os
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from benches.gpu.first_run import packing
from benches.gpu.first_run.__main__ import main
from benches.gpu.first_run.driver import ROOT, Driver
from benches.gpu.first_run.kit import mebibytes, prepare_linker
from benches.gpu.first_run.parts import PARTS, Part
from benches.gpu.first_run.results import append, is_wrong, page, read
from tests.support.processes import is_running, wait_for_end

PROGRAMS = {
    "fine": "print('fine')",
    "wrong": "raise AssertionError('3 is not 4')",
    "gone": "import os; os._exit(3)",
    "hangs": "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)",
    "leaves": (
        "import subprocess, sys, pathlib; child = subprocess.Popen(['sleep', '600']);"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(child.pid))"
    ),
    "sleeps": (
        "import pathlib, sys, time; begin = time.monotonic(); time.sleep(0.3);"
        "pathlib.Path(sys.argv[1], 'times').write_text(f'{begin} {time.monotonic()}')"
    ),
}


@dataclass
class FakeDriver(Driver):
    """Runs the program that a part is named after, with digits for its number."""

    def command(self, part: Part, folder: Path) -> list[str]:
        """Python with one of `PROGRAMS`."""
        return [sys.executable, "-c", PROGRAMS[part.name.rstrip("0123456789")], str(folder)]


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    out = tmp_path / "out"
    out.mkdir()
    return FakeDriver("cpu", out, tmp_path / "scratch", os.environ, minutes=5)


def part(name: str, seconds: float = 30, *, alone: bool = False, after: tuple = ()) -> Part:
    return Part(name, "", seconds, alone=alone, after=after)


def summary(driver: Driver) -> str:
    return (driver.out / "summary.md").read_text()


def times(driver: Driver, name: str) -> tuple[float, float]:
    begin, end = (driver.scratch / name / "times").read_text().split()
    return float(begin), float(end)


def test_every_part_has_its_line(driver: FakeDriver) -> None:
    driver.run([part("fine"), part("wrong"), part("gone"), part("hangs", 0.5), part("fine2")])
    text = summary(driver)
    for words in (
        "done  fine (",
        "FAILED  wrong (0 s): status 1; AssertionError: 3 is not 4",
        "FAILED  gone (0 s): status 3",
        "FAILED  hangs",
        "out of time",
        "done  fine2",
    ):
        assert words in text
    assert sorted(driver.failed) == ["gone", "hangs", "wrong"]
    assert (driver.logs / "fine.log").read_text() == "fine\n"


def test_what_a_part_started_ends_with_it(driver: FakeDriver) -> None:
    driver.run([part("leaves")])
    pid = int((driver.scratch / "leaves" / "pid").read_text())
    assert "done  leaves" in summary(driver)
    assert wait_for_end([pid], 10) == []


def test_parts_run_side_by_side_or_alone_and_after_others(driver: FakeDriver) -> None:
    driver.run(
        [
            part("sleeps1"),
            part("sleeps2"),
            part("sleeps3", after=("sleeps1",)),
            part("sleeps4", alone=True),
            part("sleeps5", after=("no such part",)),
        ]
    )
    spans = [times(driver, f"sleeps{number}") for number in range(1, 6)]
    assert spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
    assert spans[2][0] >= spans[0][1]
    assert spans[3][0] >= max(end for _, end in spans[:3])
    assert spans[4][0] >= spans[3][1]


def test_as_many_as_jobs_run_at_once(driver: FakeDriver) -> None:
    driver.jobs = 1
    driver.run([part("sleeps1"), part("sleeps2")])
    assert times(driver, "sleeps2")[0] >= times(driver, "sleeps1")[1]


def test_parts_without_time_are_named(driver: FakeDriver) -> None:
    driver.minutes = 0
    driver.run([part("fine")])
    assert "not run  fine: out of time" in summary(driver)


def test_an_interruption_ends_all_parts(driver: FakeDriver) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        driver.run([part("hangs"), part("fine")], interrupt)
    assert time.monotonic() - begin < 20
    assert "cut off  hangs" in summary(driver)


def test_parts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "sundries", "--out", str(tmp_path)])


def test_parts_exist_and_fit_into_nine_minutes() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        module, _, function = part.call.partition(":")
        tree = ast.parse((ROOT / f"benches/gpu/first_run/{module}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert part.seconds <= 240
        assert set(part.after) <= set(names[: names.index(part.name)])
    first = ["machine", "large"]
    assert sum(part.seconds for part in PARTS if part.name in first) < 9 * 60 - 170


# --- what comes back


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    children = []
    for letter in "ab":
        children.append(os.fork())
        if not children[-1]:
            for _ in range(50):
                append(path, f'{{"part": "{letter * 3000}"}}')
            os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert sorted({line["part"][0] for line in read(path)}) == ["a", "b"]
    assert len(read(path)) == 100


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"ok": True, "wrong": []}, False),
        ({"ok": False}, True),
        ({"wrong": ["token 3"]}, True),
        ({"wrong": 0}, False),
        ({"failed": "ValueError: no"}, True),
        ({"skipped": "no GPU"}, False),
    ],
)
def test_what_is_wrong(figures: dict, expected: bool) -> None:
    assert is_wrong(figures) is expected


DECODE = {"part": "large", "shape": "Llama-3.1-8B", "compiled": True, "work": "decode"}


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ({**DECODE, "batch": 256, "roofline_share": 0.8}, "roofline >= 0.7 | 0.8 | met"),
        ({**DECODE, "batch": 256, "roofline_share": 0.6}, "roofline >= 0.7 | 0.6 | not met"),
        ({**DECODE, "batch": 32, "roofline_share": 0.8}, "roofline >= 0.7 | not measured"),
        ({**DECODE, "batch": 256, "roofline_share": None}, "roofline >= 0.7 | not measured"),
        ({**DECODE, "batch": 256, "step_over_graph": 1.05}, "alone <= 1.1 | 1.05 | met"),
        ({**DECODE, "batch": 256, "step_over_graph": 1.3}, "alone <= 1.1 | 1.3 | not met"),
    ],
)
def test_goals(line: dict, row: str) -> None:
    assert row in "\n".join(page([line], "cuda"))


def test_the_page_has_every_figure_and_marks_what_is_wrong() -> None:
    lines = [
        {"part": "kernels", "piece": "kv write", "wrong": ["bfloat16"], "last_us": 12.345},
        {"part": "large", "work": "profile", "table": [["gemm", 2.0, 31.5]]},
    ]
    text = "\n".join(page(lines, "cuda"))
    assert "- **WRONG** kernels: piece kv write, wrong ['bfloat16'], last_us 12.3" in text
    assert "31.5 us     2.0x  gemm" in text
    assert "mean nothing" in "\n".join(page(lines, "cpu"))


def test_logs_come_back_by_their_ends(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "large.log").write_bytes(b"x" * packing.MAX_LOG + b"the end")
    packing.keep_logs(logs, tmp_path)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        file = archive.extractfile("large.log")
        assert file is not None
        data = file.read()
    assert len(data) == packing.MAX_LOG and data.endswith(b"the end")


def test_built_modules_come_back_as_the_next_kit_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("small", 1000), ("large", 200_000)):
        folder = tmp_path / "cache/.cache/flashinfer/0.6.18/90a/cached_ops" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.so").write_bytes(os.urandom(size))
        (folder / f"{name}.o").write_bytes(b"object")
    packing.keep_built(tmp_path / "cache", tmp_path)
    with tarfile.open(tmp_path / "built.tar.gz") as archive:
        assert archive.getnames() == ["small/small.so", "large/large.so"]
    monkeypatch.setattr(packing, "MAX_FILE", 100_000)
    packing.keep_built(tmp_path / "cache", tmp_path)
    with tarfile.open(tmp_path / "built.tar.gz") as archive:
        assert archive.getnames() == ["small/small.so"]
    packing.keep_built(tmp_path / "empty", tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- what is taken along


def test_wheels_and_modules_are_installed_without_pip(tmp_path: Path) -> None:
    kit, site = tmp_path / "kit", tmp_path / "site"
    (kit / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(kit / "wheels/flashinfer_python-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/__init__.py", "__version__ = '1'")
        wheel.writestr("flashinfer_python-1.dist-info/METADATA", "Name: flashinfer-python")
    (kit / "prebuilt/cascade").mkdir(parents=True)
    (kit / "prebuilt/cascade/cascade.so").write_bytes(b"library")
    assert packing.install(kit, site) == ["flashinfer_python-1-py3-none-any", "cascade"]
    assert (site / "flashinfer/__init__.py").is_file()
    assert (site / "flashinfer/data/aot/cascade/cascade.so").read_bytes() == b"library"
    assert packing.install(tmp_path / "no kit", site) == []


def test_the_size_of_a_kit_counts_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "kit/wheels").mkdir(parents=True)
    (tmp_path / "kit/wheels/one").write_bytes(bytes(1 << 20))
    (tmp_path / "two").write_bytes(bytes(1 << 19))
    assert mebibytes([tmp_path / "kit", tmp_path / "two"]) == 1.5


def test_the_linker_finds_its_libraries(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcudart.so.13").write_bytes(b"runtime")
    for _ in range(2):
        prepare_linker(tmp_path)
    assert (tmp_path / "lib64/libcudart.so").read_bytes() == b"runtime"
    assert (tmp_path / "lib64/stubs/libcuda.a").is_file()


def test_no_part_is_left_running(driver: FakeDriver) -> None:
    driver.run([part("leaves1"), part("leaves2")])
    for name in ("leaves1", "leaves2"):
        assert not is_running(int((driver.scratch / name / "pid").read_text()))
