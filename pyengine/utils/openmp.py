"""The OpenMP runtime that torch has brought along: its threads, which wait for work by spinning."""

import os
import sys
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path

BRIEF_SPIN = "20000"
"""How often a waiting thread looks before it sleeps (`GOMP_SPINCOUNT`): for a millisecond, which is
what lies between two of a step's computations, and not much more (docs/benchmarks/engine.md)."""

_SPIN, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_HARD = 2
"""`omp_pause_hard`, from omp.h."""


def wait_briefly() -> None:
    """Let OpenMP's waiting threads sleep soon, unless the environment says how they wait.

    The runtime reads the variable when torch is first imported, so this has no effect later.
    Threads that do not spin cost an idle machine 1.6 times the time of a step of one row. Threads
    that spin for long cost a busy one several times its time.
    """
    if "torch" not in sys.modules and _POLICY not in os.environ:
        os.environ.setdefault(_SPIN, BRIEF_SPIN)


_was_late = "torch" in sys.modules and _SPIN not in os.environ and _POLICY not in os.environ


def how_threads_wait() -> str:
    """How OpenMP's threads wait for work, as the environment says."""
    if openmp_runtime() is None:
        return "torch brings another runtime than GCC's"
    if _was_late:
        return f"spins for long: torch was imported before pyengine, without {_SPIN}"
    said = [f"{name}={os.environ[name]}" for name in (_SPIN, _POLICY) if name in os.environ]
    return ", ".join(said) or "the default of the runtime"


def openmp_runtime() -> Path | None:
    """The file of the runtime that torch computes by; None: torch has brought none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "lib").glob("libgomp*.so*"), None)


def release_threads() -> None:
    """End the OpenMP threads of the calling thread; its next computation makes new ones.

    Each thread that computes has its own team. Where the threads of all teams are more than
    the cores, GCC's runtime lets none of them spin: they sleep at every barrier, hundreds of times
    a step, and a step takes 1.4 times as long. So the thread that has loaded a model must not keep
    its team while another one runs the steps. (`omp_pause_resource_all`, OpenMP 5.0.)
    """
    runtime = openmp_runtime()
    pause = None if runtime is None else getattr(CDLL(str(runtime)), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_HARD)
