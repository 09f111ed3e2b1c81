"""`pyengine generate` against a fake engine: what it prints, asks, refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.cli.display import Meter
from pyengine.cli.generate import RECORDING
from pyengine.config import EngineSettings
from pyengine.errors import ModelLoadError
from pyengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.unit.cli.fakes import FakeEngine, make_output


def run(engine: FakeEngine, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], obj=engine.open)


def test_one_prompt_streams_and_closes_with_one_line_of_figures() -> None:
    result = run(FakeEngine(), "What is it?")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The answer is [red]42[/red].\n"
    figures = result.stderr.splitlines()
    assert len(figures) == 1
    prompt, new, rate, used, merged = figures[0].split(" · ")
    assert (prompt, new) == ("4 prompt tokens", "4 new tokens")
    assert rate == "1.5 tok/s"  # three tokens after the first, in two seconds
    assert (used, merged) == ("3 blocks used", "2 merged")


@pytest.mark.parametrize("prompts", [["What is it?"], ["What is it?", "And that?"]])
def test_counters_of_zero_are_shown_where_they_are_asked_for(prompts: list[str]) -> None:
    parts = run(FakeEngine(), *prompts, "--verbose").stderr.splitlines()[-1].split(" · ")
    assert re.fullmatch(r"\d+ prompt tokens \(\d cached\)", parts[0])
    assert parts[-3:] == ["3 blocks used", "0 shared in flight", "2 merged"]


QUOTES = "put quotes around it: pyengine generate 'What is it'"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["What", "is", "it"], QUOTES),
        (["What is it"], None),
        (["What is it", "Hi"], None),
        (["What", "is", "it", "--output", "out.jsonl"], None),
        (["Qwen/Qwen3-0.6B", "What is it"], "to name a model: -m Qwen/Qwen3-0.6B"),
        (["model.gguf", "What is it"], "to name a model: -m model.gguf"),
    ],
)
def test_what_a_prompt_may_have_been_meant_to_be(
    arguments: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(FakeEngine(), *arguments)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stderr.splitlines() if "quotes" in line or "model" in line]
    assert len(notes) == (said is not None) and (said or "") in "".join(notes)


def test_prompts_may_be_options() -> None:
    engine = FakeEngine(chat_template=None)
    assert run(engine, "one more", "-p", "What is it?", "--prompt", "And?").exit_code == 0
    assert engine.seen == ["one more", "What is it?", "And?"]


@pytest.mark.parametrize(
    ("prompts", "limit", "said"),
    [
        (["What is it?"], "60", None),
        (["What is it?"], "100000", "--max-tokens 100000 is reduced to 60: "),
        (["What is it?", "Hi"], "100000", "--max-tokens 100000 is reduced to 60: "),
        (["--raw", "What is it?"], "100000", "--max-tokens 100000 is reduced to at most 63: "),
    ],
)
def test_more_tokens_than_the_context_has(prompts: list[str], limit: str, said: str | None) -> None:
    engine = FakeEngine(max_model_len=64)
    result = run(engine, *prompts, "-n", limit)
    assert result.exit_code == 0, result.output
    assert ((said or "") in result.stderr) and ("reduced" in result.stderr) == bool(said)


def test_progress_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["one", "two", "three", "--output"]
    assert "prompts\n" not in run(FakeEngine(), *arguments, str(tmp_path / "a")).stderr
    monkeypatch.setattr("pyengine.utils.progress._BETWEEN_LINES", 1e-9)
    shown = run(FakeEngine(), *arguments, str(tmp_path / "b")).stderr
    assert shown.startswith("1 of 3 prompts\n2 of 3 prompts\n3 of 3 prompts\n")


def test_cached_tokens_that_a_folder_kept_are_counted() -> None:
    meter = Meter.start(FakeEngine())
    meter.add(replace(make_output([1] * 40, ["a"], cached=32), num_restored_tokens=16))
    assert str(meter).startswith("40 prompt tokens (32 cached, 16 of them restored) · 1 new")


def timed(count: int, first: float | None, last: float | None) -> RequestOutput:
    """A result with two answers of `count` tokens each."""
    answers = [CompletionOutput(index, "", [1] * count) for index in range(2)]
    metrics = RequestMetrics(0.0, 0.0, first_token_time=first, finished_time=last)
    return RequestOutput("0", None, [1], None, answers, True, 0, metrics)


@pytest.mark.parametrize(
    ("results", "rate"),
    [
        ([timed(3, 10.0, 12.0)], "2.0 tok/s"),
        ([timed(3, 10.0, 12.0), timed(3, 11.0, 14.0)], "2.0 tok/s"),  # 8 tokens in 4 seconds
        ([timed(3, 10.0, 12.0), timed(3, 20.0, 22.0)], "2.0 tok/s"),  # not while it waits
        ([timed(3, 10.0, 14.0), timed(3, 11.0, 12.0)], "2.0 tok/s"),  # one within the other
        ([timed(1, 10.0, 12.0)], None),
        ([timed(0, None, 12.0)], None),
    ],
)
def test_the_rate_is_that_of_decodes_alone(results: list[RequestOutput], rate: str | None) -> None:
    """A long prompt makes an answer late, not slow."""
    meter = Meter.start(FakeEngine())
    for result in results:
        meter.add(result)
    parts = str(meter).split(" · ")
    assert [part for part in parts if part.endswith("tok/s")] == ([rate] if rate else [])


class DraftingEngine(FakeEngine):
    def _charge(self) -> None:
        super()._charge()
        self.num_drafts += 4
        self.counters["draft_tokens"] += 20
        self.counters["accepted_draft_tokens"] += 6


def test_the_line_of_figures_says_what_came_of_drafts() -> None:
    result = run(DraftingEngine(), "What is it?")
    assert result.exit_code == 0, result.output
    end = result.stderr.splitlines()[-1].split(" · ")[-2:]
    assert end == ["6 of 20 drafts accepted", "2.50 tokens per decode with drafts"]


def test_options_reach_the_engine_and_the_sampler() -> None:
    engine = FakeEngine()
    result = run(
        engine, "hi", "--raw", "--model", "m", "--block-size", "8", "--num-blocks", "99",
        "--gpu-memory-utilization", "0.4",
        "--max-num-seqs", "3", "--max-num-batched-tokens", "64",
        "--max-model-len", "128", "--no-prefix-caching", "--no-in-flight-sharing",
        "--no-layer-groups", "--tensor-parallel-size", "3",
        "--seed", "5", "--device", "cpu",
        "--dtype", "float32", "--attention-backend", "gather", "--max-tokens", "9",
        "--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--stop", "a",
        "--stop", "b", "--ignore-eos", "--min-tokens", "2", "--repetition-penalty", "1.1",
        "--presence-penalty", "0.2", "--frequency-penalty", "0.3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings, params = engine.settings, engine.params
    assert settings is not None and params is not None
    assert settings == EngineSettings(
        model="m", device="cpu", dtype="float32", attention_backend="gather",
        block_size=8, num_blocks=99, gpu_memory_utilization=0.4, max_num_seqs=3,
        max_num_batched_tokens=64, max_model_len=128, enable_prefix_caching=False,
        in_flight_sharing=False, layer_groups=False, seed=5, tensor_parallel_size=3,
    )  # fmt: skip
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 2, 0.7)
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 40, 0.1)
    assert (params.stop, params.ignore_eos) == (("a", "b"), True)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert engine.seen == ["hi"]


@pytest.mark.parametrize(
    ("flags", "framed"), [((), True), (("--chat",), True), (("--raw",), False)]
)
def test_a_text_is_framed_unless_told_not_to(flags: tuple[str, ...], framed: bool) -> None:
    engine = FakeEngine()
    run(engine, "hi", *flags)
    assert isinstance(engine.seen[0], dict) == framed


def test_many_prompts_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("three more words\nlast\n")
    result = run(FakeEngine(), "two words", "--file", str(path), "--raw")
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n\n") == [
        "[1] two words\nanswer to 2 tokens",
        "[2] three more words\nanswer to 3 tokens",
        "[3] last\nanswer to 1 tokens",
        "",
    ]
    assert result.stderr.startswith("6 prompt tokens · 3 new tokens · ")


def test_results_are_written_as_jsonl(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "Où?"}]
    lines = [{"prompt": "a b", "id": 7}, {"prompt_token_ids": [4, 4, 4]}, {"messages": messages}]
    source.write_text("\n".join(map(json.dumps, lines)))
    result = run(FakeEngine(), "--raw", "--file", str(source), "--output", str(target))
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    lines_written = target.read_text().splitlines()
    records = sorted(map(json.loads, lines_written), key=lambda record: record["index"])
    assert len(records[0].pop("fingerprint")) == 16
    assert records[0] == {
        "index": 0, "id": 7, "prompt": "a b", "text": "answer to 2 tokens", "token_ids": [0],
        "finish_reason": "stop", "num_prompt_tokens": 2, "num_cached_tokens": 0,
    }  # fmt: skip
    assert [r.get("prompt_token_ids") for r in records] == [None, [4, 4, 4], None]
    assert [r.get("messages") for r in records] == [None, None, messages]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give a PROMPT or --file"),
        (("hi", "--max-tokens", "-1"), "--max-tokens -1"),
        (("hi", "--temperature", "-1"), "--temperature -1.0"),
        (("hi", "--top-p", "0"), "--top-p 0.0"),
        (("hi", "--file", "nowhere.txt"), "cannot read nowhere.txt"),
        (("hi", "--output", "no/such/folder/out.jsonl"), "cannot write no/such/folder/out.jsonl"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_opened(
    arguments: tuple[str, ...], complaint: str
) -> None:
    engine = FakeEngine()
    result = run(engine, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and complaint in result.stderr
    assert result.stdout == ""
    assert engine.settings is None


def test_a_bad_line_of_a_file_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('"good"\n{"prompt": 1}\n')
    engine = FakeEngine()
    result = run(engine, "--file", str(path))
    assert result.exit_code == 2
    assert "line 2: prompt must be a string, found 1" in result.stderr
    assert engine.settings is None


def test_what_the_engine_refuses_is_one_line_and_no_traceback() -> None:
    result = run(FakeEngine(longest_prompt=1), "too long")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["error: the prompt has 3 tokens, at most 1000 fit"]


def test_a_model_that_cannot_be_loaded_is_status_1() -> None:
    def broken(options: object) -> FakeEngine:
        raise ModelLoadError("no folder models/x")

    result = CliRunner().invoke(app, ["generate", "hi"], obj=broken)
    assert result.exit_code == 1
    assert result.stderr == "error: no folder models/x\n"


@pytest.mark.parametrize("other", [ImportError, ModelLoadError, OSError, RuntimeError])
def test_ctrl_c_is_known_behind_the_error_that_it_was_turned_into(other: type[Exception]) -> None:
    def interrupted(settings: object) -> FakeEngine:
        try:
            try:
                raise KeyboardInterrupt
            finally:
                raise AttributeError("half imported")
        except AttributeError as error:
            raise other("could not import module") from error

    result = CliRunner().invoke(app, ["generate", "hi"], obj=interrupted)
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted"


def test_ctrl_c_ends_a_stream_cleanly() -> None:
    engine = FakeEngine(interrupt_after=2)
    result = run(engine, "hi")
    assert result.exit_code == 130
    assert result.stdout == "The answer\n"
    assert "2 new tokens" in result.stderr and "interrupted" in result.stderr
    assert engine.closed == 1


def test_ctrl_c_in_a_batch_leaves_no_output_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    result = run(FakeEngine(interrupt_after=0), "one", "two", "--output", str(target))
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted"
    assert not target.exists()


@pytest.mark.parametrize("prompts", [["one"], ["one", "two"]])
def test_a_recording_is_begun_before_the_engine_runs(tmp_path: Path, prompts: list[str]) -> None:
    file = tmp_path / "run.kvtrace"
    result = run(FakeEngine(), *prompts, "--record", str(file))
    assert result.exit_code == 0, result.output
    assert file.read_bytes() == b"recorded"


def test_an_older_recording_is_kept(tmp_path: Path) -> None:
    """As results are: a file that holds something is not written over."""
    file, engine = tmp_path / "run.kvtrace", FakeEngine()
    file.write_bytes(RECORDING + b"older")
    result = run(engine, "one", "--record", str(file))
    assert result.exit_code == 2
    assert f"{file} is a recording already" in result.stderr and "another file" in result.stderr
    assert file.read_bytes() == RECORDING + b"older"
    assert engine.settings is None and not engine.seen
    file.write_bytes(b"")
    assert run(engine, "one", "--record", str(file)).exit_code == 0


def test_a_recording_that_cannot_be_written_runs_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    result = run(engine, "one", "--record", str(tmp_path / "no" / "folder"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert not engine.seen
