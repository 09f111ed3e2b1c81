"""tools/mutants.py names files and tests that exist."""

from tests.support.docs import ROOT
from tools.mutants import COPIED, TESTS


def test_what_is_mutated_and_what_should_notice_exists() -> None:
    assert {file.split("/")[1] for file in TESTS} == {"scheduler", "engine", "executor", "server"}
    scheduler = {str(path.relative_to(ROOT)) for path in ROOT.glob("pyengine/scheduler/*.py")}
    assert scheduler - set(TESTS) == {"pyengine/scheduler/__init__.py"}
    for path in (*COPIED, *TESTS, *(test for tests in TESTS.values() for test in tests)):
        assert (ROOT / path).exists(), path
