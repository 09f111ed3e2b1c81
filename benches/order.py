"""Hit rates of the order of requests under load, and how long a request waits, as markdown tables.

    .venv/bin/python -m benches.order FOLDER [--quick] [--only mooncake]

from the root of the repository; `FOLDER` has the files that `benches/peers/traces.py` describes.
Scheduler and block manager are the real ones; there is no model, so a step takes no time. The queue
always has 64 requests, as long as the trace lasts: when one is admitted, the next one arrives. 32
requests run at once, with the outputs of the trace, or of 32 to 127 tokens. Prompts of BBH come in
random order. Blocks that end inside a prefix are not copied (`partial_reuse=False`).

- hit rate: prompt tokens that were cached when the request was admitted.
- gap: the part of the gap between first come, first served and Belady that is closed. Belady's rule
  knows the whole trace, serves it in order of arrival, one request after the other, and has the
  whole pool for what is cached: no order of arrival can do better, another order may.
- knows the queue: the same, but the rule knows the next 64 requests only, and evicts the least
  recently used of the other blocks: what a queue of 64 can tell, without another order.
- endless pool: nothing is evicted. Belady may do better: here requests run at once that could have
  found each other's prefixes.
- wait: tokens that the engine computes between the arrival of a request and its admission.
- overtaken: later requests that were admitted before a request, at most.

`longest prefix first` is the rule of SGLang 0.5 (`schedule_policy.py`): all requests of the queue
are matched in each step and sorted by the length of their cached prefixes. Of those with at most 32
cached tokens and 32 tokens in common, all but one go last. Nothing bounds the waits.
"""

import argparse
import gzip
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.eviction import best_hit_rate
from benches.peers.traces import Prompt, bbh, mooncake
from pyengine.kv_cache import BlockManager
from pyengine.request.request import SequenceState
from pyengine.scheduler.order import PrefixOrder
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.requests import make_sequence

QUEUE, RUNNING = 64, 32
SHARES = (0.2, 0.1, 0.05)
"""Pool sizes, as shares of the distinct full blocks of all prompts."""
OVERTAKES = (16, 64, 256)
SMALL_PREFIX = 32
_NEVER = 1 << 62


