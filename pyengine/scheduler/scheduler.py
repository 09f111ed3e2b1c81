"""By priority, then first come, first served, over exact counts of blocks.

What it promises (the tests carry the numbers):

1. The prefix is matched before the budget is charged.
2. An evictable block that a match revives counts like a fresh one; an active one costs nothing.
3. Blocks are taken for this step's tokens only; a request is admitted only if its whole prompt
   fits beside what the admitted ones still need.
4. Prefill chunks and decodes share one step and one token budget, decodes first.
5. Each token is hashed at most once.
6. Nothing starves: admission follows the order of priority and arrival and reads exact counts
   only. (Those of a lower priority wait for as long as others keep coming before them. Others
   pass a request that would compute again what a running one computes, until that is computed.)
7. Out of blocks, the last request in that order that really frees some is preempted, by
   recomputation.
8. Same input, same seed, same tokens, whatever the schedule.
9. Drafts take what decodes, chunks and admissions leave of budget and blocks: they are planned
   last, nobody is preempted for them, and what they held is given back at the commit.

Matching, charging and allocating are one call of the block manager (`StepPlan.prefill`), so 1, 2
and 5 are its doing; the order of calls below makes 3, 4, 6 and 7. A request that may read the cache
only so far (`Request.readable_tokens`) has cached blocks attached before that call, and its prefix
is hashed anew each time that it is considered.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pyengine.cache import BlockManager, NoBudget, NoRoom, Pin, Prefilled, Remapping
from pyengine.cache import Sequence as CachedSequence
from pyengine.core.errors import ConfigurationError, PyEngineError
from pyengine.scheduler.reuse import ReuseCounters
from pyengine.scheduler.step import Job, ScheduledStep
from pyengine.scheduler.waiting import WaitingQueue

_J = TypeVar("_J", bound=Job)
_by_order = attrgetter("order")
_NOBODY: frozenset[Job] = frozenset()
_MOST_PASSED = 64
"""Waiting jobs that others may pass in a step; so a step looks at few of them."""


class StalledError(PyEngineError):
    """A request waits, none runs, and it cannot be admitted: something else holds the blocks."""

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The largest step: tokens to compute, and sequences that run at once."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running sequence needs a token per step"
            )


class _NoPlanAheadError(Exception):
    """What should be planned ahead takes blocks that only a preemption or a commit would free."""


class _Decodes(NamedTuple):
    """Jobs that decode, and their sequences: what the plan is given, kept from step to step."""

    jobs: tuple[Job, ...] = ()
    sequences: Sequence[CachedSequence] = ()


class _Attached(NamedTuple):
    """What was attached to a job before its first chunk was planned."""

    num_tokens: int = 0
    num_blocks: int = 0


class Scheduler:
    """Decides what each step computes. Who waits and who runs is in order."""

    def __init__(
        self,
        manager: BlockManager,
        limits: SchedulerLimits,
        *,
        replay: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        """Of what is found in the cache, the last `replay` tokens are computed again, not written:
        for heads, which need the hidden states there. `prefix_caching` is the manager's: without
        it no request waits for a prefix that another one computes."""
        self._manager = manager
        self._replay = replay
        self._prefix_caching = prefix_caching
        self._groups = manager.groups
        self._limits = limits
        self._waiting = WaitingQueue()
        self._running: list[Job] = []
        self._decodes = [_Decodes(), _Decodes()]
        self._newest: ScheduledStep | None = None
        self._is_steady = False
        """All who run were decoded by the newest step, and nobody has come or gone since."""
        self._arrivals = 0
        self._num_preemptions = 0
        self._reuse = ReuseCounters(manager.block_size, manager.null_block)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def running(self) -> list[Job]:
        """Jobs that hold blocks, in order."""
        return list(self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._num_preemptions

    @property
    def reuse(self) -> ReuseCounters:
        """What is to be added to the counters of the block manager."""
        return self._reuse

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or self._waiting)

    def add(self, job: Job) -> None:
        """Queue the first sample of a request."""
        request = job.request
        job.sequence = self._manager.sequence(
            request.prompt_token_ids, namespace=request.namespace, read_cache=request.read_cache
        )
        self._arrivals += 1
        job.order = (request.priority, self._arrivals, job.index)
        self._waiting.add(job)

    def fork(self, parent: Job, samples: Sequence[tuple[Job, int]]) -> None:
        """Let further samples run beside the one that has just got its first token.

        They stand on its prompt's blocks; each has its own first token. A partial last block is
        copied when they part.
        """
        parent.num_seats = 1
        prompt = parent.num_tokens - 1
        for job, token in samples:
            job.sequence = parent.sequence.fork(prompt)
            job.sequence.append([token])
            job.order = (*parent.order[:2], job.index)
            job.num_tokens, job.num_computed = prompt + 1, parent.num_computed
            self._reuse.add_fork(job.sequence)
            insort(self._running, job, key=_by_order)
            job.is_running = True
        self._is_steady = False

    def schedule(
        self, *, ahead: bool = False, without: Collection[Job] = _NOBODY
    ) -> ScheduledStep | None:
        """Plan the next step; None when there is nothing to do.

        The caller runs it and then calls `commit`, or `rollback` if that failed.

        With `ahead` the step before is still open: this one decodes what that one samples, but for
        jobs whose tokens must be known first. None then also means that this step has to wait for
        that one, because somebody must be preempted: whose blocks an open step uses cannot be.

        Jobs in `without` take no part.

        Raises `StalledError` if requests wait and nothing can run: blocks are held by pins.
        """
        if not self.has_work:
            return None
        before = self._newest if ahead else None
        plan = self._manager.begin_step(self._limits.max_num_batched_tokens)
        step = ScheduledStep(plan, ahead)
        try:
            preemptions = self._num_preemptions
            out = {*without, *before.awaited} if before is not None else without
            self._plan_decodes(step, out)
            self._plan_chunks(step, without)
            if self._num_preemptions == preemptions:  # never admit into a pool that is too small
                answer = self._admit(step, without)
                if isinstance(answer, NoRoom) and before is not None and before.drafts:
                    raise _NoPlanAheadError  # drafts hold blocks until then
            if not step.decodes and not step.chunks:
                if without:
                    raise _NoPlanAheadError
                self._nothing_planned(step)
            self._newest = step
            self._is_steady = not out and not step.chunks and step.decodes is self._decodes[0].jobs
        except _NoPlanAheadError:
            self.rollback(step)
            return None
        except BaseException:
            self.rollback(step)
            raise
        return step

    def draft(self, step: ScheduledStep, drafts: Mapping[_J, Sequence[int]]) -> None:
        """Let decodes of a step that was just planned compute tokens that may follow theirs.

        As far as budget and blocks are left, the first ones first (promise 9); `step.drafts` says
        what was planned. Only for jobs whose last token is known.
        """
        asked = {job: tokens for job, tokens in drafts.items() if len(tokens)}
        if not asked:
            return
        flat = [token for tokens in asked.values() for token in tokens]
        counts = [len(tokens) for tokens in asked.values()]
        planned = step.plan.draft([job.sequence for job in asked], flat, counts)
        step.drafts = {
            job: tokens[:count]
            for (job, tokens), count in zip(asked.items(), planned, strict=True)
            if count
        }

    def _plan_decodes(self, step: ScheduledStep, out: Collection[Job]) -> None:
        """One token for every job that has one left to compute: they come first (promise 4)."""
        jobs, sequences = self._current_decodes(step.is_ahead, out)
        while jobs:
            misfits = step.plan.decode(sequences)
            if not misfits:
                step.add_decodes(jobs)
                return
            unplanned = set(misfits)
            step.add_decodes(tuple(job for at, job in enumerate(jobs) if at not in unplanned))
            left = [jobs[at] for at in misfits]
            victim = self._make_room(step, left[0])
            jobs = tuple(job for job in left if job is not victim)
            sequences = [job.sequence for job in jobs]

    def _current_decodes(self, ahead: bool, out: Collection[Job]) -> _Decodes:
        """Who decodes next: the same object as before, while they are the same.

        Two such objects are kept: with overlap, those who wait for their tokens decode in every
        other step.
        """
        last, before = self._decodes
        if self._is_steady and not ahead:
            return last
        jobs = tuple([job for job in self._running if job.num_tokens - job.num_computed == 1])
        if out:
            jobs = tuple([job for job in jobs if job not in out])
        if ahead:  # else they would have ended
            jobs = tuple([job for job in jobs if not job.is_complete])
        if jobs == last.jobs:
            return last
        found = before if jobs == before.jobs else _Decodes(jobs, [job.sequence for job in jobs])
        self._decodes = [found, last]
        return found

    def _plan_chunks(self, step: ScheduledStep, without: Collection[Job]) -> None:
        """The next chunk of every admitted prompt that is not through."""
        if len(step.decodes) == len(self._running):
            return
        for job in [job for job in self._running if job.num_uncomputed > 1]:
            if not job.is_running or job in without:  # preempted for an older one just now
                continue
            if not step.has_room(job.request):
                continue
            answer = self._prefill(step, job)
            while isinstance(answer, NoRoom) and self._make_room(step, job) is not job:
                answer = self._prefill(step, job)
            if isinstance(answer, Prefilled):
                step.add_prefill(job, answer.num_tokens, answer.num_cached_tokens)
            elif isinstance(answer, NoBudget):
                return

    def _prefill(
        self, step: ScheduledStep, job: Job, reserve: int | None = None
    ) -> Prefilled | NoRoom | NoBudget:
        """Plan the next chunk of a prompt."""
        bound = job.request.max_chunk - step.num_bounded
        most = int(min(self._limits.max_num_batched_tokens, bound))
        replay = min(self._replay, most)
        return step.plan.prefill(job.sequence, most, reserve=reserve, replay=replay or None)

    def _admit(self, step: ScheduledStep, without: Collection[Job]) -> NoRoom | NoBudget | None:
        """Waiting jobs in their order, as long as whole prompts, budget and seats suffice.

        What the first one was short of that was not admitted; None if that was a seat, or all were.
        """
        candidates = self._candidates(step, without)
        job = next(candidates, None)
        if job is None:
            return None
        seats = self._limits.max_num_seqs - sum([job.num_seats for job in self._running])
        if job.num_seats > seats:
            return None
        begun = {id(entry.job) for entry in step.chunks if not entry.samples}
        reserve = sum(  # a job that decodes has all its blocks
            self._blocks_to_come(job)
            for job in self._running
            if job.num_uncomputed > 1 or id(job) in begun
        )
        while job is not None and job.num_seats <= seats:
            attached = self._attach(job)
            answer = self._prefill(step, job, reserve)
            if not isinstance(answer, Prefilled):
                _give_back(job)
                return answer
            insort(self._running, job, key=_by_order)
            self._waiting.discard(job)
            job.is_running = True
            seats -= job.num_seats
            num_cached = attached.num_tokens + answer.num_cached_tokens
            entry = step.add_prefill(job, answer.num_tokens, num_cached)
            entry.num_attached, entry.num_attached_blocks = attached
            job.request.admitted()
            if not entry.samples:
                reserve += self._blocks_to_come(job)
            job = next(candidates, None)
        return None

    def _attach(self, job: Job) -> _Attached:
        """Attach cached blocks to a job that may read the cache only in part."""
        request = job.request
        if request.read_cache:  # the plan matches and charges in one call
            return _Attached()
        _give_back(job)  # an interrupt may have left some
        most = request.readable_tokens()
        if not most:
            return _Attached()
        size = self._manager.block_size
        tokens = request.prompt_token_ids[: -(-most // size) * size]
        with self._manager.match_prefix(tokens, namespace=request.namespace) as pin:
            if pin.num_tokens > most:
                self._attach_all_but_one(job, pin)
            else:
                job.sequence.attach(pin)
            num_blocks = self._reuse.num_blocks(pin.blocks)
        return _Attached(job.sequence.num_computed_tokens, num_blocks)

    def _attach_all_but_one(self, job: Job, pin: Pin) -> None:
        """Attach the blocks of a pin and let the last of their tokens be computed, not written.

        So it is where a prompt is cached as a whole: the sequence has what follows only then.
        """
        request, end = job.request, pin.num_tokens
        tokens = job.sequence.tokens()
        sequence = self._manager.sequence(
            tokens[:end], namespace=request.namespace, read_cache=request.read_cache
        )
        sequence.attach(pin)
        if end < len(tokens):
            sequence.append(tokens[end:])
        job.sequence, before = sequence, job.sequence
        before.free()
        self._decodes = [_Decodes(), _Decodes()]  # they may hold the sequence before

    def _candidates(self, step: ScheduledStep, without: Collection[Job]) -> Iterator[Job]:
        """Who may be admitted, in order; each has been admitted when the next one is asked for.

        Others pass a job that waits for the prefix that another one computes, and a prompt for
        which the bound of the step leaves no token: both wait for jobs that run, not for blocks.
        """
        may_await = self._prefix_caching and not without
        num_passed = 0
        for job in self._waiting.in_order():
            if job in without:
                continue
            request = job.request
            is_awaiting = may_await and request.awaits_prefix()
            if not is_awaiting and step.has_room(request):
                yield job
                continue
            num_passed += 1
            if num_passed > _MOST_PASSED:
                return

    def _blocks_to_come(self, job: Job) -> int:
        """Blocks that the job takes at most for the known tokens that no step computes yet.

        Each layer group takes a block for every `block_size` tokens. A sliding one gives back what
        falls behind its window, so it never takes more than the most that it holds at once.
        """
        size, end = self._manager.block_size, job.num_computed
        begun = -(-end // size)
        new = -(-job.num_tokens // size) - begun
        behind = sum(max(0, end - window + 1) // size for window in self._groups if window)
        held = begun * len(self._groups) - behind
        most = self._manager.blocks_for(job.num_tokens, self._limits.max_num_batched_tokens)
        return min(new * len(self._groups), most - held)

    def _make_room(self, step: ScheduledStep, job: Job) -> Job:
        """Preempt for `job`: the newest one after it that really frees blocks, else itself."""
        if step.is_ahead:
            raise _NoPlanAheadError
        for candidate in reversed(self._running):
            if candidate is job or self._manager.preview(candidate.sequence) > 0:
                break
        self._preempt(step, candidate)
        return candidate

    def _preempt(self, step: ScheduledStep, job: Job) -> None:
        for other in step.cancel(job):
            if other.num_computed == 0:  # it holds nothing without what the victim computes
                self._put_back(other)
        job.sequence.reset()
        job.num_computed = 0
        job.request.num_preemptions += 1
        self._num_preemptions += 1
        self._put_back(job)

    def _put_back(self, job: Job) -> None:
        job.is_running = self._is_steady = False
        _give_back(job)
        self._waiting.add(job)
        self._running.remove(job)

    @property
    def limits(self) -> SchedulerLimits:
        """The largest step that is planned. Who does not fit into a smaller one is preempted."""
        return self._limits

    @limits.setter
    def limits(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def _nothing_planned(self, step: ScheduledStep) -> None:
        job = self._waiting.first()
        if step.is_ahead or job is None:
            raise _NoPlanAheadError
        if job.num_seats > self._limits.max_num_seqs:
            raise StalledError(
                f"request {job.request.request_id!r} runs {job.num_seats} samples at once, and "
                f"since a step was too large for the device's memory only "
                f"{self._limits.max_num_seqs} sequences run: ask for fewer samples, or make room "
                "on the device",
                job,
            )
        raise StalledError(
            f"request {job.request.request_id!r} of {job.num_tokens} tokens cannot be admitted "
            f"although nothing runs: {self._manager.usage()!r}; release pins to go on",
            job,
        )

    def commit(
        self,
        step: ScheduledStep,
        sampled: Sequence[int] | npt.NDArray[np.int64],
        counts: Sequence[int] | None = None,
    ) -> list[Remapping]:
        """Take the step as computed; `sampled` holds one token per sampling job, in order.

        With drafts `counts` says how many tokens each of them got: the drafts that were right, and
        one more.
        """
        remappings = step.plan.commit(sampled, counts)
        if counts is not None:
            step.accept(counts)
        for entry in step.chunks:
            request = entry.request
            if request.scheduled_time is None:
                request.scheduled_time = step.planned_time
            if request.num_preemptions == 0:
                request.num_cached_tokens += entry.num_cached
            if entry.num_attached:
                self._reuse.add_attached(entry.num_attached, entry.num_attached_blocks)
        return remappings

    def rollback(self, step: ScheduledStep) -> None:
        """Undo a step that did not run: jobs it admitted wait again. The newest one goes first."""
        self._is_steady = False
        step.rollback()
        for job in step.jobs:
            if job.num_computed == 0 and job.is_running:
                self._put_back(job)

    def finish(self, jobs: Iterable[Job]) -> None:
        """Forget jobs, finished or aborted; their ready blocks stay in the cache.

        May be called while a step is open: what it computes for them is kept in the cache too.
        Jobs that are not here are passed over. An interrupt (Ctrl-C) may have come between any two
        lines of this file: a job is taken from wherever it stands.
        """
        self._is_steady = False
        for job in jobs:
            sequence: CachedSequence | None = getattr(job, "sequence", None)
            if sequence is not None and sequence.is_live:
                sequence.free()
            self._waiting.discard(job)
            if job in self._running:
                self._running.remove(job)
            job.is_running = False
        if not self.has_work:
            self._newest = None  # an open step that Ctrl-C has let fall ends with its plan


def _give_back(job: Job) -> None:
    """Take the blocks from a job that waits: those that it stood on when a step was planned."""
    if job.sequence.num_computed_tokens:
        job.sequence.reset()
