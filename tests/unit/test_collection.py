"""The tests of a run of pytest: a floor for whole runs, property tests in soak."""

import sys

from tests.support.processes import run_program, run_python

ELSEWHERE = (
    *("unit", "integration", "concurrency", "property", "clients", "cluster", "peers", "gpu"),
    *("bug_zoo", "architecture/test_imports.py"),
)
SHOW_PROFILE = """
import pytest

class Show:
    def pytest_collection_finish(self):
        from hypothesis import settings
        print(f"derandomize={settings.default.derandomize}")
"""


def pytest_says(*arguments: str) -> tuple[int, list[str]]:
    """The exit status of a run, and its lines."""
    done = run_program(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], status=None
    )
    return done.returncode, done.stdout.splitlines()


def test_a_whole_run_of_a_few_tests_fails_and_says_why() -> None:
    status, lines = pytest_says(*(f"--ignore=tests/{name}" for name in ELSEWHERE))
    assert status == 1
    assert any("too few tests" in line for line in lines)
    [said] = [line for line in lines if "a whole run has at least" in line]
    assert 0 < int(said.split()[0]) < 100
    assert " failed" not in lines[-1] and " passed" in lines[-1]


def test_a_part_of_the_tests_may_be_small() -> None:
    status, _ = pytest_says("tests/architecture/test_device_copies.py")
    assert status == 0


def test_soak_runs_have_the_property_tests_with_other_examples_each_time() -> None:
    file = "tests/unit/scheduler/test_layer_groups.py"
    for options, expected in (([], True), (["-m", "soak"], False)):
        arguments = ["-q", "--collect-only", "-p", "no:cacheprovider", file, *options]
        done = run_python(f"{SHOW_PROFILE}\npytest.main({arguments}, [Show()])")
        assert f"derandomize={expected}" in done.stdout
        assert f"{file}::test_" in done.stdout
