"""A rank other than the first: `python -m pyengine.executor.tensor_parallel.worker SOCKET DRIVER`.

`workers.py` starts it, never a person. SOCKET is an open file descriptor, DRIVER the process id of
rank 0. It does what comes over the socket: a setup, a second one, then steps, until the socket
closes.
"""

import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pyengine.executor.model_runner import ModelRunner
from pyengine.executor.tensor_parallel.ranks import (
    CARRY_ON,
    Barrier,
    PackedStep,
    RankSetup,
    Report,
    RunnerSetup,
    StepAbandoned,
    join,
    make_runner,
    rank_environment,
)
from pyengine.kv_cache.memory import available_memory
from pyengine.models.loader import load_model
from pyengine.utils.frame_memory import with_frame_room

_LOOKS_FOR_DRIVER_EVERY = 0.5
_WAITS_FOR_OTHERS = 6.0
"""Seconds after a failure within the forward pass; rank 0 stops waiting for the others sooner."""

ENDED, FAILED, ALONE = 0, 1, 3
"""Exit statuses: ended on request, could not start, failed in a forward pass with other ranks."""


@with_frame_room
def serve(runner: ModelRunner, barrier: Barrier, connection: Connection) -> int:
    """Compute steps until the connection closes; the exit status."""
    while True:
        report = _step(runner, barrier, connection.recv_bytes())
        connection.send(report)
        if report.in_forward:
            if not connection.poll(_WAITS_FOR_OTHERS) or connection.recv_bytes() != CARRY_ON:
                return ALONE
            connection.send(Report())


def _step(runner: ModelRunner, barrier: Barrier, message: bytes) -> Report:
    """Compute one step, with the other ranks."""
    barrier.begin()
    try:
        plan: PackedStep = pickle.loads(message)
        plan.arrays = runner.buffers.arrays
        runner.prepare(plan, extra_rows=plan.extra_rows)(None)
    except StepAbandoned:
        pass
    except Exception:
        text, in_forward = traceback.format_exc(), not barrier.is_asked
        if not in_forward:
            barrier.refuse()
        return Report(text, in_forward)
    return Report()


def main(arguments: list[str]) -> int:
    """Run a worker to its end; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0 to act on
    connection: Connection = Connection(int(arguments[0]))
    setup: RankSetup = connection.recv()
    folder = setup.store.parent
    _end_with(int(arguments[1]), folder)
    try:
        return _run(setup, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return ENDED
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # rank 0 does that too, if it can


def _run(setup: RankSetup, connection: Connection) -> int:
    """Start, and serve to the end; the exit status."""
    connection.send(Report())  # it has imported what it needs
    try:
        runner, barrier = _start(setup, connection)
    except (EOFError, BrokenPipeError):
        raise
    except Exception:
        connection.send(Report(traceback.format_exc()))
        return FAILED
    connection.send(Report())
    return serve(runner, barrier, connection)


def _start(setup: RankSetup, connection: Connection) -> tuple[ModelRunner, Barrier]:
    """Meet the others, load this rank's part, and make a runner for it."""
    torch.set_num_threads(setup.num_threads)
    with rank_environment(setup.rank):
        join(setup)
        loaded = load_model(
            setup.model,
            device=setup.own_device,
            dtype=setup.dtype,
            tensor_parallel_size=setup.size,
        )
    connection.send(Report(available_memory=available_memory(loaded.device)))
    runner_setup: RunnerSetup = connection.recv()
    barrier = Barrier()
    return make_runner(loaded, runner_setup, barrier), barrier


def _end_with(driver: int, folder: Path) -> None:
    """End this process when `driver` is no longer its parent, whatever it is doing then.

    Unlike the signal that Linux can send (`PR_SET_PDEATHSIG`), this is about the process, not about
    the thread that started this one. `folder`, which the driver would have removed, goes too.
    """

    def look() -> None:
        while os.getppid() == driver:
            time.sleep(_LOOKS_FOR_DRIVER_EVERY)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(ENDED)

    threading.Thread(target=look, name="pyengine-driver", daemon=True).start()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # at once: the others may be gone, and torch would wait for them
