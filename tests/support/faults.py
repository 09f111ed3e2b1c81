"""An engine under fault: steps that fail, requests that go, two namespaces. All by one seed."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from pyengine.engine.core import Engine
from pyengine.engine.model_limits import ModelLimits
from pyengine.executor.executor import Executor
from pyengine.executor.kv_cache_config import longest_sequence
from pyengine.executor.model_runner import Forward, StepLogits
from pyengine.kv_cache import BlockManager, Remapping
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.drafters import MixedDrafter, speculate
from tests.support.engines import EOS, Bench, LazyQueue, make_processor
from tests.support.fake_runner import VOCAB_SIZE, FakeRunner
from tests.support.lookahead import LookaheadManager
from tests.support.requests import entries_of

NO_TOKEN = 10**6
"""The value that a failed step leaves in written slots."""
NOBODY = -1


class InjectedError(RuntimeError):
    """The exception that the runner raises."""


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    block_size: int
    groups: tuple[int | None, ...]
    budget: int
    slots: int
    caching: bool
    sharing: bool
    hash_bits: int
    lookahead: int
    depth: int
    """Steps in the queue at a time."""
    faults: float
    """Chance that a step fails."""
    drafts: int
    """Tokens drafted for a sequence and step at most, by a drafter that is often right."""
    aborts: float
    """Chance per moment that a request is aborted; a step has three."""
    overtakes: int
    """How often requests with longer cached prefixes may overtake another."""

    @classmethod
    def drawn(cls, random: Random) -> "Setting":
        budget = min(random.choice([1, 2, 3, 5, 8, 16, 32, 64]) + random.randint(0, 3), 64)
        windows = random.randint(1, 12), random.randint(1, 12)
        groups = random.choice([(None,), (None, windows[0]), (windows[0], None, windows[1])])
        rows = random.randint(8, 64) if random.random() < 0.4 else random.randint(8, 16)
        lookahead = random.choice([0, 0, 1, 3])
        return cls(
            num_blocks=rows * len(groups),
            block_size=random.randint(1, 8),
            groups=groups,
            budget=budget,
            slots=random.randint(1, min(budget, 8)),
            caching=random.random() < 0.85,
            sharing=random.random() < 0.8,
            hash_bits=random.choice([128, 128, 2]),
            lookahead=lookahead,
            depth=1 if lookahead else random.choice([1, 2]),  # drafts take their step alone
            faults=random.choice([0, 0.05, 0.25]),
            drafts=random.choice([0, 1, 3, 7]) if lookahead == 0 else 0,
            aborts=random.choice([0, 0.01, 0.05]),
            overtakes=random.choice([0, 1, 4]),
        )

    @cached_property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that the pool holds."""
        manager = BlockManager(self.num_blocks, self.block_size, groups=self.groups)
        most = self.num_blocks * self.block_size
        step = max(self.budget, 1 + self.lookahead)
        return longest_sequence(manager, step, most) - self.lookahead


class WatchedScheduler(Scheduler):
    """Tells requests' namespaces by their names, and sees to it that a new one finds nothing."""

    def __init__(self, manager: Any, limits: SchedulerLimits, setting: Setting) -> None:
        limits = replace(limits, max_overtakes=setting.overtakes)
        super().__init__(manager, limits, prefix_caching=setting.caching)
        self.namespaces: dict[str, int] = {}
        self.planned: list[int] = []
        """The namespaces of the newest step's entries."""
        self._warm: set[int] = set()

    def add(self, sequence: SequenceState) -> None:
        name = bytes([self.namespaces[sequence.request.request_id]])
        sequence.request.space = {"namespace": name, "switch": None}
        super().add(sequence)

    def schedule(
        self, *, ahead: bool = False, without: Collection[SequenceState] = frozenset()
    ) -> ScheduledStep | None:
        step = super().schedule(ahead=ahead, without=without)
        # What the step before computes may be shared before that step ends.
        warm = self._warm | set(self.planned if ahead else ())
        entries = [] if step is None else entries_of(step)
        self.planned = self._namespaces_of(step)
        for entry, namespace in zip(entries, self.planned, strict=True):
            assert namespace in warm or entry.num_cached == 0, "served from the other namespace"
            warm.add(namespace)
        return step

    def commit(self, step: ScheduledStep, sampled: Any, counts: Any = None) -> list[Remapping]:
        self._warm.update(self._namespaces_of(step))
        return super().commit(step, sampled, counts)

    def _namespaces_of(self, step: ScheduledStep | None) -> list[int]:
        entries = [] if step is None else entries_of(step)
        return [self.namespaces[entry.sequence.request.request_id] for entry in entries]


