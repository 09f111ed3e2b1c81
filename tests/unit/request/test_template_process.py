"""Chat templates that never end, use all memory or crash: an error, and no process is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from pyengine.errors import ContextLengthError, InvalidRequestError
from pyengine.models.tokenizer import chat
from pyengine.request import template_process
from pyengine.request.chat_template import ChatOptions, render_chat
from pyengine.request.template_process import TemplateError, TimedTemplate
from tests.support.processes import run_python
from tests.support.serving import assert_soon
from tests.support.tokenizers import characters

USER = {"role": "user", "content": "hi"}
WRITES = "{{ messages[0].content }}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": NESTED,
    "a power, which holds the interpreter's lock": "{{ 9 ** (9 ** 9) }}",
}
OPTIONS: dict[str, Any] = {"variables": {}}


@pytest.fixture(autouse=True)
def only_child() -> Iterator[int]:
    """The process id of the child that the next call uses."""
    template_process._idle.clear()
    assert render(WRITES) == "hi"
    (child,) = template_process._idle
    yield child._process.pid
    template_process._idle.clear()


def render(template: str, seconds: float = 30, **options: Any) -> str:
    return TimedTemplate(template, seconds).render([USER], {**OPTIONS, **options})


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_is_killed_and_the_next_call_works(
    template: str, only_child: int
) -> None:
    begin = monotonic()
    with pytest.raises(InvalidRequestError) as refused:
        render_chat([USER], characters(), ChatOptions(template=template, seconds=0.3))
    assert monotonic() - begin < 10
    assert str(refused.value) == (
        "the chat template was still at work after 0.3 seconds: send a shorter text"
    )
    assert is_gone(only_child)
    assert render(WRITES) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * (10 ** 10) }}",
        "{% set n = namespace(x='x') %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for _ in range(99) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}{{ n.x }}",
    ],
)
def test_a_template_that_allocates_without_bound_is_refused(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "_MEMORY", 256 << 20)
    template_process._idle.clear()
    assert render(WRITES) == "hi"
    pid = template_process._idle[0]._process.pid
    with pytest.raises(InvalidRequestError, match="needs more than 256 MiB of memory"):
        render_chat([USER], characters(), ChatOptions(template=template))
    assert is_gone(pid)
    assert render(WRITES) == "hi"


def test_a_child_that_dies_while_it_renders_costs_one_refusal(only_child: int) -> None:
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(render, NESTED)
        assert_soon(lambda: not template_process._idle)
        os.kill(only_child, signal.SIGSEGV)
        with pytest.raises(InvalidRequestError, match="memory, or crashes"):
            call.result()
    assert render(WRITES) == "hi"


def test_a_child_that_died_before_costs_nothing(only_child: int) -> None:
    os.kill(only_child, signal.SIGKILL)
    assert_soon(lambda: not template_process._idle[0].is_alive)
    assert render(WRITES) == "hi"


def test_no_call_waits_for_the_template_of_another() -> None:
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(render, NESTED, 5)
        assert_soon(lambda: not template_process._idle)
        for _ in range(20):
            assert render(WRITES) == "hi"
        assert not endless.done()
        with pytest.raises(InvalidRequestError, match="still at work after 5 seconds"):
            endless.result()


def test_attempts_share_their_time() -> None:
    timed = TimedTemplate("{% if value %}" + NESTED + "{% endif %}", 0.5)
    assert timed.render([USER], OPTIONS) == ""
    timed._left = 0.01
    with pytest.raises(InvalidRequestError, match=r"after 0\.5 seconds"):
        timed.render([USER], {"variables": {"value": 1}})


FORKS = """
import os
from pyengine.request import template_process
from pyengine.request.template_process import TimedTemplate

def render():
    return TimedTemplate("{{ messages[0].role }}", 30).render([{"role": "x"}], {"variables": {}})

def child():
    (found,) = template_process._idle
    return found._process.pid

assert render() == "x"
first = child()
fork = os.fork()
if not fork:
    assert render() == "x" and child() != first
    print("fork", flush=True)
else:
    assert os.waitpid(fork, 0)[1] == 0
    assert render() == "x" and child() == first
    print("parent")
"""


def test_a_fork_starts_a_child_of_its_own() -> None:
    assert run_python(FORKS, timeout=100).stdout == "fork\nparent\n"


ENDS = """
import os, signal, sys, threading, time
from pyengine.request import template_process
from pyengine.request.template_process import TimedTemplate

ours = TimedTemplate(sys.argv[1], 1)
start = template_process._Renderer
def started():
    child = start()
    print(child._process.pid, flush=True)
    return child
template_process._Renderer = started
threading.Thread(target=ours.render, args=([], {"variables": {}}), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.parametrize("template", ["", *ENDLESS.values()], ids=["idle", *ENDLESS])
def test_a_child_ends_with_a_parent_that_is_killed(template: str) -> None:
    command = [sys.executable, "-c", ENDS, template]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert_soon(lambda: is_gone(pid))


def test_what_a_template_can_tell_apart_arrives_as_it_is() -> None:
    names = ("value[1]", "value.t", "value.f", "value.n", "value.s", "value.b is true")
    template = " ".join(f"{{{{ {name} }}}}" for name in names)
    value = {1: "int", "t": (1, [2]), "f": float("inf"), "n": 2**100, "s": "\ud800 😀", "b": True}
    variables = {"value": value}
    expected = chat.render(template, [USER], variables=variables)
    assert render(template, variables=variables) == expected
    assert "(1, [2]) inf 1267650600228229401496703205376 \ud800 😀 True" in expected


def test_values_without_an_end_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TemplateError, match="recursion"):
        render(WRITES, variables={"value": value})


def test_errors_are_those_of_the_template_and_of_bounded_length(only_child: int) -> None:
    with pytest.raises(TemplateError, match=r"^no$"):
        render("{{ raise_exception('no') }}")
    with pytest.raises(TemplateError) as refused:
        render("{{ raise_exception('no' * 1000000) }}")
    assert len(str(refused.value)) < 3000
    assert not is_gone(only_child)


def test_a_text_that_is_too_long_does_not_leave_the_child() -> None:
    timed = TimedTemplate("{{ 'é' * 1000 }}", 30)
    assert len(timed.render([USER], OPTIONS, longest=1000)) == 1000
    with pytest.raises(ContextLengthError, match="has 1000 characters as the chat template writes"):
        timed.render([USER], OPTIONS, longest=999)


def test_few_children_are_kept() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(render, [WRITES] * 64)) == {"hi"}
    assert len(template_process._idle) <= template_process._MAX_IDLE
