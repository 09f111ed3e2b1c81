"""Compiles grammars first, for `grammar.py`, in a child process (`pyengine.utils.child_process`).

A hostile grammar can take any time, memory or stack to compile, which can end the process. So it is
compiled here first: with less stack than the engine's threads have, with bounded memory, and until
the engine's time limit. This module imports only the standard library, so it starts fast.

Messages are JSON: first the vocabulary, with the answer `{}`; then grammars, each with the grammar
of `llguidance` or an error as the answer.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

LONGEST_MASK = 0.1
"""Seconds of the processor."""
STACK = 1 << 20
MEMORY = 4 << 30
"""Bytes."""
_WHITE_SPACE = r"(?: |\n[ \t]{0,64})?"
"""Between the parts of JSON: no space, one space, or an indented new line. Weak models never end
unlimited white space, which JSON allows."""


def translated(kind: str, text: str) -> str:
    """The grammar in the form of `llguidance`. Raises `ValueError` if it cannot be read."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        defaults: Any = {"whitespace_pattern": _WHITE_SPACE}
        return LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    if kind == "choice":  # one expression: a grammar allows few alternatives
        texts = ["".join(map(_escaped, load)) for load in json.loads(text)]
        return LLMatcher.grammar_from_regex("|".join(texts))
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _escaped(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def checked(vocabulary: Any, limits: dict[str, Any], kind: str, text: str) -> dict[str, str]:
    """The translated grammar, or the reason why it allows no first token."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = translated(kind, text)
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # its converter raises plain exceptions
        return {"error": str(error) or type(error).__name__}
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**limits))
    begin = time.thread_time()
    if not matcher.is_error():
        matcher.compute_bitmask()
    if time.thread_time() - begin > LONGEST_MASK:
        reason = "its allowed first tokens take too long to compute; make it simpler"
        return {"error": reason, "is_passing": "yes"}
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def serve(questions: Iterator[bytes], answer: Callable[[bytes], None]) -> None:
    """Answer all questions."""
    from llguidance import LLTokenizer

    first = json.loads(next(questions))
    ends = first["eos_token"] or None
    vocabulary = LLTokenizer(first["tokenizer"], n_vocab=first["n_vocab"], eos_token=ends)
    answer(b"{}")
    for question in questions:
        verdict = checked(vocabulary, first["limits"], *json.loads(question))
        answer(json.dumps(verdict).encode())
