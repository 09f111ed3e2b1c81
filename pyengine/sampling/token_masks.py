"""Constrained answers, by `llguidance`: positions in grammars, and masks of the allowed tokens."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock, get_ident
from time import clock_gettime, pthread_getcpuclockid, thread_time
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from pyengine.cpu.threads import usable_threads
from pyengine.sampling.array_operations import ARRAYS
from pyengine.sampling.operations import Logits, operations_of
from pyengine.utils.dtypes import Rows, widened

_LONGEST_MASK = 0.1  # seconds of the processor; a row that takes longer fails
_LOOKS_EVERY = 0.05
_WORD = 32  # tokens in a word of a mask
MIN_ROWS = 16
"""Minimum rows per thread that fills masks, with several threads."""
_MAX_THREADS = 8
_QUICK = 0.02  # seconds of the processor; a grammar that takes longer is compiled once
_FREE_SECONDS = 0.5
_SECONDS_PER_TOKEN = 0.005
"""The limit of the processor time of a sample's masks: a base, and a part per token.

A mask usually takes 0.05 ms; all requests of a step wait for all of its masks."""
_FIRST_GUESS = 5e-5  # seconds of a mask, before there is any


@dataclass(slots=True)
class _Spent:
    """Processor time that a sequence's masks have taken."""

    seconds: float = 0.0
    num_masks: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)
    """Drafts of a sample may be filled by several threads."""


