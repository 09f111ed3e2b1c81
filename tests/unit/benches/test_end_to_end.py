"""The end-to-end benchmark's requests, records and tables; no text is generated here."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benches.engine import end_to_end
from benches.engine.end_to_end import (
    COMPILED,
    INT8,
    INT8_COMPILED,
    LLAMA,
    MISTRAL,
    OURS,
    VLLM32,
    WORKS,
    Record,
    Work,
    answering,
    check_tokens,
    measure,
    summary,
    tables,
)
from benches.engine.page import PAGE, publish
from benches.engine.serve import GenerateRequest, greedy_ids, text_of


def test_works_ask_for_what_their_names_say() -> None:
    for work in WORKS:
        request = work.request(Random(0))
        assert len(request.prompts) == work.count
        assert request.is_text is (work.kind == "text") is request.settings()["detokenize"]
        assert request.temperature == (work.kind == "sampled")
    shared = Work(3, 8, 2, 5)
    prompts = shared.request(Random(0)).prompts
    assert len({str(prompt[:8]) for prompt in prompts}) == 1
    assert len({str(prompt[8:]) for prompt in prompts}) == 3
    assert shared.name == "3 x (8 shared + 2 own in, 5 out)"
    assert (shared.tokens, Work(8, 0, 512, 1).tokens) == (15, 8 * 512)


def filled(path: Path) -> Record:
    record = Record(path, keep=False)
    name = WORKS[1].name
    for engine, seconds in ((OURS, (4.0, 2.0)), (COMPILED, (2.0, 2.0)), (VLLM32, (2.0, 2.0))):
        record.begin("float32", name, engine)
        for value in seconds:
            record.add("float32", name, engine, value)
    return record


def test_every_round_is_in_the_file_and_a_part_can_be_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    filled(path)
    assert json.loads(path.read_text())["seconds"]["float32"][WORKS[1].name][OURS] == [4.0, 2.0]
    again = Record(path, keep=True)
    again.begin("float32", WORKS[1].name, OURS)
    again.add("float32", WORKS[1].name, OURS, 1.0)
    kept = Record(path, keep=True).seconds["float32"][WORKS[1].name]
    assert kept == {OURS: [1.0], COMPILED: [2.0, 2.0], VLLM32: [2.0, 2.0]}


def test_ratios_are_of_the_same_rounds_and_the_better_of_ours_counts(tmp_path: Path) -> None:
    record = filled(tmp_path / "found.json")
    assert record.ratio("float32", WORKS[1].name, OURS, VLLM32) == pytest.approx(0.75)
    assert record.best_ratio("float32", WORKS[1].name, VLLM32) == pytest.approx(1.0)
    assert record.best_ratio("bfloat16", WORKS[1].name, VLLM32) is None
    page = "\n".join(tables(record))
    assert f"| {WORKS[1].name} | 683 | 1,024 | 1,024 |" in page
    assert f"| {WORKS[1].name}, float32 |  |  | 1.00 | 1.05, not met |" in page
    assert list(summary(record))[2:] == [f"| {WORKS[1].name} | 1.00 |  |  |"]


def test_8_bit_weights_are_held_against_float32(tmp_path: Path) -> None:
    record = filled(tmp_path / "found.json")
    title = "| 8-bit weights, times as fast as ours | in float32 | in bfloat16 | goal, "
    assert title not in "\n".join(tables(record))
    for seconds in (0.9, 1.0, 1.3):
        record.seconds.setdefault("bfloat16", {}).setdefault(WORKS[1].name, {}).setdefault(INT8, [])
        record.add("bfloat16", WORKS[1].name, INT8, seconds)
    page = "\n".join(tables(record))
    assert title in page
    assert f"| {WORKS[1].name} | 2.00 |  | 1.80, met |" in page
    record.begin("bfloat16", WORKS[1].name, OURS)
    record.add("bfloat16", WORKS[1].name, OURS, 0.5)
    assert f"| {WORKS[1].name} | 2.00 | 0.50 | 1.80, met |" in "\n".join(tables(record))
    assert "llama.cpp" not in page


def test_8_bit_weights_are_held_against_llama_cpp(tmp_path: Path) -> None:
    record, work = filled(tmp_path / "found.json"), WORKS[0].name
    for engine, seconds in ((LLAMA, 1.0), (INT8, 4.0), (INT8_COMPILED, 2.0)):
        record.begin("bfloat16", work, engine)
        record.add("bfloat16", work, engine, seconds)
    assert f"| {work} | 0.50 | 1.00, not met |" in "\n".join(tables(record))


@pytest.mark.parametrize("name", [LLAMA, MISTRAL])
def test_engines_of_files_answer_the_one_request_and_the_prompts(name: str, tmp_path: Path) -> None:
    record, engines = Record(tmp_path / "found.json", keep=False), [Fake(OURS), Fake(name)]
    works = [WORKS[0], WORKS[1], WORKS[4]]
    for work in works:
        measure(answering(engines, work), work, 2, "bfloat16", record)  # type: ignore[arg-type]
    rounds = record.seconds["bfloat16"]
    assert [rounds[work.name].get(name) for work in works] == [[2.0, 2.0], None, [2.0, 2.0]]
    assert end_to_end.model_of(name).suffix == ".gguf"
    assert (name, "float32") in end_to_end.NOT_MEASURED


def test_an_answer_of_another_length_is_refused() -> None:
    request = GenerateRequest([[5, 6], [7]], 3)
    check_tokens("x", request, [[1, 2, 3], [4, 5, 6]])
    for tokens, said in (
        ([[1, 2, 3], [4]], "x gave answers of 1 to 3 tokens, 3 were asked for"),
        ([[1, 2, 3], []], "x gave answers of 0 to 3 tokens, 3 were asked for"),
        ([[1, 2, 3], [1, 2, 3, 4]], "x gave answers of 3 to 4 tokens, 3 were asked for"),
        ([[1, 2, 3]], "x gave 1 answers to 2 prompts"),
    ):
        with pytest.raises(RuntimeError, match=said):
            check_tokens("x", request, tokens)
    check_tokens("x", replace(request, stops=True), [[1, 2, 3], []])
    with pytest.raises(RuntimeError, match="3 to 4 tokens"):
        check_tokens("x", replace(request, stops=True), [[1, 2, 3], [1, 2, 3, 4]])


class Tokenizer:
    """One whose tokens are words; of those above 100 a text has two."""

    def detokenize_text(self, tokens: list[int], _skip_special_tokens: bool) -> str:
        return " ".join(f"{token}" if token < 100 else f"{token % 100} 7" for token in tokens)

    def tokenize_text(self, text: str, _add_special: bool, _thinking: None) -> list[int]:
        return [int(word) if word.isdigit() else 8 for word in text.split()]


def test_a_text_has_as_many_tokens_as_the_prompt() -> None:
    for prompt in ([5, 6, 7], [5, 600, 7], [100] * 9):
        text = text_of(prompt, Tokenizer())
        assert len(Tokenizer().tokenize_text(text, False, None)) == len(prompt)
        assert text.startswith(f"{prompt[0] % 100}")


def test_engines_of_files_refuse_other_requests() -> None:
    prompts: list[list[int]] = [[5]]
    assert greedy_ids(GenerateRequest(prompts, 2), "x") == prompts
    for request in (
        GenerateRequest(["text"], 2),
        GenerateRequest(prompts, 2, temperature=1.0),
        GenerateRequest(prompts, 2, stops=True),
    ):
        with pytest.raises(ValueError, match="x takes greedy requests of token ids"):
            greedy_ids(request, "x")


def test_the_tables_say_which_build_of_llama_cpp_ran(tmp_path: Path) -> None:
    record = filled(tmp_path / "found.json")
    record.about["engines"][LLAMA] = {"bfloat16": {"version": "1.2", "build": "AVX512 = 1"}}
    assert "\nllama.cpp 1.2, built with: AVX512 = 1" in list(tables(record))


class Fake:
    """An engine that answers, up to a call from which on it fails."""

    is_alive = True

    def __init__(self, name: str, fails_at: int = 1000) -> None:
        self.name, self._calls = name, iter(range(fails_at))

    def generate(self, request: GenerateRequest) -> dict[str, Any]:
        if next(self._calls, None) is None:
            raise RuntimeError("out of memory")
        tokens = [[1] * request.max_tokens for _ in request.prompts]
        return {"seconds": 2.0, "tokens": tokens, "characters": 0}


def test_an_engine_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    record, engines = Record(tmp_path / "found.json", keep=False), [Fake(OURS), Fake(VLLM32, 2)]
    measure(engines, WORKS[1], 3, "float32", record)  # type: ignore[arg-type]
    assert record.seconds["float32"][WORKS[1].name] == {OURS: [2.0] * 3, VLLM32: [2.0]}
    assert record.about["missing"] == {f"{WORKS[1].name}, {VLLM32}, float32": "out of memory"}
    assert record.same["float32"][WORKS[1].name] == {OURS: 96, VLLM32: 32}


def test_what_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--engines", "pyengine,sglang"])
    with pytest.raises(SystemExit):
        end_to_end.parse()


def test_tables_go_between_their_marks_and_nothing_else_is_touched(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n")
    for write, middle in ((False, "old"), (True, "one\ntwo")):
        publish("x", ["one", "two"], write=write, page=page)
        assert page.read_text() == f"a\n<!-- x -->\n{middle}\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="has no marks <!-- y -->"):
        publish("y", [], write=True, page=page)


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (PAGE, "end-to-end-xeon-amx"),
        (PAGE, "engine-overhead-xeon-amx"),
        (end_to_end.INDEX, "end-to-end-epyc-avx512"),
    ],
)
def test_the_pages_have_the_marks(page: Path, name: str) -> None:
    text = page.read_text()
    assert f"<!-- {name} -->\n" in text and f"<!-- end of {name} -->" in text


@pytest.mark.slow
def test_this_engine_answers_ids_and_text(tmp_path: Path) -> None:
    with end_to_end.Engine(OURS, "float32", tmp_path) as engine:
        ids = engine.generate(GenerateRequest([[5, 6, 7]], 3))
        text = engine.generate(
            GenerateRequest(["The capital of France is"], 4, temperature=1.0, top_p=0.9)
        )
    assert engine.described["dtype"] == "float32"
    assert (len(ids["tokens"][0]), ids["characters"]) == (3, 0)
    assert len(text["tokens"][0]) == 4 and text["characters"] > 0 and text["seconds"] > 0
