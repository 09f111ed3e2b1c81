"""Tables of figures that were copied into the docs by hand: each figure is that of the results."""

import json
from typing import Any

import pytest

from benches.peers.report import RESULTS
from tests.support.docs import table

IN_VLLM = "docs/benchmarks/vllm.md"
SPECULATION = "docs/benchmarks/speculation.md"
CLUSTER = "docs/benchmarks/replicas.md"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}-xeon-amx.json").read_text())


def test_vllms_scheduler() -> None:
    expected = []
    for row in results("vllm-scheduler")["decode"]:
        for name in ("schedule", "allocate_slots", "update_from_output"):
            stock, early, ours = (row[arm][name] for arm in ("stock", "early return", "ours"))
            ratios = [f"{stock / ours:.2f}", f"{early / ours:.2f}"]
            micros = [f"{figure:,.0f}" for figure in (stock, early, ours)]
            expected.append([f"{row['running']:,}", name, *micros, *ratios])
    assert table(IN_VLLM, "running") == expected
    assert len(expected) == 9


def test_nano_vllm() -> None:
    expected = []
    for case, row in results("nano-vllm").items():
        if case == "machine":
            continue
        work, size = case.split(", ")
        stock, ours = row["stock"], row["ours"]
        cells = [f"{stock:,.0f}", f"{ours:,.0f}", f"{stock / ours:,.1f}"]
        expected.append([f"{work}, blocks of {size}", *cells])
    assert table(IN_VLLM, "", "stock", "ours", "stock / ours") == expected
    assert len(expected) == 6


WORKS = {
    "functions to be written again": "copying",
    "worked examples of BBH": "examples",
    "free prose, temperature 0.8": "prose",
    "profiles as lists of fields": "forms",
    "the same profiles again": "forms again",
}
BATCHES = {"one request at a time": 1, "eight at a time": 8, "32 at a time": 32}
ENGINES = ("ngram", "suffix", "transformers, look-up", "vLLM, ngram", "vLLM")


def test_speculation() -> None:
    figures = {
        (figure["work"], figure["batch"], figure["engine"]): figure
        for figure in results("speculative")["figures"]
    }
    batch, count = 0, 0
    for name, *cells in table(SPECULATION, "", "ngram"):
        if name.strip("*") in BATCHES:
            batch = BATCHES[name.strip("*")]
            continue
        plain = figures[WORKS[name], batch, "without"]
        for engine, cell in zip(ENGINES, cells, strict=True):
            figure = figures.get((WORKS[name], batch, engine))
            expected = ""
            if figure is not None:
                rates = [run["tokens"] / run["seconds"] for run in (figure, plain)]
                expected = f"{rates[0] / rates[1]:.2f}"
                expected += f" ({figure['per_step']:.1f})" if figure["per_step"] else ""
            assert cell == expected, (name, batch, engine)
            count += 1
    assert count == 15 * len(ENGINES)


POLICIES = {
    "round robin": "round robin",
    "least load": "least load",
    "sticky by session": "sticky",
    "ours, without eviction events": "no removals",
    "**ours**": "ours",
    "knows every cache and queue": "exact",
}


def percent(figures: dict[str, Any]) -> str:
    return f"{figures['hit_rate'] * 100:.1f}"


def queued(figures: dict[str, Any]) -> str:
    return f"{figures['queued_p99']:,.0f}"


def seconds(figures: dict[str, Any], name: str, digits: int) -> str:
    return f"{figures[f'first_token_{name}']:.{digits}f}"


def imbalance(figures: dict[str, Any]) -> str:
    return f"{figures['imbalance']:.2f}"


@pytest.mark.parametrize("work", ["conversation", "questions"])
def test_sixteen_replicas(work: str) -> None:
    written = results("cluster")[f"{work}, 16 replicas"]
    rows = table(CLUSTER, f"{work}, 16 replicas")
    assert len(rows) == len(POLICIES)
    for name, *cells in rows:
        figures = written[POLICIES[name]]
        if work == "conversation":
            expected = [
                percent(figures),
                queued(figures),
                seconds(figures, "mean", 1),
                imbalance(figures),
            ]
        else:
            times = [seconds(figures, "mean", 2), seconds(figures, "p99", 2)]
            expected = [percent(figures), *times, imbalance(figures)]
        assert cells == expected, name


def test_four_and_sixty_four_replicas() -> None:
    written = results("cluster")
    rows = table(CLUSTER, "cached, %; p99 of queued prompt tokens")
    assert len(rows) == len(POLICIES)
    for name, *cells in rows:
        expected = []
        for work in ("conversation", "questions"):
            for count in (4, 64):
                figures = written[f"{work}, {count} replicas"][POLICIES[name]]
                expected.append(f"{percent(figures)}; {queued(figures)}")
        assert cells == expected, name
