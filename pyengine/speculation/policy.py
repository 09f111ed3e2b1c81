"""The choice of drafts to compute: those that gain more tokens than their time costs.

The time of a step follows from its tokens and from the rows that are drawn: both were measured when
the engine started. Drafts are chosen by their gain, best first, as long as tokens per second rise.
The acceptance rate is counted for each request, also for drafts that were not computed: they are
compared with the tokens that came.

The loss of a request is bounded, whatever these rates say. The time of its drafts is added to its
penalty, in tokens that could have been generated meanwhile. A correct draft takes one token off,
and each generated token a hundredth (the decay). At a penalty of one token a request gets no
drafts. So n tokens of a request whose drafts are always wrong take the time of 1.01 n + 1 tokens,
and of the one step in which the penalty was reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.request.request import SequenceState
from pyengine.speculation.drafters import NO_DRAFT, Draft

_Floats: TypeAlias = npt.NDArray[np.float64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step without drafts: its tokens, its decodes, and the drawn ones of these."""

    num_tokens: int
    num_decodes: int
    num_drawn: int = 0


class Curve:
    """Seconds over a number: measured for some, straight lines between them.

    Beyond the last one it has the slope from the first to the last. It never falls: other load of
    the machine only adds to a measurement.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`sizes` are at least two, in rising order."""
        self._sizes = np.array(sizes, dtype=np.float64)
        self._seconds = np.minimum.accumulate(np.array(seconds[::-1], dtype=np.float64))[::-1]
        self._table = np.empty(0)

    def between(self, first: int, last: int) -> _Floats:
        """Seconds for each number from `first` to `last`: float64, read-only."""
        if last >= len(self._table):
            self._table = self._at(np.arange(2 * last + 2))
        return self._table[first : last + 1]

    def _at(self, numbers: npt.NDArray[np.int64]) -> _Floats:
        sizes, seconds = self._sizes, self._seconds
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
        beyond = np.maximum(numbers - sizes[-1], 0.0)
        table: _Floats = np.interp(numbers, sizes, seconds)
        table += beyond * slope
        return table


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of a step: `tokens` if all rows are greedy, and `drawn` more for sampled rows."""

    tokens: Curve
    drawn: Curve = field(default_factory=lambda: Curve([0, 1], [0.0, 0.0]))


_PRIOR = 0.6  # the acceptance rate of unknown drafts: high enough to try one
_PRIOR_WEIGHT = 8.0
_REQUEST_WEIGHT = 4.0  # weight of all other requests, in tokens of the request itself
_MAX_PENALTY = 1.0  # in tokens
_PENALTY_DECAY = 0.01  # per generated token: the cost of further tries
_DECAY = 0.9
_GLOBAL_DECAY = 0.99


@dataclass(slots=True)
class _Rate:
    """The acceptance rate of tokens; old ones count less."""

    decay: float
    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: int, tries: int) -> None:
        self.hits = self.hits * self.decay + hits
        self.tries = self.tries * self.decay + tries


@dataclass(slots=True)
class _DraftRecord:
    """A request's rate, its penalty, and its last draft with its number of tokens then."""

    length: int
    rate: _Rate = field(default_factory=lambda: _Rate(_DECAY))
    penalty: float = 0.0
    draft: Draft = NO_DRAFT


