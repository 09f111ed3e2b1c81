"""Grammars of constrained answers: each compiled once, outside of steps, under limits."""

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

from pyengine.errors import InvalidRequestError, PyEngineError
from pyengine.sampling import grammar_checker
from pyengine.sampling.closed_schema import closed_schema
from pyengine.sampling.token_masks import CompiledGrammar, TokenMatcher, num_filling_threads
from pyengine.sampling_params import StructuredOutputs
from pyengine.utils.child_process import ChildProcess, idle_child
from pyengine.utils.fair_pool import FairPool
from pyengine.utils.packaging import needs_extra

_SECONDS = 2.0  # time limit to compile a grammar
_SECONDS_TO_BEGIN = 60.0
_KEPT = 64  # compiled grammars of a tenant that are kept, the most recently used
_TENANTS = 64  # tenants whose grammars are kept, the most recently active
_THREADS = 2  # one tenant has all but one of them
_MAX_WAITING = 32  # grammars of one tenant that wait to be compiled
_LONGEST_REASON = 500  # maximum characters of a message of `llguidance`
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Fields of `llguidance.LLParserLimits`."""


_Known: TypeAlias = OrderedDict[tuple[str, str], Future[CompiledGrammar]]


class _RefusedForNow(InvalidRequestError):
    """A grammar that may compile another time: it exceeded time or memory."""


class Grammars:
    """Makes matchers for requests with a grammar. Thread-safe.

    Each grammar is compiled in another process first, which may take too long or crash: then its
    request alone fails. Then it is compiled here, without the interpreter's lock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock, self._making = Lock(), Lock()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """The grammars of each tenant; tenants and grammars by their last use."""
        self._threads = FairPool(
            _THREADS, "grammars", at_once=max(1, _THREADS - 1), max_waiting=_MAX_WAITING
        )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pyengine-grammars-again")
        self._max_bases = num_filling_threads()
        self._vocabulary: Any = None  # `llguidance.LLTokenizer`, made at first use
        self._checker_setup = b""  # the first line for each checker
        self._idle: list[_Checker] = []

    def matcher(self, structured_outputs: StructuredOutputs, tenant: bytes = b"") -> TokenMatcher:
        """Return a matcher at the beginning of an answer.

        Waits until the grammar is compiled, if it is new. Raises `InvalidRequestError` if it is
        wrong or too large, or if `llguidance` or a tokenizer is missing; `QueueFullError` as
        `compile` does.
        """
        try:
            return self.compile(structured_outputs, tenant).result().matcher()
        except InvalidRequestError as error:  # each thread raises its own error
            raise InvalidRequestError(str(error)) from error

    def prepare(self) -> Future[None]:
        """Prepare the vocabulary of all grammars: a second or two, once. Raises as `matcher` does.

        Much of that holds the interpreter's lock, so no step runs meanwhile. The future is done as
        soon as a process that checks grammars is ready, too, which takes as long without the lock.
        """
        self._make_vocabulary()
        return self._threads.submit(lambda: self._idle.append(self._checker()))

    def compile(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[CompiledGrammar]:
        """Compile a grammar in the background, unless the tenant's last ones have it.

        The future fails as `matcher`. Tenants take turns, so none waits for the many grammars of
        another one. They share no grammar: its compile time would tell who else uses it. Raises
        `QueueFullError` if too many grammars of this tenant wait.
        """
        key = (structured_outputs.kind, structured_outputs.text)
        with self._lock:
            known = self._known.setdefault(tenant, OrderedDict())
            self._known.move_to_end(tenant)
            compiled = known.get(key)
            if compiled is None:
                work = partial(self._compile_for, tenant, key, structured_outputs)
                known[key] = compiled = self._threads.submit(work, tenant)
            known.move_to_end(key)
            while len(known) > _KEPT:
                known.popitem(last=False)
            while len(self._known) > _TENANTS:
                self._known.popitem(last=False)
            return compiled

    def _compile_for(
        self, tenant: bytes, key: tuple[str, str], constraint: StructuredOutputs
    ) -> CompiledGrammar:
        """Compile a grammar. Only errors of the grammar itself are kept."""
        try:
            return self._compile(constraint)
        except Exception as error:
            is_lasting = isinstance(error, InvalidRequestError)
            if not is_lasting or isinstance(error, _RefusedForNow):
                with self._lock:
                    self._known.get(tenant, OrderedDict()).pop(key, None)
            raise

    def _compile(self, constraint: StructuredOutputs) -> CompiledGrammar:
        checker = self._checker()
        text = closed_schema(constraint.text) if constraint.kind == "json" else constraint.text
        answer = checker.ask([constraint.kind, text], _SECONDS)
        if checker.is_alive:
            self._idle.append(checker)
        if answer.get("error"):
            reason = answer["error"]
            shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
            refused = _RefusedForNow if answer.get("is_passing") else InvalidRequestError
            raise refused(f"structured_outputs.{constraint.field} cannot be served: {shown}")
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS)

        def compiled() -> LLMatcher:
            return LLMatcher(self._vocabulary, answer["grammar"], log_level=0, limits=limits)

        return CompiledGrammar(compiled, self._max_bases, self._background)

    def _checker(self) -> "_Checker":
        """An idle checker, or a new one."""
        checker = idle_child(self._idle)
        if checker is None:
            self._make_vocabulary()
            checker = _Checker(self._checker_setup)
        return checker

    def _make_vocabulary(self) -> None:
        """Build the vocabulary, once."""
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            missing = needs_extra("serve", "structured_outputs", "llguidance")
            raise InvalidRequestError(missing) from error
        with self._making:
            if self._vocabulary is not None:
                return
            text, ends = _text_of(self._tokenizer), self._eos_token_ids
            setup = {
                "tokenizer": text,
                "n_vocab": self._vocab_size,
                "eos_token": ends,
                "limits": _LIMITS,
            }
            self._checker_setup = json.dumps(setup, ensure_ascii=False).encode()
            try:
                self._vocabulary = LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=ends or None
                )
            except ValueError as error:
                raise InvalidRequestError(
                    "structured_outputs cannot be served with this model's tokenizer: "
                    f"{str(error)[:_LONGEST_REASON]}"
                ) from error


