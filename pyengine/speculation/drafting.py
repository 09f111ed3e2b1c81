"""The choice of decodes that get drafts, and the handling of a drafter that fails."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.model_runner import Runner
from pyengine.executor.mtp import MTPStep
from pyengine.kv_cache import BlockManager, NoBudget, NoRoom, StepPlan
from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler
from pyengine.speculation.draft_model import DraftModel
from pyengine.speculation.drafters import NO_DRAFT, Draft, Drafter
from pyengine.speculation.mtp import MTPDrafter
from pyengine.speculation.policy import Curve, DraftPolicy, StepCosts, StepSize

if TYPE_CHECKING:
    from pyengine.engine.request import SequenceState


_log = logging.getLogger(__name__)


class Drafting:
    """Speculation: the decodes that get drafts, and the drafter.

    If the drafter raises, or proposes invalid tokens, the sequence goes on without drafts, and the
    log says so once per sequence.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter,
        policy: DraftPolicy,
        *,
        most: int,
        vocab_size: int,
    ) -> None:
        """Draft at most `most` tokens per sequence and step."""
        self._scheduler = scheduler
        self._drafter = drafter
        self._mtp = drafter if isinstance(drafter, MTPDrafter) else None
        self._policy = policy
        self._most = most
        self._vocab_size = vocab_size
        self._asked: frozenset[SequenceState] = frozenset()
        """The sequences that were asked for drafts when the newest step was planned."""
        self.num_drafts = 0
        """Decodes with drafts."""

    def expect(self, step: ScheduledStep) -> None:
        """Mark the sequences that wait for their tokens of `step`, which runs, to get drafts.

        The drafter is asked without the unknown token; sequences that were asked when `step` was
        planned have none. MTP layers need the token, so all of their sequences wait."""
        sequences = [
            sequence
            for sequence in step.sampling_sequences
            if sequence.speculates
            and sequence.finish_reason is None
            and not sequence.waits_for_tokens
        ]
        if self._mtp is not None:
            for sequence in sequences:
                sequence.wants_drafts = True
            return
        unasked = [other for other in sequences if other not in self._asked]
        found = self._found(unasked, step)
        for sequence in sequences:
            sequence.wants_drafts = sequence in found

    def extend(self, step: ScheduledStep) -> None:
        """Add drafts to the decodes of a step that was just planned."""
        sequences = [
            sequence for sequence in step.decodes if sequence.speculates and sequence.is_known
        ]
        if self._mtp is not None:
            self._mtp.step = step
        self._asked = frozenset(sequences)
        self._scheduler.draft(step, self._found(sequences, step))

    def mtp_step(self, step: ScheduledStep) -> MTPStep | None:
        """The step of the model's MTP layers beside `step`; None if they do not draft."""
        return None if self._mtp is None else self._mtp.history.extend(step)

    def fork(self, sequence: "SequenceState", others: "Sequence[SequenceState]") -> None:
        """Let `others` start from the states of `sequence`."""
        if self._mtp is not None:
            self._mtp.history.fork(sequence, others)

    def disable(self, sequence: "SequenceState", reason: object) -> None:
        """Run a sequence without drafts from now on, and log the reason."""
        sequence.speculates = False
        _log.warning("request %r goes on without drafts: %s", sequence.request.request_id, reason)

    def forget(self, sequences: "Sequence[SequenceState]") -> None:
        """Drop sequences that have ended."""
        for sequence in sequences:
            self._policy.forget(sequence)
            try:
                self._drafter.forget(sequence)
            except Exception as error:
                _log.warning("the drafter failed to forget a sequence: %r", error)

    def _found(
        self, sequences: "Sequence[SequenceState]", step: ScheduledStep
    ) -> "dict[SequenceState, Sequence[int]]":
        """The drafts that a step computes."""
        if not sequences:
            return {}
        if isinstance(self._drafter, DraftModel):
            budget = self._scheduler.limits.max_num_batched_tokens - step.num_tokens
            self._drafter.begin_step(max(0, budget))
        most = [other.max_output - len(other.token_ids) - 1 for other in sequences]
        given = self.propose(sequences, most)
        drafts = [
            _possible(sequence, draft) for sequence, draft in zip(sequences, given, strict=True)
        ]
        num_drawn = sum([sequence.is_drawn for sequence in step.decodes])
        size = StepSize(step.num_tokens, len(step.decodes), num_drawn)
        counts = self._policy.keep(sequences, drafts, size)
        return {
            sequence: draft.tokens[:count]
            for sequence, draft, count in zip(sequences, drafts, counts, strict=True)
            if count
        }

    def propose(self, sequences: "Sequence[SequenceState]", most: Sequence[int]) -> list[Draft]:
        """A valid draft for each sequence, of at most `most[i]` tokens; it may be empty."""
        asked = [
            (at, sequence, min(count, self._most))
            for at, (sequence, count) in enumerate(zip(sequences, most, strict=True))
            if count > 0 and sequence.speculates
        ]
        drafts = [NO_DRAFT] * len(sequences)
        if not asked:
            return drafts
        given = self._ask([item for _, item, _ in asked], [count for *_, count in asked])
        for (at, sequence, count), draft in zip(asked, given, strict=True):
            fault = self._fault(draft, count)
            if fault:
                self.disable(sequence, fault)
            else:
                drafts[at] = draft
        return drafts

    def _ask(self, sequences: "Sequence[SequenceState]", most: Sequence[int]) -> Sequence[Draft]:
        """Ask for all at once; if that fails, one by one, to find the sequence at fault."""
        try:
            drafts = self._drafter.propose(sequences, most)
            if len(drafts) == len(sequences):
                return drafts
            error: object = f"{len(drafts)} drafts for {len(sequences)} sequences"
        except Exception as raised:
            error = repr(raised)
        if len(sequences) == 1:
            self.disable(sequences[0], f"the drafter failed: {error}")
            return [NO_DRAFT]
        return [
            self._ask([sequence], [count])[0]
            for sequence, count in zip(sequences, most, strict=True)
        ]

    def _fault(self, draft: Draft, most: int) -> str:
        """The error of a draft; empty if it is valid."""
        if len(draft.tokens) > most:
            return f"{len(draft.tokens)} tokens were drafted, at most {most} were asked for"
        if len(draft.tokens):
            for token in (min(draft.tokens), max(draft.tokens)):
                if not 0 <= token < self._vocab_size:
                    return f"token id {token} was drafted, the vocabulary has {self._vocab_size}"
        return ""


