"""Grammars: compiled once, by many threads, within limits, and refused with a reason."""

import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from pyengine.errors import InvalidRequestError, QueueFullError
from pyengine.models.tokenizer import Tokenizer
from pyengine.sampling import grammar as grammars_module
from pyengine.sampling import token_masks
from pyengine.sampling.grammar import Grammars
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MIN_ROWS
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from tests.support.callers import FakeModel
from tests.support.docs import ROOT
from tests.support.engines import EOS
from tests.support.fake_runner import VOCAB_SIZE
from tests.support.processes import wait_for_end
from tests.support.serving import assert_soon
from tests.unit.engine.test_structured import ONE_OF, SCHEMA, tokenizer


def grammars(of: Any = None) -> Grammars:
    return Grammars(of or tokenizer(), VOCAB_SIZE, frozenset({EOS}))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_a_matcher_is_at_the_beginning_each_time_and_the_grammar_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    ask = grammars_module._Checker.ask

    def counted(self: Any, question: Any, seconds: float) -> Any:
        compiled.append(question)
        return ask(self, question, seconds)

    there = grammars()
    there.prepare().result()
    monkeypatch.setattr(grammars_module._Checker, "ask", counted)
    first, second = there.matcher(ONE_OF), there.matcher(ONE_OF)
    for token in tokenizer().encode("yes"):
        assert not first.is_finished
        first.append(token)
    assert first.is_finished
    assert not second.is_finished
    assert compiled == [["choice", ONE_OF.text]]
    with ThreadPoolExecutor(16) as pool:
        forms = [StructuredOutputs(choice=[f"{at % 8}"]) for at in range(64)]
        matchers = list(pool.map(there.matcher, forms))
    assert len(matchers) == len({id(matcher) for matcher in matchers}) == 64
    assert len([item for item in compiled if isinstance(item, list)]) == 9


def test_a_grammar_of_many_requests_is_compiled_for_each_thread_without_another_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_masks, "usable_threads", lambda: 2)
    there = grammars()
    few = [there.matcher(ONE_OF) for _ in range(MIN_ROWS)]
    monkeypatch.setattr(grammars_module._Checker, "ask", None)
    sampling = SamplingState(SamplingParams(structured_outputs=ONE_OF), [1], seed=1, vocab_size=97)
    sampling.keep_to(there.matcher(ONE_OF))
    assert len({matcher.base for matcher in few}) == 1
    samples = []

    def has_other_base() -> bool:
        samples.append(sampling.sibling(len(samples)))
        return sampling_base(samples[-1]) is not few[0].base

    assert_soon(has_other_base)
    samples += [sampling.sibling(seed) for seed in range(64)]
    counts = Counter([*map(sampling_base, samples), *(matcher.base for matcher in few)])
    assert len(counts) == 2
    assert max(counts.values()) - min(counts.values()) <= 1


def sampling_base(state: SamplingState) -> object:
    assert state.matcher is not None
    return state.matcher.base


def test_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "_KEPT", 3)
    there = grammars()
    forms = [StructuredOutputs(regex=f"a{{{at}}}") for at in range(1, 6)]
    for at in (0, 1, 2, 0, 3, 4):
        there.matcher(forms[at])
    assert [text for _, text in there._known[b""]] == ["a{1}", "a{4}", "a{5}"]


