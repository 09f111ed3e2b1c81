"""Runs tokenizers and chat templates on threads of the server."""

import asyncio
import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pyengine.errors import QueueFullError, TenantQueueFullError
from pyengine.request.untrusted_calls import unfinished_work
from pyengine.utils.fair_pool import FairPool

_T = TypeVar("_T")
_NUM_THREADS = 2
_MAX_WAITING = 1024
"""Calls of one tenant that wait."""


class TokenizerThreads:
    """A thread pool in which each thread has its own copy of the tokenizer.

    Tokenizers are not re-entrant. Tenants take turns; with several, each has at most all threads
    but one. Work that goes on after its time limit (`pyengine.request.untrusted_calls`) counts as
    its tenant's, so no tenant has more of it than threads.
    """

    def __init__(self, tokenizer: Any, *, has_tenants: bool = False) -> None:
        """`has_tenants`: there are several tenants."""
        self._local = threading.local()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        at_once = _NUM_THREADS - has_tenants
        self._pool = FairPool(_NUM_THREADS, "tokenizer", at_once=at_once, max_waiting=_MAX_WAITING)

    async def run(self, work: Callable[[Any], _T], tenant: bytes = b"") -> _T:
        """Call `work` with a tokenizer (or None) on a thread, and await its result.

        If this is cancelled before its turn, `work` is not called. Raises `QueueFullError` if too
        many calls of the tenant wait.
        """
        try:
            call = self._pool.submit(partial(self._call, work, tenant), tenant)
        except QueueFullError as error:
            if not tenant:
                raise
            raise TenantQueueFullError(str(error)) from error
        return await asyncio.wrap_future(call)

    def _call(self, work: Callable[[Any], _T], tenant: bytes) -> _T:
        with unfinished_work() as unfinished:
            try:
                return work(self._own())
            finally:
                for left in unfinished:
                    self._pool.hold(tenant, left)

    def _own(self) -> Any:
        """The tokenizer of the current thread."""
        if not hasattr(self._local, "tokenizer"):
            with self._lock:
                self._local.tokenizer = copy.deepcopy(self._tokenizer)
        return self._local.tokenizer

    def close(self) -> None:
        """End the threads once their current calls return."""
        self._pool.close()
