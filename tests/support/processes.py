"""Processes that tests start, and running ones by /proc."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

WORKERS = ("pyengine.executor.tensor_parallel.worker", "tests.support.faulty_worker")


ROOT = Path(__file__).parents[2]


def run_python(code: str, *arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a new Python, as `run_program` does."""
    return run_program([sys.executable, "-c", code, *arguments], **options)


def run_program(
    command: Sequence[object], *, status: int | None = 0, cwd: Path = ROOT, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command that must end with `status`, or with any if that is None.

    The result has its output. `options` are those of `subprocess.run`.
    """
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, **options)
    return ended_with(status, done)


def ended_with(
    status: int | None, done: "subprocess.CompletedProcess[str]"
) -> "subprocess.CompletedProcess[str]":
    """`done`, whose status must be this one unless it is None."""
    said = f"{done.stdout[-6000:]}{done.stderr[-4000:]}"
    assert status in (None, done.returncode), f"ended with {done.returncode}: {said}"
    return done


def in_a_fork(act: Callable[[], object], seconds: float = 20) -> str:
    """The error or result of `act` in a fork of this process; "hangs" if it does not end."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, with threads
        child = os.fork()
    if child == 0:
        try:
            reply = str(act())
        except BaseException as error:
            reply = f"{type(error).__name__}: {error}"
        os.write(theirs, reply.encode())
        os._exit(0)
    os.close(theirs)
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    with open(ours, "rb") as answer:
        reply = answer.read().decode()
    os.waitpid(child, 0)
    timer.cancel()
    return reply or "hangs"


def workers_of(parent: int) -> list[int]:
    """Process ids of the workers of `parent`, and of what has ended and it has not reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit():
                continue
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if int(ppid) == parent and (state == "Z" or any(word in words for word in WORKERS)):
            found.append(int(folder.name))
    return sorted(found)


def workers_left(parent: int, seconds: float) -> list[int]:
    """`workers_of` once there are none, or after `seconds`: who was killed takes a moment to go."""
    deadline = time.monotonic() + seconds
    while (left := workers_of(parent)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that waits for its parent to reap it."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: list[int], seconds: float) -> list[int]:
    """Those of `pids` that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def processes_with(*words: str) -> list[int]:
    """Process ids of those that run and have any of these words in their command lines."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(word in line for word in words) and is_running(int(folder.name)):
            found.append(int(folder.name))
    return sorted(found)


def _sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for descriptor in (Path("/proc") / str(pid) / "fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            found.add(name.removeprefix("socket:[").removesuffix("]"))
    return found


def listening(pid: int) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """The addresses and ports on which a process takes connections."""
    found: list[tuple[IPv4Address | IPv6Address, int]] = []
    own = _sockets_of(pid)
    for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (Path("/proc") / str(pid) / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != "0A" or words[9] not in own:  # TCP_LISTEN
                continue
            host, _, port = words[1].partition(":")
            digits = bytes.fromhex(host)  # 32 bits each, as numbers
            numbers = struct.unpack(f">{len(digits) // 4}I", digits)
            address = struct.pack(f"={len(numbers)}I", *numbers)
            named = IPv4Address(address) if kind == socket.AF_INET else IPv6Address(address)
            found.append((named, int(port, 16)))
    return found


def unix_names(pid: int) -> list[str]:
    """The names of a process's Unix sockets, by which others can reach them."""
    own = _sockets_of(pid)
    lines = (Path("/proc") / str(pid) / "net" / "unix").read_text().splitlines()[1:]
    several = [line.split() for line in lines]
    return [words[7] for words in several if words[6] in own and len(words) > 7]
