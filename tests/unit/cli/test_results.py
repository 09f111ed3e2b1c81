"""A batch's results: written as they come, kept whatever happens, found again with --resume."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.errors import EngineDeadError
from tests.unit.cli.fakes import FakeEngine

WORDS = ["one", "two words", "three more words", "and four words more"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in WORDS))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def run(engine: FakeEngine, file: Path, output: Path, *more: str) -> Result:
    arguments = ["generate", "--raw", "--file", str(file), "--output", str(output), *more]
    return CliRunner().invoke(app, arguments, obj=engine.open)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def indices(path: Path) -> list[int]:
    return [record["index"] for record in records(path)]


def test_results_stand_in_the_order_of_their_ends_with_their_index(
    prompts: Path, target: Path
) -> None:
    result = run(FakeEngine(), prompts, target)
    assert result.exit_code == 0, result.output
    assert indices(target) == [3, 2, 1, 0]
    assert [record["prompt"] for record in records(target)] == WORDS[::-1]
    assert [record["num_prompt_tokens"] for record in records(target)] == [4, 3, 2, 1]
    assert f"4 results in {target}" in result.stderr


def test_each_is_in_the_file_before_the_next_one_comes(prompts: Path, target: Path) -> None:
    seen: list[int] = []

    class Watching(FakeEngine):
        def _cached(self, ids: list[int]) -> int:
            seen.append(len(target.read_text().splitlines()))
            return super()._cached(ids)

    assert run(Watching(), prompts, target).exit_code == 0
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineDeadError("a worker ended")])
def test_what_was_done_is_kept_and_resume_does_the_rest(
    error: BaseException, prompts: Path, target: Path
) -> None:
    first = run(FakeEngine(interrupt_after=2, interruption=error), prompts, target)
    assert first.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert f"2 of 4 results are in {target}; --resume computes the others" in first.stderr
    assert "new tokens" in first.stderr
    before = target.read_bytes()
    assert indices(target) == [3, 2]
    engine = FakeEngine()
    second = run(engine, prompts, target, "--resume")
    assert second.exit_code == 0, second.output
    assert engine.seen == WORDS[:2]
    assert target.read_bytes().startswith(before)
    assert indices(target) == [3, 2, 1, 0]
    assert f"4 results in {target}, 2 of them from an earlier run" in second.stderr


def test_when_all_is_there_no_engine_is_opened(prompts: Path, target: Path) -> None:
    run(FakeEngine(), prompts, target)
    before, engine = target.read_bytes(), FakeEngine()
    result = run(engine, prompts, target, "--resume")
    assert result.exit_code == 0
    assert engine.settings is None and target.read_bytes() == before


def test_resume_begins_where_there_is_no_file(prompts: Path, target: Path) -> None:
    assert run(FakeEngine(), prompts, target, "--resume").exit_code == 0
    assert sorted(indices(target)) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_that_was_cut_short_is_computed_again(prompts: Path, target: Path, cut: int) -> None:
    run(FakeEngine(), prompts, target)
    whole = target.read_bytes()
    target.write_bytes(whole[:-cut])
    result = run(FakeEngine(), prompts, target, "--resume")
    assert result.exit_code == 0, result.output
    assert indices(target) == [3, 2, 1, 0]


def test_prompts_with_ids_are_found_in_another_order(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "id": f"p{number}"} for number, text in enumerate(WORDS)]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, engine = FakeEngine(interrupt_after=2), FakeEngine()
    run(first, file, target, "--temperature", "1")
    file.write_text("\n".join(map(json.dumps, reversed(lines))))
    assert run(engine, file, target, "--temperature", "1", "--resume").exit_code == 0
    assert engine.several == first.several[1::-1], "each draws as it would have"
    assert sorted(engine.seen) == sorted(WORDS[:2])
    assert sorted(record["id"] for record in records(target)) == ["p0", "p1", "p2", "p3"]


def refused(engine: FakeEngine, *arguments: Any) -> str:
    result = run(engine, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert engine.settings is None, "an engine was opened"
    return result.stderr


def test_a_file_that_holds_something_is_not_touched(prompts: Path, target: Path) -> None:
    target.write_text("years of work")
    assert "is not empty" in refused(FakeEngine(), prompts, target)
    assert target.read_text() == "years of work"


def test_an_empty_file_is_taken(prompts: Path, target: Path) -> None:
    target.touch()
    assert run(FakeEngine(), prompts, target).exit_code == 0
    assert len(records(target)) == 4


@pytest.mark.parametrize(
    "content",
    [
        "years of work",
        "years of work\n",
        "[]\n",
        "{}\n",
        '{"index": 0}\n',
        '{"index": [], "fingerprint": ""}\n',
        '{"index": 9, "fingerprint": ""}\n',
        '{"index": 0, "fingerprint": ""}\n',
        '{"id": 0, "fingerprint": ""}\n',
        "[" * 100_000 + "\n",
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_of_something_else_is_not_touched(
    prompts: Path, target: Path, content: str
) -> None:
    target.write_text(content)
    assert f"{target}, line 1 does not belong to this run" in refused(
        FakeEngine(), prompts, target, "--resume"
    )
    assert target.read_text() == content


@pytest.mark.parametrize(
    "change",
    [
        ("--max-tokens", "3"),
        ("--temperature", "1"),
        ("--model", "other"),
        ("--seed", "4"),
        ("--chat",),
    ],
    ids=str,
)
def test_results_under_other_circumstances_are_not_mixed(
    prompts: Path, target: Path, change: tuple[str, ...]
) -> None:
    run(FakeEngine(interrupt_after=1), prompts, target)
    before = target.read_bytes()
    assert "sampling parameters were different" in refused(
        FakeEngine(), prompts, target, "--resume", *change
    )
    assert target.read_bytes() == before


def test_another_prompt_at_the_same_place(prompts: Path, target: Path) -> None:
    run(FakeEngine(interrupt_after=1), prompts, target)
    prompts.write_text("\n".join([*WORDS[:3], "another one"]))
    assert "the prompt with the index 3" in refused(FakeEngine(), prompts, target, "--resume")


def test_two_prompts_of_one_id_can_not_be_resumed(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n')
    assert "the same id" in refused(FakeEngine(), file, target, "--resume")


def test_resume_needs_a_file() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--resume"], obj=FakeEngine().open)
    assert result.exit_code == 2 and "--resume needs --output" in result.stderr


def test_draws_do_not_depend_on_what_is_left(prompts: Path, target: Path) -> None:
    warm = ("--temperature", "1")
    engine = FakeEngine()
    run(engine, prompts, target, *warm)
    target.unlink()
    run(FakeEngine(interrupt_after=2), prompts, target, *warm)
    resumed = FakeEngine()
    run(resumed, prompts, target, *warm, "--resume")
    assert resumed.several == engine.several[:2]
    assert len({params.seed for params in engine.several}) == 4


def test_a_prompt_that_failed_is_said_and_tried_again(prompts: Path, target: Path) -> None:
    first = run(FakeEngine(failing={1}), prompts, target)
    assert first.exit_code == 1
    assert "prompt 2 failed: pool full" in first.stderr
    assert indices(target) == [3, 2, 0]
    engine = FakeEngine()
    assert run(engine, prompts, target, "--resume").exit_code == 0
    assert engine.seen == [WORDS[1]]


def test_on_standard_output_a_failed_prompt_holds_up_nobody(prompts: Path) -> None:
    arguments = ["generate", "--raw", "--file", str(prompts)]
    result = CliRunner().invoke(app, arguments, obj=FakeEngine(failing={0}).open)
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("[")] == [
        f"[{number}] {WORDS[number - 1]}" for number in (2, 3, 4)
    ]


def test_on_standard_output_an_interrupted_batch_shows_what_is_done(prompts: Path) -> None:
    arguments = ["generate", "--raw", "--file", str(prompts)]
    result = CliRunner().invoke(app, arguments, obj=FakeEngine(interrupt_after=2).open)
    assert result.exit_code == 130
    assert [line for line in result.stdout.splitlines() if line.startswith("[")] == [
        "[3] three more words",
        "[4] and four words more",
    ]


def test_another_run_that_writes_is_left_alone(prompts: Path, target: Path) -> None:
    with target.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing" in refused(FakeEngine(), prompts, target)
    assert target.exists()


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/dev/full", "No space left on device"),
        ("/proc/pyengine", "No such file"),
        ("/no/such/folder/out.jsonl", "No such file"),
        ("/", "Is a directory"),
        ("x" * 5000, "File name too long"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_can_not_be_written_is_refused_before_anything_is_computed(
    prompts: Path, path: str, complaint: str
) -> None:
    engine = FakeEngine()
    error = refused(engine, prompts, Path(path))
    assert "cannot write" in error and complaint in error


def test_a_file_of_somebody_else(prompts: Path, target: Path) -> None:
    target.touch(mode=0o400)
    if os.access(target, os.W_OK):
        pytest.skip("root may write anything")
    assert "Permission denied" in refused(FakeEngine(), prompts, target)


@pytest.mark.parametrize("options", [("--output",), ("--record",)])
def test_nothing_is_left_where_nothing_came(
    prompts: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    def broken(settings: object) -> FakeEngine:
        raise EngineDeadError("no")

    new = tmp_path / "new"
    arguments = ["generate", "--file", str(prompts), *options, str(new)]
    assert CliRunner().invoke(app, arguments, obj=broken).exit_code == 1
    assert not new.exists()


def test_a_pipe_takes_results(prompts: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run(FakeEngine(), prompts, pipe).exit_code == 0
        assert reader.stdout is not None
        assert len(reader.stdout.read().splitlines()) == 4
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(("first", "second"), [("--output", "--record"), ("--file", "--output")])
def test_two_options_never_name_the_same_file(prompts: Path, first: str, second: str) -> None:
    before = prompts.read_bytes()
    alias = prompts.parent / "." / prompts.name
    engine = FakeEngine()
    arguments = ["generate", "hi", first, str(prompts), second, str(alias)]
    result = CliRunner().invoke(app, arguments, obj=engine.open)
    assert result.exit_code == 2 and f"{first} and {second} are the same file" in result.stderr
    assert engine.settings is None and prompts.read_bytes() == before


def test_a_recording_replaces_no_other_file(prompts: Path) -> None:
    arguments = ["generate", "hi", "--record"]
    result = CliRunner().invoke(app, [*arguments, str(prompts)], obj=FakeEngine().open)
    assert result.exit_code == 2 and "is not a recording" in result.stderr
    assert prompts.read_text().splitlines() == WORDS


SLOW = """
import sys, time
from pyengine.cli import main
from tests.unit.cli.fakes import FakeEngine

class Slow(FakeEngine):
    def _cached(self, ids):
        if len(ids) == 2:
            time.sleep(60)
        return super()._cached(ids)

main(Slow().open)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_what_came_before_a_signal_is_there(prompts: Path, target: Path, number: int) -> None:
    arguments = ["generate", "--raw", "--file", str(prompts), "--output", str(target)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        # One that the test run ignores (nohup, a background job) would be ignored there, too.
        preexec_fn=lambda: number != signal.SIGKILL and signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        while process.poll() is None and not (target.exists() and len(records(target)) == 2):
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors
    assert indices(target) == [3, 2]
    assert run(FakeEngine(), prompts, target, "--resume").exit_code == 0
    assert indices(target) == [3, 2, 1, 0]
