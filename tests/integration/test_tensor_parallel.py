"""Three processes on the embedded model, real signals, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigurationError, EngineDeadError
from tests.support.processes import wait_for_end, workers_left, workers_of
from tests.support.tokenizers import save_byte_level
from tests.support.versions import IS_TORCH_2_9
from tests.unit.executor.hand_made import random_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=16)
QUESTIONS = ["The capital of France is", "Two and two make", "Once upon a time"]
IN_TIME = 10.0
COMMAND = "from pyengine.cli import main; main()"
SCRIPT = """
import sys
from pyengine import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", num_blocks=64, tensor_parallel_size=2)
for _ in llm.stream([3, 4, 5], SamplingParams(max_tokens=250, ignore_eos=True)):
    print("an item", flush=True)
"""


def test_three_processes_answer_as_one_and_end_when_one_is_killed() -> None:
    llm = LLM(device="cpu", dtype="float32", quantization="none", num_blocks=64)
    expected = [o.outputs[0].token_ids for o in llm.generate(QUESTIONS, GREEDY, use_tqdm=False)]
    del llm
    with pytest.raises(ConfigurationError, match=r"9 query heads and .*3 KV heads|3 KV heads and"):
        LLM(device="cpu", tensor_parallel_size=2)
    with LLM(device="cpu", dtype="float32", num_blocks=64, tensor_parallel_size=3) as llm:
        outputs = llm.generate(QUESTIONS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected

        workers = workers_of(os.getpid())
        assert len(workers) == 2
        stream = llm.stream(QUESTIONS[0], SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        os.kill(workers[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"process {workers[1]}.* SIGKILL"):
            list(stream)
        assert time.monotonic() - started < IN_TIME
        assert workers_left(os.getpid(), IN_TIME) == []


def test_the_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "temporary"
    random_model("llama", vocab_size=98).save_pretrained(model)
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model)],
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert driver.stdout is not None
    try:
        line = driver.stdout.readline()
        while IS_TORCH_2_9 and line not in {b"an item\n", b""}:  # its Gloo says there whom it met
            line = driver.stdout.readline()
        assert line == b"an item\n"
        workers = workers_of(driver.pid)
        assert len(workers) == 1
        assert list(folder.glob("pyengine-*"))
    finally:
        driver.kill()
        driver.communicate()
    assert wait_for_end(workers, IN_TIME) == []
    assert not list(folder.glob("pyengine-*")), "the file through which the ranks met is left"


def test_ctrl_c_in_a_terminal_ends_the_answer_and_the_workers(tmp_path: Path) -> None:
    random_model("llama", vocab_size=300).save_pretrained(tmp_path)
    save_byte_level(tmp_path, 300)
    arguments = ["generate", "Count to 1000.", "--max-tokens", "240", "--ignore-eos", "--raw"]
    arguments += ["--model", str(tmp_path)]
    sizes = ["--device", "cpu", "--num-blocks", "300", "--tensor-parallel-size", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        # A test run in the background inherits an ignored SIGINT, which Python would keep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdout is not None
    try:
        assert os.read(process.stdout.fileno(), 1)
        workers = workers_of(process.pid)
        assert len(workers) == 1
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert b"interrupted" in errors and b"Traceback" not in errors, errors
    assert wait_for_end(workers, IN_TIME) == []
