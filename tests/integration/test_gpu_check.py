"""`python -m benches.gpu_check`: its checks on a CPU, and what becomes of parts that go wrong."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from benches.gpu_check.__main__ import main, run
from benches.gpu_check.harness import Section, SectionResult
from benches.gpu_check.models import FAMILIES, SHAPES
from benches.gpu_check.report import Report
from benches.gpu_check.rows import Setup
from benches.gpu_check.sections import CHECKS
from tests.support.docs import ROOT, commands, table

DOCUMENT = "docs/gpu.md"
PARTS = "tests.support.gpu_check_parts"


def section(name: str = "odd", *, part_seconds: float = 60, **options: Any) -> Section:
    return Section(
        name=name,
        module=PARTS,
        share=1,
        part_seconds=part_seconds,
        is_check=True,
        options=options,
    )


def setup(folder: Path, device: str = "cpu") -> Setup:
    return Setup(device=device, folder=str(folder))


def nothing(results: Sequence[SectionResult]) -> None:
    """Keep no report."""


def states(result: SectionResult) -> dict[str, str]:
    return {name: part.state for name, part in result.parts.items()}


def report_of(results: list[SectionResult]) -> Report:
    return Report(device="cpu", date="2026-01-01", seconds=1, sections=results, plot="none")


def test_what_goes_wrong_in_a_part_costs_that_part_alone(tmp_path: Path) -> None:
    wanted = ("good", "raises", "hangs", "exits", "is killed", "good too")
    bad = section(part_seconds=1.5, parts=wanted)
    results = run([bad, section("next", parts=("good",))], setup(tmp_path), 300, nothing)
    first, second = results
    assert states(first) == dict(
        zip(wanted, ("done", "failed", "failed", "failed", "failed", "done"), strict=True)
    )
    errors = {name: part.error for name, part in first.parts.items()}
    assert "RuntimeError: kernel launch failed" in errors["raises"]
    assert "ended by force: not done after 2 s" in errors["hangs"]
    assert errors["exits"].startswith("the process ended with status 3")
    assert "about to exit" in errors["exits"]
    assert "was ended by SIGKILL" in errors["is killed"]
    assert [row.check for row in first.parts["raises"].rows] == ["before the error"]
    assert [row.check for row in first.parts["hangs"].rows] == ["before the hang"]
    assert states(second) == {"good": "done"}
    report = report_of(results)
    assert report.has_failed
    page = report.as_markdown()
    assert "FAILED" in page.splitlines()[0]
    assert "4 broke off" in page
    for name in ("raises", "hangs", "exits", "is killed"):
        assert f"**odd: {name}**" in page
    assert "kernel launch failed" in page


def test_a_device_that_answers_no_more_is_replaced(tmp_path: Path) -> None:
    names = ("good", "breaks the device", "good too")
    (result,) = run([section(parts=names)], setup(tmp_path, "cuda"), 300, nothing)
    assert set(states(result).values()) == {"done"}
    processes = [result.parts[name].rows[0].numbers["process"] for name in names]
    assert processes[0] == processes[1] != processes[2]


def test_a_section_that_does_not_begin_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    broken = section("broken", breaks="at once")
    results = run([broken, section(parts=("good",))], setup(tmp_path), 300, nothing)
    assert "ValueError: no parts today" in results[0].error
    assert states(results[1]) == {"good": "done"}
    assert report_of(results).has_failed
    assert "no parts today" in report_of(results).as_markdown()


def test_what_there_was_no_time_for_is_skipped_and_named(tmp_path: Path) -> None:
    start = monotonic()
    slow = section("slow", part_seconds=500, parts=("hangs", "good too"))
    results = run([slow, section("late", parts=("good",))], setup(tmp_path), 4, nothing)
    assert monotonic() - start < 60
    assert states(results[0]) == {"hangs": "open", "good too": "open"}
    report = report_of(results)
    assert not report.has_failed  # nothing was found to be wrong
    _, _, not_run = report.as_markdown().partition("## Not run")
    assert "slow: hangs, good too: out of time" in not_run


def test_what_was_found_is_kept_after_every_section(tmp_path: Path) -> None:
    kept: list[list[int]] = []

    def keep(results: Sequence[SectionResult]) -> None:
        kept.append([len(result.parts) for result in results])

    run([section(parts=("good",)), section("b", parts=("good",))], setup(tmp_path), 300, keep)
    assert kept == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("end", "status"), [("terminate", 1), ("kill", -9)])
def test_whoever_ends_it_ends_what_it_started(tmp_path: Path, end: str, status: int) -> None:
    command = [sys.executable, "-m", "benches.gpu_check", "--device", "cpu", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first part is done: its process is there
        (child,) = children(process.pid)
        getattr(process, end)()
        process.stderr.read()
    assert process.returncode == status
    deadline = monotonic() + 20
    while Path(f"/proc/{child}").exists() and monotonic() < deadline:
        sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            parent = status.read_text().rpartition(")")[2].split()[1]
            found += [int(status.parent.name)] if int(parent) == pid else []
    return found


def test_what_never_began_goes_before_what_was_broken_off(tmp_path: Path) -> None:
    slow = section("slow", part_seconds=500, parts=("hangs",))
    late = replace(section("late", parts=("good",)), share=0.0)  # its turn is over at once
    results = run([slow, late, replace(late, name="rest", share=1)], setup(tmp_path), 20, nothing)
    assert states(results[1]) == {"good": "done"}
    assert states(results[0]) == {"hangs": "open"}


@pytest.mark.slow
def test_the_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--families", "mistral", "--backends", "gather"]
    status = main([*arguments, "--only", "machine,backends", "--out", str(tmp_path)])
    said: Mapping[str, Any] = json.loads((tmp_path / "report.json").read_text())
    page = (tmp_path / "report.md").read_text()
    assert status == 0, page
    parts = {part["name"]: part for each in said["sections"] for part in each["parts"]}
    assert {part["state"] for part in parts.values()} == {"done"}
    (row,) = parts["mistral: gather"]["rows"]
    assert row["status"] == "pass"
    assert 0 < row["numbers"]["error"] <= row["numbers"]["bound"]
    assert row["numbers"]["cached_tokens"] > 0
    (control,) = parts["control"]["rows"]
    assert control["numbers"]["error"] > control["numbers"]["bound"]
    assert page.startswith("# GPU check on cpu: passed")
    assert said["plot"].startswith("none: no decode rates")


def test_a_section_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no section sundries; known: machine, first use"):
        main(["--device", "cpu", "--only", "sundries", "--out", str(tmp_path)])


def test_the_page_names_what_there_is() -> None:
    said = {row[0] for row in table(DOCUMENT, "section", "what must hold")}
    assert said == {section.name for section in CHECKS}
    text = (ROOT / DOCUMENT).read_text()
    _, _, families = text.partition("in bfloat16: ")
    assert set(re.findall(r"\w+", families.partition(".")[0])) == set(FAMILIES)
    for shape in ("Qwen3-0.6B", "Llama-3.1-8B"):
        assert shape in text and shape in SHAPES
    assert "Not yet run on a GPU" in text


def test_the_page_s_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    asked = commands(DOCUMENT)
    assert len(asked) == 3
    for words in asked:
        if words[0] == "make":
            assert words[1] in targets
        else:
            assert "benches.gpu_check" in words
            assert all(word in shown for word in words if word.startswith("--"))


@pytest.mark.slow
def test_a_device_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    arguments = ["--device", "cuda:63", "--families", "llama", "--backends", "gather"]
    assert main([*arguments, "--only", "first use", "--out", str(tmp_path)]) == 1
    assert "torch" in (tmp_path / "report.md").read_text()
