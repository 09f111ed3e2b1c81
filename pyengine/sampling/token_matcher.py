"""Positions of samples in their grammars, by `llguidance`, and the grammars that they come from."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from threading import Lock
from time import thread_time
from typing import Any
from weakref import WeakSet

import torch

LEAST_ROWS = 16
"""The least rows per thread that fills masks, if there are several threads."""
_MOST_THREADS = 8
_QUICK = 0.02
"""Seconds of the processor; a grammar that takes longer is compiled once."""
_FREE_SECONDS = 0.5
_SECONDS_PER_TOKEN = 0.005
"""The limit of the processor time of a sample's masks: a base, and a part per token.

A mask usually takes 0.05 ms; all requests of a step wait for all of its masks."""
_FIRST_GUESS = 5e-5
"""Seconds of a mask, before there is any."""


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

    def fill(self, masks: torch.Tensor, row: int, begin: float) -> float:
        """Write a bit for each allowed next token into `masks[row]`: int32 [R, V / 32], contiguous.

        After an error all bits are set: the chosen token is ignored. `begin` is the processor time
        of this thread, and so is the result, at the end.
        """
        end = begin
        if not self.error:
            size = masks.stride(0) * masks.itemsize
            self._matcher.unsafe_compute_mask_ptr(masks.data_ptr() + row * size, size)
            end = thread_time()
            self._charge(end - begin)
        if self.error:
            masks.numpy()[row] = -1  # not by torch, which may refuse a tensor of inference mode
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

    Copies of an `llguidance.LLMatcher` share a lock. So a grammar that many matchers use is
    compiled again, once for each thread that fills masks, and new matchers come from the base with
    the fewest.
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
            is_full = len(base.in_use) > LEAST_ROWS
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
    """The most threads that fill masks."""
    return min(torch.get_num_threads(), _MOST_THREADS)
