"""The program of a `ChildProcess`: limits itself, then serves questions with a worker file.

Arguments: the process id of the parent, the path of the worker file, and the limits of memory and
stack in bytes. It imports only the standard library, so it starts fast.

A message is its length in bytes and the bytes; before a question comes its time limit. Both
directions use the socket that is the standard input.
"""

import importlib.util
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator

LOOKS_EVERY = 0.5
"""Seconds between two looks at the parent."""
GRACE = 1.0
"""Seconds after its time limit at which the child ends itself, in case the parent has ended."""
QUESTION, ANSWER = struct.Struct("!dQ"), struct.Struct("!Q")
"""The time limit in seconds and the length; the length."""


def questions() -> Iterator[bytes]:
    """The questions of the parent, until it closes the socket. A timer ends an endless answer.

    The timer's signal needs no thread of Python: a single operation may hold the interpreter's
    lock for ever.
    """
    with open(0, "rb", closefd=False) as source:
        while header := source.read(QUESTION.size):
            seconds, length = QUESTION.unpack(header)
            question = source.read(length)
            signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
            yield question
            signal.setitimer(signal.ITIMER_REAL, 0)


def answer(text: bytes) -> None:
    """Send an answer."""
    with open(0, "wb", closefd=False) as target:
        target.write(ANSWER.pack(len(text)))
        target.write(text)


def limit(kind: int, value: int) -> None:
    """Lower a limit of the system for this process."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def serve_of(path: str) -> Callable[[Iterator[bytes], Callable[[bytes], None]], None]:
    """The function `serve` of a worker file."""
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    serve: Callable[[Iterator[bytes], Callable[[bytes], None]], None] = module.serve
    return serve


def main(parent: int, path: str, memory: int, stack: int) -> None:
    """Serve until the parent closes the socket or ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_CORE, 0)
    threading.stack_size(stack)
    thread = threading.Thread(target=serve_of(path), args=(questions(), answer), daemon=True)
    thread.start()
    while thread.is_alive() and os.getppid() == parent:
        thread.join(LOOKS_EVERY)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
