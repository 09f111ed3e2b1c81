"""Runs tokenizers and chat templates on threads of the server."""

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_NUM_THREADS = 2


class TokenizerThreads:
    """A thread pool in which each thread has its own copy of the tokenizer.

    Tokenizers are not re-entrant. Chat templates have a separate time limit
    (`pyengine.engine.untrusted_calls`).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._local = threading.local()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "pyengine-tokenizer")

    async def run(self, work: Callable[[Any], _T]) -> _T:
        """Call `work` with a tokenizer (or None) on a thread, and await its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(self._own()))

    def _own(self) -> Any:
        """The tokenizer of the current thread."""
        if not hasattr(self._local, "tokenizer"):
            with self._lock:
                self._local.tokenizer = copy.deepcopy(self._tokenizer)
        return self._local.tokenizer

    def close(self) -> None:
        """End the threads once their current calls return."""
        self._pool.shutdown(wait=False, cancel_futures=True)
