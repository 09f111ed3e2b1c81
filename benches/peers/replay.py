"""Real prompts through the managers: what is shared, stored twice, computed twice, and the cost.

Requests wait in their order. A step takes whole prompts, up to 512 of them, as many as fit its
budget of computed tokens and the pool; then it is taken as computed, and its requests end. Timed is
what works.py times: requests made (and hashed), matched, allocated, registered, freed. Managers
take turns, step by step, or tick by tick where requests have times.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter_ns as clock
from typing import Any

from benches.peers.adapters.base import Manager
from benches.peers.sampling import without_collector
from benches.peers.traces import Prompt, Workload

MOST_SEQUENCES = 512


@dataclass
class Counts:
    """The counts of one manager over a workload. Duplicates are counted within each step."""

    prompts: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    full_blocks_computed: int = 0
    duplicate_tokens_computed: int = 0
    duplicate_blocks_stored: int = 0
    steps: int = 0
    nanoseconds: int = 0

    def row(self) -> dict[str, float]:
        """For the report."""
        return asdict(self) | {
            "hit_rate": 1 - self.computed_tokens / max(self.prompt_tokens, 1),
            "duplicate_share": self.duplicate_tokens_computed / max(self.computed_tokens, 1),
            "us_per_prompt": self.nanoseconds / 1000 / max(self.prompts, 1),
        }


@dataclass
class Admitted:
    """A request in the step."""

    request: Any
    prompt: Prompt
    computed: int


class Replay:
    """One manager and one workload."""

    def __init__(self, manager: Manager, workload: Workload) -> None:
        self.manager = manager
        self.block_size, self.budget = workload.block_size, workload.budget
        self.counts = Counts()

    def run(self, prompts: list[Prompt]) -> Iterator[None]:
        """All steps of these prompts; yields after each."""
        waiting: deque[tuple[Prompt, Any]] = deque()
        for prompt in prompts:
            given = self.manager.prompt(prompt.tokens)
            start = clock()
            request = self.manager.submit(given)
            self.counts.nanoseconds += clock() - start
            waiting.append((prompt, request))
        while waiting:
            self.step(waiting)
            yield

    def step(self, waiting: deque[tuple[Prompt, Any]]) -> None:
        """One step."""
        manager, left = self.manager, self.budget
        step: list[Any] = []
        start = clock()
        manager.open_step(self.budget)
        while waiting and len(step) < MOST_SEQUENCES:
            prompt, request = waiting[0]
            computed = manager.admit(request, left)
            if computed is None:
                break
            left -= computed
            step.append(Admitted(request, prompt, computed))
            waiting.popleft()
        requests = [entry.request for entry in step]
        manager.close_step(requests)
        between = clock()
        if not step:
            raise MemoryError(f"{manager.name}: {len(waiting[0][0].tokens)} tokens do not fit")
        self.look(step)
        again = clock()
        manager.release(requests)
        self.counts.nanoseconds += clock() - again + between - start

    def look(self, step: list[Admitted]) -> None:
        """Counts, from the block tables and from what had to be computed."""
        counts, size = self.counts, self.block_size
        counts.steps += 1
        blocks_of: dict[int, set[int]] = {}
        computed_here: set[int] = set()
        for entry in step:
            length, block_ids = len(entry.prompt.tokens), entry.prompt.block_ids
            counts.prompts += 1
            counts.prompt_tokens += length
            counts.computed_tokens += entry.computed
            first = length - entry.computed
            for index in range(first // size, len(block_ids)):
                counts.full_blocks_computed += 1
                if block_ids[index] in computed_here:
                    counts.duplicate_tokens_computed += (index + 1) * size - max(
                        first, index * size
                    )
                computed_here.add(block_ids[index])
            table = self.manager.blocks(entry.request)
            for block_id, block in zip(block_ids, table, strict=False):
                blocks_of.setdefault(block_id, set()).add(block)
        counts.duplicate_blocks_stored += sum(len(blocks) - 1 for blocks in blocks_of.values())


def replay(
    workload: Workload, kinds: list[type[Manager]], progress: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Each manager's counts."""
    replays = [Replay(kind(workload.num_blocks, workload.block_size), workload) for kind in kinds]
    order = deque(replays)
    with without_collector():
        for group in workload.groups:
            running = [run.run(group) for run in order]
            while running:
                running = [run for run in running if next(run, "ended") is None]
            order.rotate()
            progress()
    return {run.manager.name: run.counts.row() for run in replays}
