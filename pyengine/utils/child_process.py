"""A process of ours for untrusted input: with bounded memory, stack and time."""

import os
import subprocess
import sys
from contextlib import suppress
from socket import socket, socketpair
from time import monotonic
from typing import TypeVar
from weakref import finalize

from pyengine.utils import child_main


class ChildProcess:
    """A process that answers questions, one at a time; it ends with this object or its parent.

    It runs the function `serve(questions, answer)` of a worker file. It loads the file by its path,
    without its package, to start fast. Never unpickle an answer: untrusted input may have taken the
    child over.
    """

    def __init__(self, worker: str, *, memory: int, stack: int) -> None:
        """`worker`: the path of the file. `memory`, `stack`: of the process, in bytes."""
        self._owner = os.getpid()
        command = [sys.executable, "-P", child_main.__file__]
        command += [str(self._owner), worker, str(memory), str(stack)]
        self._socket, theirs = socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # Ctrl-C is not for it
            )
        self._end = finalize(self, _end, self._process, self._socket, self._owner)

    @property
    def is_alive(self) -> bool:
        """True if it can answer another question. In a fork of the parent it cannot."""
        is_ours = self._owner == os.getpid()
        return is_ours and self._end.alive and self._process.poll() is None

    def exchange(self, question: bytes, seconds: float, longest: int) -> bytes:
        """The answer to a question.

        Raises `TimeoutError` after `seconds`, and `ChildProcessError` if the child ends or its
        answer has more than `longest` bytes. The child is killed then.
        """
        deadline = monotonic() + seconds
        try:
            self._wait_until(deadline)
            self._socket.sendall(child_main.QUESTION.pack(seconds, len(question)) + question)
            (length,) = child_main.ANSWER.unpack(self._receive(child_main.ANSWER.size, deadline))
            if length > longest:
                raise ChildProcessError(f"an answer of {length} bytes, and {longest} are allowed")
            return self._receive(length, deadline)
        except ConnectionError as error:
            self.kill()
            raise ChildProcessError("the child ended") from error
        except BaseException:
            self.kill()
            raise

    def _receive(self, length: int, deadline: float) -> bytes:
        received = bytearray(length)
        rest = memoryview(received)
        while rest:
            self._wait_until(deadline)
            count = self._socket.recv_into(rest)
            if not count:
                raise ChildProcessError("the child ended")
            rest = rest[count:]
        return bytes(received)

    def _wait_until(self, deadline: float) -> None:
        seconds = deadline - monotonic()
        if seconds <= 0:  # a timeout of 0 would mean not to wait
            raise TimeoutError
        self._socket.settimeout(seconds)

    def kill(self) -> None:
        """End it."""
        self._end()


T = TypeVar("T", bound=ChildProcess)


def idle_child(idle: list[T]) -> T | None:
    """Take a child that is alive from a list; None if there is none. Thread-safe."""
    with suppress(IndexError):
        while True:
            child = idle.pop()
            if child.is_alive:
                return child
    return None


def _end(process: "subprocess.Popen[bytes]", connection: socket, owner: int) -> None:
    if os.getpid() == owner:  # a fork has only a copy
        process.kill()
        process.wait()
    connection.close()