class DraftPolicy:
    """Decides which drafts of a step to compute."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._rates: dict[int, _Rate] = {}  # rates by match length
        self._records: dict[SequenceState, _DraftRecord] = {}

    def keep(
        self, contexts: Sequence[SequenceState], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        """The number of tokens of each draft to compute in a step."""
        kept = [0] * len(drafts)
        hopeful: list[int] = []
        firsts: list[float] = []
        for at, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
            chance = self._chance(context, draft)
            if chance:
                hopeful.append(at)
                firsts.append(chance)
        if not hopeful:
            return kept
        lengths = np.array([len(drafts[at].tokens) for at in hopeful])
        ends = lengths.cumsum()
        nth = np.arange(1, 1 + ends[-1]) - (ends - lengths).repeat(lengths)
        chances = np.array(firsts).repeat(lengths) ** nth
        drawn = np.array([contexts[at].output.sampling.is_drawn for at in hopeful]).repeat(lengths)
        chosen, prices = self._most_gained(chances, drawn, step)
        counts = np.add.reduceat(chosen, ends - lengths, dtype=np.int64)
        for at, count in zip(hopeful, counts.tolist(), strict=True):
            kept[at] = count
            is_drawn = contexts[at].output.sampling.is_drawn
            self._records[contexts[at]].penalty += count * prices[is_drawn]
        return kept

    def _most_gained(
        self, chances: _Floats, drawn: _Bools, step: StepSize
    ) -> tuple[_Bools, tuple[float, float]]:
        """The drafts to compute, and the cost of a greedy and a drawn one of them, in tokens.

        `chances` fall within a draft. A step of decodes alone sets the price of time, in tokens per
        second. In the actual step, which may compute prompts too, drafts must gain that rate for
        the time that they add.
        """
        alone, num_drafts, before = max(1, step.num_decodes), len(chances), step.num_drawn
        decoding = self._costs.tokens.between(alone, alone + num_drafts)
        drawing = self._costs.drawn.between(before, before + num_drafts)
        # The drafts in the order of their gain, less the cost of drawing them.
        dearer = alone * (drawing[1] - drawing[0]) / (decoding[0] + drawing[0])
        order = np.argsort(drawn * dearer - chances, kind="stable")  # a draft stays in its order
        gains, draws = np.zeros(1 + num_drafts), np.zeros(1 + num_drafts, dtype=np.int64)
        chances[order].cumsum(out=gains[1:])
        drawn[order].cumsum(out=draws[1:])
        drawing = drawing[draws]
        rate = ((alone + gains) / (decoding + drawing)).max()
        computing = self._costs.tokens.between(step.num_tokens, step.num_tokens + num_drafts)
        count = int((gains - rate * (computing + drawing)).argmax())
        chosen = np.zeros(num_drafts, dtype=np.bool_)
        chosen[order[:count]] = True
        price = rate * (computing[count] - computing[0]) / max(1, count)
        more = rate * (drawing[count] - drawing[0]) / max(1, draws[count])
        return chosen, (price, price + more)

    def _chance(self, context: SequenceState, draft: Draft) -> float:
        """The probability of each token of a draft, if those before it are right; 0 without a
        draft, or if the penalty is too high."""
        tokens = context.token_ids
        record = self._records.get(context)
        if record is None:
            record = self._records[context] = _DraftRecord(len(tokens))
        elif record.penalty or len(record.draft.tokens):
            self._compare(record, tokens)
        record.draft, record.length = draft, len(tokens)
        if record.penalty >= _MAX_PENALTY or not len(draft.tokens):
            return 0.0
        known, own = self._rate(draft.match_length), record.rate
        common = known.hits / known.tries
        return (common * _REQUEST_WEIGHT + own.hits) / (_REQUEST_WEIGHT + own.tries)

    def _compare(self, record: _DraftRecord, tokens: Sequence[int]) -> None:
        """Count the correct tokens of the last draft, compared with the tokens since."""
        decay = _PENALTY_DECAY * (len(tokens) - record.length)
        record.penalty = max(0.0, record.penalty - decay)
        hits = tries = 0
        for drafted, came in zip(record.draft.tokens, tokens[record.length :], strict=False):
            tries += 1
            if drafted != came:
                break
            hits += 1
        if tries:
            record.penalty = max(0.0, record.penalty - hits)
            record.rate.add(hits, tries)
            self._rate(record.draft.match_length).add(hits, tries)

    def _rate(self, match_length: int) -> _Rate:
        rate = self._rates.get(match_length)
        if rate is None:
            prior = _Rate(_GLOBAL_DECAY, _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
            rate = self._rates[match_length] = prior
        return rate

    def forget(self, context: SequenceState) -> None:
        """Drop a sample that has ended; it may be unknown."""
        self._records.pop(context, None)
