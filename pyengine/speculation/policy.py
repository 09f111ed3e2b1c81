"""How many drafts are computed: those that bring more tokens than the time they take could.

A step of n tokens takes T(n), measured when the engine starts. Drafts are taken in the order of
their chances to stand, as long as tokens per second rise. How often drafts are right is counted for
each request, and also where none were computed: what a draft said is compared with what came.

What a request may lose is bounded, whatever these rates say: the time of its drafts is charged to
it, in tokens that could have been generated meanwhile. A draft that comes true pays one back, and a
hundredth is let off for each token. In debt by a token, a request gets no drafts. So n tokens of a
request whose drafts never come true take the time of 1.01 n + 1 tokens, and of the one step in
which it ran into debt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.speculation.drafter import Context, Draft


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step without drafts: tokens that it computes, and decodes, each of which gives a token."""

    num_tokens: int
    num_decodes: int


class Policy(Protocol):
    """Decides which drafts of a step are worth computing."""

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        """How many tokens of each draft are computed beside a step."""
        ...

    def forget(self, context: Context) -> None:
        """The sample has ended. It may never have been seen."""
        ...


class EveryDraft:
    """Keeps all there is."""

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        """See `Policy.keep`."""
        return [len(draft.tokens) for draft in drafts]

    def forget(self, context: Context) -> None:
        """See `Policy.forget`."""


class StepCosts:
    """Seconds that a step of n tokens takes: measured for some n, straight lines between them.

    Beyond the last one it goes on as steeply as from the first to the last. A step never takes more
    than a longer one: what else the machine did meanwhile only ever adds to what is measured.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`sizes` rise; there are two of them at least."""
        self._sizes = np.array(sizes, dtype=np.float64)
        self._seconds = np.minimum.accumulate(np.array(seconds[::-1], dtype=np.float64))[::-1]
        rise = self._seconds[-1] - self._seconds[0]
        self._slope = rise / (self._sizes[-1] - self._sizes[0])

    def of(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds, of the same shape as `sizes`."""
        beyond = np.maximum(sizes - self._sizes[-1], 0.0)
        seconds: npt.NDArray[np.float64] = np.interp(sizes, self._sizes, self._seconds)
        seconds += beyond * self._slope
        return seconds


_PRIOR = 0.6
"""How often a draft is right of which nothing is known: enough to try one."""
_PRIOR_WEIGHT = 8.0
_REQUEST_WEIGHT = 4.0
"""Tokens of a request that count as much as all other requests together."""
_CREDIT = 1.0
"""Tokens that a request may be in debt by."""
_LET_OFF = 0.01
"""Of a request's debt, for each token: so much is spent on looking again."""
_DECAY = 0.9
_GLOBAL_DECAY = 0.99


class _Rate:
    """How often tokens were right; what is long ago counts less."""

    __slots__ = ("_decay", "hits", "tries")

    def __init__(self, decay: float, hits: float = 0.0, tries: float = 0.0) -> None:
        self.hits, self.tries = hits, tries
        self._decay = decay

    def add(self, hits: int, tries: int) -> None:
        self.hits = self.hits * self._decay + hits
        self.tries = self.tries * self._decay + tries


class _Followed:
    """A request's own rate, its debt, and the last draft for it with the number of tokens it had
    then."""

    __slots__ = ("debt", "draft", "length", "rate")

    def __init__(self, length: int) -> None:
        self.rate = _Rate(_DECAY)
        self.debt = 0.0
        self.draft = Draft()
        self.length = length


class PayingDrafts:
    """Keeps the drafts that pay; none where nothing is gained."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._rates: dict[int, _Rate] = {}
        """By support."""
        self._followed: dict[Context, _Followed] = {}

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        """See `Policy.keep`."""
        chances = [
            self._chance(context, draft) ** np.arange(1, 1 + len(draft.tokens))
            for context, draft in zip(contexts, drafts, strict=True)
        ]
        flat = np.concatenate([np.empty(0), *chances])
        if not len(flat):
            return [0] * len(drafts)
        order = np.argsort(-flat, kind="stable")  # those of one draft stay in their order
        kept = np.zeros(len(flat), dtype=bool)
        count, price = self._most_gained(flat[order], step)
        kept[order[:count]] = True
        ends = np.cumsum([len(draft.tokens) for draft in drafts])
        counts = [int(part.sum()) for part in np.split(kept, ends[:-1])]
        for context, count in zip(contexts, counts, strict=True):
            self._followed[context].debt += count * price
        return counts

    def _most_gained(self, chances: npt.NDArray[np.float64], step: StepSize) -> tuple[int, float]:
        """How many drafts to compute, of `chances` that fall, and what one costs, in tokens.

        A step that only decodes sets what time is worth, in tokens per second; in the actual
        step, which may compute prompts too, drafts have to bring that for the time they add.
        """
        gains = np.concatenate([[0.0], np.cumsum(chances)])
        counts = np.arange(len(gains))
        alone = max(1, step.num_decodes)
        rate = ((alone + gains) / self._costs.of(alone + counts)).max()
        seconds = self._costs.of(step.num_tokens + counts)
        costs = rate * (seconds - seconds[0])
        count = int((gains - costs).argmax())
        return count, float(costs[count]) / max(1, count)

    def _chance(self, context: Context, draft: Draft) -> float:
        """How likely each token of a draft is, if those before it are right; 0 where it is too much
        in debt."""
        length = len(context.token_ids)
        followed = self._followed.setdefault(context, _Followed(length))
        self._compare(followed, context.token_ids)
        followed.draft, followed.length = draft, length
        if followed.debt >= _CREDIT:
            return 0.0
        known, own = self._rate(draft.support), followed.rate
        common = known.hits / known.tries
        return (common * _REQUEST_WEIGHT + own.hits) / (_REQUEST_WEIGHT + own.tries)

    def _compare(self, followed: _Followed, tokens: Sequence[int]) -> None:
        """Count how far the last draft was right, as far as what came since tells."""
        drafted = followed.draft.tokens
        let_off = _LET_OFF * (len(tokens) - followed.length)
        followed.debt = max(0.0, followed.debt - let_off)
        came = tokens[followed.length : followed.length + len(drafted)]
        if not came:
            return
        hits = 0
        while hits < len(came) and came[hits] == drafted[hits]:
            hits += 1
        tries = hits + (hits < len(came))
        followed.debt = max(0.0, followed.debt - hits)
        followed.rate.add(hits, tries)
        self._rate(followed.draft.support).add(hits, tries)

    def _rate(self, support: int) -> _Rate:
        rate = self._rates.get(support)
        if rate is None:
            prior = _Rate(_GLOBAL_DECAY, _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
            rate = self._rates[support] = prior
        return rate

    def forget(self, context: Context) -> None:
        """See `Policy.forget`."""
        self._followed.pop(context, None)
