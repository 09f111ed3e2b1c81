"""The figures of the GPU bench: written down one by one, goals and tables made of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benches.gpu.__main__ import goals, main, read, tables
from benches.gpu.works import WORKS, Bench, Figures, write_down

DECODE = {"work": "decode", "batch": 256, "roofline_share": 0.8, "tokens_per_second": 102_400.0}


def engine(name: str, rate: float) -> Figures:
    return {"work": "batching", "engine": name, "tokens_per_second": rate}


def host(overlap: bool, step: float, work: float) -> Figures:
    return {"work": "host", "overlap": overlap, "step_us": step, "host_us": work}


@pytest.mark.parametrize(
    ("figures", "at", "met"),
    [
        ([DECODE], 0, "met"),
        ([DECODE, {**DECODE, "roofline_share": 0.6}], 0, "not met"),
        ([{**DECODE, "batch": 32}], 0, "-"),
        ([engine("pyengine", 300), engine("transformers", 200)], 1, "met"),
        ([engine("pyengine", 290), engine("transformers", 200)], 1, "not met"),
        ([engine("pyengine", 290)], 1, "-"),
        ([host(False, 1000, 200), host(True, 820, 200)], 2, "met"),
        ([host(False, 1000, 200), host(True, 900, 200)], 2, "not met"),
        ([{"work": "duplicates", "ratio": 1.05}], 3, "met"),
        ([{"work": "duplicates", "ratio": 1.2}], 3, "not met"),
    ],
)
def test_goals(figures: list[Figures], at: int, met: str) -> None:
    assert list(goals(figures))[at][2] == met


def test_tables_leave_nothing_out() -> None:
    skipped = {"work": "decode", "batch": 256, "skipped": "the pool holds 9 tokens"}
    page = "\n".join(tables([DECODE, skipped, {"work": "host, tiny", "failed": "it timed out"}]))
    assert "| decode | 256 | 0.8 | 102,400 |" in page
    assert "skipped the pool holds 9 tokens" in page
    assert "## host, tiny: failed\n\n```\nit timed out\n```" in page
    assert page.count("not measured") == 3


def test_what_is_known_is_in_the_file_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines"

    def two(bench: Bench) -> Iterator[Figures]:
        yield {"work": "two", "of": bench.shape_name}
        assert read(lines) == [{"work": "two", "of": "tiny"}]
        raise RuntimeError("no more")

    monkeypatch.setitem(WORKS, "two", two)
    with pytest.raises(RuntimeError, match="no more"):
        write_down("two", Bench("cpu", "tiny"), lines)
    assert len(read(lines)) == 1


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "sundries", "--out", str(tmp_path)])


@pytest.mark.gpu
@pytest.mark.slow
def test_every_work_runs_and_one_without_a_device_is_named(tmp_path: Path) -> None:
    main(["--device", "cpu", "--out", str(tmp_path)])
    found = read(tmp_path / "figures.jsonl")
    assert {match["work"] for match in found} == {*WORKS, "prefill"}
    assert not any("failed" in match for match in found)
    main(["--device", "cuda:63", "--only", "machine", "--out", str(tmp_path)])
    (failed,) = map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines())
    assert failed["work"] == "machine, Qwen3-0.6B" and failed["failed"]
