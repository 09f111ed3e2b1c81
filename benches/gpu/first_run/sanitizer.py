"""A small run under compute-sanitizer, which checks every access to the device's memory."""

import shutil
import subprocess
import sys
from random import Random

from benches.gpu.first_run.context import Context
from benches.gpu.first_run.driver import ROOT
from benches.gpu.target import NotHere

_ERRORS = "9"
"""The status if the tool finds errors."""


def run(context: Context) -> None:
    """A prefill and decodes in graphs, without an error of memcheck."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise NotHere("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", _ERRORS, "--print-limit", "5"]
    command += [sys.executable, "-m", __name__, context.device, context.folder]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout)
    lines = done.stdout.strip().splitlines()
    context.record(ok=done.returncode == 0, status=done.returncode, said=lines[-1:])


def small_run(device: str, folder: str) -> None:
    """The run that is checked."""
    from pyengine import SamplingParams
    from tests.gpu.answers import tokens
    from tests.gpu.models import Place

    where, random = Place(device, folder), Random(3)
    llm = where.llm(where.model("llama"), "bfloat16", "auto", enforce_eager=False, max_num_seqs=2)
    params = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=4, detokenize=False)
    llm.generate([tokens(20, random), tokens(3, random)], params, use_tqdm=False)


if __name__ == "__main__":
    small_run(*sys.argv[1:])
