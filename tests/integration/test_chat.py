"""Conversations become the prompts that transformers makes of them; callers take turns."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, RequestOutput, SamplingParams
from pyengine.async_engine import AsyncEngine
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import RequestOutputKind
from tests.support import chat
from tests.support.chat import by_template, chat_tokenizer
from tests.support.checkpoints import save_tiny
from tests.support.tokenizers import save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 32}
"""Of engines of the embedded model that are compared with each other."""
SHORT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2)
USER = {"role": "user", "content": "What is 1 + 2?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTIONS = ["The capital of France is", "2 + 2 ="]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def save(folder: Path, template: str) -> Path:
    save_tiny(folder, vocab_size=chat.VOCAB_SIZE, max_position_embeddings=1024)
    save_tokenizer(folder, chat_tokenizer(template))
    return folder


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"device": "cpu", "block_size": 16, "num_blocks": 80, **settings})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A small model that takes tools and the variable `enable_thinking`."""
    return make(save(tmp_path_factory.mktemp("chatml"), chat.CHATML))


ASKED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "more turns": ([USER, {"role": "assistant", "content": "3"}, USER], {}),
    "calls and what they gave": (CALLED, {}),
    "tools": ([USER], {"tools": [TOOL]}),
    "tools and calls": (CALLED, {"tools": [TOOL, TOOL]}),
    "variables": ([USER], {"chat_template_kwargs": {"enable_thinking": False}}),
    "another template": ([USER], {"chat_template": chat.CONCATENATES}),
    "no new turn": ([USER], {"add_generation_prompt": False}),
    "the last message goes on": (
        [USER, {"role": "assistant", "content": "It is"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}


@pytest.mark.parametrize(("messages", "options"), ASKED.values(), ids=ASKED)
def test_the_prompt_is_the_one_of_transformers(
    messages: list[dict[str, Any]], options: dict[str, Any], tiny: LLM
) -> None:
    plain = {key: value for key, value in options.items() if key != "chat_template_kwargs"}
    variables = options.get("chat_template_kwargs", {})
    expected = by_template(tiny.tokenizer, messages, **plain, **variables)
    (output,) = tiny.chat(messages, SHORT, use_tqdm=False, **options)
    assert output.prompt_token_ids == expected
    assert tiny.apply_chat_template(messages, **options) == expected
    assert tokens_of([output]) == tokens_of(tiny.generate(expected, SHORT, use_tqdm=False))


def test_several_conversations_in_one_call(tiny: LLM) -> None:
    several = [[USER], CALLED, [USER, {"role": "assistant", "content": "3"}, USER]]
    outputs = tiny.chat(several, SHORT, use_tqdm=False, tools=[TOOL])
    assert [output.prompt_token_ids for output in outputs] == [
        by_template(tiny.tokenizer, value, tools=[TOOL]) for value in several
    ]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (chat.CHATML, "What is\n1 + 2?"),
        (
            chat.WALKS_PARTS,
            [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 2?"}],
        ),
    ],
    ids=["as text", "as parts"],
)
def test_content_in_parts(template: str, content: Any, tmp_path: Path) -> None:
    llm = make(save(tmp_path, template))
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 2?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], SHORT, use_tqdm=False)
    asked = [{"role": "user", "content": content}]
    assert output.prompt_token_ids == by_template(llm.tokenizer, asked)


