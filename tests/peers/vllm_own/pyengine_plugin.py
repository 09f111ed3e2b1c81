"""A pytest plugin for vLLM's own tests: with `PYENGINE_BLOCK_MANAGER=1` our manager is in place of
vLLM's, in the Scheduler and where tests make one themselves. It counts, test by test, which
managers were ours and why others were not, checks ours after each test, and writes it all to
`PYENGINE_REPORT`.
"""

import importlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

OURS = os.environ.get("PYENGINE_BLOCK_MANAGER") == "1"

if OURS:
    from pyengine.integrations import vllm as integration
    from pyengine.integrations.vllm_manager import KVCacheManager

made: list[Any] = []
report: dict[str, dict[str, Any]] = {}


def engage() -> None:
    """Put ours in place, and note every one that is made."""
    import vllm.v1.core.kv_cache_manager as module

    insides: Any = importlib.import_module("insides")  # beside this file
    own = module.KVCacheManager
    integration.install()
    module.KVCacheManager = integration.manager_factory(own)
    initialise = KVCacheManager.__init__

    def noted(self: Any, *args: Any, **settings: Any) -> None:
        initialise(self, *args, **settings)
        insides.show(self)
        made.append(self)

    KVCacheManager.__init__ = noted  # type: ignore[method-assign]


def pytest_configure() -> None:
    """Before any test module imports a manager by name."""
    if OURS:
        engage()


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's logger does not propagate; tests that read the log get it here."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The managers that a test created."""
    made.clear()
    if OURS:
        integration.state.reasons.clear()
    report[item.nodeid] = {"outcome": "", "ours": 0, "reasons": []}
    result = yield
    if OURS:
        report[item.nodeid]["ours"] = len(made)
        report[item.nodeid]["reasons"] = sorted(set(integration.state.reasons))
    made.clear()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Item) -> Iterator[None]:
    """Our managers are consistent when a test ends."""
    result = yield
    for manager in made:
        manager.tables.kv.check()
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """How it ended; the worst of its phases."""
    entry = globals()["report"][report.nodeid]
    if report.outcome != "passed" or (report.when == "call" and not entry["outcome"]):
        entry["outcome"] = report.outcome
        if report.outcome == "failed":
            entry["error"] = str(report.longreprtext).strip().splitlines()[-1]


def pytest_sessionfinish() -> None:
    """To the file."""
    path = os.environ.get("PYENGINE_REPORT")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
