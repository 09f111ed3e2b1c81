"""Log-probabilities of the chosen token, its rank, and the most probable tokens.

They are of the model's distribution: raw logits, before bias, penalties and temperature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyengine.outputs import Logprob
from pyengine.sampling.operations import Logits, TokenIds, operations_of


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position: of its token and of the alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token; equal ones rank by token id, lowest first."""
    top_ids: tuple[int, ...]
    """The most probable tokens, as many as requested, in order of rank."""
    top_logprobs: tuple[float, ...]

    def as_dict(
        self, decode: Callable[[int], tuple[str, bytes]] | None = None
    ) -> dict[int, Logprob]:
        """Return the form for users: the token itself first, then the others by rank.

        ``decode`` gives a token's text and bytes; without it they are ``None``.
        """
        ranked = {self.token_id: (self.logprob, self.rank)}
        for top_rank, (token, logprob) in enumerate(
            zip(self.top_ids, self.top_logprobs, strict=True), start=1
        ):
            ranked.setdefault(token, (logprob, top_rank))
        return {
            token: Logprob(logprob, rank, *(decode(token) if decode is not None else ()))
            for token, (logprob, rank) in ranked.items()
        }


class PendingLogprobs:
    """Log-probabilities of one token per row, and of the best ``top[i]``.

    ``logits`` are raw, [T, V] of any floating type (computed in float32); ``token_ids`` int64
    [T], of the same kind and on the same device; ``top`` holds T counts from 0 to V. ``rows``,
    int64 [T], selects rows of ``logits`` [B, V] without a copy. Arrays are read at once, work on
    tensors is queued at once; the caller may drop the logits.
    """

    def __init__(
        self,
        logits: Logits,
        token_ids: TokenIds,
        top: Sequence[int],
        rows: "TokenIds | None" = None,
    ) -> None:
        self._wait = operations_of(logits).logprobs(logits, token_ids, top, rows)

    def result(self) -> list[TokenLogprobs]:
        """Wait for them; one entry per row."""
        return [
            TokenLogprobs(token, logprob, rank, tuple(ids), tuple(logprobs))
            for token, logprob, rank, ids, logprobs in self._wait()
        ]
