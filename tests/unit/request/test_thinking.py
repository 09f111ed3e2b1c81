"""Thinking that a chat template leaves out of the next turn: found, and not left in the cache."""

from collections.abc import Iterator
from typing import Any

import pytest

from pyengine.kv_cache import KVStore
from pyengine.request.chat_template import ChatOptions, render_chat
from pyengine.request.prompts import Prompt, common_prefix
from pyengine.request.thinking import StrippedThinking, stripped_thinking
from pyengine.sampling_params import SamplingParams
from tests.support.chat import (
    BEGINS_THINKING,
    CHATML,
    NO_SYSTEM,
    STRIPS_THINKING,
    chat_tokenizer,
    thinking_tokenizer,
)
from tests.support.engines import GREEDY, Bench, add_request, make_bench
from tests.unit.engine.test_offloading import wait_until_stored, with_store

KEEPS_FOR_TOOLS = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if messages[-1].role == 'tool' %}{{ message.content }}\
{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

KEEPS_FIELD = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def found(tokenizer: Any, **options: Any) -> StrippedThinking | None:
    return stripped_thinking(tokenizer, ChatOptions(**options))


def test_a_template_that_strips_thinking_is_recognized() -> None:
    tokenizer = thinking_tokenizer(STRIPS_THINKING)
    begin, end = ids(tokenizer, "<think></think>")
    assert found(tokenizer) == StrippedThinking(begin, end)
    assert found(tokenizer, tools=TOOLS) == StrippedThinking(begin, end)


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, KEEPS_FIELD])
def test_a_template_that_writes_thinking_strips_none(template: str) -> None:
    assert found(thinking_tokenizer(template)) is None


def test_marks_of_several_tokens_are_not_followed() -> None:
    assert found(chat_tokenizer(STRIPS_THINKING)) is None
    assert found(thinking_tokenizer(STRIPS_THINKING.replace("think>", "think]"), "[think]")) is None


def test_a_continued_message_strips_nothing() -> None:
    tokenizer = thinking_tokenizer(STRIPS_THINKING)
    assert found(tokenizer, add_generation_prompt=False) is None
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert found(tokenizer, **options) is None


def test_the_prompt_may_begin_the_thinking() -> None:
    tokenizer = thinking_tokenizer(BEGINS_THINKING)
    thinking = found(tokenizer)
    assert thinking is not None
    prompt = render_chat([{"role": "user", "content": "Why <think> so?"}], tokenizer)
    kept = thinking.num_kept(len(prompt), [1, 2, 3])
    assert prompt[kept] == thinking.begin
    assert tokenizer.decode(prompt[:kept]).endswith("<|im_start|>assistant\n")


def test_a_tool_call_keeps_the_thinking_if_the_template_does() -> None:
    tokenizer = thinking_tokenizer(KEEPS_FOR_TOOLS)
    begin, end, call = ids(tokenizer, "<think></think><tool_call>")
    thinking = found(tokenizer, tools=TOOLS)
    assert thinking == StrippedThinking(begin, end, call)
    assert thinking.num_kept(5, [begin, 7, end, call, 8]) is None
    assert thinking.num_kept(5, [begin, 7, end, 8]) == 5
    assert thinking.num_kept(5, [9, begin, 7, end]) == 6
    assert thinking.num_kept(5, [begin, 7, 8]) is None  # the template strips whole parts alone
    unmarked = thinking_tokenizer(KEEPS_FOR_TOOLS, "<think>", "</think>")
    assert found(unmarked, tools=TOOLS) is None
    assert found(unmarked) is not None


def test_what_is_found_is_what_the_next_turn_cannot_reuse() -> None:
    """By rendering the next turn."""
    for template in (STRIPS_THINKING, BEGINS_THINKING, KEEPS_FOR_TOOLS):
        tokenizer = thinking_tokenizer(template)
        asked = [{"role": "user", "content": "How many?"}]
        prompt = render_chat(asked, tokenizer)
        text = (
            "<think>\nOne, two.\n</think>\n\nTwo."
            if template != BEGINS_THINKING
            else "One.\n</think>Two"
        )
        answer = ids(tokenizer, text)
        begun = "<think>\n" if template == BEGINS_THINKING else ""
        turn = {"role": "assistant", "content": begun + text}
        later = render_chat([*asked, turn, {"role": "user", "content": "Sure?"}], tokenizer)
        both = [*prompt, *answer]
        thinking = found(tokenizer)
        assert thinking is not None
        assert thinking.num_kept(len(prompt), answer) == common_prefix(both, later)


class Thinks:
    """Tells every answer after its second token to be thinking."""

    def num_kept(self, num_prompt: int, token_ids: Any) -> int | None:
        return num_prompt + 2 if len(token_ids) > 2 else None


def think(bench: Bench, name: str, tokens: list[int], params: SamplingParams = GREEDY) -> None:
    request = add_request(bench, name, Prompt(token_ids=tokens), params)
    thinking: Any = Thinks()
    request.thinking = thinking
    bench.requests[name] = request


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    yield store
    store.close(5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_thinking_does_not_stay_cached(depth: int, n: int) -> None:
    bench = make_bench(depth=depth, num_blocks=64)
    prompt = list(range(5, 19))
    params = SamplingParams(temperature=1, ignore_eos=True, max_tokens=20, n=n, seed=1)
    think(bench, "first", prompt, params)
    done = bench.run()
    assert bench.manager.usage().evictable == 3 + n  # the fourth has two tokens of an answer
    assert bench.manager.stats().discarded_blocks == n * 4
    for output in done["first"].outputs:
        with bench.manager.match_prefix([*prompt, *output.token_ids]) as pin:
            assert pin.num_tokens in (12, 16)
    bench.assert_all_free()


def test_what_a_priority_keeps_ends_before_the_thinking() -> None:
    bench = make_bench(max_pinned_blocks=32)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, cache_priority=5)
    think(bench, "first", list(range(5, 19)), params)
    bench.run()
    assert (bench.manager.usage().pinned, bench.manager.usage().evictable) == (4, 0)


def test_an_aborted_and_a_preempted_answer_keep_no_thinking_either() -> None:
    bench = make_bench(num_blocks=12)
    for number, name in enumerate("ab"):
        think(
            bench,
            name,
            [*range(5, 13), number],
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=24),
        )
    for _ in range(12):
        bench.engine.step()
    bench.abort(["a"])
    bench.run()
    bench.assert_all_free()
    assert bench.manager.usage().evictable <= 4
    assert bench.manager.stats().discarded_blocks > 4


def test_thinking_is_not_stored(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.engine.offloading._SHORT", 8)
    bench = make_bench()
    offloader = with_store(bench, store)
    think(
        bench,
        "first",
        list(range(5, 19)),
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=40),
    )
    while bench.engine.has_work:
        bench.engine.step()
    wait_until_stored(offloader)
    assert store.stats()["readable_entries"] == 4
