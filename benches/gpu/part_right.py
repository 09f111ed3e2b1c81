"""Is it right? The checks of three families, random requests with overlap and without, and a run
under compute-sanitizer."""

import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from benches.gpu.steps import Found, NotHere, Step, Target
from tests.gpu.answers import tokens
from tests.gpu.models import Place

SANITISED = "benches.gpu.part_right"
ROOT = Path(__file__).parents[2]
_RESERVE = 5.0
"""Seconds of a step that are kept for telling what was found."""


def checks(target: Target, name: str, wanted: str) -> Found:
    """Some of tests/gpu, as many as there is time for; the lines of their report."""
    report = Path(target.folder) / f"checks-{name}.md"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--device", target.device]
    command += ["--report", str(report), "-k", wanted, "--maxfail", "6"]
    status, said = ended(command, target.seconds - _RESERVE)
    last = (said.strip().splitlines() or ["no word"])[-1] if status is not None else "out of time"
    lines = report.read_text().splitlines() if report.exists() else []
    failed = [line for line in lines if line.startswith("- failed")]
    if failed or status not in {0, 5, None}:  # 5: nothing to run here
        raise AssertionError("\n".join([last, *(failed or lines[-20:])]))
    return {"passed": sum(line.startswith("- passed") for line in lines), "ended": last}


def ended(command: list[str], seconds: float) -> tuple[int | None, str]:
    """A command's status, None if it had to be ended, and what it said.

    It is in the group of its step's process: whatever ends that, ends the command.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
        if status is None:
            process.kill()
            process.wait()
        said.seek(0)
        return status, said.read()


def random_requests(target: Target, seed: int) -> Found:
    """200 requests of all kinds, with overlap and without: the same tokens."""
    from pyengine import SamplingParams

    place, random = Place(target.device, target.folder), Random(seed)
    count = target.either(200, 40)
    prompts = [tokens(random.randrange(1, 120), random) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=random.choice((0, 0, 1)),
            top_p=random.choice((1, 0.9)),
            top_k=random.choice((0, 20)),
            seed=number,
            max_tokens=random.randrange(1, 40),
            min_tokens=random.choice((0, 1)),
            frequency_penalty=random.choice((0, 0, 0.5)),
            logprobs=random.choice((None, None, 2)),
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(count)
    ]
    answers: list[list[tuple[int, ...]]] = []
    for ahead in (False, True):
        llm = place.llm(
            place.model("llama"),
            "float32",
            "gather",
            async_scheduling=ahead,
            max_num_seqs=32,
            max_num_batched_tokens=random.choice((64, 256)),
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([tuple(output.outputs[0].token_ids) for output in outputs])
    different = sum(answer != other for answer, other in zip(*answers, strict=True))
    assert different <= count // 50, f"{different} of {count} differ"
    return {"requests": count, "different": different}


def sanitised(target: Target, tool: str) -> Found:
    """A small run whose every access to the device's memory is looked at."""
    if not target.on_cuda or shutil.which("compute-sanitizer") is None:
        raise NotHere("compute-sanitizer is for CUDA, and has to be installed")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += ["--print-limit", "5", sys.executable, "-m", SANITISED, target.device, target.folder]
    status, said = ended(command, target.seconds - _RESERVE)
    lines = said.strip().splitlines()[-25:]
    if status is None:
        return {"ended": "out of time", "said": lines[-1] if lines else ""}
    assert status == 0, "\n".join(lines)
    return {"said": lines[-1] if lines else ""}


def small_run(device: str, folder: str) -> None:
    """The run under the sanitizer: a prefill and decodes in graphs."""
    from pyengine import SamplingParams

    place, random = Place(device, folder), Random(3)
    llm = place.llm(place.model("llama"), "bfloat16", "auto", enforce_eager=False, max_num_seqs=2)
    params = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=4, detokenize=False)
    llm.generate([tokens(20, random), tokens(3, random)], params, use_tqdm=False)


def _families(backend: str) -> str:
    return " or ".join(f"{backend}-{family}" for family in ("llama", "qwen3", "mistral"))


def _check(name: str, wanted: str, seconds: float) -> Step:
    return Step(f"checks: {name}", checks, (name, wanted), seconds)


STEPS = [
    _check("gather", f"({_families('gather')}) or window", 90),
    _check("flashinfer", f"test_a_backend and ({_families('flashinfer')})", 120),
    _check("graphs", "test_graphs", 120),
    *(
        Step(f"random requests, round {seed}", random_requests, (seed,), 120)
        for seed in range(1, 4)
    ),
    _check("engine", "test_engine", 120),
    _check("flex", f"test_a_backend and ({_families('flex')})", 180),
    Step("compute-sanitizer memcheck", sanitised, ("memcheck",), 120),
]

if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    small_run(*arguments)
