"""Tokenizers and chat templates, in threads of their own: one tokenizer each."""

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_NUM_THREADS = 2


class TokenizerThreads:
    """Runs what needs a tokenizer, off the event loop.

    Tokenizers are not re-entrant: each thread has a copy. What may take for ever has a time limit
    of its own (`pyengine.engine.untrusted_calls`).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._local = threading.local()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "pyengine-tokenizer")

    async def run(self, work: Callable[[Any], _T]) -> _T:
        """What `work` makes of a tokenizer, which may be None."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(self._own()))

    def _own(self) -> Any:
        """This thread's tokenizer."""
        if not hasattr(self._local, "tokenizer"):
            with self._lock:
                self._local.tokenizer = copy.deepcopy(self._tokenizer)
        return self._local.tokenizer

    def close(self) -> None:
        """End the threads; what they are at comes to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
