"""`pyengine trace replay` on files that are none: a sentence and status 2, whatever is in them.

Damage that fits its checks is in the tests of the Rust crate, and in its fuzz target.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.kv_cache import BlockManager
from tests.support.blocks import computed
from tests.support.processes import run_python

MAGIC = b"kvtrace\n"
TIB = 2**40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording of a few prompts, a fork, pins and a cancelled step."""
    path = tmp_path_factory.mktemp("recording") / "a.kvtrace"
    manager = BlockManager(64, 4, hash_seed=5, groups=[None, 6], events=True)
    manager.record(path)
    for length in (10, 10, 30):
        sequence = computed(manager, range(length), namespace=b"tenant")
        fork, pin = sequence.fork(length), sequence.pin()
        fork.append([7])
        plan = manager.begin_step(8)
        plan.decode([sequence])
        plan.prefill(fork, 8)
        plan.cancel(fork)
        plan.copies()
        plan.commit([1])
        del fork, pin
    manager.stop_recording()
    return path.read_bytes()


def replayed(file: Path) -> Result:
    return CliRunner().invoke(app, ["trace", "replay", str(file)])


def is_refused_in_a_sentence(file: Path, result: Result) -> bool:
    """Status 2 and one line that names the file; or the file was whole up to where it was cut."""
    if result.exit_code == 0:
        return "all results as recorded" in result.stdout
    lines = result.stderr.splitlines()
    return (
        (result.exit_code, result.stdout, len(lines)) == (2, "", 1)
        and isinstance(result.exception, SystemExit)
        and lines[0].startswith(f"error: {file}: ")
        and lines[0].isprintable()
    )


def damaged(whole: bytes, rng: random.Random) -> Iterator[bytes]:
    """Files that are nearly recordings, and others."""
    at, other = sorted(rng.sample(range(len(whole)), 2))
    noise = rng.randbytes(rng.choice([1, 2, 10, 300]))
    yield whole[:at]
    yield whole[:at] + noise
    yield whole[:at] + noise + whole[at:]
    yield whole[:at] + whole[other:]
    yield whole[:other] + whole[at:]
    yield whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
    yield whole[:at] + b"\xff" * rng.randrange(1, 12) + whole[other:]
    yield noise
    yield MAGIC + noise
    yield MAGIC + b"\x04" + noise
    yield whole + noise


def test_damaged_files(whole: bytes, tmp_path: Path) -> None:
    rng, file = random.Random(1), tmp_path / "damaged"
    statuses = {0: 0, 2: 0}
    for _ in range(30):
        for data in damaged(whole, rng):
            file.write_bytes(data)
            result = replayed(file)
            assert is_refused_in_a_sentence(file, result), (data, result.output)
            statuses[result.exit_code] += 1
    assert statuses[2] > 250 > statuses[0]


def length(count: int) -> bytes:
    """A number as the format writes it."""
    digits = []
    while count >= 128:
        digits.append(count % 128 + 128)
        count //= 128
    return bytes([*digits, count])


LIMITED = """
import resource, sys
from pathlib import Path
from pyengine.cli import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
main()
"""


def replayed_within(mebibytes: int, file: Path) -> str:
    """The error for a file in a process with limited further memory, with status 2."""
    arguments = [str(mebibytes), "trace", "replay", str(file)]
    done = run_python(LIMITED, *arguments, timeout=60, status=2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (b"", "is damaged at byte"),
        (length(2**26), "is damaged at byte"),
        (length(2**26 + 1), "67108865, a replay takes 67108864 at most"),
        (length(2**63), "9223372036854775808, a replay takes 67108864 at most"),
        (b"\xff" * 11, "a number of more than 64 bits"),
    ],
    ids=["zeros", "longest", "longer", "much longer", "no length"],
)
def test_huge_files(whole: bytes, tmp_path: Path, tail: bytes, said: str) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as out:
        out.write(whole + tail)
        out.truncate(TIB)
    assert said in replayed_within(256, file)


def test_endless_files() -> None:
    for file in (Path("/dev/zero"), Path("/dev/urandom")):
        assert "is not a recording" in replayed_within(64, file)


def test_a_pool_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    file = tmp_path / "large"
    manager = BlockManager(4_000_000, 1)
    manager.record(file)
    manager.stop_recording()
    said = replayed_within(64, file)
    assert "the tables of 4000000 blocks do not fit into memory" in said
