"""The scheduler: by tenant, priority, cached prefixes and arrival, over exact counts of blocks.

Its promises (tests refer to the numbers):

1. The prefix is matched before the budget is charged.
2. An evictable block that a match revives counts like a fresh one; an active one costs nothing.
3. Blocks are allocated for this step's tokens only; a request is admitted only if its whole prompt
   fits beside what the admitted ones still need.
4. Prefill chunks and decodes share one step and one token budget, decodes first.
5. Each token is hashed at most once.
6. Nothing starves: admission follows the order of priority and arrival and reads exact counts
   only. If several tenants have requests, they take turns, and that order is each tenant's own
   (`TenantShares`); a request above its tenant's share of sequences or blocks waits for others of
   its tenant. Requests with cached prefixes overtake others of their priority, each of which at
   most `max_overtakes` times (`PrefixOrder`). (Requests of a lower priority wait while others of a
   higher one keep arriving. Others may overtake a request whose prefix a running one computes,
   until it is computed, or whose prefix is being loaded, until the load ends or is abandoned after
   a time limit. Prefixes that are kept for waiting requests or by priority give way; callers' pins
   leave space for the longest request.)
7. Out of blocks, such prefixes give way; then the last request in that order that frees
   some is preempted, by recomputation.
8. Same input, same seed, same tokens, whatever the schedule.
9. Drafts get the budget and blocks that decodes, chunks and admissions leave: they are planned
   last, preempt no request, and release their blocks at the commit.

Matching, charging and allocating are one call of the block manager (`StepPlan.prefill`), so 1, 2
and 5 are its promises; the order of calls below makes 3, 4, 6 and 7. A request that may read only
part of the cache (`PromptLogprobs.readable_tokens`) gets cached blocks attached before that call;
its prefix is hashed again each time that it is considered.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyengine.errors import PyEngineError
from pyengine.kv_cache import (
    BlockManager,
    Computing,
    Loading,
    NoBudget,
    NoRoom,
    Pin,
    Prefilled,
    Remapping,
)
from pyengine.kv_cache import Sequence as KVSequence
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import Entry, ScheduledStep
from pyengine.scheduler.order import PrefixOrder
from pyengine.scheduler.pins import PinTable
from pyengine.scheduler.queue import WaitingQueue, by_order
from pyengine.scheduler.shares import TenantShares
from pyengine.scheduler.states import RunningStates

_NONE: frozenset[SequenceState] = frozenset()
_NOBODY: frozenset[bytes] = frozenset()
_MAX_PASSED = 64  # waiting sequences that others may overtake in a step, which bounds the search


class StalledError(PyEngineError):
    """A request waits, none runs, and it cannot be admitted: pins hold the blocks."""

    def __init__(self, message: str, sequence: SequenceState) -> None:
        super().__init__(message)
        self.sequence = sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The largest step: tokens to compute, and sequences that run at once. Settings check them.

    A tenant runs up to `max_num_seqs_per_tenant` sequences, or one request with more. If blocks are
    short, requests with cached prefixes overtake others, each up to `max_overtakes` times. Callers
    pin up to `max_pinned_blocks` blocks.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_num_seqs_per_tenant: int | None = None
    max_overtakes: int = 0
    max_pinned_blocks: int = 0


class _NoPlanAheadError(Exception):
    """The step ahead needs blocks that only a preemption or a commit frees."""


class _Decodes(NamedTuple):
    """Decoding sequences and their KV handles for the plan, kept from step to step."""

    sequences: tuple[SequenceState, ...] = ()
    handles: Sequence[KVSequence] = ()


class Scheduler:
    """Decides what each step computes. Waiting and running sequences are in order."""

    def __init__(
        self,
        manager: BlockManager,
        limits: SchedulerLimits,
        *,
        replay: int = 0,
        prefix_caching: bool = True,
        is_held: Callable[[SequenceState], bool] | None = None,
        states: RunningStates | None = None,
    ) -> None:
        """The last `replay` cached tokens are computed again, not written: MTP layers need their
        hidden states. `prefix_caching` is the manager's: without it no request waits for a prefix
        that another one computes. A sequence for which `is_held` returns True is not admitted yet:
        its prefix is being loaded. `states` are for a model with recurrent layers."""
        self._manager = manager
        self._replay = replay
        self._prefix_caching = prefix_caching
        reorders = limits.max_overtakes and prefix_caching
        self._order = PrefixOrder(manager, limits.max_overtakes) if reorders else None
        self.pins = PinTable(manager, limits.max_pinned_blocks)
        """Prefixes that callers asked to keep."""
        self.limits = limits
        """The largest step. Sequences that do not fit into a smaller one are preempted."""
        self._waiting = WaitingQueue()
        self._running: list[SequenceState] = []
        self._decodes = [_Decodes(), _Decodes()]
        self._newest: ScheduledStep | None = None
        self._is_steady = False
        """The newest step decoded all running sequences, and these are still the same."""
        self.shares = TenantShares(manager)
        """Shares of the tenants if several have requests."""
        self._last_commit = 0.0
        self._arrivals = 0
        self.num_preemptions = 0
        """Preemptions so far."""
        self._is_held = is_held
        self.states = states
        """The slots of running states, if the model has recurrent layers."""
        self.reuse = Counter(forked_tokens=0, forked_blocks=0)
        """Counters to add to those of the block manager, which counts the cached tokens of plans:
        prefixes that are attached before the step is planned, and blocks that a fork shares."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def running(self) -> list[SequenceState]:
        """Sequences that hold blocks, in order."""
        return list(self._running)

    @property
    def waiting(self) -> Iterator[SequenceState]:
        """Sequences that hold no blocks, each tenant's in order. Meanwhile the last one may be
        removed."""
        return iter(self._waiting)

    def num_of(self, tenant: bytes) -> tuple[int, int]:
        """The numbers of a tenant's sequences that run, and of its requests that wait."""
        waiting = self._waiting.count(tenant)
        return max(0, self.shares.turns.count(tenant) - waiting), waiting

    def _enqueue(self, sequence: SequenceState) -> None:
        """Let a sequence wait, unless it does."""
        self._waiting.add(sequence)
        if self._order is not None:
            self._order.enqueued(sequence)

    def _dequeue(self, sequence: SequenceState) -> bool:
        """Let a sequence wait no more; False if it did not."""
        was_waiting = self._waiting.remove(sequence)
        if self._order is not None:
            self._order.dequeued(sequence)
        return was_waiting

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._running or self._waiting.queues)

    def add(self, sequence: SequenceState) -> None:
        """Queue the first sample of a request."""
        request = sequence.request
        sequence.kv = self._manager.sequence(
            request.prompt_token_ids, **request.space, read_cache=request.read_cache
        )
        pins = request.cache_hints.pins
        if pins and self.states is not None:
            sequence.kv.want_snapshots([num_tokens for num_tokens, _ in pins])
        self._arrivals += 1
        sequence.order = (request.priority, self._arrivals, sequence.index)
        self._enqueue(sequence)
        self.shares.turns.enter(request.tenant)

    def fork(self, parent: SequenceState, samples: Sequence[tuple[SequenceState, int]]) -> None:
        """Run further samples beside the one that has just got its first token.

        They share its prompt's blocks; each has its first token. A partial last block is copied
        at their first write.
        """
        parent.num_seqs = 1
        prompt = parent.num_tokens - 1
        for sequence, token in samples:
            sequence.kv = parent.kv.fork(prompt)
            sequence.kv.append([token])
            sequence.order = (*parent.order[:2], sequence.index)
            sequence.num_tokens, sequence.num_computed = prompt + 1, parent.num_computed
            self._count_fork(sequence.kv)
            if self.states is not None:
                self.states.fork(parent, sequence)
            insort(self._running, sequence, key=by_order)
            sequence.is_running = True
            self.shares.turns.enter(sequence.request.tenant)
        self._is_steady = False

    def _count_fork(self, kv: KVSequence) -> None:
        """Count the blocks that a new fork shares; the last one only if it is full."""
        computed = kv.num_computed_tokens
        full = computed // self._manager.block_size
        self.reuse["forked_tokens"] += computed
        self.reuse["forked_blocks"] += sum(
            [self._num_blocks(table[:full]) for table in kv.block_tables]
        )

    def _num_blocks(self, blocks: Iterable[int]) -> int:
        """The number of blocks in a table that no window has passed."""
        return len([block for block in blocks if block != self._manager.null_block])

    def schedule(
        self, *, ahead: bool = False, without: Collection[SequenceState] = _NONE
    ) -> ScheduledStep | None:
        """Plan the next step; None if no request can run.

        The caller runs it and then calls `commit`, or `rollback` if that failed.

        With `ahead` the step before is still open: this one decodes its samples, except for
        sequences whose tokens must be known first. None then also means that this step must wait
        for that one: a sequence must be preempted, and those of an open step cannot be.

        Sequences in `without` are left out.

        Raises `StalledError` if requests wait and none can run: pins hold the blocks.
        """
        if not (self._running or self._waiting.queues):
            return None
        before = self._newest if ahead else None
        if self.states is not None and before is None:
            for sequence in self.states.take_unknown():
                self._recompute(sequence)
        budget = self.limits.max_num_batched_tokens
        if self.shares.turns.are_several:
            budget = self.shares.budget(self._running, budget)
        plan = self._manager.begin_step(budget)
        step = ScheduledStep(plan, ahead)
        try:
            left_out = self._left_out() if self.shares.turns.are_several else _NOBODY
            answer, is_whole = self._plan(step, before, without, left_out)
            if left_out and not step.decodes and not step.chunks and not ahead:
                answer, is_whole = self._plan(step, before, without, _NOBODY)
            if isinstance(answer, NoRoom) and before is not None and before.drafts:
                raise _NoPlanAheadError  # drafts hold blocks until then
            if not step.decodes and not step.chunks:
                if without:
                    raise _NoPlanAheadError
                self._nothing_planned(step)
            self._newest = step
            self._is_steady = (
                is_whole and not step.chunks and step.decodes is self._decodes[0].sequences
            )
            if self._waiting.queues and self._order is not None and self._order.has_changed:
                self._order.protect(self._waiting.first(self._order.window))
        except _NoPlanAheadError:
            self._undo(step)
            return None
        except BaseException:
            self._undo(step)
            raise
        return step

    def _left_out(self) -> frozenset[bytes]:
        """Tenants without a share of the next step."""
        budget = self.limits.max_num_batched_tokens
        left_out = self.shares.left_out(self._running, self._waiting, budget)
        if left_out:
            self._is_steady = False
        return left_out

    def _plan(
        self,
        step: ScheduledStep,
        before: ScheduledStep | None,
        without: Collection[SequenceState],
        left_out: frozenset[bytes],
    ) -> tuple[NoRoom | NoBudget | None, bool]:
        """Plan decodes, chunks and admissions, except for sequences and tenants that are left out.

        Returns the shortage of the first rejected admission, and whether all could decode.
        """
        if left_out:
            ahead = [sequence for sequence in self._running if sequence.request.tenant in left_out]
            without = {*without, *ahead}
        out = {*without, *before.awaited} if before is not None else without
        preemptions = self.num_preemptions
        self._plan_decodes(step, out)
        closed, answer = set(left_out), None
        is_short = self.num_preemptions > preemptions
        if len(step.decodes) < len(self._running):
            if self._waiting.queues and not is_short and self.shares.turns.are_several:
                answer = self._admit_first(step, without, closed)
            preemptions = self.num_preemptions
            self._plan_chunks(step, without)
            is_short = is_short or self.num_preemptions > preemptions
        # Never admit into a pool that is too small.
        if self._waiting.queues and not is_short and answer is None:
            answer = self._admit(step, without, closed)
        return answer, not out

    def _admit_first(
        self, step: ScheduledStep, without: Collection[SequenceState], closed: set[bytes]
    ) -> NoRoom | NoBudget | None:
        """Admit requests of tenants that have used less than all those with prompts to compute.

        Otherwise the prompts of those would take the budget.
        """
        turns = self.shares.turns
        computing = {
            sequence.request.tenant for sequence in self._running if sequence.num_uncomputed > 1
        } - closed
        least_used = min([turns.used(tenant) for tenant in computing], default=0.0)
        later = {tenant for tenant in self._waiting.queues if turns.used(tenant) >= least_used}
        if not computing or later.issuperset(self._waiting.queues):
            return None
        return self._admit(step, without, closed | later)

    def draft(self, step: ScheduledStep, drafts: Mapping[SequenceState, Sequence[int]]) -> None:
        """Add drafts to decodes of a step that was just planned.

        As many as budget and blocks allow, in order (promise 9); `step.drafts` are the planned
        ones. Only for sequences whose last token is known.
        """
        drafts = {sequence: tokens for sequence, tokens in drafts.items() if len(tokens)}
        if not drafts:
            return
        flat = [token for tokens in drafts.values() for token in tokens]
        counts = [len(tokens) for tokens in drafts.values()]
        planned = step.plan.draft([sequence.kv for sequence in drafts], flat, counts)
        step.drafts = {
            sequence: tokens[:count]
            for (sequence, tokens), count in zip(drafts.items(), planned, strict=True)
            if count
        }

    def _plan_decodes(self, step: ScheduledStep, out: Collection[SequenceState]) -> None:
        """Plan one token for every decoding sequence: they come first (promise 4)."""
        sequences, handles = self._current_decodes(step.is_ahead, out)
        while sequences:
            rejected = step.plan.decode(handles)
            if not rejected:
                step.add_decodes(sequences)
                return
            unplanned = set(rejected)
            step.add_decodes(
                tuple(sequence for at, sequence in enumerate(sequences) if at not in unplanned)
            )
            left = [sequences[at] for at in rejected]
            if self._give_way(len(left)):
                sequences, handles = tuple(left), [sequence.kv for sequence in left]
                continue
            victim = self._preempt_for(step, left[0])
            sequences = tuple(sequence for sequence in left if sequence is not victim)
            handles = [sequence.kv for sequence in sequences]

    def _current_decodes(self, ahead: bool, out: Collection[SequenceState]) -> _Decodes:
        """The sequences that decode next: the same object while they are the same.

        Two objects are kept: with overlap, sequences that wait for their tokens decode in every
        other step.
        """
        last, before = self._decodes
        if self._is_steady and not ahead:
            return last
        sequences = tuple(
            [
                sequence
                for sequence in self._running
                if sequence.num_tokens - sequence.num_computed == 1
            ]
        )
        if out:
            sequences = tuple([sequence for sequence in sequences if sequence not in out])
        if ahead:  # otherwise these have ended
            sequences = tuple([sequence for sequence in sequences if not sequence.is_complete])
        if sequences == last.sequences:
            return last
        decodes = (
            before
            if sequences == before.sequences
            else _Decodes(sequences, [sequence.kv for sequence in sequences])
        )
        self._decodes = [decodes, last]
        return decodes

    def _plan_chunks(self, step: ScheduledStep, without: Collection[SequenceState]) -> None:
        """Plan the next chunk of every admitted prompt with uncomputed tokens."""
        begun = {id(entry.sequence) for entry in step.chunks}  # just admitted
        sequences = [
            sequence
            for sequence in self._running
            if sequence.num_uncomputed > 1 and id(sequence) not in begun
        ]
        if self.shares.turns.are_several:
            sequences.sort(key=lambda sequence: self.shares.turns.used(sequence.request.tenant))
        for sequence in sequences:
            if not sequence.is_running or sequence in without:  # or just preempted
                continue
            if step.num_bounded >= sequence.request.max_chunk:
                continue
            answer = self._prefill(step, sequence)
            while isinstance(answer, NoRoom) and (
                self._give_way(answer.needed) or self._preempt_for(step, sequence) is not sequence
            ):
                answer = self._prefill(step, sequence)
            if isinstance(answer, Prefilled):
                step.add_prefill(sequence, answer.num_tokens, answer.num_cached_tokens)
            elif isinstance(answer, NoBudget):
                return

    def _prefill(
        self, step: ScheduledStep, sequence: SequenceState, spare_blocks: int | None = None
    ) -> Prefilled | NoRoom | NoBudget | Loading | Computing:
        """Plan the next chunk of a prompt."""
        bound = sequence.request.max_chunk - step.num_bounded
        max_tokens = int(min(self.limits.max_num_batched_tokens, bound))
        replay = min(self._replay, max_tokens)
        return step.plan.prefill(
            sequence.kv, max_tokens, spare_blocks=spare_blocks, replay=replay or None
        )

    def _give_way(self, num_blocks: int) -> bool:
        """Release prefixes that are kept if possible, for so many blocks; True if there were any.

        First those with a priority, then those of waiting requests, which will surely be used.
        """
        if self.pins.give_way(num_blocks):
            return True
        return self._order is not None and self._order.give_way(num_blocks)

    def _make_room(self, num_blocks: int) -> bool:
        """The same for an admission: while requests run, it does not take what has a priority."""
        if not self._running:
            return self._give_way(num_blocks)
        return self._order is not None and self._order.give_way(num_blocks)

    def _admit(
        self, step: ScheduledStep, without: Collection[SequenceState], closed: set[bytes]
    ) -> NoRoom | NoBudget | None:
        """Admit waiting sequences in order, while whole prompts fit the limits, blocks and budget.

        Others overtake one whose prefix is being loaded or computed. With several tenants,
        sequences of those above their share are preempted for it, and a request above its tenant's
        share waits for others of that tenant alone. No tenant in `closed` is admitted; those that
        wait so are added. Returns the shortage of the first rejected one; None if `max_num_seqs`
        was reached, or none was rejected.
        Requests that can never be admitted are refused before: see `InputProcessor._check`.
        """
        seqs_left, spare_blocks = self._seqs_left(), None
        if seqs_left < 1 and not self.shares.turns.are_several:
            return None
        shortage = None
        for sequence in self._candidates(step, without, closed):
            tenant = sequence.request.tenant
            if sequence.num_seqs > seqs_left:
                seqs_left = self._take_seqs(step, sequence, seqs_left, closed)
                spare_blocks = None
            if sequence.num_seqs > seqs_left:
                if tenant in closed:
                    continue
                break
            if spare_blocks is None:
                spare_blocks = self._spare_blocks(step)
            answer = self._admit_one(step, sequence, spare_blocks)
            if isinstance(answer, NoRoom) and self._take_blocks(
                step, sequence, answer, spare_blocks, closed
            ):
                seqs_left, spare_blocks = self._seqs_left(), self._spare_blocks(step)
                answer = self._admit_one(step, sequence, spare_blocks)
            if isinstance(answer, Entry):
                seqs_left -= sequence.num_seqs
                if not answer.samples:
                    spare_blocks += self._blocks_to_come(sequence)
            elif not isinstance(answer, Loading | Computing):
                shortage = shortage or answer
                if isinstance(answer, NoBudget) or tenant not in closed:
                    break
        return shortage

    def _admit_one(
        self, step: ScheduledStep, sequence: SequenceState, spare_blocks: int
    ) -> Entry | NoRoom | NoBudget | Loading | Computing:
        """Admit a sequence if its whole prompt fits and leaves `spare_blocks`."""
        request, num_attached, num_blocks = sequence.request, 0, 0
        # Else the plan matches and charges in one call. A state cannot be attached.
        if not request.read_cache and self.states is None:
            num_attached, num_blocks = self._attach(sequence)
        answer = self._prefill(step, sequence, spare_blocks)
        while isinstance(answer, NoRoom) and self._make_room(answer.needed):
            answer = self._prefill(step, sequence, spare_blocks)
        if not isinstance(answer, Prefilled):
            _release_blocks(sequence)
            return answer
        insort(self._running, sequence, key=by_order)
        self._dequeue(sequence)
        sequence.is_running = True
        num_cached = num_attached + answer.num_cached_tokens
        entry = step.add_prefill(sequence, answer.num_tokens, num_cached)
        entry.num_attached, entry.num_attached_blocks = num_attached, num_blocks
        if request.prompt_entries is not None:
            request.prompt_entries.pre_register(request.sequences[0])
        return entry

    def _seqs_left(self) -> int:
        return self.limits.max_num_seqs - sum([sequence.num_seqs for sequence in self._running])

    def _spare_blocks(self, step: ScheduledStep) -> int:
        """Blocks that admitted prompts still need. (A sequence that decodes has all its blocks.)"""
        begun = {id(entry.sequence) for entry in step.chunks if not entry.samples}
        return sum(
            self._blocks_to_come(sequence)
            for sequence in self._running
            if sequence.num_uncomputed > 1 or id(sequence) in begun
        )

    def _take_seqs(
        self, step: ScheduledStep, sequence: SequenceState, seqs_left: int, closed: set[bytes]
    ) -> int:
        """Preempt other tenants for a waiting sequence, if it is within its tenant's share.

        Returns how many sequences may still be admitted. If it is above the share, its tenant is
        closed.
        """
        if not self._running or not self.shares.turns.are_several:
            return seqs_left
        missing = sequence.num_seqs - seqs_left
        victims = self.shares.for_seqs(self._running, sequence, missing, self.limits.max_num_seqs)
        return self._seqs_left() if self._take(step, sequence, victims, closed) else seqs_left

    def _take_blocks(
        self,
        step: ScheduledStep,
        sequence: SequenceState,
        answer: NoRoom,
        spare_blocks: int,
        closed: set[bytes],
    ) -> bool:
        """The same for the blocks of its prompt; true if any sequence was preempted."""
        if not self._running or not self.shares.turns.are_several:
            return False
        missing, needed = answer.needed - answer.available, answer.needed - spare_blocks
        victims = self.shares.for_blocks(self._running, sequence, needed, missing)
        return self._take(step, sequence, victims, closed)

    def _take(
        self,
        step: ScheduledStep,
        sequence: SequenceState,
        victims: list[SequenceState] | None,
        closed: set[bytes],
    ) -> bool:
        if victims is None:
            closed.add(sequence.request.tenant)
            return False
        if victims and step.is_ahead:
            raise _NoPlanAheadError
        for victim in victims:
            if victim.is_running:  # else it shared the blocks of another victim
                self._preempt(step, victim)
            closed.add(victim.request.tenant)
        return bool(victims)

    def _attach(self, sequence: SequenceState) -> tuple[int, int]:
        """Attach cached blocks to a sequence that may read the cache only in part.

        Returns the numbers of their tokens and of the blocks.
        """
        request = sequence.request
        _release_blocks(sequence)  # an interrupt may have left some
        entries = request.prompt_entries
        max_tokens = 0 if entries is None else entries.readable_tokens()
        if not max_tokens:
            return 0, 0
        size = self._manager.block_size
        tokens = request.prompt_token_ids[: -(-max_tokens // size) * size]
        with self._manager.match_prefix(tokens, **request.space) as pin:
            if pin.num_tokens > max_tokens:
                self._attach_all_but_one(sequence, pin)
            else:
                sequence.kv.attach(pin)
            num_blocks = self._num_blocks(pin.blocks)
        return sequence.kv.num_computed_tokens, num_blocks

    def _attach_all_but_one(self, sequence: SequenceState, pin: Pin) -> None:
        """Attach the blocks of a pin, and compute their last token again without writing it.

        A fully cached prompt is such a case: its handle gets the further tokens afterwards.
        """
        request, end = sequence.request, pin.num_tokens
        tokens = sequence.kv.tokens()
        kv = self._manager.sequence(tokens[:end], **request.space, read_cache=request.read_cache)
        kv.attach(pin)
        if end < len(tokens):
            kv.append(tokens[end:])
        sequence.kv, before = kv, sequence.kv
        before.free()
        self._decodes = [_Decodes(), _Decodes()]  # they may hold the old handle

    def _candidates(
        self, step: ScheduledStep, without: Collection[SequenceState], closed: set[bytes]
    ) -> Iterator[SequenceState]:
        """Sequences that may be admitted; each is admitted before the next is read.

        Tenants take turns, except those in `closed`, to which the reader may add: the one with the
        fewest sequences so far, and of these the one that has used the least of the steps.
        """
        max_seqs = self.limits.max_num_seqs_per_tenant
        tenants: Iterable[bytes] = self._waiting.queues
        if self.shares.turns.are_several:
            tenants = self.shares.turns.in_order(tenants)
        queues = {
            tenant: self._candidates_of(tenant, step, without)
            for tenant in tenants
            if tenant not in closed
        }
        numbers = dict.fromkeys(queues, 0)
        while queues:
            tenant = min(queues, key=numbers.__getitem__)
            sequence = None if tenant in closed else next(queues[tenant], None)
            if sequence is None or (max_seqs is not None and not self._may_run(sequence, max_seqs)):
                del queues[tenant]
                continue
            numbers[tenant] += 1
            yield sequence

    def _may_run(self, sequence: SequenceState, max_seqs: int) -> bool:
        """True if its tenant then runs up to `max_seqs` sequences, or nothing else."""
        tenant = sequence.request.tenant
        running = [other.num_seqs for other in self._running if other.request.tenant == tenant]
        return not running or sum(running) + sequence.num_seqs <= max_seqs

    def _candidates_of(
        self, tenant: bytes, step: ScheduledStep, without: Collection[SequenceState]
    ) -> Iterator[SequenceState]:
        """A tenant's sequences that may be admitted, in order.

        Others overtake a sequence that waits for a prefix that another one computes, and a prompt
        without tokens left in the step's bound: both wait for running sequences, not for
        blocks."""
        may_await = self._prefix_caching and not without
        num_passed = 0
        for sequence in self._in_order(tenant, without):
            if self._is_held is not None and self._is_held(sequence):
                continue
            request = sequence.request
            entries = request.prompt_entries if may_await else None
            is_awaiting = entries is not None and entries.awaits_prefix()
            if not is_awaiting and step.num_bounded < request.max_chunk:
                yield sequence
                continue
            num_passed += 1
            if num_passed > _MAX_PASSED:
                return

    def _in_order(
        self, tenant: bytes, without: Collection[SequenceState]
    ) -> Iterator[SequenceState]:
        """A tenant's waiting sequences in the order of admission.

        Meanwhile the last one may be removed.
        """
        order, waiting = self._order, self._waiting.queues[tenant]
        if order is None or len(waiting) == 1:
            for sequence in self._waiting.iterate(tenant):
                if sequence not in without:
                    yield sequence
            return
        order.refresh(waiting)
        ready: list[SequenceState] = []
        end = 0
        while True:
            for sequence in waiting[end : end + order.window - len(ready)]:
                end += 1
                if sequence not in without:
                    ready.append(sequence)
            if not ready:
                return
            sequence = order.choose(ready)
            ready.remove(sequence)
            yield sequence
            if sequence.is_running:
                end -= 1
                order.count(sequence, ready)

    def _blocks_to_come(self, sequence: SequenceState) -> int:
        """The most blocks that the sequence needs for known tokens that no step computes yet."""
        largest = self.limits.max_num_batched_tokens
        computed = sequence.num_computed
        return self._manager.blocks_for(sequence.num_tokens, largest, computed=computed)

    def _preempt_for(self, step: ScheduledStep, sequence: SequenceState) -> SequenceState:
        """Preempt for `sequence`: the newest one after it that frees blocks, else itself."""
        if step.is_ahead:
            raise _NoPlanAheadError
        if self.shares.turns.are_several:
            candidate = self.shares.for_decode(self._running, sequence)
        else:
            for candidate in reversed(self._running):
                if candidate is sequence or self._manager.preview(candidate.kv) > 0:
                    break
        self._preempt(step, candidate)
        return candidate

    def _preempt(self, step: ScheduledStep, sequence: SequenceState) -> None:
        for other in step.cancel(sequence):
            if other.num_computed == 0:  # without the victim's blocks it has none
                self._put_back(other)
        sequence.request.progress.num_preemptions += 1
        self.num_preemptions += 1
        self._recompute(sequence)

    def _recompute(self, sequence: SequenceState) -> None:
        """Let a running sequence wait, without its blocks."""
        sequence.kv.reset()
        sequence.num_computed = 0
        self._put_back(sequence)

    def recompute_all(self) -> None:
        """Let all running sequences wait, without their blocks. No step is open."""
        for sequence in self.running:
            sequence.request.progress.num_preemptions += 1
            self._recompute(sequence)

    def drop_kept(self) -> None:
        """Release the prefixes that are kept for callers and for waiting sequences."""
        self.pins.release_all()
        if self._order is not None:
            self._order.drop_all()

    def _put_back(self, sequence: SequenceState) -> None:
        sequence.is_running = self._is_steady = False
        if self.states is not None:
            self.states.release(sequence)
        _release_blocks(sequence)
        self._enqueue(sequence)
        self._running.remove(sequence)

    def _nothing_planned(self, step: ScheduledStep) -> None:
        sequence = next(self.waiting, None)
        if step.is_ahead or sequence is None:
            raise _NoPlanAheadError
        if sequence.num_seqs > self.limits.max_num_seqs:
            raise StalledError(
                f"request {sequence.request.request_id!r} runs {sequence.num_seqs} samples at "
                f"once, and since a step was too large for the device's memory only "
                f"{self.limits.max_num_seqs} sequences run: ask for fewer samples, or free memory "
                "of the device",
                sequence,
            )
        usage = self._manager.usage()
        way_out = "release pins to go on"
        if usage.loading:
            way_out = "the disk of the KV store does not answer, and holds the blocks that load"
        raise StalledError(
            f"request {sequence.request.request_id!r} of {sequence.num_tokens} tokens cannot be "
            f"admitted although no request runs: {usage!r}; {way_out}",
            sequence,
        )

    def commit(
        self,
        step: ScheduledStep,
        sampled: Sequence[int] | npt.NDArray[np.int64],
        counts: Sequence[int] | None = None,
    ) -> list[Remapping]:
        """Commit a computed step; `sampled` has one token per sampling sequence, in order.

        With drafts, `counts` is the number of tokens of each: the accepted drafts and one more.
        """
        remappings = step.plan.commit(sampled, counts)
        now, begin = monotonic(), step.planned_time
        seconds = now - (begin if begin > self._last_commit else self._last_commit)
        self._last_commit = now
        if self.shares.turns.are_several:
            self.shares.charge(step, seconds)
        else:
            self.shares.charge_alone(step, seconds)
        if self._waiting.queues and step.chunks and self._order is not None:
            self._order.expect_more()
        if counts is not None:
            step.accept(counts)
        for entry in step.chunks:
            request = entry.sequence.request
            if request.progress.scheduled_time is None:
                request.progress.scheduled_time = step.planned_time
            if request.progress.num_preemptions == 0:
                request.progress.num_cached_tokens += entry.num_cached
            if entry.num_attached:
                self.reuse["prompt_tokens"] += entry.num_attached
                self.reuse["cached_tokens"] += entry.num_attached
                self.reuse["hit_blocks"] += entry.num_attached_blocks
        return remappings

    def rollback(self, step: ScheduledStep) -> None:
        """Undo a submitted step that has failed: sequences it admitted wait again.

        The newest step first. States that it may have changed are computed again.
        """
        if self.states is not None:
            self.states.failed(step)
        self._undo(step)

    def _undo(self, step: ScheduledStep) -> None:
        """Undo a step that did not run: sequences it admitted wait again. The newest step first."""
        self._is_steady = False
        step.rollback()
        for sequence in step.sequences:
            if sequence.num_computed == 0 and sequence.is_running:
                self._put_back(sequence)

    def finish(self, sequences: Iterable[SequenceState]) -> None:
        """Remove sequences, finished or aborted; their computed blocks stay cached.

        May be called while a step is open: its results for them are cached too. Unknown sequences
        are ignored. An interrupt (Ctrl-C) may have come between any two lines of this file, so a
        sequence is removed from any queue that has it."""
        self._is_steady = False
        for sequence in sequences:
            kv: KVSequence | None = getattr(sequence, "kv", None)
            if kv is not None and kv.is_live:
                kv.free(keep=sequence.num_kept)
            was_here = self._dequeue(sequence)
            if self._order is not None:
                self._order.forget(sequence)
            if sequence in self._running:
                self._running.remove(sequence)
                was_here = True
            sequence.is_running = False
            if self.states is not None:
                self.states.release(sequence)
            if was_here:
                self.shares.turns.leave(sequence.request.tenant)
        if not self.has_work:
            self._newest = None  # a step that Ctrl-C abandoned ends with its plan
            self.shares.turns.clear()


def _release_blocks(sequence: SequenceState) -> None:
    """Release the blocks of a waiting sequence, from the planning of an earlier step."""
    if sequence.kv.num_computed_tokens:
        sequence.kv.reset()
