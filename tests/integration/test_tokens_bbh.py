"""The embedded model answers BIG-Bench-Hard as transformers' `generate` does, token by token."""

import json
import os
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benches.engine.float_model import float_folder
from pyengine import LLM, SamplingParams
from pyengine.utils.openmp import torch_threads
from tests.support.reference import Counts, Reference
from tests.support.without_torch import needs_torch

pytestmark = [pytest.mark.slow, needs_torch]

TRACES = Path(
    os.environ.get("PYENGINE_TRACES", Path(__file__).parents[2].parent / "shared/data/traces")
)
ARCHIVE = TRACES / "bbh_text.tar.gz"
TASKS = (  # the eight whose three examples and questions stay within 1,024 tokens
    "sports_understanding",
    "object_counting",
    "boolean_expressions",
    "snarks",
    "date_understanding",
    "navigate",
    "word_sorting",
    "movie_recommendation",
)
LONGEST = 1024
"""Tokens that a sequence may have, prompt and answer together."""
SOAK_TOKENS = int(os.environ.get("PYENGINE_SOAK_TOKENS", LONGEST))
"""Tokens of an answer in the long run, where `LONGEST` does not end it before."""


@dataclass(frozen=True)
class Setup:
    """One way to run the engine; `pool` is in tokens."""

    block_size: int
    caching: bool
    pool: int

    def __str__(self) -> str:
        caching = "caching" if self.caching else "no caching"
        return f"blocks of {self.block_size}, {caching}, pool of {self.pool:,} tokens"


ROOMY = 64 * LONGEST
TIGHT = 8 * LONGEST
SOAK = [
    Setup(16, True, ROOMY),
    Setup(16, False, ROOMY),
    Setup(64, True, ROOMY),
    Setup(64, False, ROOMY),
    Setup(16, True, TIGHT),
    Setup(64, False, TIGHT),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other at every operation when the cores are shared."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def archive() -> Iterator[tarfile.TarFile]:
    if not ARCHIVE.is_file():
        pytest.skip(f"{ARCHIVE} is not there; PYENGINE_TRACES names another folder")
    with tarfile.open(ARCHIVE) as opened:
        yield opened


def read(archive: tarfile.TarFile, name: str) -> str:
    member = archive.extractfile(name)
    assert member is not None
    return member.read().decode()


def questions(archive: tarfile.TarFile, task: str, count: int, *, shots: int) -> list[str]:
    """Questions of a task, each after the same worked examples."""
    preface = read(archive, f"cot-prompts/{task}.txt").split("-----\n", 1)[-1].strip()
    introduction, *examples = preface.split("\n\nQ: ")
    head = "\n\nQ: ".join([introduction, *examples[:shots]])
    asked = json.loads(read(archive, f"bbh/{task}.json"))["examples"][:count]
    return [f"{head}\n\nQ: {request['input']}\nA: Let's think step by step.\n" for request in asked]


def run(setup: Setup, prompts: list[str], max_tokens: int) -> tuple[LLM, Counts]:
    longest = min(LONGEST, setup.pool)
    llm = LLM(
        dtype="float32",
        quantization="none",  # transformers' generate computes with float weights
        block_size=setup.block_size,
        num_blocks=setup.pool // setup.block_size,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=longest,
        enable_prefix_caching=setup.caching,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    limits = [min(max_tokens, longest - len(output.prompt_token_ids)) for output in outputs]
    reference = the_reference(str(float_folder()), str(llm.describe()["device"]))
    counts = reference.compare(outputs, limits, batch_size=8)
    stats = llm.stats()
    assert (stats.usage.active, stats.usage.pinned) == (0, 0)
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == setup.caching
    return llm, counts


_REFERENCES: dict[tuple[str, str], Reference] = {}


def the_reference(folder: str, device: str) -> Reference:
    """One for all setups: what it has generated once it knows."""
    if (folder, device) not in _REFERENCES:
        _REFERENCES[folder, device] = Reference(Path(folder), attention="sdpa", device=device)
    return _REFERENCES[folder, device]


@pytest.mark.parametrize(
    "setup", [Setup(16, True, ROOMY), Setup(64, False, 8 * 64)], ids=["roomy", "tight"]
)
def test_six_short_prompts(archive: tarfile.TarFile, setup: Setup) -> None:
    prompts = [
        prompt
        for task in ("sports_understanding", "boolean_expressions")
        for prompt in questions(archive, task, 3, shots=1)
    ]
    llm, counts = run(setup, prompts, max_tokens=24)
    print(f"{setup}: {counts}")
    counts.assert_same()
    assert (llm.stats().num_preemptions > 0) == (setup.pool < ROOMY)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("setup", SOAK, ids=str)
def test_64_prompts_in_one_batch(
    archive: tarfile.TarFile, setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt for task in TASKS for prompt in questions(archive, task, 8, shots=3)]
    assert len(prompts) == 64
    start = time.monotonic()
    llm, counts = run(setup, prompts, SOAK_TOKENS)
    stats = llm.stats()
    with capsys.disabled():
        print(
            f"\n{setup}: {counts}; {stats.num_preemptions} preemptions, "
            f"{stats.counters['cached_tokens']:,} tokens cached, "
            f"{stats.counters['merged_blocks']} blocks merged, {time.monotonic() - start:.0f} s",
            flush=True,
        )
    counts.assert_same()
    assert (stats.num_preemptions > 0) == (setup.pool < ROOMY)
