"""The rows of the bench of whole generations in vLLM; no text is generated here."""

from pathlib import Path
from typing import Any

from benches.engine.page import publish
from benches.engine.works import WORKS
from benches.integrations.end_to_end import PAGE, table, verdict

FIRST, SAMPLED, IDENTICAL = WORKS[0], WORKS[3], WORKS[6]


def row(ratio: float, same: int = 5) -> dict[str, Any]:
    rates, seconds = [1000.0, 1000.0 * ratio], [[1.0] * 5] * 2
    return {"rates": rates, "ratio": ratio, "same": same, "of": 5, "seconds": seconds}


def test_each_row_has_its_goal_and_greedy_ones_their_tokens() -> None:
    assert list(verdict(FIRST, "128", row(0.98))) == ["0.98 (goal 0.98: met)", "same tokens"]
    assert list(verdict(FIRST, "32", row(0.97, 4))) == [
        "0.97 (goal 0.98: NOT MET)",
        "4 of 5 have the SAME TOKENS",
    ]
    assert list(verdict(SAMPLED, "32", row(1.0, 0))) == ["1.00 (goal 0.98: met)"]
    assert IDENTICAL.name == "32 x (512 identical in, 32 out)"
    assert "1.79 (goal 1.80: NOT MET)" in verdict(IDENTICAL, "128", row(1.79))
    assert "1.00 (goal 1.00: met)" in verdict(IDENTICAL, "32", row(1.0))


def test_the_table_has_the_rows_that_are_known() -> None:
    machine = {"cpu": "A CPU", "isa": "avx2", "cores": 2, "date": "2026-01-01"}
    about = {"dtype": "float32", "machine": machine}
    rows = {FIRST.name: {"128": row(1.0), "32": row(1.0)}, IDENTICAL.name: {"128": row(2.0)}}
    lines = "\n".join(table({"about": about, "rows": rows})).splitlines()
    head = "float32, tokens per second, A CPU (avx2), 2 cores, 2026-01-01, medians of 5 rounds:"
    assert lines[0] == head
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4].startswith(f"| {FIRST.name} | 1,000 | 1,000 | 1.00 (goal 0.98: met), same")
    assert "2.00 (goal 1.80: met)" in lines[5]


def test_the_page_has_its_marks(tmp_path: Path) -> None:
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    name = "vllm-end-to-end-xeon-amx"
    publish(name, ["| a table |"], write=True, page=page)
    assert f"<!-- {name} -->\n| a table |\n<!-- end" in page.read_text(encoding="utf-8")
