"""A process that compiles grammars first, for `grammar.py`; it runs by its path.

Its argument is the process id of its engine; it ends with that process.

A hostile grammar can take any time, memory or stack to compile, which can end the process. So it is
compiled here first: with less stack than the engine's threads have, with bounded memory, and until
the engine's time limit. This module imports only the standard library, so it starts fast.

Messages are lines of JSON: first the vocabulary, with the answer `{}`; then a grammar per line,
with the grammar of `llguidance` or an error as the answer.
"""

import json
import os
import resource
import sys
import threading
import time
from typing import Any

LONGEST_MASK = 0.1
"""Seconds of the processor."""
STACK = 1 << 20
MEMORY = 4 << 30
"""Bytes."""
LOOKS_EVERY = 0.5
"""Seconds."""
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


def serve() -> None:
    """Answer lines until the end of input."""
    from llguidance import LLTokenizer

    first = json.loads(sys.stdin.readline())
    ends = first["eos_token"] or None
    vocabulary = LLTokenizer(first["tokenizer"], n_vocab=first["n_vocab"], eos_token=ends)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(checked(vocabulary, first["limits"], *json.loads(line))), flush=True)


def end_with(engine: int) -> None:
    """End this process when `engine` is no longer its parent."""
    while os.getppid() == engine:
        time.sleep(LOOKS_EVERY)
    os._exit(0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