def test_a_tenant_neither_uses_nor_evicts_the_grammars_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compile times would tell it whether another tenant uses a schema."""
    monkeypatch.setattr(grammars_module, "_KEPT", 2)
    monkeypatch.setattr(grammars_module, "_TENANTS", 3)
    there = grammars()
    checkers = SlowCheckers(monkeypatch, 0)
    assert not there.matcher(slow(0), b"one").error
    for index in range(4):
        assert not there.matcher(slow(index), b"two").error
    assert len(checkers.texts) == 5
    assert not there.matcher(slow(0), b"one").error
    assert len(checkers.texts) == 5
    for tenant in (b"three", b"four"):
        there.matcher(slow(0), tenant)
    assert list(there._known) == [b"one", b"three", b"four"]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "minimum (5) is greater than"),
        ({"json": {"type": "whatever"}}, "whatever"),
        ({"json": {"$ref": "http://127.0.0.1:9/x"}}, "is not present in a registry"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "is not present in a registry"),
        ({"json": {"$ref": "#"}}, "NoExtension"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: start"}, "NoExtension"),
        ({"grammar": "begin: 'a'"}, "Expected ::="),
        ({"grammar": "root ::= nowhere"}, "nowhere"),
        ({"choice": ["日本"]}, "NoExtension"),  # this tokenizer has ASCII alone
    ],
)
def test_what_cannot_be_served_is_refused_for_a_reason(form: dict[str, Any], words: str) -> None:
    there, constraint = grammars(), StructuredOutputs(**form)
    for _ in range(2):  # and the second time for the same
        with pytest.raises(InvalidRequestError) as caught:
            there.matcher(constraint)
        message = str(caught.value)
        assert message.startswith(f"structured_outputs.{constraint.field} cannot be served: ")
        assert words in message
        assert len(message) < 700


HOSTILE: dict[str, dict[str, Any]] = {
    "repeats": {"regex": "(a|b){1,100000}"},
    "nested repeats": {"regex": "((a{1,1000}b){1,1000}c){1,1000}"},
    "deep": {"json": deep(30)},
    "deep expression": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "deep grammar": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "left recursion": {"grammar": 'start: start "a" | "a"'},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" |'},
    "many multiples": {
        "json": {
            "type": "array",
            "prefixItems": [{"type": "integer", "multipleOf": 9001 + at} for at in range(1000)],
        }
    },
    "all of any of": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{at}{item}": {"type": "integer"}}} for item in "xyz"]}
                for at in range(12)
            ]
        }
    },
    "states": {"regex": "(a|b)*a(a|b){400}"},
    "long list": {"json": {"type": "array", "minItems": 100_000, "maxItems": 1_000_000}},
    "large enum": {"json": {"enum": [f"value {at}" for at in range(3500)]}},
    "rules": {"grammar": "start: a0\n" + "".join(f"a{at}: a{at + 1}\n" for at in range(4000))},
    "repeated rules": {"grammar": 'start: x{1,100000}\nx: "a" | "b" y\ny: x'},
    "chain of rules": {
        "grammar": "start: a0\n"
        + "".join(f"a{at}: a{at + 1}\n" for at in range(5000))
        + 'a5000: "x"'
    },
    "chain of negations": {
        "grammar": "start: A0\n"
        + "".join(f"A{at}: ~A{at + 1}\n" for at in range(3000))
        + "A3000: /a+/"
    },
    "conjunction": {
        "grammar": "start: A\nA: "
        + " & ".join(f"/(.*[{chr(97 + at % 26)}].{{{at % 17}}})*/" for at in range(200))
    },
    "nullable": {
        "grammar": "start: s\ns: "
        + " ".join(f"a{at}?" for at in range(3000))
        + "\n"
        + "\n".join(f'a{at}: s? | "a"' for at in range(3000))
    },
    "empty lines": {"grammar": "\n" * 60_000 + "root ::= a"},
    "long text of a grammar": {"grammar": "root ::= " + "a " * 30_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_served_or_refused_in_time(name: str) -> None:
    there = grammars()
    there.prepare().result()
    begin = time.monotonic()
    try:
        constraint = StructuredOutputs(**HOSTILE[name])
        matcher = there.matcher(constraint)
    except InvalidRequestError as error:
        assert "structured_outputs." in str(error)
    else:
        assert not matcher.error
    assert time.monotonic() - begin < 2.5


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused_in_words() -> None:
    backend = RustTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    there = grammars(Tokenizer(backend))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="this model's tokenizer: can't determine"):
            there.prepare().result()
    with pytest.raises(InvalidRequestError, match="this model's tokenizer"):
        there.matcher(ONE_OF)


def test_whatever_happens_to_the_process_that_checks_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = grammars()
    there.prepare().result()
    (checker,) = there._idle
    checker._process.kill()
    checker._process.wait()
    assert not there.matcher(ONE_OF).error
    ask = grammars_module._Checker.ask

    def killed(checker: Any, question: Any, limit: float) -> Any:
        checker._process.kill()
        checker._process.wait()
        return ask(checker, question, limit)

    def hurried(checker: Any, question: Any, _: float) -> Any:
        return ask(checker, question, 1e-9)

    for asked, reason in ((killed, "too much stack or memory"), (hurried, "takes more than 1e-09")):
        monkeypatch.setattr(grammars_module._Checker, "ask", asked)
        with pytest.raises(InvalidRequestError, match=reason):
            there.matcher(StructuredOutputs(json=SCHEMA))
    monkeypatch.setattr(grammars_module._Checker, "ask", ask)
    assert not there.matcher(StructuredOutputs(json=SCHEMA)).error
    assert len(there._idle) == 1


class SlowCheckers:
    """Grammars that contain "slow" take a second, and fail on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> None:
        self.texts: list[str] = []
        self.answer: dict[str, str] | None = None
        ask = grammars_module._Checker.ask

        def slowly(checker: Any, question: Any, limit: float) -> Any:
            if not isinstance(question, list) or "slow" not in question[1]:
                return ask(checker, question, limit)
            self.texts.append(question[1])
            time.sleep(seconds)
            return self.answer or ask(checker, question, limit)

        monkeypatch.setattr(grammars_module._Checker, "ask", slowly)


def slow(index: int) -> StructuredOutputs:
    return StructuredOutputs(choice=[f"slow {index}"])


