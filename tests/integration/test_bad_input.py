"""Bad input is refused by name and number, and leaves the engine as it was."""

import json
import linecache
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

import pyengine
from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigurationError, InvalidRequestError, ModelLoadError
from pyengine.kv_cache import replay
from pyengine.models.decoder.cpu_kernels import CpuKernels
from tests.support.checkpoints import save_tiny
from tests.support.soak import soak_only

VOCABULARY, POSITIONS = 32, 64
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9], [10, 11], list(range(3, 23))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, dtype="float32")
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def make(model: Path | str, **settings: Any) -> LLM:
    return LLM(model, **{"device": "cpu", "block_size": 4, "num_blocks": 40, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def assert_says(error: pytest.ExceptionInfo[Exception], *parts: object) -> None:
    message = str(error.value)
    assert not [part for part in parts if str(part) not in message], message


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        make(tmp_path / "nowhere")
    assert_says(error, tmp_path / "nowhere", "give a path")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        make(tmp_path)
    assert_says(error, tmp_path, "config.json")


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"this is no model at all, only text")
    with pytest.raises(ModelLoadError) as error:
        make(path)
    assert_says(error, path, "not a GGUF file", b"this", "34 bytes", "download it again")


def test_a_gguf_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (9).to_bytes(8, "little") * 2)
    with pytest.raises(ModelLoadError) as error:
        make(path)
    assert_says(error, path, "damaged")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_safetensors_file(copy: Path, share: float) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError) as error:
        make(copy)
    assert_says(error, path, "truncated", "get it again")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_weights_of_another_shape_than_the_configuration(copy: Path) -> None:
    edit_config(copy, intermediate_size=48)
    with pytest.raises(ModelLoadError) as error:
        make(copy)
    assert_says(error, copy)


