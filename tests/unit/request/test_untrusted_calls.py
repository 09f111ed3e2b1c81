"""Templates and tokenizers that fail in odd ways or never end: a refusal."""

import threading
import time
from typing import Any

import pytest

from pyengine.errors import InvalidRequestError
from pyengine.request.chat_template import ChatOptions, render_chat
from pyengine.request.untrusted_calls import unfinished_work, within
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel
from tests.support.fake_runner import continued
from tests.support.processes import run_python
from tests.support.tokenizers import Fast, byte_level, characters

USER = {"role": "user", "content": "hi"}
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_work_without_an_end_is_refused_and_listed() -> None:
    gate = threading.Event()
    with unfinished_work() as unfinished:
        with pytest.raises(
            InvalidRequestError, match=r"^it was still at work after 0\.05 seconds: "
        ):
            within(0.05, gate.wait, "it")
        assert within(10, lambda: 7, "it") == 7
    (left,) = unfinished
    assert not left.done()
    gate.set()
    assert left.result(20)


def test_what_work_returns_and_raises_is_passed_on() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    assert within(10, lambda: 7, "it") == 7
    with pytest.raises(TimeoutError, match="its own"):
        within(10, fails, "it")


TEMPLATES = {
    "loops": NESTED,
    "a loop and a half": NESTED + "{{ messages[0].content }}",
    "a macro that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "squares": "{% set n = namespace(x=7) %}{% for a in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a range": "{{ range(10 * 1000 * 1000 * 1000) | list }}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "a function's code": "{{ (strftime_now | attr('__code__')).co_code }}",
    "the environment": "{{ self._TemplateReference__context.environment.from_string('x') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.getpid() }}",
    "a change": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_hostile_template_costs_its_caller_a_refusal(template: str) -> None:
    options = ChatOptions(template=template, seconds=0.5)
    before = dict(USER)
    with pytest.raises(InvalidRequestError, match="chat template"):
        render_chat([before], characters(), options)
    assert before == USER


def test_an_llm_gives_an_endless_template_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = characters()
    tokenizer.chat_template = "{% if messages[0].content == 'x' %}" + NESTED + "{% endif %}ab"
    llm = FakeModel(monkeypatch, tokenizer=tokenizer).llm()
    monkeypatch.setattr(ChatOptions, "__init__", _quick(ChatOptions.__init__))
    with pytest.raises(InvalidRequestError, match=r"still at work after 0\.3 seconds"):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    (output,) = llm.chat([USER], use_tqdm=False)
    assert output.finished


def _quick(init: Any) -> Any:
    return lambda self, **fields: init(self, **fields, seconds=0.3)


def splitting(expression: str) -> Any:
    """A tokenizer that splits texts by a regular expression first."""
    from tokenizers import Regex, pre_tokenizers

    decoder = byte_level(260)
    decoder.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return Fast(decoder)


def test_an_expression_that_never_ends_is_refused_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(monkeypatch, tokenizer=splitting(r"(\w+\s?)+$"))
    llm = model.llm()
    evil = "a" * 40 + "!"
    refused = "the model's tokenizer fails on this text: "
    with pytest.raises(InvalidRequestError, match=refused):
        llm.generate(["hello", evil], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=refused):
        next(llm.stream(evil))
    with pytest.raises(InvalidRequestError, match=refused):
        llm.generate(["hello"], SamplingParams(bad_words=[evil]), use_tqdm=False)
    assert model.bench.runner.computed == []
    (output,) = llm.generate(["hello"], use_tqdm=False)
    assert output.finished


MINUTES = r"""
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from pyengine.models.tokenizer import Tokenizer as EngineTokenizer
from pyengine.request import prompts

tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[ab]+[ab]+!!"), "isolated")
tokenizer = EngineTokenizer(tokenizer)
prompts._SECONDS = 0.5
try:
    prompts.tokens_of("ab" * 2000 + "!", tokenizer)
except ValueError as error:
    print(error)
"""


def test_an_expression_that_takes_minutes_is_given_up() -> None:
    """Nothing interrupts it, and it does not hold up the end of the process either."""
    began = time.monotonic()
    done = run_python(MINUTES, timeout=100)
    assert done.stderr == ""
    assert done.stdout.startswith("the model's tokenizer was still at work after 0.9001 seconds")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "error", [RuntimeError("no text"), type("PanicException", (BaseException,), {})()]
)
@pytest.mark.parametrize("settings", [{}, {"stop": ["zz"]}, {"logprobs": 1}], ids=str)
def test_tokens_that_cannot_be_decoded_have_no_text(
    error: BaseException, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are right, and other requests are not affected."""

    class Failing(Fast):
        @property
        def backend_tokenizer(self) -> Any:
            return None

        @backend_tokenizer.setter
        def backend_tokenizer(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def decode(
            self, token_ids: list[int], *, skip_special_tokens: bool = True, **_: Any
        ) -> str:
            if set(token_ids) & set(continued([1, 2], 4)[2:]):
                raise error
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    model = FakeModel(monkeypatch, tokenizer=Failing(byte_level(260)))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, **settings)
    llm = model.llm()
    first, other = llm.generate([[1, 2], [51, 51]], params, use_tqdm=False)
    assert first.outputs[0].token_ids == continued([1, 2], 8)
    assert first.outputs[0].text.endswith("\ufffd")
    assert len(other.outputs[0].text) > 4 and "\ufffd" not in other.outputs[0].text
    parts = list(llm.stream([1, 2], params))
    assert parts[-1].outputs[0].text.endswith("\ufffd")
    assert parts[-1].outputs[0].token_ids == first.outputs[0].token_ids
    model.bench.assert_all_free()
