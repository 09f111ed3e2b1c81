"""The serving benchmark's requests, profiles and tables; no server runs here."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benches.engine import serving
from benches.engine.crowd import shares
from benches.engine.serving import Child, Server, loads
from benches.engine.serving_tables import ALONE, AT_ONCE, OURS, SLOTS, VLLM, tables


def test_loads_ask_for_what_their_names_say() -> None:
    plain, shared, half, most, crowd = loads(64, 32, 256)
    assert (half.share, most.share, crowd.clients) == (0.5, 0.9, 256)
    for load in (plain, shared, crowd):
        prompts = load.prompts(3)
        assert prompts == load.prompts(3) != load.prompts(4)
        assert len(set(prompts)) == load.count
        assert {len(prompt.split()) for prompt in prompts} == {load.shared + load.own}
        beginnings = {" ".join(prompt.split()[: load.shared]) for prompt in prompts}
        assert len(beginnings) == 1
    assert len({prompt.split()[0] for prompt in plain.prompts(0)}) > 20


def test_a_profile_says_where_the_event_loop_is_at_work() -> None:
    stacks = "\n".join(
        [
            "thread (1): MainThread;run (asyncio/runners.py:1);"
            "chat (pyengine/server/routes/chat.py:3) 6",
            "thread (1): MainThread;run (asyncio/runners.py:1);app (starlette/routing.py:3);"
            "send (/x/uvicorn/protocols/http/httptools_impl.py:9) 2",
            "thread (1): MainThread;main (<string>:1) 2",
            "thread (2): pyengine-engine;step (pyengine/engine/core.py:7) 90",
            "thread (3): other;work (x.py:7) 10",
        ]
    )
    measured = shares(stacks, 100)
    assert measured["threads"] == {"MainThread": 0.1, "pyengine-engine": 0.9, "else": 0.1}
    assert measured["loop"]["pyengine/server: chunks of answers"] == 0.6
    assert measured["loop"]["httptools and uvicorn: HTTP"] == measured["loop"]["else"] == 0.2
    assert sum(measured["loop"].values()) == pytest.approx(1)


def test_the_tables_have_medians_shares_and_what_is_missing() -> None:
    def measured(rate: float, **more: float) -> dict[str, float]:
        times = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
        return {"output_throughput": rate, **dict.fromkeys(times, 7.0), **more}

    content: dict[str, Any] = {
        "machine": {"cpu": "a CPU", "cores": 2, "date": "today", "isa": "amx"},
        "dtype": "bfloat16",
        "missing": {"vllm32": "not there"},
        "rates": {"Poisson": 1.5},
        "found": {
            "waiting": {
                OURS: [measured(90), measured(100), measured(1000, p99_itl_ms=9)],
                VLLM: [measured(50)],
                SLOTS: [{"output_throughput": 100.0}] * 3,
                AT_ONCE: [{"output_throughput": 1234.0}],
            },
            "Poisson": {OURS: [measured(10)]},
            "256 clients": {ALONE: [{"median_itl_ms": 5.0, "p99_itl_ms": 6.0}]},
        },
        "profile": {
            "threads": {"MainThread": 0.25, "pyengine-engine": 0.75, "else": 0},
            "loop": {"HTTP": 0.4, "json": 0.6},
        },
    }
    text = "\n".join(tables(content))
    assert "| `pyengine serve --compile` | 100 | 7 | 7 | 7 | 7 |" in text
    assert "| `LLM.generate`, all at once | 1,234 |  |  |  |  |" in text
    assert "1.00 of `LLM.generate`, a slot for each client; goal 0.95, met." in text
    assert "| Poisson (1.50 a second) |" in text
    assert "| `AsyncEngine` alone |  |  |  | 5 | 6 |" in text
    assert text.index("| json | 60% |") < text.index("| HTTP | 40% |")
    assert "vllm32: missing (not there)" in text


ECHO = "import sys\nfor line in sys.stdin:\n    print(line.upper(), end='', flush=True)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '600'])\n"
    "print(child.pid, flush=True); time.sleep(600)"
)


def test_a_child_answers_line_by_line_or_its_last_words_are_told() -> None:
    with Child([sys.executable, "-c", ECHO]) as child:
        assert child.ask("a") == "A"
    with (
        Child([sys.executable, "-c", "raise SystemExit('it is too late')"]) as child,
        pytest.raises(RuntimeError, match="ended with 1: it is too late"),
    ):
        child.ask("a")


def test_with_a_child_its_own_children_end() -> None:
    with Child([sys.executable, "-c", PARENT]) as child:
        stat = Path(f"/proc/{child.answer()}/stat")
        assert stat.exists()
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("a child of the child is left")


def test_without_vllm_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PEERS", serving.ROOT / "no/such/python")
    with pytest.raises(RuntimeError, match=r"no no/such/python; benches/peers/env.py makes it"):
        Server(VLLM, "bfloat16")