def _possible(sequence: "SequenceState", draft: Draft) -> Draft:
    """A draft up to the first token that ends the sequence, or that its grammar forbids."""
    tokens, stop_ids, matcher = draft.tokens, sequence.stop_ids, sequence.sampling.matcher
    if not stop_ids.isdisjoint(tokens):
        tokens = tokens[: [token in stop_ids for token in tokens].index(True)]
    if matcher is not None and len(tokens):
        tokens = tokens[: matcher.num_allowed(tokens)]
    return draft if tokens is draft.tokens else replace(draft, tokens=tokens)


_Times: TypeAlias = npt.NDArray[np.float64]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TURNS = 4
_SECONDS = 1.5  # sizes are measured in order, again and again, for this time


def measured_costs(runner: Runner, manager: BlockManager, limits: RunnerLimits) -> StepCosts:
    """Measure steps of decodes and drafts, whose tokens all give logits.

    The least of several rounds counts, two at least: the first includes work of the first use, and
    other load of the machine often outlasts a few steps of one size. Rows are drawn without
    filters, which is usually slowest. `manager` is a separate one over the runner's pool, which is
    still empty.
    """
    least: dict[int, _Times] = {}
    start = perf_counter()
    sizes = [size for size in _SIZES if size <= limits.max_num_samples]
    for turn in range(_TURNS):
        for size in sizes:
            is_late = len(least) > 1 and perf_counter() - start > _SECONDS
            is_new = size not in least
            plan = None if is_late and is_new else _plan(manager, size, limits.rows_per_seq)
            if plan is None:
                sizes = sizes[: sizes.index(size)]
                break
            times = _times(runner, plan)
            plan.rollback()
            least[size] = np.minimum(times, least.get(size, times))
        if turn and perf_counter() - start > _SECONDS:
            break
    if len(sizes) < 2:  # no step fits a draft
        return StepCosts(Curve([1, 2], [1.0, 2.0]))
    steps, drawing = np.array([least[size] for size in sizes]).T.tolist()
    return StepCosts(Curve(sizes, steps), Curve([0, *sizes], [0.0, *drawing]))


def _plan(manager: BlockManager, size: int, rows: int) -> StepPlan | None:
    """A step of `size` tokens, `rows` a sequence; None if it does not fit into the pool."""
    plan = manager.begin_step(size)
    for first in range(0, size, rows):
        drafts = [0] * (min(rows, size - first) - 1)
        answer = plan.speculate(manager.sequence([0]), drafts)
        if isinstance(answer, NoRoom | NoBudget):
            plan.rollback()
            return None
    return plan


def _times(runner: Runner, plan: StepPlan) -> _Times:
    """Seconds of a greedy step, and of drawing all of its tokens in addition; both include the
    short search for the largest logit."""
    start = perf_counter()
    logits = runner.prepare(plan)(None).sampling
    return np.diff([start, _sample(logits, 0), _sample(logits, 1)])


def _sample(logits: Any, temperature: float) -> float:
    """Choose a token for each row; return the time afterwards."""
    params, (size, vocab_size) = SamplingParams(temperature=temperature), logits.shape
    state = SamplingState(params, (), seed=0, vocab_size=vocab_size)
    sampled = sample(logits, SamplingBatch([state] * size))
    sampled.token_ids.tolist()  # waits for the device
    return perf_counter()
