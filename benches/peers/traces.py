"""The workloads that are replayed. The data is not in the repository.

- `mooncake_conversation.jsonl.gz`: a real chat service, from github.com/kvcache-ai/Mooncake. Each
  request names its prompt's blocks of 512 tokens by id, and equal ids are equal whole prefixes; the
  tokens are made from the ids.
- `bbh_text.tar.gz`: BIG-Bench-Hard, from github.com/suzgunmirac/BIG-Bench-Hard: its folders `bbh`
  and `cot-prompts`. Words and signs stand for tokens; a tokenizer would give a few more.
"""

import gzip
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from benches.peers.adapters.base import Tokens

VOCABULARY = 151_643
TRACES = Path(os.environ.get("PYENGINE_TRACES", Path(__file__).parents[3] / "shared/data/traces"))
"""The folder of the files."""
WORD = re.compile(r" ?\w+|[^\w\s]|\s+")


@dataclass(frozen=True)
class Prompt:
    """Tokens, and for each full block the id of its whole prefix."""

    tokens: Tokens
    block_ids: list[int]


@dataclass(frozen=True)
class Workload:
    """Groups of prompts that are submitted together, and the steps in which they are computed."""

    name: str
    about: str
    block_size: int
    num_blocks: int
    budget: int
    groups: Iterable[list[Prompt]]


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mooncake(path: Path, limit: int | None) -> Iterator[list[Prompt]]:
    """The requests of each tick of three seconds; of all, the first `most`."""
    block = 512
    within = np.arange(block, dtype=np.uint64)
    with gzip.open(path, "rt") as lines:
        requests = [json.loads(line) for line in lines][:limit]
    for _, tick in groupby(requests, key=lambda request: request["timestamp"]):
        group = []
        for request in tick:
            length, ids = request["input_length"], request["hash_ids"]
            numbers = mix(mix(np.array(ids, np.uint64))[:, None] ^ within) % np.uint64(VOCABULARY)
            tokens = numbers.astype(np.int64).reshape(-1)[:length]
            group.append(Prompt(tokens, ids[: length // block]))
        yield group


class PrefixIds:
    """Assigns ids to prefixes of full blocks: equal ones for equal tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.numbers: dict[tuple[int, bytes], int] = {}

    def of(self, tokens: Tokens) -> list[int]:
        """The ids of the full blocks."""
        last, numbers = -1, []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size].tobytes()
            last = self.numbers.setdefault((last, block), len(self.numbers))
            numbers.append(last)
        return numbers


@dataclass(frozen=True)
class Task:
    """A task of BIG-Bench-Hard: its worked examples and its questions."""

    examples: str
    questions: list[str]

    def prompt(self, question: str) -> str:
        """A question after the worked examples."""
        return f"{self.examples}\n\nQ: {question}\nA:"


def bbh_tasks(path: Path = TRACES / "bbh_text.tar.gz") -> list[Task]:
    """The tasks by their names."""
    with tarfile.open(path) as archive:

        def read(name: str) -> str:
            member = archive.extractfile(name)
            assert member is not None
            return member.read().decode()

        files = [name for name in archive.getnames() if name.endswith(".json")]
        return [
            Task(
                # A canary stands before the examples.
                read(f"cot-prompts/{name}.txt").partition("-----\n")[2].strip(),
                [example["input"] for example in json.loads(read(f"bbh/{name}.json"))["examples"]],
            )
            for name in sorted(Path(file).stem for file in files)
        ]


def bbh(path: Path, block_size: int, every: int, samples: int) -> list[Prompt]:
    """Every n-th question after its task's examples, task by task, so many times in a row."""
    block_ids, prompts = PrefixIds(block_size), []
    for task in bbh_tasks(path):
        for question in task.questions[::every]:
            text = f"{task.prompt(question)} Let's think step by step."
            words = (crc32(word.encode()) % VOCABULARY for word in WORD.findall(text))
            tokens = np.fromiter(words, np.int64)
            prompts += [Prompt(tokens, block_ids.of(tokens))] * samples
    return prompts


def workloads(folder: Path, quick: bool) -> Iterator[Workload]:
    """Those whose data is there."""
    conversation, questions = folder / "mooncake_conversation.jsonl.gz", folder / "bbh_text.tar.gz"
    if questions.exists():
        every = 20 if quick else 1
        for samples in (1, 8):
            prompts = bbh(questions, 16, every * (4 if samples > 1 else 1), samples)
            about = f"{len(prompts):,} prompts submitted at once, grouped by task"
            yield Workload(
                "BBH" if samples == 1 else f"BBH, n = {samples}",
                f"{about}; steps of 16,384 tokens",
                16,
                16_384,
                16_384,
                [prompts],
            )
    if conversation.exists():
        yield Workload(
            "Mooncake",
            "the conversation trace, the requests of each tick of 3 s in one step",
            512,
            10_000,
            1 << 30,
            mooncake(conversation, 500 if quick else None),
        )