def _text_of(tokenizer: Any) -> str:
    """The tokenizer as JSON of the tokenizers library."""
    if tokenizer is None:
        raise InvalidRequestError(
            "structured_outputs needs a tokenizer, and this model has none: leave it out"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequestError(
            "structured_outputs needs a tokenizer of the tokenizers library, and this model's is a "
            f"{type(tokenizer).__name__}: leave it out"
        )
    if backend.padding is not None or backend.truncation is not None:
        backend = copy(backend)  # a second for a large vocabulary
        backend.no_padding()
        backend.no_truncation()
    return str(backend.to_str())


class _Checker(ChildProcess):
    """A process that runs `grammar_checker.py`."""

    def __init__(self, setup: bytes) -> None:
        """Start it with the vocabulary as JSON, and wait until it is ready."""
        super().__init__(
            grammar_checker.__file__, memory=grammar_checker.MEMORY, stack=grammar_checker.STACK
        )
        answer = self._answer_to(setup, _SECONDS_TO_BEGIN)
        if answer:
            raise PyEngineError(f"the process that checks grammars did not start: {answer}")

    def ask(self, question: Any, seconds: float) -> dict[str, str]:
        """The answer; a passing "error" if the process ended, or exceeded `seconds`."""
        return self._answer_to(json.dumps(question).encode(), seconds)

    def _answer_to(self, question: bytes, seconds: float) -> dict[str, str]:
        try:
            answer: dict[str, str] = json.loads(
                self.exchange(question, seconds, grammar_checker.MEMORY)
            )
            return answer
        except TimeoutError:
            reason = f"it takes more than {seconds:g} s to compile; make it smaller"
        except ChildProcessError:
            reason = "it takes too much stack or memory to compile; make it flatter"
        return {"error": reason, "is_passing": "yes"}
