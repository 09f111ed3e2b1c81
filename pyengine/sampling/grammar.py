"""Grammars of constrained answers: each compiled once, outside of steps, under limits."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from threading import Lock, Timer
from typing import Any
from weakref import finalize

from pyengine.errors import InvalidRequestError, PyEngineError, QueueFullError
from pyengine.sampling import grammar_checker
from pyengine.sampling.closed_schema import closed_schema
from pyengine.sampling.token_masks import CompiledGrammar, TokenMatcher, num_filling_threads
from pyengine.sampling_params import StructuredOutputs
from pyengine.utils.packaging import needs_serve_extra

_SECONDS = 2.0  # time limit to compile a grammar
_SECONDS_TO_BEGIN = 60.0
_KEPT = 64  # compiled grammars that are kept, the most recently used
_THREADS = 2
_AT_ONCE = max(1, _THREADS - 1)
"""Grammars of one tenant that are compiled at once: the other threads are for others."""
_MAX_WAITING = 32  # grammars of one tenant that wait to be compiled
_LONGEST_REASON = 500  # the most characters of a message of `llguidance`
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


class _RefusedForNow(InvalidRequestError):
    """A grammar that may compile another time: it exceeded time or memory."""


@dataclass(slots=True, eq=False)
class _Job:
    """A waiting grammar, in the queue of each tenant that has sent it."""

    structured_outputs: StructuredOutputs
    compiled: Future[CompiledGrammar] = field(default_factory=Future)
    tenants: set[bytes] = field(default_factory=set)
    is_started: bool = False


class _FairQueue:
    """Jobs by tenant. Tenants take turns, each with `_AT_ONCE` jobs at most. Not locked."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, deque[_Job]] = OrderedDict()
        self._running: Counter[bytes] = Counter()

    def add(self, job: _Job, tenant: bytes) -> None:
        """Queue a job for a tenant. Raises `QueueFullError` if too many of its jobs wait."""
        if job.is_started or tenant in job.tenants:
            return
        jobs = self._waiting.get(tenant, deque())
        count = sum(not other.is_started for other in jobs)
        if count >= _MAX_WAITING:
            raise QueueFullError(
                f"{count} other grammars of this sender wait to be compiled: try again later"
            )
        job.tenants.add(tenant)
        jobs.append(job)
        self._waiting[tenant] = jobs

    def take(self) -> tuple[_Job, bytes] | None:
        """The next job, started, and its tenant; `end` follows."""
        for tenant in list(self._waiting):
            if self._running[tenant] >= _AT_ONCE:
                continue
            jobs = self._waiting.pop(tenant)
            while jobs:
                job = jobs.popleft()
                if not job.is_started:
                    job.is_started = True
                    self._running[tenant] += 1
                    if jobs:
                        self._waiting[tenant] = jobs  # after the others now
                    return job, tenant
        return None

    def end(self, tenant: bytes) -> None:
        """A job of this tenant has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


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
        self._known: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._queue = _FairQueue()
        self._num_workers = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pyengine-grammars")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pyengine-grammars-again")
        self._max_bases = num_filling_threads()
        self._vocabulary: Any = None  # `llguidance.LLTokenizer`, made at first use
        self._checker_setup: dict[str, Any] = {}  # the setup of checkers
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

    def prepare(self) -> None:
        """Prepare the tokenizer for all grammars: a second or two, once. Raises as `matcher` does.

        Much of that holds the interpreter's lock, so no step runs meanwhile.
        """
        checker = self._threads.submit(self._checker).result()
        self._idle.append(checker)

    def compile(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[CompiledGrammar]:
        """Compile a grammar in the background, unless it is known. The future fails as `matcher`.

        Tenants take turns, so none waits for the many grammars of another one. Raises
        `QueueFullError` if too many grammars of this tenant wait.
        """
        key = (structured_outputs.kind, structured_outputs.text)
        with self._lock:
            job = self._known.get(key)
            if job is None or not job.compiled.done():
                job = job or _Job(structured_outputs)
                self._queue.add(job, tenant)
                if self._num_workers < _THREADS:
                    self._num_workers += 1
                    self._threads.submit(self._work)
            self._known[key] = job
            self._known.move_to_end(key)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return job.compiled

    def _work(self) -> None:
        """Compile grammars until no grammar is left for this thread."""
        while True:
            with self._lock:
                taken = self._queue.take()
                if taken is None:
                    self._num_workers -= 1
                    return
            job, tenant = taken
            try:
                job.compiled.set_result(self._compile(job.structured_outputs))
            except Exception as error:
                self._fail(job, error)
            finally:
                with self._lock:
                    self._queue.end(tenant)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Fail a job. Errors of the grammar itself are kept, other failures are not."""
        key = (job.structured_outputs.kind, job.structured_outputs.text)
        is_lasting = isinstance(error, InvalidRequestError) and not isinstance(
            error, _RefusedForNow
        )
        with self._lock:
            if not is_lasting and self._known.get(key) is job:
                del self._known[key]
        job.compiled.set_exception(error)

    def _compile(self, asked: StructuredOutputs) -> CompiledGrammar:
        checker = self._checker()
        text = closed_schema(asked.text) if asked.kind == "json" else asked.text
        answer = checker.ask([asked.kind, text], _SECONDS)
        if checker.is_alive:
            self._idle.append(checker)
        if answer.get("error"):
            reason = answer["error"]
            shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]} ..."
            refused = _RefusedForNow if answer.get("is_passing") else InvalidRequestError
            raise refused(f"structured_outputs.{asked.field} cannot be served: {shown}")
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS)

        def compiled() -> LLMatcher:
            return LLMatcher(self._vocabulary, answer["grammar"], log_level=0, limits=limits)

        return CompiledGrammar(compiled, self._max_bases, self._background)

    def _checker(self) -> "_Checker":
        """An idle checker, or a new one."""
        with suppress(IndexError):
            return self._idle.pop()
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            missing = needs_serve_extra("structured_outputs", "llguidance")
            raise InvalidRequestError(missing) from error
        with self._making:
            if self._vocabulary is None:
                text, ends = _text_of(self._tokenizer), self._eos_token_ids
                self._vocabulary = LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=ends or None
                )
                self._checker_setup = {
                    "tokenizer": text,
                    "n_vocab": self._vocab_size,
                    "eos_token": ends,
                    "limits": _LIMITS,
                }
        return _Checker(self._checker_setup)


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
    own = copy(backend)
    own.no_padding()
    own.no_truncation()
    return str(own.to_str())


class _Checker:
    """A process that runs `grammar_checker.py`."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", grammar_checker.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        finalize(self, _end, self._process, os.getpid())
        answer = self.ask(first, _SECONDS_TO_BEGIN)
        if answer:
            raise PyEngineError(f"the process that checks grammars has not begun: {answer}")

    @property
    def is_alive(self) -> bool:
        """True if it can be asked again."""
        return self._process.poll() is None

    def ask(self, question: Any, seconds: float) -> dict[str, str]:
        """Its answer; a passing "error" if the process ended, or exceeded `seconds`."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        end = Timer(seconds, process.kill)
        end.start()
        answer = b""
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            end.cancel()
        if answer:
            found: dict[str, str] = json.loads(answer)
            return found
        if process.wait() == -signal.SIGKILL:
            reason = f"it takes more than {seconds:g} s to compile; make it smaller"
        else:
            reason = "it takes too much stack or memory to compile; make it flatter"
        return {"error": reason, "is_passing": "yes"}


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # in a fork
        return
    process.kill()
    process.communicate()
