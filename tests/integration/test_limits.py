"""Little address space, few open files, no /dev/shm: a sentence or an answer, and no traceback."""

import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.processes import run_program
from tests.support.soak import soak_only

pytestmark = pytest.mark.slow

GENERATE = [sys.executable, "-c", "from pyengine.cli import main; main()"]
GENERATE += ["generate", "--max-tokens", "4", "hello"]
LIBRARY = """
import pyengine
import pyengine.errors

try:
    llm = pyengine.LLM(num_blocks=64)
    params = pyengine.SamplingParams(max_tokens=4)
    print(llm.generate(["hello"], params, use_tqdm=False)[0].finished)
except pyengine.errors.PyEngineError as error:
    print(f"refused: {error}")
"""


def limited(command: list[str], kind: int, most: int) -> "subprocess.CompletedProcess[str]":
    """Run a command limited to `most` bytes of addresses, or `most` files: no traceback."""
    limit: Callable[[], None] = lambda: resource.setrlimit(kind, (most, most))  # noqa: E731
    ended = run_program(command, status=None, preexec_fn=limit)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


@pytest.mark.parametrize("gigabytes", [0.08, 0.6, 1.4, 2.4, 3.8, 4.4, *soak_only([5.2])])
def test_little_address_space_is_said_in_a_sentence(gigabytes: float) -> None:
    assert_said(int(gigabytes * 1e9))


def assert_said(most: int) -> None:
    """With so many bytes of addresses the command answers, or ends with a sentence."""
    ended = limited(GENERATE, resource.RLIMIT_AS, most)
    if ended.returncode != 0:
        assert ended.returncode == 1
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert "delete the folder" not in line  # nothing is wrong with the model


@pytest.mark.parametrize("gigabytes", [0.9, 4.6, *soak_only([4.2, 5.2])])
def test_and_a_library_raises_errors_of_its_own(gigabytes: float) -> None:
    ended = limited([sys.executable, "-c", LIBRARY], resource.RLIMIT_AS, int(gigabytes * 1e9))
    assert ended.stdout.startswith(("True", "refused: ")), ended


def test_twenty_open_files_are_enough() -> None:
    ended = limited(GENERATE, resource.RLIMIT_NOFILE, 20)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_six_open_files_are_not_and_it_is_said() -> None:
    limited(GENERATE, resource.RLIMIT_NOFILE, 6)


@pytest.mark.parametrize("processes", [2, *soak_only([1])])
def test_no_shared_memory_folder(processes: int) -> None:
    """A read-only `/dev/shm`, in a separate mount namespace."""
    inside = ["mount -t tmpfs -o ro none /dev/shm", 'exec "$@"']
    alone = ["unshare", "-m", "sh", "-c"]
    if run_program([*alone, inside[0]], status=None).returncode:
        pytest.skip("needs the right to mount")
    command = [*alone, " && ".join(inside), "sh", *GENERATE, "--tensor-parallel-size"]
    ended = run_program([*command, processes], status=None)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 0 or "error: " in ended.stderr, ended.stderr
