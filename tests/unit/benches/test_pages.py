"""The figures in the docs are those of the stored results."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benches.engine import (
    busy,
    end_to_end,
    overhead,
    serving_tables,
    stored,
)
from benches.engine.end_to_end import Record
from benches.engine.floor import tables as floor_tables
from benches.integrations import end_to_end as in_vllm
from benches.peers import goals, pages
from benches.peers.report import RESULTS, commit, heading, machine, machine_name
from tests.support.docs import ROOT, table

BENCHMARKS = ROOT / "docs/benchmarks"
MANAGER, ENGINE = BENCHMARKS / "block-manager.md", BENCHMARKS / "engine.md"
SERVING, IN_VLLM = BENCHMARKS / "serving.md", BENCHMARKS / "vllm.md"
FILES = sorted(path for path in RESULTS.glob("*.json") if path.stem != "instructions")


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def record(name: str) -> Record:
    return Record(RESULTS / f"{name}.json", keep=True)


def from_file(table_of: Callable[[Any], Iterator[str]]) -> Callable[[str], Iterator[str]]:
    return lambda name: table_of(results(name))


SHOWN: list[tuple[Path, str, Callable[[str], Iterator[str]]]] = [
    (end_to_end.INDEX, "end-to-end-epyc-avx512", lambda name: end_to_end.summary(record(name))),
    (MANAGER, pages.MARK, lambda _: pages.goals(pages.results())),
    (ENGINE, "end-to-end-xeon-amx", lambda name: end_to_end.tables(record(name))),
    (ENGINE, "end-to-end-epyc-avx512", lambda name: end_to_end.tables(record(name))),
    (
        ENGINE,
        "end-to-end-epyc-avx512-held-to-avx2",
        lambda name: end_to_end.tables(record(name)),
    ),
    (ENGINE, "floor-xeon-avx512", from_file(floor_tables.tables)),
    (ENGINE, "floor-xeon-amx", from_file(floor_tables.tables)),
    (ENGINE, "busy-rows-xeon-avx512", from_file(busy.table)),
    (ENGINE, "stored-epyc-avx512", from_file(stored.tables)),
    (ENGINE, "engine-overhead-xeon-amx", from_file(overhead.page)),
    (ENGINE, "engine-overhead-epyc-avx512", from_file(overhead.page)),
    (SERVING, "serving-epyc-avx512", from_file(serving_tables.tables)),
    (SERVING, "serving-xeon-amx", from_file(serving_tables.tables)),
    (IN_VLLM, "vllm-end-to-end-xeon-amx", from_file(in_vllm.table)),
]


@pytest.mark.parametrize(
    ("page", "name", "lines"), SHOWN, ids=[f"{page.name}-{name}" for page, name, _ in SHOWN]
)
def test_a_table_is_what_its_results_say(
    page: Path, name: str, lines: Callable[[str], Iterator[str]]
) -> None:
    _, mark, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    shown, end, _ = rest.partition(f"\n<!-- end of {name} -->")
    assert mark and end
    assert shown == "\n".join(lines(name))
    assert len(re.findall(r"\d", shown)) > 50


def test_every_place_between_marks_is_compared() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    marked = {(page, name) for page, text in texts.items() for name in marks(text)}
    assert marked == {(page, name) for page, name, _ in SHOWN}


def marks(text: str) -> list[str]:
    """The names of the places for tables of figures; others have separate tests."""
    names: list[str] = re.findall(r"^<!-- end of (.*) -->$", text, re.M)
    return [name for name in names if name not in ("fields", "families")]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_results_say_whose_they_are(path: Path) -> None:
    abouts = list(machines(json.loads(path.read_text())))
    assert abouts
    for about in abouts:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
        assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"])
        assert path.stem.endswith(f"-{machine_name(about)}")


def machines(value: Any) -> Iterator[dict[str, Any]]:
    """Descriptions of machines, at any depth."""
    if isinstance(value, dict):
        if "cpu" in value and "cores" in value:
            yield value
        for inner in value.values():
            yield from machines(inner)


def test_a_new_result_says_whose_it_is() -> None:
    about = machine()
    assert about["cpu"] and about["isa"] and about["date"]
    assert re.fullmatch(r"([0-9a-f]{7,}\+?)?", about["commit"]) and about["commit"] == commit()
    assert machine_name({"cpu": "Intel(R) Xeon(R) Processor", "isa": "amx"}) == "xeon-amx"
    assert machine_name({"cpu": "Some CPU (TM) 7", "isa": "avx2"}) == "some-cpu-tm-7-avx2"


def test_a_heading_says_how_many_rounds() -> None:
    about = {"cpu": "a CPU", "isa": "avx2", "cores": 2, "date": "today"}
    assert heading(about) == "a CPU (avx2), 2 cores, today"
    assert heading(about, [1, 1]).endswith("today, one round")
    assert heading(about, [3, 1]).endswith("today, medians of 1 to 3 rounds")
    assert heading(about, [5]).endswith("today, medians of 5 rounds")


def test_a_goal_is_met_against_the_faster_of_vllms(tmp_path: Path) -> None:
    work = end_to_end.WORKS[1].name
    for first, verdict in ((1.0, "not met"), (3.0, "met")):
        measured = Record(tmp_path / "found.json", keep=False)
        seconds = {end_to_end.OURS: 2.0, end_to_end.VLLM: first, end_to_end.VLLM32: 4.0}
        for engine, value in seconds.items():
            measured.begin("float32", work, engine)
            measured.add("float32", work, engine, value)
        [line] = [
            text for text in end_to_end.goals(measured) if text.startswith(f"| {work}, float32")
        ]
        assert line.endswith(f"1.05, {verdict} |")


def test_the_page_repeats_figures_of_the_results() -> None:
    xeon, epyc = record("end-to-end-xeon-amx"), record("end-to-end-epyc-avx512")
    text = " ".join(ENGINE.read_text(encoding="utf-8").split())
    vllm = (end_to_end.VLLM, end_to_end.VLLM32)
    lowest = [
        min(filter(None, (xeon.best_ratio("bfloat16", work.name, peer) for peer in vllm)))
        for work in end_to_end.WORKS
    ]
    one, many, texts, sampled, prompts, *shared = lowest
    assert f"one request has {one:.2f} times the tokens per second" in text
    assert f"32 requests {min(many, texts, sampled):.2f} to {max(many, texts, sampled):.2f}" in text
    assert f"share a beginning {min(shared):.2f} to {max(shared):.2f} times" in text
    assert f"share nothing {prompts:.2f} times" in text
    default = [
        xeon.ratio("bfloat16", end_to_end.WORKS[at].name, end_to_end.DEFAULT, end_to_end.OURS)
        for at in (0, 4)
    ]
    assert default[0] and default[1]
    assert f"one request only ({default[0]:.2f} times), and has {default[1]:.2f} of its" in text
    spans = []
    for column in (2, 1):
        cells = [line.split("|")[column + 1] for line in list(end_to_end.summary(epyc))[2:]]
        spans.append(f"{min(map(float, cells)):.2f} to {max(map(float, cells)):.2f}")
    assert f"one round: {spans[0]} in bfloat16, {spans[1]} in float32." in text


def test_what_became_slower_is_named() -> None:
    def row(median: float, spread: float) -> dict[str, Any]:
        return {"processor": {"median": median, "q1": median - spread, "q3": median + spread}}

    before = {"a": row(10, 1), "b": row(10, 1), "c": row(10, 1)}
    now = {"a": row(20, 1), "b": row(11, 1), "c": row(5, 1)}
    [line] = overhead.slower(before, now)
    assert "a (+100%)" in line and "b (" not in line and "c (" not in line
    assert next(overhead.slower(before, before)).endswith(": no row.")


def test_lowered_goals_are_those_of_the_code() -> None:
    rows = {row[0]: row[2] for row in table("docs/benchmarks/goals.md", "work", "first goal")}
    index = {goal.text: goal.least for goal in goals.SPEED if goal.peer == goals.SGLANG}
    for name in ("cold prefill 8,192, array", "hot prefill 8,192, array"):
        assert float(rows[f"{name}, over SGLang's index"]) == index[name]
    for number, compiled in ((1, ", compiled"), (5, ""), (6, "")):
        work = end_to_end.WORKS[number].name
        said = [float(number) for number in rows[f"{work}{compiled}, over vLLM"].split(" and ")]
        assert tuple(said) == end_to_end.GOALS[work]
    assert end_to_end.START not in end_to_end.GOALS
    assert rows[f"{end_to_end.START}, over vLLM"] == "none"
