"""Calls in separate processes, forked from one that has imported torch and its compiler."""

import multiprocessing
import os
import tempfile
from importlib import import_module

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.fake_cuda.steps", "torch._inductor.compile_fx"])


def run_forked(module: str, function: str, *arguments: str) -> None:
    """Call `function` of `module` in a process that it may change for good."""
    with tempfile.NamedTemporaryFile("r") as output:
        call = (output.name, module, function, arguments)
        process = _forks.Process(target=_call, args=call, daemon=True)
        process.start()
        try:
            process.join()
            assert process.exitcode == 0, output.read()
        finally:
            process.kill()


def _call(output: str, module: str, function: str, arguments: tuple[str, ...]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    getattr(import_module(module), function)(*arguments)
