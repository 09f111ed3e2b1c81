"""Every program of examples/ runs as it is, and prints what it is there to show."""

import os
import re
from pathlib import Path

import pytest

from tests.support.docs import ROOT
from tests.support.forked import run_forked
from tests.support.without_torch import needs_torch

FOLDER = ROOT / "examples"
NUMBER = r"(\d+)"


def output_of(name: str) -> str:
    """Output of an example, run from the root in a new process that has torch already."""
    file = f"examples/{name}.py"
    code = f"import runpy; runpy.run_path({file!r}, run_name='__main__')"
    return run_forked(code, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300).stdout


def number(pattern: str, text: str) -> int:
    """The number in the one place where the pattern matches."""
    [found] = re.findall(pattern.replace("N", NUMBER), text)
    return int(found)


def test_all_are_listed_and_tested() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) == 9
    listed = re.findall(r"^\| \[(\w+)\.py\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == names
    assert sorted(name.removeprefix("test_") for name in globals() if name[5:] in names) == names


def test_toy_engine() -> None:
    text = output_of("toy_engine")
    assert "the same tokens as each prompt alone: True" in text
    for name in ("preemptions", "tokens from the cache", "blocks evicted"):
        assert number(f"{name}: N", text) > 0


def test_router() -> None:
    text = output_of("router")
    total = number("^N prompt tokens", text)
    assert number("in turns: N", text) * 1.5 < number("by prefix: N", text) < total


@pytest.mark.slow
def test_offline_batch() -> None:
    text = output_of("offline_batch")
    assert len(re.findall(r"^\w+:['\"]", text, re.MULTILINE)) == 8
    assert "Tokyo" in text and "Paris" in text
    assert number(r"prompt tokens, N of them", text) > number(r"N prompt tokens,", text) // 2


@pytest.mark.slow
def test_chat_stream() -> None:
    text = output_of("chat_stream")
    assert "Tokyo" in text and "Japanese" in text
    first, second = (int(found) for found in re.findall(r"(\d+) from the cache", text))
    assert first == 0 < second


@pytest.mark.slow
def test_server_with_clients() -> None:
    text = output_of("server_with_clients")
    assert "Tokyo" in text and "Paris" in text
    chunks = [int(found) for found in re.findall(r"in (\d+) chunks", text)]
    assert len(chunks) == 4 and min(chunks) > 1
    assert number("tokens generated: N", text) >= 4
    assert "the server ended with status 0" in text


@pytest.mark.slow
def test_best_of_n() -> None:
    text = output_of("best_of_n")
    scores = [float(found) for found in re.findall(r"^(-\d+\.\d\d) ['\"]", text, re.MULTILINE)]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    assert number("^N tokens of forks", text.splitlines()[-1]) > 0


@pytest.mark.slow
def test_speculation() -> None:
    text = output_of("speculation")
    assert "the same tokens: True" in text
    assert number("N drafts accepted", text) > number("N steps with drafts", text) > 0


@pytest.mark.slow
def test_evaluation() -> None:
    text = output_of("evaluation")
    assert "4 of 4 right" in text


@pytest.mark.slow
@needs_torch
def test_grpo(tmp_path: Path) -> None:
    code = f"from examples import grpo; grpo.QUESTIONS = 2; grpo.main({str(tmp_path)!r}, 2)"
    text = run_forked(code, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300).stdout
    steps = re.findall(r"step \d: reward (0\.\d+), log-probabilities differ by (0\.\d+)", text)
    assert len(steps) == 2
    for reward, difference in steps:
        assert 0 <= float(reward) < 0.5
        assert float(difference) < 0.2  # of the engine's 8 bits from the trainer's float32
