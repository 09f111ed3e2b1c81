"""One call per step: a batch of logits in, one token per request out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyengine.sampling.adjust import adjusted_logits
from pyengine.sampling.draw import draw
from pyengine.sampling.logprobs import TokenLogprobs, token_logprobs
from pyengine.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step, in the order of the logits' rows."""

    token_ids: torch.Tensor
    """int64 [B], on the CPU."""
    logprobs: list[TokenLogprobs | None]
    """B entries, ``None`` for requests that did not ask."""


class Sampler:
    """Chooses tokens as vLLM does, in this order.

    1. Log-probabilities are those of the raw logits.
    2. Stop tokens barred by ``min_tokens``, logit bias, penalties (:mod:`.adjust`).
    3. Greedy requests take the largest logit, of equal ones the lowest id.
    4. The others: temperature, min-p, top-k, top-p, draw (:mod:`.draw`).

    It holds no state and never changes that of a request: the caller records the token that it
    accepts with :meth:`SamplingState.append`. A row's token depends on that row and its state
    only, not on the rest of the batch.
    """

    def __call__(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> Sampled:
        """Return one token per row of ``logits``: [B, V], any floating type and device.

        Raises ``ValueError`` if rows and states don't correspond.
        """
        _check_shapes(logits, states)
        if not states:
            return Sampled(torch.empty(0, dtype=torch.int64), [])
        candidates = adjusted_logits(logits, states)
        random_rows = [row for row, state in enumerate(states) if not state.params.is_greedy]
        if not random_rows:
            token_ids = candidates.argmax(1)
        elif len(random_rows) == len(states):
            token_ids = draw(candidates.float(), states)
        else:
            token_ids = candidates.argmax(1)
            index = torch.tensor(random_rows, device=logits.device)
            drawn = draw(candidates[index].float(), [states[row] for row in random_rows])
            token_ids[index] = drawn
        return Sampled(token_ids.cpu(), _requested_logprobs(logits, token_ids, states))


def _check_shapes(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    if logits.dim() != 2 or len(logits) != len(states):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for {len(states)} requests: "
            "one row per request is needed"
        )
    widest = max((state.vocab_size for state in states), default=0)
    if widest > logits.shape[1]:
        raise ValueError(
            f"logits of {logits.shape[1]} tokens for a request with a vocabulary of {widest}"
        )


def _requested_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, states: Sequence[SamplingState]
) -> list[TokenLogprobs | None]:
    """Fill in the log-probabilities of the requests that asked; ``logits`` are the raw ones."""
    wanted = {
        row: state.params.logprobs
        for row, state in enumerate(states)
        if state.params.logprobs is not None
    }
    results: list[TokenLogprobs | None] = [None] * len(states)
    if wanted:
        index = torch.tensor(list(wanted), device=logits.device)
        found = token_logprobs(logits[index], token_ids[index], list(wanted.values()))
        for row, entry in zip(wanted, found, strict=True):
            results[row] = entry
    return results
