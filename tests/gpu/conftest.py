"""Where the checks run, and what is written down of each as soon as it is done."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.child import Child

if TYPE_CHECKING:  # it imports torch
    from tests.gpu.models import Place

SECONDS = 240.0
"""For one check: a backend may compile its kernels."""
InChild = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--device", help="cuda, cuda:1, or cpu (default: cuda)")
    group.addoption("--report", help="a file that every check is added to when it is done")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that runs in a place is a `gpu` test, which `make test` leaves out, and slow."""
    for item in items:
        if "in_child" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
            item.add_marker("slow")


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Place":
    """The device, and a folder for models."""
    from tests.gpu.models import Place

    device = request.config.getoption("--device", default=None) or "cuda"
    return Place(device, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    """One process for all checks, until one of them takes it down."""
    child = Child()
    yield child
    child.end()


@pytest.fixture
def in_child(child: Child, place: "Place", record_property: Callable[..., None]) -> InChild:
    """Runs a check of `place`; what it returns is written down. A refusal skips the test."""
    from tests.gpu.models import Refused

    def run(check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        try:
            numbers = child.run(check, place, *arguments, seconds=SECONDS)
        except Refused as refused:
            pytest.skip(f"refused: {refused}")
        for name, value in numbers.items():
            record_property(name, value)

    return run


class Report:
    """A line for each check, in the file at once: whoever is cut off still has it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# GPU checks\n\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add it."""
        if report.when != "call" and report.outcome == "passed":
            return
        words = [f"{name} {value}" for name, value in report.user_properties]
        if report.skipped and isinstance(report.longrepr, tuple):
            words.append(report.longrepr[2].removeprefix("Skipped: "))
        name = report.nodeid.rpartition("/")[2]
        line = f"- {report.outcome} {name} ({report.duration:.1f} s): {', '.join(words)}"
        failure = f"\n\n```\n{report.longreprtext}\n```\n" if report.failed else ""
        with self._path.open("a") as file:
            file.write(f"{line.rstrip(': ')}{failure}\n")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--report", default=None):
        config.pluginmanager.register(Report(Path(path)))