class TokenMatcher:
    """The position of one sample in its grammar.

    Several threads may use it, never at the same time.
    """

    __slots__ = ("__weakref__", "_grammar", "_matcher", "_spent", "base", "error")

    def __init__(
        self, grammar: "CompiledGrammar", base: "BaseMatcher", matcher: Any, spent: _Spent
    ) -> None:
        """`matcher` is an `llguidance.LLMatcher`, a copy of that of `base`."""
        self._grammar = grammar
        self.base = base
        self._matcher = matcher
        self._spent = spent
        self.error = str(matcher.get_error())
        """The reason why no token can be chosen any more; empty while that is possible."""

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete: no token can follow."""
        return bool(self._matcher.is_stopped()) and not self.error

    @property
    def seconds_per_mask(self) -> float:
        """The mean processor time of its masks so far; a guess before the first one."""
        return (self._spent.seconds + _FIRST_GUESS) / (self._spent.num_masks + 1)

    def sibling(self) -> "TokenMatcher":
        """Return a matcher of the same grammar, at the beginning."""
        return self._grammar.matcher()

    def ahead(self) -> "TokenMatcher":
        """Return a copy for drafts, whose time counts as this one's."""
        return TokenMatcher(self._grammar, self.base, self._matcher.deep_copy(), self._spent)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that are allowed and do not end the answer."""
        matcher = self._matcher
        consumed: int = matcher.try_consume_tokens([*tokens])
        is_stopped = consumed > 0 and bool(matcher.is_stopped())
        matcher.rollback(consumed)
        return consumed - is_stopped

    def append(self, token: int) -> None:
        """Advance by one allowed token."""
        if not self.error and not self._matcher.consume_token(token):
            self.error = str(self._matcher.get_error())

    def fail(self, reason: str) -> None:
        """Set the error to `reason`, unless one is set or `reason` is empty."""
        self.error = self.error or reason

    def may_come(self, token: int) -> bool:
        """True if this token is allowed, without computing the mask.

        After an error any token is. False for the end of the answer, which needs the mask.
        """
        if self.error:
            return True
        begin = thread_time()
        may_come: bool = self._matcher.validate_tokens([token]) == 1
        self._charge(thread_time() - begin)
        return may_come or bool(self.error)

    def fill(self, masks: npt.NDArray[np.int32], row: int, begin: float) -> float:
        """Write a bit for each allowed next token into `masks[row]`: int32 [R, V / 32], contiguous.

        After an error all bits are set: the chosen token is ignored. `begin` is the processor time
        of this thread, and so is the result, at the end.
        """
        end = begin
        if not self.error:
            size = masks.strides[0]
            self._matcher.unsafe_compute_mask_ptr(masks.ctypes.data + row * size, size)
            end = thread_time()
            self._charge(end - begin)
        if self.error:
            masks[row] = -1
        return end

    def _charge(self, seconds: float) -> None:
        spent = self._spent
        with spent.lock:
            spent.seconds += seconds
            spent.num_masks += 1
        self.fail(str(self._matcher.get_error()) or self._excess())

    def _excess(self) -> str:
        spent = self._spent
        allowed = _FREE_SECONDS + _SECONDS_PER_TOKEN * spent.num_masks
        if spent.seconds <= allowed:
            return ""
        return (
            f"the masks of {spent.num_masks} tokens took {spent.seconds:.1f} s, "
            f"and {allowed:.1f} s are allowed"
        )


@dataclass(slots=True, eq=False)
class BaseMatcher:
    """A compilation of a grammar. Two threads that fill masks of its copies take turns."""

    matcher: Any
    """An `llguidance.LLMatcher` at the beginning."""
    in_use: WeakSet[TokenMatcher] = field(default_factory=WeakSet)


class CompiledGrammar:
    """Makes matchers of a grammar. Thread-safe.

    Copies of an `llguidance.LLMatcher` share a lock. So a grammar with many matchers is compiled
    again, once for each thread that fills masks; new matchers come from the base with the fewest.
    """

    def __init__(self, compile: Callable[[], Any], max_bases: int, background: Executor) -> None:
        """`compile` returns an `llguidance.LLMatcher`: once now, further ones in `background`."""
        begin = thread_time()
        self._bases = [BaseMatcher(compile())]
        is_quick = thread_time() - begin <= _QUICK
        self._compile, self._background = compile, background
        self._max_bases = max_bases if is_quick else 1
        self._is_compiling = False
        self._lock = Lock()

    def matcher(self) -> TokenMatcher:
        """Return a matcher at the beginning of an answer."""
        with self._lock:
            base = min(self._bases, key=lambda base: len(base.in_use))
            matcher = TokenMatcher(self, base, base.matcher.deep_copy(), _Spent())
            base.in_use.add(matcher)
            is_full = len(base.in_use) > MIN_ROWS
            if is_full and len(self._bases) < self._max_bases and not self._is_compiling:
                self._is_compiling = True
                self._background.submit(self._add_base)
        return matcher

    def _add_base(self) -> None:
        matcher = self._compile()
        if matcher.get_error():  # compiled before, so unlikely; `_is_compiling` prevents a retry
            return
        with self._lock:
            self._bases.append(BaseMatcher(matcher))
            self._is_compiling = False


def num_filling_threads() -> int:
    """Maximum number of threads that fill masks."""
    return min(usable_threads(), _MAX_THREADS)


class TokenMasks:
    """Masks of the tokens allowed in some rows of a batch, filled in the background."""

    def __init__(
        self, matchers: Mapping[int, TokenMatcher], vocab_size: int, filler: "MaskFiller"
    ) -> None:
        """`matchers` by row."""
        self._rows = np.array([*matchers], dtype=np.int64)
        self._matchers = [*matchers.values()]
        self._vocab_size = vocab_size
        self._filler = filler
        self._filling: _Filling | None = None

    def begin(self) -> None:
        """Start to fill the masks during the step; otherwise they are filled at first use."""
        self._filling = self._fill(self._matchers)

    def _fill(self, matchers: list[TokenMatcher]) -> "_Filling":
        return self._filler.fill(matchers, -(-self._vocab_size // _WORD))

    def largest(self, logits: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the allowed token with the largest logit, and that logit: [B] each; of arrays.

        The most probable token of a model is mostly allowed. That check takes a fiftieth of the
        time of a mask, and then the row needs no mask.
        """
        token_ids = ARRAYS.largest(logits)
        tokens = token_ids[self._rows].tolist()
        rejected = [
            at
            for at, (matcher, token) in enumerate(zip(self._matchers, tokens, strict=True))
            if token >= self._vocab_size or not matcher.may_come(token)
        ]
        if not rejected:
            return token_ids, ARRAYS.logits_of(logits, token_ids)
        bits = self._fill([self._matchers[at] for at in rejected]).result()
        rows = self._rows[rejected]
        own = widened(logits[rows])
        masked = ARRAYS.forbid(own, np.arange(len(rejected)), bits, to_copy=False)
        token_ids[rows] = masked.argmax(1)
        chosen = ARRAYS.logits_of(logits, token_ids)
        chosen[rows] = masked.max(1)
        return token_ids, chosen

    def apply(self, logits: Logits, *, to_copy: bool) -> Logits:
        """Return logits [B, V] in which forbidden tokens are -inf.

        They are `logits` themselves, changed, or a copy, in float32 where no kernel serves. Raises
        the error of filling.
        """
        filling = self._filling or self._fill(self._matchers)
        operations = operations_of(logits)
        masked: Logits = operations.forbid(logits, self._rows, filling.result(), to_copy=to_copy)
        return masked


class _Filling:
    """Masks that threads fill, each a part of the rows."""

    def __init__(self, masks: npt.NDArray[np.int32], parts: "list[_Part]") -> None:
        self._masks, self._parts = masks, parts

    def result(self) -> npt.NDArray[np.int32]:
        """Wait for the masks: int32 [R, V / 32]. Raises the error of filling."""
        dropped = [row for part in self._parts for row in part.wait_for_masks()]
        bits = self._masks
        if dropped:
            bits = bits.copy()  # their threads may write into the rows later
            bits[dropped] = -1
        return bits


