"""The OpenMP runtime of torch, whose threads wait for work by spinning."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BRIEF_SPIN = "20000"
"""Spins of a waiting thread before it sleeps (`GOMP_SPINCOUNT`): about a millisecond, the time
between two computations of a step (docs/benchmarks/engine.md)."""

_SPIN, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_HARD = 2
"""`omp_pause_hard`, from omp.h."""


def wait_briefly() -> None:
    """Let OpenMP's waiting threads sleep soon, unless the environment sets their waiting.

    The runtime reads the variable when torch is first imported; later this has no effect. Without
    spinning, a step of one row takes 1.6 times as long on an idle machine. With long spinning, it
    takes several times as long on a busy one.
    """
    if "torch" not in sys.modules and _POLICY not in os.environ:
        os.environ.setdefault(_SPIN, BRIEF_SPIN)


_was_late = "torch" in sys.modules and _SPIN not in os.environ and _POLICY not in os.environ


def how_threads_wait() -> str:
    """The way in which OpenMP's threads wait, by the environment."""
    if find_spec("torch") is None:
        return "torch, which has OpenMP's threads, is not installed"
    if openmp_runtime() is None:
        return "torch brings another runtime than GCC's"
    if _was_late:
        return f"spins for long: torch was imported before pyengine, without {_SPIN}"
    variables = [f"{name}={os.environ[name]}" for name in (_SPIN, _POLICY) if name in os.environ]
    return ", ".join(variables) or "the default of the runtime"


def openmp_runtime() -> Path | None:
    """The file of torch's OpenMP runtime; None without one."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "lib").glob("libgomp*.so*"), None)


def loaded_torch() -> Any:
    """The module torch, if it was imported; else None, and no thread of it computes."""
    return sys.modules.get("torch")


def num_torch_threads() -> int | None:
    """The threads that torch uses in calls of this thread; None if it was not imported."""
    torch = loaded_torch()
    return None if torch is None else int(torch.get_num_threads())


def set_torch_threads(count: int | None) -> None:
    """Let torch use `count` threads in calls of this thread, and later in those of new ones."""
    torch = loaded_torch()
    if torch is not None and count is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def set_own_torch_threads(count: int) -> None:
    """Let torch use `count` threads in calls of this thread, and leave those of other threads.

    Without effect until torch is imported.

    `torch.set_num_threads` also changes the default of threads that call torch for the first time
    later. Code that inductor compiled takes that default when a thread first runs it, whatever was
    set here, so this is for threads that run none.
    """
    torch = loaded_torch()
    if torch is None or count == torch.get_num_threads():  # this gives the thread the default
        return
    setters = _setters_of_this_thread()
    if not setters:
        torch.set_num_threads(count)
    for setter in setters:
        setter(count)


@cache
def _setters_of_this_thread() -> tuple[Callable[[int], object], ...]:
    """Those of torch's OpenMP and MKL, for the calling thread alone; none for other runtimes."""
    runtime = openmp_runtime()
    if runtime is None:
        return ()
    torch_library = CDLL(str(runtime.parent / "libtorch_cpu.so"))
    of_mkl = getattr(torch_library, "MKL_Set_Num_Threads_Local", None)
    of_openmp = CDLL(str(runtime)).omp_set_num_threads
    return (of_openmp,) if of_mkl is None else (of_openmp, of_mkl)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch uses `count` threads in calls of this thread, if it was imported before."""
    before = num_torch_threads()
    set_torch_threads(count)
    try:
        yield
    finally:
        set_torch_threads(before)


def release_threads() -> None:
    """End the OpenMP threads of the calling thread; its next computation makes new ones.

    Each computing thread has a team. If all teams together have more threads than there are cores,
    GCC's runtime lets none of them spin: they sleep at every barrier, hundreds of times a step, and
    a step takes 1.4 times as long. So the thread that has loaded a model releases its team before
    another thread runs the steps. (`omp_pause_resource_all`, OpenMP 5.0.)
    """
    runtime = openmp_runtime() if loaded_torch() is not None else None
    pause = None if runtime is None else getattr(CDLL(str(runtime)), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_HARD)