@dataclass(frozen=True)
class Load:
    """Prompts in order of arrival, and the tokens of their outputs."""

    name: str
    block_size: int
    budget: int
    prompts: list[Prompt]
    outputs: list[int]

    @property
    def ids(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each prompt's full blocks."""
        return [np.array(prompt.block_ids, np.int64) for prompt in self.prompts]


class LongestPrefixFirst(PrefixOrder):
    """The order of SGLang, without pins and without a bound."""

    def __init__(self, manager: BlockManager, max_overtakes: int) -> None:
        super().__init__(manager, max_overtakes)
        self._last: set[SequenceState] = set()

    def refresh(self, waiting: list[SequenceState]) -> None:
        """Match the whole queue, and find those that go last."""
        self._last.clear()
        beginnings = set[bytes]()
        for sequence in waiting:
            if self._match(sequence) > SMALL_PREFIX:
                continue
            tokens = np.asarray(sequence.request.prompt_token_ids[:SMALL_PREFIX])
            beginning = tokens.tobytes() if len(tokens) == SMALL_PREFIX else b""
            if beginning and beginning in beginnings:
                self._last.add(sequence)
            beginnings.add(beginning)

    def choose(self, ready: list[SequenceState]) -> SequenceState:
        """The one with the longest cached prefix."""

        def preference(sequence: SequenceState) -> tuple[bool, int]:
            return sequence not in self._last, self._sequences[sequence].prefix_length or 0

        return max(ready, key=preference)

    def protect(self, waiting: list[SequenceState]) -> None:
        """Nothing is kept."""

    def _match(self, sequence: SequenceState) -> int:
        length = super()._match(sequence)
        self.forget(sequence)
        return length


@dataclass
class Result:
    """The counts of one run."""

    cached: int = 0
    tokens: int = 0
    waits: list[int] = field(default_factory=list)
    overtaken: int = 0
    preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        """Of all prompt tokens, those that were cached."""
        return self.cached / self.tokens


class Run:
    """One load through one scheduler."""

    def __init__(self, load: Load, manager: BlockManager, scheduler: Scheduler) -> None:
        self.load, self.manager, self.scheduler = load, manager, scheduler
        self.coming = deque(enumerate(zip(load.prompts, load.outputs, strict=True)))
        self.clock = 0
        self.arrived: dict[SequenceState, int] = {}
        self.left: dict[SequenceState, int] = {}
        self.result = Result()

    def run(self) -> Result:
        """All steps."""
        while self.coming or self.scheduler.has_work:
            while self.coming and self.scheduler.num_waiting < QUEUE:
                number, (prompt, output) = self.coming.popleft()
                tokens: Any = prompt.tokens
                sequence = make_sequence(str(number), tokens)
                self.scheduler.add(sequence)
                self.arrived[sequence], self.left[sequence] = self.clock, output
            self.step()
        self.manager.check()
        self.result.preemptions = self.scheduler.num_preemptions
        return self.result

    def step(self) -> None:
        """One step."""
        step, result = self.scheduler.schedule(), self.result
        assert step is not None
        for entry in step.chunks:
            if (arrival := self.arrived.pop(entry.sequence, None)) is not None:
                result.waits.append(self.clock - arrival)
                result.cached += entry.num_cached
                result.tokens += len(entry.sequence.request.prompt_token_ids)
        self.clock += step.num_tokens
        sampling = step.sampling_sequences
        self.scheduler.commit(step, [1] * len(sampling))
        for sequence in sampling:
            self.left[sequence] -= 1
        ended = [sequence for sequence in sampling if not self.left[sequence]]
        order = self.scheduler._order
        for sequence in ended:
            del self.left[sequence]
            if order is not None:
                overtaken = order._sequences[sequence].num_overtaken
                result.overtaken = max(result.overtaken, overtaken)
        if ended:
            self.scheduler.finish(ended)


def replay(load: Load, num_blocks: int, max_overtakes: int, eviction: str) -> Result:
    """The load with our order; 0 is first come, first served."""
    manager = BlockManager(num_blocks, load.block_size, partial_reuse=False, eviction=eviction)
    limits = SchedulerLimits(
        max_num_batched_tokens=load.budget, max_num_seqs=RUNNING, max_overtakes=max_overtakes
    )
    scheduler = Scheduler(manager, limits)
    if max_overtakes == _NEVER:
        scheduler._order = LongestPrefixFirst(manager, max_overtakes)
    return Run(load, manager, scheduler).run()


def queue_hit_rate(prompts: list[npt.NDArray[np.int64]], num_blocks: int) -> float:
    """Hits in order of arrival, if an eviction spares what the next `QUEUE` requests need.

    Otherwise the least recently used block is evicted. Requests run one after the other.
    """
    coming = Counter[int]()
    for prompt in prompts[:QUEUE]:
        coming.update(prompt.tolist())
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt, later in zip_longest(prompts, prompts[QUEUE:]):
        blocks = prompt.tolist()
        coming.subtract(blocks)
        if later is not None:
            coming.update(later.tolist())
        hits += sum(block in held for block in blocks)
        for block in reversed(blocks):  # of one prompt, the last block goes first
            held[block] = None
            held.move_to_end(block)
        num_spared = 0
        while len(held) > num_blocks:
            block, _ = held.popitem(last=False)
            if coming[block] > 0 and num_spared < num_blocks:
                held[block] = None
                num_spared += 1
    return hits / sum(map(len, prompts))


def mooncake_load(folder: Path, limit: int | None) -> Load:
    """The conversation trace, in blocks of 512 tokens."""
    path = folder / "mooncake_conversation.jsonl.gz"
    prompts = [prompt for group in mooncake(path, limit) for prompt in group]
    with gzip.open(path, "rt") as lines:
        outputs = [max(1, json.loads(line)["output_length"]) for line in lines]
    return Load("Mooncake", 512, 8192, prompts, outputs[: len(prompts)])


def bbh_load(folder: Path, every: int) -> Load:
    """Every n-th question of BIG-Bench-Hard in random order, in blocks of 16 tokens."""
    prompts: list[Any] = bbh(folder / "bbh_text.tar.gz", 16, every, 1)
    random = np.random.default_rng(0)
    prompts = [prompts[index] for index in random.permutation(len(prompts))]
    return Load("BBH", 16, 2048, prompts, random.integers(32, 128, len(prompts)).tolist())


def rows(load: Load, share: float, eviction: str) -> Iterator[list[str]]:
    """The cells of the table for one pool."""
    ids = load.ids
    distinct = len(np.unique(np.concatenate(ids)))
    num_blocks = int(share * distinct)
    full = sum(map(len, ids)) * load.block_size / sum(len(prompt.tokens) for prompt in load.prompts)
    best = best_hit_rate(ids, num_blocks) * full
    first = replay(load, num_blocks, 0, eviction)
    pool = f"{share:g} ({num_blocks:,})"

    def cells(name: str, result: Result) -> list[str]:
        gap = (result.hit_rate - first.hit_rate) / (best - first.hit_rate)
        waits = [f"{np.percentile(result.waits, part):,.0f}" for part in (50, 99, 100)]
        return [
            *(load.name, pool, name, f"{result.hit_rate:.1%}", f"{gap:.0%}", *waits),
            f"{result.overtaken:,}",
        ]

    yield cells("first come, first served", first)
    for overtakes in OVERTAKES:
        yield cells(f"`max_overtakes={overtakes}`", replay(load, num_blocks, overtakes, eviction))
    yield cells("longest prefix first", replay(load, num_blocks, _NEVER, eviction))
    yield cells("first come, first served, endless pool", replay(load, 2 * distinct, 0, eviction))
    for name, rate in (
        ("knows the queue, in order of arrival", queue_hit_rate(ids, num_blocks) * full),
        ("Belady, in order of arrival", best),
    ):
        gap = (rate - first.hit_rate) / (best - first.hit_rate)
        yield [load.name, pool, name, f"{rate:.1%}", f"{gap:.0%}", "", "", "", ""]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="a part of each trace")
    parser.add_argument("--only", choices=("bbh", "mooncake"))
    parser.add_argument("--eviction", default="lru", choices=("lru", "2q"))
    options = parser.parse_args()
    loads: dict[str, Callable[[], Load]] = {
        "bbh": lambda: bbh_load(options.folder, 10 if options.quick else 1),
        "mooncake": lambda: mooncake_load(options.folder, 500 if options.quick else None),
    }
    print("| trace | pool | order | hit rate | gap | wait: median | 99 % | worst | overtaken |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name in [options.only] if options.only else list(loads):
        load = loads[name]()
        for share in SHARES:
            for row in rows(load, share, options.eviction):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