class _Part:
    """Rows that a thread fills one after the other."""

    def __init__(
        self,
        thread: "_Thread",
        matchers: list[TokenMatcher],
        masks: npt.NDArray[np.int32],
        rows: list[int],
        earlier: "list[_Part]",
    ) -> None:
        """It starts after the `earlier` parts, which may have the same matchers.

        `matchers` and `masks` are those of all parts.
        """
        self._thread, self._matchers, self._masks, self._rows = thread, matchers, masks, rows
        self._dropped: list[int] = []
        self._run = _Run(matchers, masks, rows, 0, earlier)
        self._filled = thread.submit(self._run)

    @property
    def is_filled(self) -> bool:
        """True if no thread uses its matchers any more, except one that timed out."""
        return self._filled.done()

    def wait(self) -> None:
        """Wait until it is filled."""
        while not self.is_filled:  # it may time out meanwhile, and go on in another thread
            wait((self._filled,), _LOOKS_EVERY)

    def wait_for_masks(self) -> list[int]:
        """Wait for its masks. Returns the dropped rows; raises the error of filling.

        A row that takes too much processor time is dropped, with its matcher.
        """
        while True:
            try:
                self._filled.result(_LOOKS_EVERY)
                return self._dropped
            except TimeoutError:
                if self._run.seconds > _LONGEST_MASK:
                    self._time_out(self._run)

    def _time_out(self, run: "_Run") -> None:
        """Go on in another thread, after the current row of this one."""
        run.is_timed_out = True
        dropped = self._rows[run.at]
        self._matchers[dropped].fail(
            f"the allowed next tokens take more than {_LONGEST_MASK:g} s to compute"
        )
        self._dropped.append(dropped)
        self._thread.renew()
        self._run = _Run(self._matchers, self._masks, self._rows, run.at + 1, [])
        self._filled = self._thread.submit(self._run)


class _Run:
    """The work of a thread: of its rows those from number `first` on."""

    def __init__(
        self,
        matchers: list[TokenMatcher],
        masks: npt.NDArray[np.int32],
        rows: list[int],
        first: int,
        earlier: list[_Part],
    ) -> None:
        self.at = first
        self.is_timed_out = False
        self._matchers, self._masks, self._rows, self._earlier = matchers, masks, rows, earlier
        self._clock: int | None = None  # the clock of the thread, once it has begun
        self._begin = 0.0

    def __call__(self) -> None:
        for part in self._earlier:
            part.wait()
        self._earlier = []
        self._begin = thread_time()
        self._clock = pthread_getcpuclockid(get_ident())
        while self.at < len(self._rows) and not self.is_timed_out:
            row = self._rows[self.at]
            self._begin = self._matchers[row].fill(self._masks, row, self._begin)
            self.at += 1

    @property
    def seconds(self) -> float:
        """Processor time of the row so far, while the thread works on it."""
        return 0.0 if self._clock is None else clock_gettime(self._clock) - self._begin


class _Thread:
    """A thread that runs tasks in order."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace the thread, which still runs a task."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pyengine-masks")

    def submit(self, run: _Run) -> Future[None]:
        """Run this after the earlier tasks."""
        return self._pool.submit(run)


class MaskFiller:
    """Fills the masks of a step in its own threads, while the device computes the step.

    `llguidance` computes a mask without the interpreter's lock; rows of one base matcher take
    turns. Few rows get one thread: a hand-off takes as long as a few masks.
    """

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._latest: list[_Part] = []  # the parts of the latest filling

    def fill(self, matchers: list[TokenMatcher], num_words: int) -> _Filling:
        """Start to fill the masks of these matchers, `num_words` words each.

        Earlier fillings end first: no two threads ever use the same matcher.
        """
        count = max(1, min(num_filling_threads(), len(matchers) // MIN_ROWS))
        parts = _divided(matchers, count)
        while len(self._threads) < len(parts):
            self._threads.append(_Thread())
        masks = np.full((len(matchers), num_words), -1, dtype=np.int32)
        earlier = [part for part in self._latest if not part.is_filled]
        self._latest = [
            _Part(thread, matchers, masks, rows, earlier)
            for thread, rows in zip(self._threads, parts, strict=False)
        ]
        return _Filling(masks, self._latest)


def _divided(matchers: list[TokenMatcher], count: int) -> list[list[int]]:
    """Rows for each of at most `count` threads, about equal in time; a base's stay together."""
    if count == 1:
        return [[*range(len(matchers))]]
    rows_by_base: dict[object, list[int]] = {}
    for row, matcher in enumerate(matchers):
        rows_by_base.setdefault(matcher.base, []).append(row)
    seconds = {
        base: len(rows) * matchers[rows[0]].seconds_per_mask for base, rows in rows_by_base.items()
    }
    parts: list[list[int]] = [[] for _ in range(min(count, len(rows_by_base)))]
    loads = [0.0] * len(parts)
    for base in sorted(rows_by_base, key=seconds.__getitem__, reverse=True):
        part = loads.index(min(loads))
        parts[part] += rows_by_base[base]
        loads[part] += seconds[base]
    return parts
