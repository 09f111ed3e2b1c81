"""The floor of a step: bytes and operations of its parts, timers that leave nothing behind."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benches.engine.floor import __main__ as command
from benches.engine.floor import parts
from benches.engine.floor.machine import Limits, limits_of, measure_limits
from benches.engine.floor.measure import Case, MeasuredEngine, Variant, measure
from benches.engine.floor.parts import (
    ATTENTION,
    DOWN,
    EMBEDDING,
    GATE,
    HEAD,
    MODEL_PARTS,
    NORMS,
    OTHER,
    OUT,
    QKV,
    ROTATION,
    SAMPLING,
    SCHEDULING,
    CountedModel,
    FloorError,
    StepShape,
)
from benches.engine.floor.tables import rates, tables
from benches.engine.floor.timers import Timers
from pyengine import LLM, SamplingParams
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import usable_threads
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.gguf_header import read_header
from pyengine.models.source import embedded_gguf
from tests.unit.models.decoder.tiny_models import MODELS, Tiny, save

LIMITS = Limits.even(2, 1e9, 1e10)
CASES = (Case("1 row", 1, 5), Case("3 rows", 3, 5), Case("a prompt", 1, 0, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
NAMES = ("llama-biases", "qwen3", "gemma2", "gemma3", "gemma4", "gpt2", "phi3", "smollm3-window")
DENSE = [tiny for tiny in MODELS if tiny.name in NAMES]
LLAMA = next(tiny for tiny in MODELS if tiny.name == "llama-tied")

needs_kernels = pytest.mark.skipif(not CpuAttention.is_fast(), reason="no fast CPU kernels")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(LLAMA, folder)
    return folder


@pytest.fixture
def engine(llama: Path) -> Iterator[MeasuredEngine]:
    measured = MeasuredEngine(Variant("tiny", llama, "float32"), 1, CASES)
    yield measured
    measured.close()


@pytest.mark.parametrize("tiny", DENSE, ids=[tiny.name for tiny in DENSE])
def test_weights_of_parts_add_up_to_those_of_the_file(tiny: Tiny, tmp_path: Path) -> None:
    save(tiny, tmp_path)
    tensors = check_weights(tmp_path).tensors.values()
    sizes = CountedModel(tmp_path, "float32").weight_bytes
    assert sum(sizes.values()) == 4 * sum(prod(tensor.shape) for tensor in tensors)
    assert all(sizes[part] for part in (QKV, OUT, GATE, DOWN, HEAD, NORMS))
    assert bool(sizes[OTHER]) == (tiny.family == "gemma4_text")


def test_weights_of_a_gguf_file_have_its_bytes() -> None:
    path = embedded_gguf()
    sizes = CountedModel(path, "float32").weight_bytes
    assert sum(sizes.values()) == sum(tensor.num_bytes for tensor in read_header(path).tensors)


def test_operations_and_bytes_are_those_of_a_count_by_hand(llama: Path) -> None:
    hidden, inner, heads, size, layers, vocabulary = 48, 72, 6, 8, 3, 101
    for rows, context, new, width in ((1, 10, 1, 4), (4, 7, 1, 2), (1, 0, 9, 4), (1, 3, 5, 2)):
        dtype: Any = "float32" if width == 4 else "bfloat16"
        model = CountedModel(llama, dtype)
        costs = model.costs(StepShape(rows, context, new), width)
        tokens = rows * new
        pairs = rows * sum(context + number + 1 for number in range(new))
        operations = {
            QKV: 2 * tokens * hidden * 3 * heads * size * layers,
            OUT: 2 * tokens * heads * size * hidden * layers,
            GATE: 2 * tokens * hidden * 2 * inner * layers,
            DOWN: 2 * tokens * inner * hidden * layers,
            HEAD: 2 * rows * hidden * vocabulary,
            ATTENTION: 2 * pairs * heads * 2 * size * layers,
            ROTATION: 3 * tokens * 2 * heads * size * layers,
            NORMS: 5 * hidden * (2 * layers * tokens + rows),
            SAMPLING: rows * vocabulary,
            EMBEDDING: 0,
            SCHEDULING: 0,
        }
        actual = {part: sum(costs[part].operations.values()) for part in operations}
        assert actual == operations
        num_bytes = {
            QKV: width * hidden * 3 * heads * size * layers,
            DOWN: width * inner * hidden * layers,
            HEAD: width * (hidden + rows) * vocabulary,
            ATTENTION: width * rows * context * 2 * heads * size * layers,
            ROTATION: width * tokens * 2 * heads * size * layers,
            EMBEDDING: width * tokens * hidden,
            NORMS: width * hidden * (2 * layers + 1),
        }
        assert {part: costs[part].num_bytes for part in num_bytes} == num_bytes


def test_a_window_limits_the_keys() -> None:
    shape = StepShape(2, 6, 3)
    assert shape.seen(None) == (2 * (7 + 8 + 9), 2 * 6)
    assert shape.seen(8) == (2 * (7 + 8 + 8), 2 * 6)
    assert shape.seen(4) == (2 * (4 + 4 + 4), 2 * 3)


def test_the_floor_is_that_of_bytes_or_of_operations() -> None:
    cost = parts.Cost()
    cost.add(1000, 100, "float32")
    assert cost.seconds(100, {"float32": 1}) == 100
    assert cost.seconds(100, {"float32": 50}) == 10
    cost.add(0, 100, "int8")
    assert cost.seconds(100, {"float32": 5, "int8": 50}) == 22


@needs_kernels
def test_limits_of_the_machine_are_measured_and_kept() -> None:
    limits = measure_limits(1, 1 << 16, large=1 << 20, side=64)
    rates_found = [
        limits.reading,
        limits.reading_alone,
        limits.reading_again,
        *limits.peaks.values(),
    ]
    assert all(rate.per_second > 0 and rate.program for rate in rates_found)
    assert limits_of(json.loads(json.dumps(limits.as_json()))) == limits


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_step_add_up_to_the_step(llama: Path, dtype: Any) -> None:
    result = measure(Variant("tiny", llama, dtype), 2, 1, limits=LIMITS, cases=CASES)
    assert list(result["steps"]) == [case.name for case in CASES]
    for case in CASES:
        figures = result["steps"][case.name]
        seconds = {part: part_figures["seconds"] for part, part_figures in figures["parts"].items()}
        inside = sum(seconds.values()) - seconds[parts.BETWEEN]
        assert inside == pytest.approx(figures["seconds"])
        assert all(
            part_figures["seconds_of_one_thread"] >= 0 for part_figures in figures["parts"].values()
        )
        assert figures["tokens"] == case.rows * case.new
        named = set(MODEL_PARTS) - {OTHER, ROTATION, ATTENTION}
        assert all(seconds[part] > 0 for part in named | {SAMPLING, SCHEDULING})
        assert seconds[ROTATION] + seconds[ATTENTION] > 0
        assert seconds[OTHER] == 0
    about = {"cpu": "a CPU", "isa": "avx2", "cores": 2, "date": "today"}
    lines = list(tables({"machine": about, "variants": {"tiny": result}}))
    text = "\n".join(lines)
    for case in CASES:
        rate, highest = rates(result["steps"][case.name])
        assert f"| tiny, {case.name} | {rate:,.1f} | {highest:,.1f} |" in text
        columns = "MB | MFLOP | floor, ms | ms | floor / ms | share | one thread / 2"
        assert f"\n| tiny, {case.name} | {columns} |" in lines
    assert sum(line.startswith("| whole step |") for line in lines) == len(CASES)


@needs_kernels
def test_timers_leave_the_engine_as_it_was(engine: MeasuredEngine) -> None:
    llm, decoder = engine._llm, engine.timers._decoder
    prompts = [[5, 6, 7], [9] * 20]

    def answers() -> list[Any]:
        return [
            output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)
        ]

    def state() -> list[Any]:
        owners = [
            decoder,
            *parts.layer_parts(decoder),
            *(owner for _, owner in products_of(decoder)),
        ]
        own = [vars(owner) if hasattr(owner, "__dict__") else owner.product for owner in owners]
        return [dict(owner) if isinstance(owner, dict) else owner for owner in own]

    expected, before = answers(), state()
    with engine.timers.on():
        assert answers() == expected
        assert state() != before
    assert engine.timers.steps[-1].spent[QKV] > 0
    with engine.timers.without_writes(), engine.timers.on():
        engine.round(CASES[2])
    assert state() == before
    assert answers() == expected
    assert not engine.timers.steps[-1].spent
    engine.timers.close()
    assert "step" not in vars(llm._engine)


@needs_kernels
def test_steps_of_one_thread_have_one(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MeasuredEngine(Variant("tiny", llama, "float32"), 2, CASES)
    seen: list[int] = []
    step = engine.timers._step

    def watched() -> Any:
        seen.append(usable_threads())
        return step()

    monkeypatch.setattr(engine.timers, "_step", watched)
    with engine.timers.one_thread():
        engine.round(CASES[0])
    assert set(seen) == {1}
    engine.round(CASES[0])
    assert set(seen) == {1, 2}
    engine.close()


def products_of(decoder: Any) -> Iterator[tuple[str, Any]]:
    return parts.products(decoder)


@needs_kernels
def test_an_engine_without_these_parts_is_refused(llama: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 64}
    refused = pytest.raises(FloorError, match="attention is computed by 'gather'")
    with LLM(llama, attention_backend="gather", **settings) as llm, refused:
        Timers(llm)
    save(next(tiny for tiny in MODELS if tiny.family == "mixtral"), tmp_path)
    with pytest.raises(FloorError, match="mixture of experts"):
        measure(Variant("experts", tmp_path, "float32"), 1, 1, limits=LIMITS, cases=CASES)


@needs_kernels
def test_a_model_of_torch_s_operations_is_refused(llama: Path) -> None:
    refused = pytest.raises(FloorError, match=r"torch's operations.*float16")
    with LLM(llama, dtype="float16", num_blocks=64) as llm, refused:
        Timers(llm)


def test_what_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (
        (["--model", "/nowhere"], "--model /nowhere: there is no such file or folder"),
        (["--only", "64 rows"], "--only '64 rows': there are 1 row after 64 tokens; "),
        (["--threads", "0"], "--threads 0: at least 1"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
    ):
        monkeypatch.setattr("sys.argv", ["floor", *given])
        with pytest.raises(SystemExit):
            command.parse()
        assert said in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["floor", "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"config\.json"):
        command.main()


def test_steps_beyond_the_context_are_left_out(llama: Path) -> None:
    cases = (*CASES, replace(CASES[0], name="long", context=200))
    result = measure(Variant("tiny", llama, "float32"), 1, 1, limits=LIMITS, cases=cases)
    assert "long" not in result["steps"] and len(result["steps"]) == len(CASES)
    assert np.isfinite(result["steps"]["1 row"]["seconds"])
