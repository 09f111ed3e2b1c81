"""The first run on a GPU, on a CPU: the whole script, its results, and docs/guides/gpu.md."""

import json
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benches.gpu.first_run.parts import PARTS
from benches.gpu.first_run.results import read
from benches.gpu.model import SHAPES
from tests.gpu.models import FAMILIES
from tests.support.docs import ROOT, commands, table
from tests.support.gpu_checks import checked
from tests.support.processes import processes_with, run_program

DOCUMENT = "docs/guides/gpu.md"
MAX_FILES, MAX_BYTES = 8, 16 << 20
HERE = [part.name for part in PARTS if part.tiny is not None]
"""The parts that run on a CPU."""


def command(folder: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "benches.gpu.first_run", "--out", str(folder / "out")]
    kit = ["--kit", str(folder / "no kit"), "--cache", str(folder / "cache")]
    return [*program, *kit, "--slow", "8", "--minutes", "30", "--jobs", "2", *arguments]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run_program(command(tmp_path, "--device", "cpu"), status=None)
    out = tmp_path / "out"
    summary = (out / "summary.md").read_text()
    assert done.returncode == 0, summary + (out / "found.md").read_text()
    assert re.findall(r" (\w+)  (\w+) \(", summary) == [("done", name) for name in _ended(summary)]
    assert sorted(_ended(summary)) == sorted(HERE)
    assert summary.splitlines()[-1].endswith("end, through")
    files = list(out.iterdir())
    assert len(files) <= MAX_FILES
    assert all(file.stat().st_size < MAX_BYTES for file in files)
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert sorted(archive.getnames()) == sorted(f"{name}.log" for name in HERE)
    _figures(read(out / "results.jsonl"))
    _checks((out / "checks.md").read_text())


def _ended(summary: str) -> list[str]:
    return re.findall(r"done  (\w+) \(", summary)


def _figures(lines: list[dict]) -> None:
    """A run on any device has these figures. A profile is of torch: a CPU's steps have none."""
    works = {line.get("work") for line in lines}
    wanted = {"rates", "decode", "prefill", "equal prompts", "mixed", "sampling", "overlap"}
    assert wanted | {"batching", "shared prefix"} <= works
    (profile,) = (line for line in lines if line.get("piece") == "profile")
    assert profile["skipped"] == "the profiler saw nothing"
    pieces = {line.get("piece") for line in lines}
    assert {"kv write", "rotation", "grouped products", "draw", "log-probabilities"} <= pieces
    states = [line for line in lines if line["part"] == "state_kernels"]
    of_states = {"short convolution", "delta rule", "state space", "gated norm"}
    assert {line["piece"] for line in states} == of_states
    assert all(line["us"] > 0 and line["bound_us"] > 0 for line in states)
    (crowd,) = (line for line in lines if line["part"] == "crowd")
    assert crowd["equal"] == crowd["requests"]


def _checks(page: str) -> None:
    """The default configuration is within its bound; a window that is too small is not."""
    error, bound = _error(page, "oracle_up_to_rounding[llama]")
    assert error <= bound
    error, bound = _error(page, "states_are_those_of_the_cpu_up_to_rounding[lfm2-float32]")
    assert error <= bound
    error, bound = _error(page, "test_a_window")
    assert error > bound


def _error(page: str, check: str) -> tuple[float, float]:
    """The error of a check that passed, and its bound."""
    (line,) = re.findall(rf"^- passed .*{re.escape(check)}.*$", page, re.MULTILINE)
    error, bound = (re.findall(rf"\b{name} ([^,\s]+)", line)[0] for name in ("error", "bound"))
    return float(error), float(bound)


@pytest.mark.slow
def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path) -> None:
    arguments = command(tmp_path, "--device", "cpu", "--only", "machine,checks_gather")
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, cwd=ROOT)
    out = tmp_path / "out"
    log = tmp_path / "out" / "checks.md"
    while not log.exists():  # written when the first part is done
        time.sleep(0.1)
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    summary = (out / "summary.md").read_text()
    assert "done  machine" in summary
    assert "cut off  checks_gather" in summary
    assert "end, cut off; failed: checks_gather" in summary
    assert any("bytes_per_second" in line for line in read(out / "results.jsonl"))
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert archive.getnames() == ["checks_gather.log", "machine.log"]
    assert processes_with(str(out)) == []


@pytest.mark.slow
def test_a_device_that_is_not_there_is_a_failure_that_is_told(tmp_path: Path) -> None:
    arguments = command(tmp_path, "--device", "cuda:63", "--only", "machine")
    run_program(arguments, status=1)
    assert "FAILED  machine" in (tmp_path / "out/summary.md").read_text()
    failures = [line for line in read(tmp_path / "out/results.jsonl") if "failed" in line]
    assert json.dumps(failures[0]) and failures[0]["part"] == "machine"
    assert "**WRONG** machine" in (tmp_path / "out/found.md").read_text()


@pytest.mark.slow
def test_checks_without_a_device_are_failures_that_are_written_down(tmp_path: Path) -> None:
    wanted = "test_the_first_use_of_a_backend and gather"
    status, page = checked("--device", "cuda:63", "-k", wanted, report=tmp_path / "checks.md")
    assert status == 1
    assert "- failed test_backends.py::test_the_first_use_of_a_backend[gather]" in page
    assert "Error" in page


def test_the_guide_names_what_there_is() -> None:
    said = {row[0] for row in table(DOCUMENT, "tests/gpu", "what must hold")}
    assert said == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    text = (ROOT / DOCUMENT).read_text()
    _, _, families = text.partition("in bfloat16: ")
    assert set(re.findall(r"\w+", families.partition(".")[0])) == set(FAMILIES)
    for shape in ("Qwen3-0.6B", "Llama-3.1-8B"):
        assert shape in text and shape in SHAPES
    listed = [name for row in table(DOCUMENT, "parts", "contents") for name in row[0].split()]
    assert [name.strip("`,") for name in listed] == [part.name for part in PARTS]
    assert "Not yet run on a GPU" in text


def test_the_guide_s_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = commands(DOCUMENT)
    assert len(asked) == 6
    for words in asked:
        if words[0] == "make":
            assert words[1] in targets
        elif "benches.gpu.first_run" in words:
            only = words[words.index("--only") + 1].split(",") if "--only" in words else []
            assert set(only) <= {part.name for part in PARTS}
        else:
            assert words[:4] == ["python3", "-m", "pytest", "tests/gpu"]
