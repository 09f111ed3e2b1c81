"""The command line as people start it: a process, the embedded model, real signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked import run_forked
from tests.support.processes import run_program
from tests.support.without_torch import MISSING

pytestmark = pytest.mark.slow

PYENGINE = str(Path(sys.executable).with_name("pyengine"))
QUESTION = "What is the capital of Japan?"
FIGURES = re.compile(
    r"^(\d+) prompt tokens \((\d+) cached\) · (\d+) new tokens · (?:[\d.]+ tok/s · )?"
    r"(\d+) blocks used · (\d+) shared in flight · (\d+) merged$",
    re.MULTILINE,
)


def run(*arguments: str, text: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process that has torch already."""
    code = "from pyengine.cli import main; main()"
    return run_forked(code, *arguments, input=text, timeout=300, status=status)


def figures(output: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found)) for found in FIGURES.findall(output)]


def test_one_prompt_is_answered_and_closed_with_figures() -> None:
    command = [PYENGINE, "generate", QUESTION, "--max-tokens", "32", "-v"]
    done = run_program(command)
    assert "Tokyo" in done.stdout
    assert "Traceback" not in done.stderr
    [(prompt, cached, new, used, shared, merged)] = figures(done.stderr)
    assert prompt > 16 and cached == 0 and 0 < new <= 32
    assert used == -(-(prompt + new - 1) // 16)
    assert shared == merged == 0


@pytest.mark.parametrize("sharing", [True, False])
def test_identical_prompts_share_their_full_blocks(sharing: bool, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    long = "Repeat: " + "one two three four five six seven eight nine ten " * 6
    arguments = [long, long, "--raw", "-n", "4", "-v", "--output", str(target)]
    done = run(
        "generate", *arguments, "--in-flight-sharing" if sharing else "--no-in-flight-sharing"
    )
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first["token_ids"] == second["token_ids"]
    [(prompt, _, _, _, shared, merged)] = figures(done.stderr)
    full_blocks = prompt // 2 // 16
    decoded = (prompt // 2 + 4 - 1) // 16 - full_blocks  # filled by the new tokens: merged
    assert full_blocks >= 3
    # Stored once: not computed twice at all, or merged after the step that did.
    expected = (full_blocks, decoded) if sharing else (0, full_blocks + decoded)
    assert (shared, merged) == expected


def test_earlier_turns_of_a_chat_are_cache_hits() -> None:
    done = run("chat", "--max-tokens", "24", "-v", text=f"{QUESTION}\nAnd of Italy?\n")
    first, second = figures(done.stderr)
    assert first[1] == 0
    assert second[1] >= first[0] // 16 * 16  # every full block of the first prompt at least
    assert second[0] > first[0]


def test_ctrl_c_in_the_middle_of_an_answer() -> None:
    process = subprocess.Popen(
        [PYENGINE, "generate", "Count to 1000.", "--max-tokens", "4000", "--ignore-eos", "-v"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        # A test run in the background inherits an ignored SIGINT, which Python would keep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert b"interrupted" in errors and b"Traceback" not in errors
    assert len(figures(errors.decode())) == 1


@pytest.mark.parametrize(
    ("mapped", "name"),
    [("_multiarray_umath", "SIGTERM"), ("_kv.abi3", "SIGHUP"), ("tokenizers", "SIGINT")],
)
def test_a_signal_while_it_imports_and_loads(name: str, mapped: str) -> None:
    """It comes when the process has mapped that library."""
    number = signal.Signals[name]
    process = subprocess.Popen(
        [PYENGINE, "generate", "Count to 1000.", "--max-tokens", "4000", "--ignore-eos"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # One that the test run ignores (nohup, a background job) would be ignored there, too.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    )
    while process.poll() is None and mapped not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"Traceback" not in errors, errors.decode()
    assert process.returncode == (130 if number == signal.SIGINT else -number)


def test_a_batch_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    file, target, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    lines = [{"prompt": f"Name {n} animals.", "id": f"p{n}"} for n in range(2, 8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", "--file", str(file), "--max-num-seqs", "2", "--max-tokens", "8"]
    arguments += ["--temperature", "0.8", "--max-num-batched-tokens", "64", "--dtype", "float32"]
    run(*arguments, "--output", str(whole))
    process = subprocess.Popen([PYENGINE, *arguments, "--output", str(target)])
    while process.poll() is None and not (target.exists() and target.read_text().count("\n") > 1):
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = target.read_bytes()
    run(*arguments, "--output", str(target), "--resume")
    assert target.read_bytes().startswith(before[: before.rfind(b"\n") + 1])

    def answers(path: Path) -> dict[str, list[int]]:
        records = map(json.loads, path.read_text().splitlines())
        return {record["id"]: record["token_ids"] for record in records}

    assert answers(target) == answers(whole)
    assert len(answers(whole)) == len(lines)


@pytest.mark.parametrize("shell", ["| head -1", "> /dev/full", ">&-"])
def test_standard_output_that_takes_no_more(shell: str) -> None:
    command = ["bash", "-c", f'"$@" {shell}', "bash", PYENGINE, "generate", "Hello!", "-n", "9"]
    done = run_program(command, status=None)
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    assert ("No space left on device" in done.stderr) == ("full" in shell)


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    done = run("generate", "word " * 200, "--raw", "--num-blocks", "4", status=2)
    assert done.stdout == ""
    first, *_, last = done.stderr.splitlines()
    assert first == "loading the demo model, SmolLM2-135M-Instruct, ..."
    assert last.startswith("error: ") and "Traceback" not in done.stderr
    assert re.search(r"\d+", last)


def test_the_answer_ends_where_the_context_does_and_a_note_says_so() -> None:
    done = run("generate", QUESTION, "-n", "100000", "--max-model-len", "40", "--ignore-eos", "-v")
    [(prompt, _, new, *_)] = figures(done.stderr)
    assert prompt + new == 40
    assert f"--max-tokens 100000 is reduced to {new}: " in done.stderr


def test_info_names_the_backend_and_why() -> None:
    done = run("info", "--device", "cpu")
    torch = "not installed" if "torch" in MISSING else r"\d"
    assert re.search(f"^  torch +{torch}", done.stdout, re.MULTILINE)
    assert re.search(r"^  device +cpu$", done.stdout, re.MULTILINE)
    assert re.search(r"^  attention backend +cpu$", done.stdout, re.MULTILINE)
