"""What the sampler remembers of one request, from submission to its end."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pyengine.core.errors import InvalidRequestError
from pyengine.core.sampling_params import SamplingParams

_EMPTY_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
_EMPTY_VALUES: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


class TokenCounts:
    """The distinct tokens a request has seen, and how often it generated each.

    Grows by doubling, so adding a token costs O(1) and reading costs no copy. A token of the
    prompt that was not generated has the count 0.
    """

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        capacity = max(64, 2 * len(distinct))
        self._ids: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts: npt.NDArray[np.float32] = np.zeros(capacity, dtype=np.float32)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct token ids, in order of first appearance; a view, int64 [n]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids`` was generated; a view, float32 [n]."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """Count one generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1


class SamplingState:
    """One request's settings and history, as far as choosing the next token needs them.

    Made at submission and kept until the request ends. It depends on generated tokens only, not
    on steps or blocks, so a preempted request goes on where it was.
    """

    __slots__ = (
        "bias_ids",
        "bias_values",
        "counts",
        "params",
        "seed",
        "stop_ids",
        "token_ids",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        seed: int,
        vocab_size: int,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Resolve ``params`` for a vocabulary of ``vocab_size`` tokens.

        ``seed`` feeds every draw (the caller picks one where ``params.seed`` is ``None``).
        ``stop_ids``, and ``params.stop_token_ids`` with them, cannot be drawn before
        ``params.min_tokens`` tokens; those that the vocabulary does not have can never be drawn.
        Raises :class:`InvalidRequestError` for token ids of ``params`` outside the vocabulary,
        and where no token would be left to draw.
        """
        params.check_vocabulary(vocab_size)
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.counts: TokenCounts | None = None
        """Kept only if a penalty is asked for."""
        if params.has_penalties:
            repeats = params.repetition_penalty != 1
            self.counts = TokenCounts(prompt_token_ids if repeats else ())
        self.stop_ids = _EMPTY_IDS
        """Tokens that may not come yet: int64 [n]; empty unless ``min_tokens`` is set."""
        if params.min_tokens > 0:
            own = {*stop_ids, *params.stop_token_ids}
            distinct = sorted(token for token in own if 0 <= token < vocab_size)
            self.stop_ids = np.array(distinct, dtype=np.int64)
        if len(self.stop_ids) >= vocab_size:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} leaves nothing to draw: all {vocab_size} tokens "
                "of the vocabulary are stop tokens"
            )
        self.bias_ids, self.bias_values = _EMPTY_IDS, _EMPTY_VALUES
        if params.logit_bias:
            self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
            self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.token_ids: list[int] = []
        """The generated tokens."""

    @property
    def num_output(self) -> int:
        """How many tokens were generated; the position of the next draw."""
        return len(self.token_ids)

    def must_go_on(self, position: int) -> bool:
        """Whether `min_tokens` still bars stop tokens from being the output's `position`-th."""
        return position < self.params.min_tokens and len(self.stop_ids) > 0

    @property
    def depends_on_output(self) -> bool:
        """Whether the next token cannot be chosen before the one before it is known."""
        return self.counts is not None

    @property
    def may_change_logits(self) -> bool:
        """Whether any token, now or later, is chosen from other logits than the model's own."""
        return self.counts is not None or len(self.bias_ids) > 0 or len(self.stop_ids) > 0

    def changes_logits(self, position: int) -> bool:
        """Whether the output's `position`-th token is chosen from other logits than the model's."""
        return self.counts is not None or len(self.bias_ids) > 0 or self.must_go_on(position)

    def append(self, token: int) -> int:
        """Take note of a generated token; returns how many there are. Once for each, in order."""
        self.token_ids.append(token)
        if self.counts is not None:
            self.counts.add(token)
        return len(self.token_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of several generated tokens, in order."""
        if self.counts is None:
            self.token_ids.extend(tokens)
        else:
            for token in tokens:
                self.append(token)
