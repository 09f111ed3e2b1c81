"""A section of the GPU check whose parts go wrong in every way. Imports nothing heavy."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

from benches.gpu_check.rows import Part, Row, Setup


def parts(setup: Setup) -> list[Part]:
    if setup.options.get("breaks") == "at once":
        raise ValueError("no parts today")
    wanted = setup.options.get("parts")
    named = {
        "good": _good,
        "raises": _raises,
        "hangs": _hangs,
        "exits": _exits,
        "is killed": _is_killed,
        "breaks the device": _breaks_the_device,
        "good too": _good,
    }
    return [(name, run) for name, run in named.items() if wanted is None or name in wanted]


def _good() -> Iterator[Row]:
    yield Row("two and two", "pass", {"sum": 4, "process": os.getpid()})


def _raises() -> Iterator[Row]:
    yield Row("before the error", "pass")
    raise RuntimeError("kernel launch failed")


def _hangs() -> Iterator[Row]:
    yield Row("before the hang", "pass")
    time.sleep(600)


def _exits() -> Iterator[Row]:
    print("about to exit", flush=True)
    os._exit(3)
    yield Row("never", "pass")


def _is_killed() -> Iterator[Row]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Row("never", "pass")


def _breaks_the_device() -> Iterator[Row]:
    """What CUDA does after an illegal access: every call raises from then on."""

    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    yield Row("before the access", "pass", {"process": os.getpid()})