class FaultyRunner(FakeRunner):
    """Fails by chance, and then what it was to write is destroyed. Knows whose KV a slot holds."""

    def __init__(self, setting: Setting, scheduler: WatchedScheduler, random: Random) -> None:
        super().__init__(setting.num_blocks, setting.block_size, groups=setting.groups)
        self.during: Callable[[str], None] = lambda moment: None
        """Called between plan and commit."""
        self.seen: Counter[str] = Counter()
        self._owners = np.full_like(self.slots, NOBODY)
        self._chance = setting.faults
        self._scheduler = scheduler
        self._random = random

    def prepare(
        self,
        plan: Any,
        *,
        extra_rows: Any = None,
        hidden_rows: Any = None,
        mtp: Any = None,
        states: Any = None,
    ) -> Forward:
        forward, planned = super().prepare(plan, extra_rows=extra_rows), self._scheduler.planned
        arrays, copies = self._sets[0], plan.copies()
        total = plan.num_tokens

        def faulty(sampled: Any) -> StepLogits:
            self.during("before the forward pass")
            fails = self._random.random() < self._chance
            if fails and self._random.random() < 0.7:
                self._destroy(arrays["slot_mapping"][:, :total], copies)
                self._fail("half-way")
            logits = forward(sampled)
            self._check_owners(copies, planned)
            self.during("after the forward pass")
            if fails:
                self._fail("after the forward pass")
            return logits

        return faulty

    def _fail(self, moment: str) -> None:
        self.seen[f"failed {moment}"] += 1
        raise InjectedError if self._random.random() < 0.8 else KeyboardInterrupt

    def _destroy(self, slots: Any, copies: Any) -> None:
        self.slots[slots[slots >= 0]] = NO_TOKEN
        for _, target in copies:
            self.block(self.slots, target)[:] = NO_TOKEN

    def _check_owners(self, copies: Any, namespaces: list[int]) -> None:
        a = self.arrays
        for source, target in copies:
            self.block(self._owners, target)[:] = self.block(self._owners, source)
        starts = a["query_start_loc"]
        for row, namespace in enumerate(namespaces):
            slots = a["slot_mapping"][:, starts[row] : starts[row + 1]]
            self._owners[slots[slots >= 0]] = namespace
        for row, namespace in enumerate(namespaces):
            for group in range(len(self.windows)):
                read = self._owners[self.visible(row, group)]
                assert (read == namespace).all(), "the other namespace's KV is read"


def make_faulty_bench(setting: Setting, random: Random) -> Bench:
    blocks = BlockManager(
        setting.num_blocks,
        setting.block_size,
        groups=setting.groups,
        prefix_caching=setting.caching,
        in_flight_sharing=setting.sharing,
        hash_bits=setting.hash_bits,
    )
    limits = SchedulerLimits(max_num_batched_tokens=setting.budget, max_num_seqs=setting.slots)
    scheduler = WatchedScheduler(LookaheadManager(blocks, setting.lookahead), limits, setting)
    runner = FaultyRunner(setting, scheduler, random)
    model_limits = ModelLimits(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        max_model_len=setting.max_model_len,
        max_num_seqs=setting.slots,
        limited_by="the pool",
    )
    executor = Executor(runner, LazyQueue(), depth=setting.depth)
    engine = Engine(blocks, scheduler, executor)
    if setting.drafts:
        speculate(engine, MixedDrafter(random.getrandbits(32)), setting.drafts)
    return Bench(blocks, scheduler, runner, engine, make_processor(blocks, model_limits))
