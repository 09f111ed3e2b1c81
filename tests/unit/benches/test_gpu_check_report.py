"""The page and the goals of the GPU check, from made-up results."""

from dataclasses import replace

import pytest

from benches.gpu_check.goals import goals, hidden_share
from benches.gpu_check.harness import PartResult, Section, SectionResult
from benches.gpu_check.plot import FILE, draw
from benches.gpu_check.report import Report, rows_of, table
from benches.gpu_check.rows import Row, checked, rounded

DECODE = Row(
    "decode tiny, batch 256, context 512",
    "info",
    {
        "shape": "tiny",
        "batch": 256,
        "context": 512,
        "step_ms": 2.5,
        "tokens_per_second": 102_400.0,
        "roofline_tokens_per_second": 128_000.0,
        "roofline_share": 0.8,
        "backend": "flashinfer",
        "cuda_graphs": True,
    },
)


def section(name: str, *parts: PartResult, is_check: bool = True) -> SectionResult:
    what = Section(name=name, module="m", share=1, part_seconds=1, is_check=is_check)
    return SectionResult(what, {part.name: part for part in parts}, seconds=3)


def done(name: str, *rows: Row) -> PartResult:
    return PartResult(name, "done", list(rows), 1.0)


def report(*sections: SectionResult) -> Report:
    return Report(device="cuda", date="2026-01-01", seconds=90, sections=sections, plot=FILE)


def pair(family: str, backend: str, error: float, bound: float) -> Row:
    wrong = "too far" if error > bound else ""
    numbers = {"family": family, "backend": backend, "error": error, "bound": bound}
    return checked(f"{family}: {backend}", wrong, numbers)


BACKENDS = section(
    "backends",
    done("llama: flex", pair("llama", "flex", 0.05, 0.7)),
    done("llama: varlen", Row("llama: varlen", "refused", {}, "it needs torch 2.12")),
    done("qwen3: flex", pair("qwen3", "flex", 1.5, 0.7)),
    PartResult("qwen3: varlen", "failed", [], 1.0, "RuntimeError: no kernel image"),
    PartResult("phi3: flex"),
)


def test_families_and_backends_are_a_table() -> None:
    lines = report(BACKENDS).as_markdown().splitlines()
    assert "| family | flex | varlen |" in lines
    assert "| llama | 0.05 of 0.7 | refused |" in lines
    assert "| qwen3 | FAIL 1.5 of 0.7 | BROKE OFF |" in lines
    assert "| phi3 | not run | - |" in lines
    assert "- refused (llama): it needs torch 2.12" in lines
    assert "- backends: phi3: flex: out of time" in lines
    assert lines[0] == "# GPU check on cuda: FAILED"
    words = "Checks: 1 passed, 1 failed, 1 refused, 0 skipped, 1 broke off."
    assert lines[2] == f"2026-01-01, 1.5 minutes. {words}"


def test_a_reason_that_all_families_have_is_said_so() -> None:
    parts = [done(f"{one}: b", Row(f"{one}: b", "refused", {}, "no")) for one in ("llama", "phi3")]
    assert "- refused (all families): no" in report(section("backends", *parts)).as_markdown()


def test_the_reasons_of_failures_are_below() -> None:
    _, _, failed = report(BACKENDS).as_markdown().partition("## What failed")
    assert "**backends: qwen3: flex**\n\ntoo far" in failed
    assert "```\nRuntimeError: no kernel image\n```" in failed


def test_a_refusal_is_no_failure_and_neither_is_a_benchmark_that_broke() -> None:
    refused = section("backends", done("a: b", Row("a: b", "refused", {}, "no")))
    broken = section("decode", PartResult("x", "failed", [], 1.0, "boom"), is_check=False)
    assert not report(refused, broken).has_failed
    assert "boom" in report(refused, broken).as_markdown()
    assert report(replace_error(refused)).has_failed


def replace_error(result: SectionResult) -> SectionResult:
    return replace(result, error="did not begin")


def test_figures_and_goals() -> None:
    page = report(section("decode", done("d", DECODE), is_check=False)).as_markdown()
    assert "| tiny | 256 | 512 | 2.5 | 102,400 | 128,000 | 0.8 | flashinfer | yes |" in page
    assert "met | tiny at 512: 80% |" in page
    assert page.count("not measured") == 3


def test_everything_is_in_the_json() -> None:
    said = report(BACKENDS).as_json()
    assert said["failed"] is True
    parts = said["sections"][0]["parts"]
    assert [part["state"] for part in parts] == ["done", "done", "done", "failed", "open"]
    assert parts[0]["rows"][0]["numbers"]["error"] == 0.05


def engine(name: str, rate: float) -> Row:
    numbers = {"engine": name, "tokens_per_second": rate, "attention": "x"}
    return Row(f"continuous batching, {name}", "info", numbers)


def host(overlap: bool, step: float, work: float) -> Row:
    numbers = {"overlap": overlap, "step_us": step, "host_us": work}
    return Row(f"host work, overlap {overlap}", "info", numbers)


@pytest.mark.parametrize(
    ("rows", "at", "met"),
    [
        ([DECODE], 0, True),
        ([replace(DECODE, numbers={**DECODE.numbers, "roofline_share": 0.6})], 0, False),
        ([replace(DECODE, numbers={**DECODE.numbers, "batch": 32})], 0, None),
        ([engine("pyengine", 300.0), engine("transformers", 200.0)], 1, True),
        ([engine("pyengine", 290.0), engine("transformers", 200.0)], 1, False),
        ([engine("pyengine", 290.0)], 1, None),
        ([host(False, 1000, 200), host(True, 820, 200)], 2, True),
        ([host(False, 1000, 200), host(True, 900, 200)], 2, False),
        ([Row("duplicates in one step", "info", {"ratio": 1.05, "work": "w"})], 3, True),
        ([Row("duplicates in one step", "info", {"ratio": 1.2, "work": "w"})], 3, False),
    ],
)
def test_goals(rows: list[Row], at: int, met: bool | None) -> None:
    assert goals(rows)[at].met is met


def test_hidden_share() -> None:
    assert hidden_share(1000, 200, 800) == 1
    assert hidden_share(1000, 200, 1000) == 0
    assert hidden_share(1000, 200, 1100) < 0


def test_cells() -> None:
    assert table(("a", "b"), [(None, "x|y\nz"), (1234.5, True)]).splitlines()[2:] == [
        "| - | x\\|y z |",
        "| 1,234 | yes |",
    ]
    assert rounded(float("nan")) is None
    assert rounded(1234567.0) == 1_235_000


def test_there_is_no_plot_without_figures(tmp_path) -> None:
    assert draw(rows_of([BACKENDS]), tmp_path) == "no decode rates were measured"
    assert not (tmp_path / FILE).exists()


def test_the_plot_is_drawn_or_missed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    missing = draw([DECODE], tmp_path)
    assert missing is not None and missing.startswith("matplotlib is missing")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert draw([DECODE], tmp_path) is None
    assert (tmp_path / FILE).stat().st_size > 0