def test_weights_that_lack_a_layer(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=3)
    with pytest.raises(ModelLoadError) as error:
        make(copy)
    assert_says(error, copy, "layers.2.")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"eviction": "fifo"}, ["fifo", "lru, 2q"]),
        ({"block_size": 0}, ["block_size=0", "at least 1"]),
        ({"block_size": -16}, ["block_size=-16", "at least 1"]),
        ({"num_blocks": 0}, ["num_blocks=0", "at least 1"]),
        ({"num_blocks": 10**12}, ["num_blocks=1000000000000", "available", "at most num_blocks="]),
        (
            {"num_blocks": None, "kv_cache_memory": 10**16},
            ["kv_cache_memory=10000000000000000", "available", "at most num_blocks="],
        ),
        (
            {"num_blocks": None, "kv_cache_memory": 100},
            ["kv_cache_memory=100 ", "give at least that"],
        ),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "at least 1"]),
        ({"max_num_batched_tokens": 8}, ["max_num_batched_tokens=8", "max_num_seqs=256"]),
        (
            {"max_num_batched_tokens": 10**9},
            ["max_num_batched_tokens=1000000000", "GiB", "available", "at most max_num_batched"],
        ),
        ({"max_num_batched_tokens": 10**12}, ["max_num_batched_tokens=1000000000000", "at most"]),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            ["max_num_seqs=1000000000", "available", "fewer max_num_seqs"],
        ),
        ({"max_model_len": POSITIONS + 1}, [f"max_model_len={POSITIONS + 1}", "64 positions"]),
        ({"max_model_len": 60, "num_blocks": 4}, ["max_model_len=60", "4 blocks of 4", "larger"]),
        ({"attention_backend": "magic"}, ["attention_backend='magic'", "auto, cpu, flashinfer"]),
        ({"device": "abacus"}, ["abacus"]),
        ({"dtype": "float7"}, ["float7"]),
    ],
    ids=str,
)
def test_settings_that_cannot_be_served(
    folder: Path, settings: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make(folder, **settings)
    assert_says(error, *parts)


UNSERVABLE: list[tuple[Any, dict[str, Any], list[str]]] = [
    ([], {}, ["prompt is empty", "at least one token"]),
    ([3, VOCABULARY], {}, ["token id 32 at position 1", "vocabulary of 32"]),
    ([3, 4, -1], {}, ["token id -1 at position 2", "vocabulary of 32"]),
    ([3, 2**70], {}, [f"token id {2**70}", "at position 1", "outside of any vocabulary"]),
    ([3, 4.5], {}, ["4.5", "position 1"]),
    ("text", {}, ["'text'", "no tokenizer", "token ids"]),
    ([3] * POSITIONS, {}, ["has 64 tokens", "at most 63", "64 positions", "shorten"]),
    ([3], {"stop": "x"}, ["stop=['x']", "stop_token_ids"]),
    ([3], {"stop_token_ids": [VOCABULARY]}, ["32"]),
    ([3], {"logit_bias": {VOCABULARY: 1.0}}, ["32"]),
]


def generate_one(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    form = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    llm.generate([PROMPTS[0], form, PROMPTS[2]], [GREEDY, params, GREEDY], use_tqdm=False)


@pytest.mark.parametrize(("prompt", "settings", "parts"), UNSERVABLE, ids=lambda v: str(v)[:30])
def test_one_invalid_request_stops_the_batch_before_any_runs(
    llm: LLM, prompt: Any, settings: dict[str, Any], parts: list[str]
) -> None:
    before = llm.stats()
    with pytest.raises(InvalidRequestError) as error:
        generate_one(llm, prompt, SamplingParams(temperature=0, max_tokens=4, **settings))
    assert_says(error, *parts)
    after = llm.stats()
    assert after == before, "the refused batch left a trace"
    assert (after.num_running, after.num_waiting) == (0, 0)


def test_a_prompt_longer_than_the_pool(folder: Path) -> None:
    small = make(folder, num_blocks=3)
    with pytest.raises(InvalidRequestError) as error:
        small.generate([3] * 12, GREEDY, use_tqdm=False)
    assert_says(error, "has 12 tokens", "at most 11", "3 blocks of 4 tokens", "shorten")
    [output] = small.generate([3] * 11, GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    "settings",
    [{"max_tokens": -1}, {"temperature": -0.5}, {"temperature": float("nan")}, {"top_p": 0}],
    ids=str,
)
def test_sampling_parameters_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**settings)
    [(name, value)] = settings.items()
    assert_says(error, name, value)


def all_free(llm: LLM) -> bool:
    stats = llm.stats()
    held = (stats.usage.active, stats.usage.pinned, stats.num_running, stats.num_waiting)
    return held == (0, 0, 0, 0)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def fail() -> None:
    raise RuntimeError("a fault")


@contextmanager
def in_forward(act: Callable[[], object], at: int) -> Iterator[None]:
    """Act before the `at`-th sum with norm of decoder layers, counted from now."""
    seen, add_norm = 0, CpuKernels.add_norm

    def counted(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == at:
            act()
        return add_norm(*arguments)

    with patch.object(CpuKernels, "add_norm", counted):
        yield


FALLS_AT = pytest.mark.parametrize("at", [1, 3, 5, 11, 23])
POOLS = pytest.mark.parametrize("num_blocks", [40, 12])


@FALLS_AT
@POOLS
def test_a_forward_pass_that_is_interrupted(folder: Path, at: int, num_blocks: int) -> None:
    llm = make(folder, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=8)
    expected = tokens(make(folder))
    main = threading.main_thread().ident or 0
    with (
        in_forward(partial(signal.pthread_kill, main, signal.SIGINT), at),
        pytest.raises(KeyboardInterrupt),
    ):
        tokens(llm)
    assert all_free(llm), llm.stats()
    assert tokens(llm) == expected
    assert all_free(llm)


@FALLS_AT
@POOLS
def test_a_forward_pass_that_fails_once_is_run_again(
    folder: Path, at: int, num_blocks: int
) -> None:
    llm = make(folder, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=8)
    expected = tokens(make(folder))
    with in_forward(fail, at):
        assert tokens(llm) == expected
    assert llm.stats().counters["rolled_back_steps"] == 1
    assert all_free(llm), llm.stats()


def test_a_stream_that_is_left_early(llm: LLM) -> None:
    for output in llm.stream(PROMPTS[3], GREEDY):
        if len(output.outputs[0].token_ids) >= 3:
            break
    assert all_free(llm)


PACKAGE = str(Path(pyengine.__file__).parent)
CODE = (f"{PACKAGE}/engine", f"{PACKAGE}/request", f"{PACKAGE}/llm.py")
CLEANING = {"abort", "interrupt", "__exit__", "close"}
"""Ending requests: an interruption in there is one of the clean-up itself."""


class Interruption:
    """Raises `KeyboardInterrupt` at the n-th line of ours that a caller's thread runs.

    Not at a line of `try:` alone: CPython looks for no signal there, and in 3.11 an exception there
    passes by the handlers of an outer `try`. Not at a line of `with`, which is traced again before
    `__exit__` is called: CPython looks for no signal there, either, and a lock would stay locked.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.lines: list[str] = []

    def __enter__(self) -> "Interruption":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        is_ours = frame.f_code.co_filename.startswith(CODE)
        return self._line if is_ours and not self._cleans(frame) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        file = frame.f_code.co_filename
        line = linecache.getline(file, frame.f_lineno).strip()
        if event == "line" and line != "try:" and not line.startswith("with "):
            self.lines.append(f"{Path(file).name}:{frame.f_lineno}")
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
        return self._line

    @staticmethod
    def _cleans(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in CLEANING:
                return True
            frame = frame.f_back
        return False


def interrupted_at(llm: LLM, line: int, expected: list[list[int]]) -> str | None:
    """Interrupt a batch at that line; say what is wrong, if the engine did not get over it."""
    try:
        with Interruption(line), suppress(KeyboardInterrupt):
            tokens(llm)
        recovered = all_free(llm) and tokens(llm) == expected and all_free(llm)
    except Exception as error:
        return repr(error)
    return None if recovered else f"not all free: {llm.stats()}"


@pytest.mark.slow
@pytest.mark.parametrize("stride", [4, *soak_only([1])])
def test_ctrl_c_wherever_it_falls(folder: Path, stride: int) -> None:
    """At every `stride`-th line that a batch with a preemption runs in its caller's thread."""

    def fresh() -> LLM:
        return make(folder, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=8)

    llm = fresh()
    expected = tokens(llm)
    before = llm.stats().num_preemptions
    with Interruption(None) as counting:
        tokens(llm)
    assert llm.stats().num_preemptions > before
    last = {where: at for at, where in enumerate(counting.lines, start=1)}
    assert len(last) > 150
    failures = {}
    for where, at in list(last.items())[::stride]:
        failure = interrupted_at(llm, at, expected)
        if failure is not None:
            failures[where] = failure
            llm = fresh()
    assert not failures, "\n".join(f"{where}: {what}" for where, what in failures.items())


def test_a_recording_comes_before_the_first_request(folder: Path, tmp_path: Path) -> None:
    llm, file = make(folder), tmp_path / "run.kvtrace"
    with pytest.raises(ConfigurationError) as error, llm.recording(tmp_path / "no" / "folder"):
        pass
    assert_says(error, tmp_path / "no" / "folder", "No such file")
    with llm.recording(file):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    report = replay(file)
    assert report.is_complete and report.divergence is None
    counters = dict(llm.stats().counters)
    forked = {counters.pop("forked_blocks"), counters.pop("forked_tokens")}  # the scheduler's
    assert forked == {0}
    replayed = report.stats.as_dict()
    # Explanations hash blocks, too, and a replay makes none.
    assert replayed.pop("hashed_blocks") <= counters.pop("hashed_blocks")
    assert replayed == counters
    with pytest.raises(ConfigurationError) as error, llm.recording(tmp_path / "late"):
        pass
    assert_says(error, tmp_path / "late", "4 sequences")
