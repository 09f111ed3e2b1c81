"""`pyengine chat` against a fake engine: turns, cache hits, commands, Ctrl-C."""

import re

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from tests.unit.cli.fakes import FakeEngine

ANSWER = "The answer is [red]42[/red]."


def talk(engine: FakeEngine, *lines: str, options: tuple[str, ...] = ()) -> Result:
    text = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["chat", *options], input=text, obj=engine.open)


def cached_per_turn(result: Result) -> list[int]:
    return [int(n) for n in re.findall(r"\((\d+) cached\)", result.stderr)]


def conversation(engine: FakeEngine, turn: int) -> str:
    return " ".join(engine.vocabulary[i] for i in engine.seen[turn]["prompt_token_ids"])


def test_earlier_turns_are_sent_again_and_found_in_the_cache() -> None:
    engine = FakeEngine()
    result = talk(engine, "first question", "second one", options=("--verbose",))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{ANSWER}\n{ANSWER}\n"
    expected = f"<user> first question <assistant> {ANSWER} <user> second one"
    assert conversation(engine, 1) == expected
    assert cached_per_turn(result) == [0, 3]


def test_the_first_line_names_the_model_and_not_its_folder() -> None:
    """The folder of a model from the hub is named after a commit."""
    assert talk(FakeEngine()).stderr.startswith("owner/fake: /reset starts over")


def test_a_system_message_opens_the_conversation_and_survives_reset() -> None:
    engine = FakeEngine()
    talk(engine, "one", "/reset", "two", options=("--system", "Be brief."))
    assert [conversation(engine, turn) for turn in (0, 1)] == [
        "<system> Be brief. <user> one",
        "<system> Be brief. <user> two",
    ]


def test_commands_and_empty_lines_are_not_sent() -> None:
    engine = FakeEngine()
    result = talk(engine, "", "   ", "/what", "/exit", "never asked")
    assert result.exit_code == 0
    assert engine.seen == []
    assert "unknown: /what" in result.stderr


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    engine = FakeEngine(interrupt_after=2)
    result = talk(engine, "one", "two")
    assert result.exit_code == 0
    assert result.stderr.count("stopped · ") == 2
    assert conversation(engine, 1) == "<user> one <assistant> The answer <user> two"
    assert engine.closed == 2


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    result = talk(FakeEngine())
    assert result.exit_code == 0
    assert "Traceback" not in result.output


def test_a_refused_turn_is_forgotten_and_the_next_one_is_answered() -> None:
    engine = FakeEngine(longest_prompt=4)
    result = talk(engine, "far too many words for this", "short")
    assert result.exit_code == 0
    assert "error: the prompt has 7 tokens" in result.stderr and "/reset" in result.stderr
    assert conversation(engine, 1) == "<user> short"
    assert result.stdout == f"{ANSWER}\n"


def test_the_demo_model_says_that_it_is_one_and_samples() -> None:
    engine = FakeEngine()
    result = talk(engine, "one", options=("--top-p", "0.5"))
    assert "a demo model" in result.stderr and "`pyengine help models`" in result.stderr
    assert engine.params is not None
    assert engine.params.top_p == 0.5  # an option counts more
    assert 0 < engine.params.temperature < 1 < engine.params.repetition_penalty
    result = talk(engine, "one", options=("--model", "owner/fake"))
    assert "demo" not in result.stderr
    assert (engine.params.temperature, engine.params.repetition_penalty) == (0, 1)


def test_a_model_without_a_template_is_refused() -> None:
    result = talk(FakeEngine(chat_template=None), "hi")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