def test_many_slow_grammars_of_one_tenant_do_not_make_another_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = grammars()
    there.prepare().result()
    checkers = SlowCheckers(monkeypatch)
    several = [there.compile(slow(index), b"one") for index in range(20)]
    begin = time.monotonic()
    assert not there.matcher(ONE_OF, b"two").error
    assert time.monotonic() - begin < 2  # a process begins, too
    assert len(checkers.texts) <= 8
    mine = there.compile(slow(19), b"two")  # the last one of the other's queue
    assert not mine.result().matcher().error and mine is not several[19]
    assert not all(future.done() for future in several)
    assert [future.result().matcher().error for future in several] == [""] * 20
    assert len(checkers.texts) == 21
    assert_soon(lambda: not there._threads._num_workers)
    assert not there._threads._running and not there._threads._waiting


def test_a_tenant_has_so_many_waiting_and_known_ones_never_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "_MAX_WAITING", 4)
    there = grammars()
    there.matcher(ONE_OF, b"one")
    SlowCheckers(monkeypatch, 0.02)
    several = []
    with pytest.raises(QueueFullError, match="4 other calls of this caller wait for the grammars"):
        for index in range(100):
            several.append(there.compile(slow(index), b"one"))
    assert not there.compile(ONE_OF, b"one").result().matcher().error
    for _ in range(10):  # nor does one that is in the queue already count again
        assert there.compile(slow(0), b"one") is several[0]
    assert not there.matcher(slow(1000), b"two").error
    assert [future.result().matcher().error for future in several] == [""] * len(several)
    assert not there.matcher(slow(1001), b"one").error


@pytest.mark.parametrize("is_passing", [True, False])
def test_what_failed_for_time_is_tried_again(
    is_passing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = grammars()
    there.prepare().result()
    checkers = SlowCheckers(monkeypatch, 0)
    checkers.answer = {"error": "no", **({"is_passing": "yes"} if is_passing else {})}
    with pytest.raises(InvalidRequestError, match="cannot be served: no"):
        there.matcher(slow(0))
    checkers.answer = None
    if is_passing:
        assert not there.matcher(slow(0)).error
    else:
        with pytest.raises(InvalidRequestError, match="cannot be served: no"):
            there.matcher(slow(0))
    assert len(checkers.texts) == 1 + is_passing


def test_the_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    text_of = grammars_module._text_of
    monkeypatch.setattr(grammars_module, "_text_of", lambda item: read.append(1) or text_of(item))
    there = grammars()
    for _ in range(2):
        there.prepare().result()
        there._idle.clear()
    assert not there.matcher(ONE_OF).error
    assert read == [1]


def test_no_process_is_left_behind() -> None:
    there = grammars()
    there.prepare().result()
    (checker,) = there._idle
    process = checker._process
    del checker, there
    assert process.wait(5) == -signal.SIGKILL


COMPILES = """
import sys
from pyengine.sampling_params import StructuredOutputs
from pyengine.models.tokenizer import Tokenizer
from pyengine.sampling import grammar as grammars
from tests.unit.sampling import test_grammar as tests

grammars._SECONDS = 100.0
there = tests.grammars()
there.prepare().result()
print(there._idle[0]._process.pid, flush=True)
there.matcher(StructuredOutputs(**tests.HOSTILE["many multiples"]))
"""


def test_nor_when_its_engine_is_killed_while_it_is_at_work() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as engine:
        assert engine.stdout is not None
        checker = int(engine.stdout.readline())
        time.sleep(0.5)  # it is compiling
        engine.kill()
    assert wait_for_end([checker], 10) == []


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="needs llguidance, of the extra 'serve'"):
        grammars().matcher(ONE_OF)


def test_tokenizers_that_will_not_do_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer, and this model has none"):
        Grammars(None, VOCAB_SIZE, frozenset({EOS})).matcher(ONE_OF)
    with pytest.raises(InvalidRequestError, match="and this model's is a object"):
        grammars(object()).matcher(ONE_OF)


async def test_an_event_loop_goes_on_while_a_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, go_on = grammars_module._Checker.ask, Event()

    def slow(self: Any, question: Any, seconds: float) -> Any:
        assert go_on.wait(10)
        return ask(self, question, seconds)

    monkeypatch.setattr(grammars_module._Checker, "ask", slow)
    model = FakeModel(monkeypatch, tokenizer=tokenizer())
    async with model.async_engine() as engine:

        async def answer(form: StructuredOutputs | None) -> str:
            params = SamplingParams(temperature=0, structured_outputs=form)
            items = [item async for item in engine.generate([1, 2], params)]
            return items[-1].outputs[0].text

        waiting = asyncio.create_task(answer(ONE_OF))
        assert await answer(None)
        assert not waiting.done()
        go_on.set()
        assert await waiting in ("yes", "no", "nothing")
    model.bench.assert_all_free()
