"""Settings that every test shares. Imports nothing of the engine: unit tests start fast."""

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.support.without_torch import (
    MISSING,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a hub
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads do not spin: cores are shared
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # each of several has one core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

FEWEST = 8750 if "torch" in MISSING else 12_000
"""Tests that a whole run runs at least, skipped ones not counted: fewer, and it fails."""

# The same examples on every machine and run, and no deadline: cores are shared.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
# Others in every run, under `CI=true` too; what fails is printed such that it can be repeated.
settings.register_profile(
    "random", deadline=None, derandomize=False, database=None, print_blob=True
)
settings.load_profile("repeatable")

_ran: set[str] = set()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few kilobytes with a byte-level tokenizer; read-only by convention."""
    from tests.support.serving import save_small_model

    return save_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def slow_steps() -> Iterator[None]:
    """Steps of all engines in this process take 10 ms longer."""
    from tests.support import engines

    with engines.slow_steps():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Random examples in soak runs; signals as in a terminal, for processes that tests start, too.

    A run in the background (`&`, nohup) inherits ignored signals, and passes them on.
    """
    if is_soak(config):
        settings.load_profile("random")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def is_soak(config: pytest.Config) -> bool:
    """Whether long runs are asked for: `pytest -m soak`."""
    return str(config.getoption("markexpr")) == "soak"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak runs have every property test: its examples are other ones each time."""
    for item in items if is_soak(config) else []:
        if is_hypothesis_test(getattr(item, "obj", None)) and not item.get_closest_marker("gpu"):
            item.add_marker("soak")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish() -> None:
    """Take what the modules hold out of the garbage collector's way: half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's end find it."""
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test that ran."""
    if report.when == "call" and report.outcome != "skipped":
        _ran.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a whole run of too few tests: part of them was not collected, or was skipped."""
    if _is_whole(session.config) and exitstatus == pytest.ExitCode.OK and len(_ran) < FEWEST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say so."""
    if _is_whole(terminalreporter.config) and len(_ran) < FEWEST:
        terminalreporter.section("too few tests", sep="=", red=True)
        terminalreporter.line(f"{len(_ran)} tests ran, a whole run has at least {FEWEST}")


def _is_whole(config: pytest.Config) -> bool:
    """Whether everything was asked for, in the process that reports: `pytest` without arguments."""
    options = config.option
    last_failed = getattr(options, "lf", False)
    partial = options.keyword or options.maxfail or options.collectonly or last_failed
    is_default = options.markexpr in config.getini("addopts")
    from_ini = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return from_ini and is_default and not partial and not hasattr(config, "workerinput")