def test_what_a_template_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    llm = make(save(tmp_path, chat.NO_SYSTEM))
    before = llm.stats().usage
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        llm.chat([[USER], [system, USER]], SHORT, use_tqdm=False)
    assert llm.stats().usage == before, "the other one was run"
    (output,) = llm.chat([USER], SHORT, use_tqdm=False)
    assert output.prompt_token_ids == by_template(llm.tokenizer, [USER])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**USER, "images": ["cat.png"]}, "message 0 has the key 'images'"),
        ({**USER, "tool_call": CALL}, "message 0 has the key 'tool_call'"),
        ({"role": "user", "content": "half \ud83d"}, r"the text has '\\ud83d' at position 5"),
    ],
)
def test_what_no_template_reads_is_refused(message: Any, words: str, tiny: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        tiny.chat([message], SHORT, use_tqdm=False)


# ---- generation_config


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("configured"), chat.CHATML)
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_without_parameters_the_models_own_are_taken_and_shown(configured: Path) -> None:
    own = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    llm = make(configured, seed=3)
    shown = "auto: temperature=0.6, top_p=0.9, top_k=20"
    assert llm.describe()["generation_config"] == shown
    assert llm.get_default_sampling_params() == own
    calls = [
        (item.generate("Hello", params, use_tqdm=False), item.chat([USER], params, use_tqdm=False))
        for item, params in ((llm, None), (make(configured, seed=3), own))
    ]
    taken, expected = ([*map(tokens_of, outputs)] for outputs in calls)
    assert taken == expected
    plain = make(configured, seed=3).generate("Hello", SamplingParams(), use_tqdm=False)
    assert tokens_of(plain) != taken[0], "the seed shows no difference: take another one"


def test_or_those_of_pyengine(configured: Path) -> None:
    llm = make(configured, generation_config="vllm")
    assert llm.describe()["generation_config"] == "vllm: the defaults of SamplingParams"
    assert llm.get_default_sampling_params() == SamplingParams()


# ---- the embedded model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """The answer to each question by itself."""
    return [llm.generate(question, GREEDY, use_tqdm=False)[0] for question in QUESTIONS]


@pytest.mark.slow
def test_a_real_model_answers(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of Japan?"}],
        SamplingParams(temperature=0, max_tokens=16),
        use_tqdm=False,
    )
    assert "Tokyo" in output.outputs[0].text


@pytest.mark.slow
def test_calls_without_content_in_a_template_that_does_not_know_them(llm: LLM) -> None:
    expected = by_template(llm.tokenizer, [USER, {"role": "assistant", "content": ""}])
    assert llm.apply_chat_template(CALLED[:2]) == expected


@pytest.mark.slow
def test_two_streams_in_turns(llm: LLM, alone: list[RequestOutput]) -> None:
    streams = [llm.stream(question, GREEDY) for question in QUESTIONS]
    rounds = list(zip_longest(*streams))
    for place, expected in enumerate(alone):
        items = [row[place].outputs[0] for row in rounds if row[place] is not None]
        assert items[-1] == expected.outputs[0]
        lengths = [len(item.token_ids) for item in items]
        assert lengths == sorted(set(lengths))
        assert all(expected.outputs[0].text.startswith(item.text) for item in items)


@pytest.mark.slow
def test_a_batch_between_two_items_of_a_stream(llm: LLM, alone: list[RequestOutput]) -> None:
    stream = llm.stream(QUESTIONS[0], GREEDY)
    next(stream)
    assert tokens_of(llm.generate(QUESTIONS[1], GREEDY, use_tqdm=False)) == tokens_of(alone[1:])
    *_, last = stream
    assert last.finished
    assert last.outputs == alone[0].outputs


@pytest.mark.slow
def test_two_threads(llm: LLM, alone: list[RequestOutput]) -> None:
    def generate(question: str) -> list[RequestOutput]:
        return llm.generate(question, GREEDY, use_tqdm=False)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(generate, QUESTIONS))
    assert [item.outputs for (item,) in outputs] == [item.outputs for item in alone]
    usage = llm.stats().usage
    assert (usage.active, usage.pinned) == (0, 0)


@pytest.mark.slow
async def test_deltas_of_two_tasks_add_up(alone: list[RequestOutput]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)

    async def read(engine: AsyncEngine, question: str) -> tuple[str, list[int], int]:
        items = [output.outputs[0] async for output in engine.generate(question, params)]
        assert [item.is_finished for item in items] == [False] * (len(items) - 1) + [True]
        tokens = [token for item in items for token in item.token_ids]
        return "".join(item.text for item in items), tokens, len(items)

    async with AsyncEngine(**SETTINGS) as engine:
        answers = await asyncio.gather(*(read(engine, question) for question in QUESTIONS))
    for (text, tokens, num_items), expected in zip(answers, alone, strict=True):
        assert (text, tokens) == (expected.outputs[0].text, expected.outputs[0].token_ids)
        assert num_items > 1
